"""The Python sandbox: what each kind of bad code does to it, as the user of the tests and, from root, as another."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "python" / "tools" / "python_sandbox.py"
NOBODY = 65534
CALL = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
from python_sandbox import run_python
print(json.dumps(asyncio.run(run_python(sys.argv[2], **json.loads(sys.argv[3])))))
"""


def load(path: Path = FILE):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sandbox = load()


def interpreter_for_nobody() -> str:
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run([python, "-c", "import asyncio"], user=NOBODY, group=NOBODY, check=True, cwd="/")
            return python
        except (OSError, subprocess.CalledProcessError):
            continue
    pytest.skip("no interpreter on this machine that another user may execute")


@pytest.fixture
def home(monkeypatch, tmp_path):  # tmp_path first, or pytest would put it there
    """Where sandboxes put their directories; whatever the test does, nothing may be left in it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        until(lambda: not os.listdir(folder))  # what takes long to delete goes on after the return
        assert running(folder) == []


def running(folder: str | Path) -> list[str]:
    """Processes whose working directory is inside `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(entry.parts[2])
    return found


@pytest.fixture(params=["self", "nobody"] if os.geteuid() == 0 else ["self"])
def run(request, home):
    """`run(code, **limits) -> SandboxResult`, as this user or as nobody."""
    if request.param == "self":
        return lambda code, **limits: asyncio.run(sandbox.run_python(code, **{"timeout_s": 20.0} | limits))
    python = interpreter_for_nobody()

    def as_nobody(code: str, **limits):
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.chmod(folder, 0o755)
            (Path(folder) / FILE.name).write_text(FILE.read_text())
            done = subprocess.run(
                [python, "-c", CALL, folder, code, json.dumps({"timeout_s": 20.0} | limits)],
                env={"TMPDIR": str(home)}, cwd="/", user=NOBODY, group=NOBODY, extra_groups=[],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return sandbox.SandboxResult(*json.loads(done.stdout))

    return as_nobody


def test_output_errors_and_files(run):
    result = run(
        "import sys; print(6 * 7, open('a/b.txt').read()); print('é', file=sys.stderr)", files={"a/b.txt": "x"}
    )
    assert result == ("42 x\n", "é\n", 0, None)
    result = run("1 / 0")
    assert result.returncode == 1 and result.killed is None and "ZeroDivisionError" in result.stderr
    assert run("import sys; sys.exit(3)").returncode == 3
    assert "SyntaxError" in run("def (:").stderr


def test_ordinary_code_works(run):
    code = """
import asyncio, os, random, tempfile
async def later():
    await asyncio.sleep(0.01)
    return "later"
with tempfile.TemporaryDirectory() as folder, open(folder + "/a", "w") as file, open("/dev/null", "w") as null:
    print("a", file=file); print("a", file=null); random.seed()
os.makedirs("b/c"); open("b/c/d", "w").write("d"); os.rename("b/c/d", "e"); os.remove("e")
print(asyncio.run(later()), sorted(os.listdir()), os.environ["HOME"] == os.getcwd())
"""
    assert run(code) == ("later ['b', 'main.py'] True\n", "", 0, None)


def test_endless_loops_end(run):
    for code in (
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import sys; sys.stdin.read()\nimport time\ntime.sleep(60)",
    ):
        started = time.monotonic()
        result = run(f"print('started', flush=True)\n{code}", timeout_s=1.0)
        assert result.killed == "time" and result.returncode == -signal.SIGKILL
        assert time.monotonic() - started < 15


def test_memory_is_bounded(run):
    hog = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    result = run(hog)
    assert "MemoryError" in result.stderr and result.returncode == 1
    assert "MemoryError" in run("x = bytes(200 << 20)", memory_mb=128).stderr
    assert run("x = bytes(200 << 20); print(len(x) >> 20)", memory_mb=512).stdout == "200\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['/bin/sh', '-c', ':(){ :|:& };:'])",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time; time.sleep(60)",
    ],
    ids=["fork bomb", "shell bomb", "threads", "multiprocessing", "daemon"],
)
def test_there_is_one_process(run, code):
    result = run(f"print('started', flush=True)\n{code}\nprint('went on')")
    assert result.stdout == "started\n" and result.returncode == 1
    assert "Operation not permitted" in result.stderr or "can't start new thread" in result.stderr


def test_nothing_outside_its_directory_is_read_or_changed(run, home):
    with tempfile.TemporaryDirectory(dir="/tmp") as beside:
        os.chmod(beside, 0o777)
        secret = Path(beside) / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        code = f"""
import os
beside = {str(beside)!r}
def own_program():  # one that may not be read would hide from the count of bytes
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, 0o100))
    os.execv("x", ["x"])
tries = {{
    "passwd": lambda: open("/etc/passwd").read(),
    "environ": lambda: open("/proc/self/environ", "rb").read(),
    "read": lambda: open(beside + "/secret").read(),
    "up": lambda: open(os.path.relpath(beside) + "/secret").read(),
    "list": lambda: os.listdir(beside),
    "root": lambda: os.listdir("/"),
    "above": lambda: os.listdir(".."),
    "write": lambda: open(beside + "/secret", "w"),
    "truncate": lambda: os.truncate(beside + "/secret", 0),
    "create": lambda: open(beside + "/new", "w"),
    "remove": lambda: os.remove(beside + "/secret"),
    "rename": lambda: os.rename(beside + "/secret", "mine"),
    "put": lambda: os.rename("main.py", beside + "/main.py"),
    "link": lambda: os.link(beside + "/secret", "mine"),
    "symlink": lambda: os.symlink(beside + "/secret", "mine"),
    "mode": lambda: os.chmod(beside + "/secret", 0),
    "times": lambda: os.utime(beside + "/secret", (0, 0)),
    "fifo": lambda: os.mkfifo(beside + "/fifo"),
    "program": lambda: own_program(),
}}
for name, attempt in tries.items():
    try:
        attempt()
        print(name)
    except OSError:
        pass
print("end")
"""
        result = run(code)
        assert result.stdout == "end\n", result
        assert secret.read_text() == "secret" and os.listdir(beside) == ["secret"]


def test_no_socket_is_opened(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"""
import socket
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5),
    lambda: socket.socket(socket.AF_UNIX), lambda: socket.socket(type=socket.SOCK_DGRAM),
    lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", "/dev/log"),
):
    try:
        attempt(); print("opened")
    except PermissionError:
        print("refused")
"""
        assert run(code).stdout == "refused\n" * 4
        with pytest.raises(TimeoutError):
            server.accept()


def test_system_calls_by_hand_are_refused_as_well(run):
    code = """
import ctypes, errno, fcntl, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
pipe = os.pipe()[0]
calls = {
    "socket": (41, 2, 1, 0), "clone": (56, 17, 0, 0, 0, 0), "fork": (57,), "vfork": (58,),
    "kill": (62, os.getppid(), 0), "fallocate": (285, 3, 0, 0, 1),
    "tkill": (200, os.getppid(), 0), "ptrace": (101, 16, os.getppid(), 0, 0), "prctl": (157, 1, 0, 0, 0, 0),
    "setsid": (112,), "shmget": (29, 0, 4096, 0o1600), "memfd": (319, b"x", 0), "unshare": (272, 0x10000000),
    "mount": (165, b"/", b"/", 0, 0, 0), "bpf": (321, 0, 0, 0), "keyctl": (250, 0, -3, 1),
    "prlimit": (302, os.getppid(), 0, 0, 0), "setown": (72, pipe, 8, os.getppid()), "setsig": (72, pipe, 10, 9),
    "spgrp": (16, pipe, 0x8902, b"x"), "splice": (275, 0, 0, 0, 0, 0, 0), "x32 fork": (0x40000000 + 57,),
    "io_uring": (425, 8, 0), "clone3": (435, 0, 0), "pidfd_open": (434, os.getppid(), 0), "openat2": (437, 0, 0, 0, 0),
}
for name, call in calls.items():
    ctypes.set_errno(0)
    if libc.syscall(*call) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(name, ctypes.get_errno())
with open("a", "wb+") as file:
    file.truncate(4096)
    try:
        mmap.mmap(file.fileno(), 4096)
        print("shared mapping")
    except PermissionError:
        print("end")
"""
    assert run(code).stdout == "end\n"


def test_limits_cannot_be_raised(run):
    code = """
import resource
for name in ("AS", "CPU", "FSIZE", "NOFILE", "CORE"):
    number = getattr(resource, "RLIMIT_" + name)
    try:
        resource.setrlimit(number, (-1, -1)); print("raised", name)
    except (ValueError, PermissionError):
        pass
print("end")
"""
    assert run(code).stdout == "end\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut(run, stream):
    result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", max_output=5000)
    assert result.killed == "output" and getattr(result, stream) == "x" * 5000
    assert run(f"import sys; sys.{stream}.write('x' * 5000)", max_output=5000).killed is None
    assert run(f"import sys; sys.{stream}.write('x' * 5001)", max_output=5000).killed == "output"


def test_files_are_bounded_each_and_in_sum(run):
    result = run("print(open('a', 'wb').write(bytes(20 << 20)))")
    assert "File too large" in result.stderr and result.killed is None
    assert run("print(open('a', 'wb').write(bytes(4 << 20)))").stdout == f"{4 << 20}\n"
    many = "import os\nfor i in range(10**6):\n open(f'{i}', 'wb').write(bytes(4 << 20)); os.remove(f'{i}')"
    assert run(many).killed == "disk"
    assert "Too many open files" in run("import os\nwhile True: os.pipe()").stderr


@pytest.mark.parametrize(
    "code",
    [
        "import os, itertools\nfor i in itertools.count(): os.mkdir(str(i))",
        "import itertools\nfor i in itertools.count(): open(str(i), 'w').close()",
        "import os\nwhile True: os.mkdir('a'); os.chdir('a')",
        "import os\nname = 'x' * 255\nwhile True: os.mkdir(name); os.chdir(name)",
        "import os, itertools\nopen('a', 'w').close()\nfor i in itertools.count(): os.link('a', str(i))",
    ],
    ids=["directories", "empty files", "nested", "nested with long names", "links"],
)
def test_files_and_directories_are_counted(code, run):
    """They take no byte that is written, but inodes, and seconds to delete: `mkdir` makes some 5,000 in a second."""
    assert run(code, timeout_s=60.0).killed == "disk"


def test_as_many_files_as_it_was_given_are_no_matter(run):
    files = {f"data/{i}.txt": "x" for i in range(1500)}
    made = "import os\nfor i in range(900): os.mkdir(f'd{i}')\nprint(len(os.listdir('data')))"
    result = run(made, files=files, timeout_s=60.0)
    assert (result.killed, result.stdout) == (None, "1500\n")


def test_directories_that_come_and_go_are_no_matter(run):
    result = run("import os\nfor i in range(1200): os.mkdir('d'); os.rmdir('d')\nprint('ok')", timeout_s=60.0)
    assert (result.killed, result.stdout) == (None, "ok\n")


def test_deleting_does_not_hold_up_the_caller(home, monkeypatch):
    """A slow disk: `rm` takes ten seconds, and goes on after the return."""
    slow = home.parent / f"{home.name}-bin"
    slow.mkdir()
    remover = slow / "rm"
    remover.write_text('#!/bin/sh\nsleep 10\nexec /bin/rm "$@"\n')
    remover.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow}:{os.environ['PATH']}")
    monkeypatch.setattr(sandbox, "REMOVE_S", 0.3)

    async def timed():
        started = time.monotonic()
        await sandbox.run_python("1")
        seconds = time.monotonic() - started
        while os.listdir(home):  # it is deleted after all
            await asyncio.sleep(0.05)
        return seconds

    try:
        assert asyncio.run(asyncio.wait_for(timed(), 60)) < 10.0
    finally:
        remover.unlink()
        slow.rmdir()


def test_a_tree_that_is_hard_to_delete_is_deleted(run):  # the fixture looks
    deep = "import os\nfor i in range(90): os.mkdir('d' * 200); os.chdir('d' * 200)\nprint('end')"
    assert run(deep).killed in (None, "disk"), "the path is longer than a system call takes"
    assert run("import os\nos.mkdir('a', 0o300); open('a/b', 'w'); os.mkdir('c', 0)\nprint('end')").stdout == "end\n"


def test_many_at_once_do_not_disturb_each_other(home):
    async def all_of_them():
        return await asyncio.gather(*(sandbox.run_python(f"print({i})", timeout_s=60) for i in range(12)))

    assert [result.stdout for result in asyncio.run(all_of_them())] == [f"{i}\n" for i in range(12)]


def test_cancelling_kills_and_cleans(home):
    async def cancelled():
        task = asyncio.create_task(sandbox.run_python("import time; time.sleep(60)", timeout_s=60))
        while not running(home):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_it_ends_with_the_process_that_started_it(home):
    command = [sys.executable, "-c", CALL, FILE.parent, "import time; time.sleep(60)", '{"timeout_s": 60}']
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(home)}) as parent:
        until(lambda: running(home))
        parent.kill()
    until(lambda: not running(home))
    for left in home.iterdir():  # a directory, which nobody is left to delete
        (left / "main.py").unlink()
        left.rmdir()


def until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["../main.py", "/etc/x", "a/../../b"])
def test_a_file_outside_is_refused(home, name):
    with pytest.raises(ValueError, match=r"files has '.*': it would lie outside the sandbox. Use a relative path"):
        asyncio.run(sandbox.run_python("", files={name: ""}))


@pytest.mark.parametrize(
    ("means", "missing", "message"),
    [
        ("LANDLOCK = 444", "LANDLOCK = 4444", "Function not implemented"),
        ("version < 3", "version < 300", r"Landlock has version \d+, 3 is needed"),
        ('"x86_64")', '"riscv64")', "linux on x86_64 has other system calls"),
        ('"/proc/self/io"', '"/proc/self/no"', "No such file"),
        ("libc.prctl, 22, 2", "libc.prctl, 22, 9", "Invalid argument"),
    ],
    ids=["landlock", "old landlock", "machine", "accounting", "seccomp"],
)
def test_without_a_means_nothing_runs(home, tmp_path, means, missing, message):
    source = FILE.read_text()
    assert source.count(means) == 1
    without = tmp_path / "without.py"
    without.write_text(source.replace(means, missing))
    module = load(without)
    with pytest.raises(module.SandboxError, match=rf"{message}.*the code could leave the sandbox.*Use Linux >= 6\.2"):
        asyncio.run(module.run_python("print('ran')"))


def test_code_cannot_fake_a_refusal(run):
    code = "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'no sandbox')\n except OSError: pass\nos._exit(1)"
    assert run(code).returncode == 1  # no SandboxError, which would count as a failure of the infrastructure
