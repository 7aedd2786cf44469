"""Run Python that a model wrote, as a tool: `await run_python("print(6 * 7)")`.

The code is one process with one thread in a directory of its own, which is deleted afterwards. The process starts
as this file, gives up its rights and then becomes the code. The kernel keeps the limits, for root as for any user,
inside a container or not:

* files: Landlock lets it read the interpreter with its packages and change its own directory. Of others it can see
  names it guesses and their sizes, never contents or listings.
* network, processes, threads, signals, shared memory, modes and times of files: seccomp lets only the system calls
  of `ALLOWED` pass. With no second process there is nothing to leave behind.
* memory, CPU time, open files, the size of a file: resource limits.

Wall clock, output, the sum of bytes written and the number of files and directories are watched from outside. Where
one of these means is missing (Linux >= 6.2 on x86-64 has them), `SandboxError` is raised and the code does not run.
"""

import ctypes
import math
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ != "__main__":  # the process that becomes the code would wait for them each time
    import asyncio
    import contextlib
    import sysconfig
    import tempfile

FILE_MB, WRITTEN_MB, OPEN_FILES = 8, 64, 64
MOST_ENTRIES, MOST_DEPTH = 1000, 100
"""Files and directories that the code may have at a time, beside those it was given; how deep they may be nested."""
POLL_S = 0.02
REMOVE_S = 2.0
"""For deleting its directory; what takes longer goes on after the return."""
ENVIRONMENT = {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# System calls by number. Absent are socket, connect, clone, kill, ptrace, prctl, memfd_create, chmod, utimensat, ...
ALLOWED = (
    "0-8 10-15 17-28 32-40 45 48 51-55 59-61 63 73-89 95-100 102 104 107-108 110-111 115 118 120-121 124 127-128 "
    "130-131 137-138 140 143 145-148 158 160 186-187 191-196 201-202 204 213 217-219 221-226 228-233 247 257-259 "
    "262-267 269-271 273-274 281-284 286-287 289-293 295-296 309 316 318 322 324 327-332 334"
)
CHECKED = {
    9: (3, 1),  # mmap: not MAP_SHARED, which changes files uncounted
    16: (1, 0xFFFF8000),  # ioctl: the old ones of terminals and pipes, not those of sockets and file systems
    44: (4, 0xFFFFFFFFFFFFFFFF),  # sendto: on a socket pair (asyncio needs one), never to an address
    72: (1, 8),  # fcntl: not F_SETOWN and F_SETSIG, which signal other processes
    302: (0, 0xFFFFFFFF),  # prlimit: its own limits
}
"""System call: which argument, and the bits that must be 0 in it."""

LANDLOCK = 444
"""Its first system call, landlock_create_ruleset."""
READ, WRITE = 0b1101, 0b0110  # execute, read, list; write, read
EVERYTHING = 0x7FFF
OWN = EVERYTHING & ~(1 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 12)  # no programs, devices, sockets and symbolic links


class SandboxError(RuntimeError):
    """The code did not run, because not every limit can be kept."""


class SandboxResult(NamedTuple):
    stdout: str
    stderr: str
    returncode: int
    killed: str | None
    """`time`, `output`, `disk` (bytes written, or files and directories made) or `cpu`; None when it ended by itself,
    be it with an error."""


async def run_python(
    code: str,
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 256,
    max_output: int = 8192,
    files: dict[str, str] | None = None,
) -> SandboxResult:
    """Run `code` beside `files` (name: text), which it can read but not import unless it extends `sys.path`.

    `max_output`: bytes kept of stdout and of stderr; the process that writes more is killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="sandbox-")).resolve()
    try:
        for name, text in {**(files or {}), "main.py": code}.items():
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):
                raise ValueError(f"files has {name!r}: it would lie outside the sandbox. Use a relative path.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode(errors="surrogatepass"))
        most_entries = _entries(folder, sys.maxsize) + MOST_ENTRIES
        with tempfile.TemporaryFile() as report:
            numbers = report.fileno(), memory_mb << 20, math.ceil(timeout_s) + 1
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", __file__, *map(str, numbers), folder, *_readable(),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                pass_fds=[report.fileno()], start_new_session=True,
                env=ENVIRONMENT | {"HOME": str(folder), "TMPDIR": str(folder)},
            )  # fmt: skip
            result = await _watch(process, folder, most_entries, timeout_s, max_output)
            report.seek(0)
            if wrong := report.read():
                raise SandboxError(wrong.decode())
            return result
    finally:
        remove = 'chmod -R u+rwx "$0"; exec rm -rf "$0"'  # copes with any depth and with closed directories
        remover = await asyncio.create_subprocess_exec("sh", "-c", remove, folder)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOVE_S):
                await remover.wait()


async def _watch(
    process: "asyncio.subprocess.Process", folder: Path, most_entries: int, timeout_s: float, max_output: int
) -> SandboxResult:
    """Collect the output until the process ends or has to be ended."""
    kept, killed, loop = (bytearray(), bytearray()), None, asyncio.get_running_loop()

    async def drain(stream, out):
        while chunk := await stream.read(1 << 16):
            out += chunk[: max_output + 1 - len(out)]

    drains = asyncio.gather(drain(process.stdout, kept[0]), drain(process.stderr, kept[1]))
    ended, deadline = asyncio.ensure_future(process.wait()), loop.time() + timeout_s
    try:
        while not killed and not (await asyncio.wait([ended], timeout=POLL_S))[0]:
            over = {
                "output": max(map(len, kept)) > max_output,
                "disk": _written(process.pid) > WRITTEN_MB << 20 or _entries(folder, most_entries) > most_entries,
                "time": loop.time() > deadline,
            }
            killed = next((why for why, true in over.items() if true), None)
    finally:
        if process.returncode is None:
            process.kill()
        code, _ = await asyncio.gather(ended, drains)
    if max(map(len, kept)) > max_output:
        killed = "output"
    elif code in (-signal.SIGXCPU, -signal.SIGKILL):
        killed = killed or "cpu"
    return SandboxResult(*(bytes(out[:max_output]).decode(errors="replace") for out in kept), code, killed)


def _written(pid: int) -> int:
    """Bytes the process has written, be it to files that are deleted by now."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[3])  # rchar: N wchar: N
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has just ended, or is not yet collected
        return 0


def _entries(folder: Path, most: int) -> int:
    """Files and directories in a folder; counting ends above `most`, which is also exceeded below `MOST_DEPTH`."""
    count = 0
    folders = [(str(folder), 0)]
    while folders and count <= most:
        path, depth = folders.pop()
        if depth > MOST_DEPTH:
            return most + 1
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    if count > most:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # gone meanwhile, or closed, so nothing new
            continue
        except OSError:  # the path is too long
            return most + 1
    return count


def _readable() -> list[str]:
    """What Python needs: libraries, the interpreter, its packages."""
    paths = sysconfig.get_paths()
    places = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [f"{sys.base_prefix}/lib", f"{sys.prefix}/pyvenv.cfg", os.path.realpath(sys.executable)]
    places += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime"]
    return [*places, "/usr/share/zoneinfo", "/dev/urandom"]


def _confine(memory: int, cpu_s: int, folder: str, readable: list[str]) -> None:
    """Put this process, for good, under every limit. Raises OSError when the kernel refuses one."""
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        raise OSError(f"{sys.platform} on {os.uname().machine} has other system calls than Linux on x86-64")
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *arguments) -> int:
        if (result := function(*arguments)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"{function.__name__}{arguments[:2]}")
        return result

    os.stat("/proc/self/io")  # what `_written` reads
    limits = {"AS": memory, "CPU": cpu_s, "FSIZE": FILE_MB << 20, "NOFILE": OPEN_FILES, "CORE": 0}
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        limit = min(limit, resource.getrlimit(kind)[1] % 2**64)  # -1 is none
        resource.setrlimit(kind, (limit, limit))
    call(libc.capset, struct.pack("Ii", 0x20080522, 0), bytes(24))  # root without any capability
    call(libc.prctl, 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the process that watches
    call(libc.prctl, 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS

    version = call(libc.syscall, LANDLOCK, None, 0, 1)
    if version < 3:
        raise OSError(f"Landlock has version {version}, 3 is needed")
    ruleset = call(libc.syscall, LANDLOCK, struct.pack("Q", EVERYTHING), 8, 0)
    for path, rights in [*((path, READ) for path in readable), ("/dev/null", WRITE), (folder, OWN)]:
        if os.path.exists(path):
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= EVERYTHING if os.path.isdir(path) else 0b111
            call(libc.syscall, LANDLOCK + 1, ruleset, 1, struct.pack("=Qi", rights, handle), 0)
    call(libc.syscall, LANDLOCK + 2, ruleset, 0)

    program = ctypes.create_string_buffer(_program())  # its last byte is a zero more
    call(libc.prctl, 22, 2, struct.pack("HP", len(program) // 8, ctypes.addressof(program)), 0, 0)  # PR_SET_SECCOMP


def _program() -> bytes:
    """The seccomp filter: instructions (code, jump if true, jump if false, value) over the call's record."""
    load, equal, at_least, above, bits, leave = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
    allow, deny, absent, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000  # 1 is EPERM, 0x26 ENOSYS
    lines = [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (leave, 0, 0, kill), (load, 0, 0, 0)]  # x86-64, number
    lines += [(above, 0, 1, 334), (leave, 0, 0, absent)]  # newer ones, which libraries do without
    for number, (argument, mask) in CHECKED.items():
        low = 16 + 8 * argument
        lines += [(equal, 0, 6, number), (load, 0, 0, low), (bits, 3, 0, mask & 0xFFFFFFFF), (load, 0, 0, low + 4)]
        lines += [(bits, 1, 0, mask >> 32), (leave, 0, 0, allow), (leave, 0, 0, deny)]
    for span in ALLOWED.split():
        first, last = int(span.split("-")[0]), int(span.split("-")[-1])
        lines += [(at_least, 1, 0, first), (leave, 0, 0, deny), (above, 1, 0, last), (leave, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (leave, 0, 0, deny)])


if __name__ == "__main__":
    report_fd, memory_bytes, seconds = map(int, sys.argv[1:4])
    os.set_inheritable(report_fd, False)
    os.chdir(sys.argv[4])
    try:
        _confine(memory_bytes, seconds, sys.argv[4], sys.argv[5:])
        os.execv(sys.executable, [sys.executable, "-I", "main.py"])
    except (OSError, AttributeError) as error:
        fix = "Use Linux >= 6.2 on x86-64; in a container, allow the landlock, seccomp and prctl system calls."
        os.write(report_fd, f"{error}: the code could leave the sandbox, so it was not run. {fix}".encode())
        os._exit(1)
