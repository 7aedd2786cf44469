"""External programs that an agent runs: started with their environment, read, and ended with all that they started."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

MARK = "MOLT_HARNESS"
"""An environment variable by which the descendants of a harness are found."""
POLL_S = 0.02
GRACE_S = 1.0
"""What a harness may take to end after SIGTERM."""
KILL_S = 5.0
"""What it may take to be gone after SIGKILL."""
KEPT_BYTES = 1 << 22
"""Of the beginning of what a harness writes, and of its end."""
CHUNK_BYTES = 1 << 16

# Agents with synchronous clients fill the threads of the event loop: the search for processes would wait for them.
_SEARCH = ThreadPoolExecutor(max_workers=1, thread_name_prefix="molt-harness")


@dataclass(frozen=True)
class Finished:
    """How an external harness ended."""

    returncode: int
    stdout: str
    """Its beginning and its end, where it is too long to be kept."""
    stderr: str
    timed_out: bool = False


class Output:
    """The beginning and the end of what a process writes, which a policy may make endless."""

    def __init__(self):
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0
        """Bytes between the two."""

    def add(self, chunk: bytes) -> None:
        space = KEPT_BYTES - len(self.head)
        self.head += chunk[:space]
        self.tail += chunk[space:]
        if len(self.tail) > 2 * KEPT_BYTES:
            self.dropped += len(self.tail) - KEPT_BYTES
            del self.tail[:-KEPT_BYTES]

    def text(self) -> str:
        gap = b""
        if self.dropped:
            gap = f"\n... {self.dropped:,} bytes ...\n".encode()
        return (self.head + gap + self.tail).decode(errors="replace")


async def run_harness(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: str | os.PathLike | None,
    stdin: str,
    timeout_s: float | None,
) -> Finished:
    """Run a program in `environment` until it ends or `timeout_s` has passed, then end what it left running.

    Ended are its process group, its descendants, and every process that has its `MOLT_HARNESS` in the environment.
    """
    mark = secrets.token_hex(16)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**environment, MARK: mark},
        start_new_session=True,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout = Output()
    stderr = Output()
    pipes = [
        asyncio.create_task(_read(process.stdout, stdout)),
        asyncio.create_task(_read(process.stderr, stderr)),
        asyncio.create_task(_write(process.stdin, stdin)),
    ]
    timed_out = False
    try:
        async with asyncio.timeout(timeout_s):
            await _wait_for_exit(process)
    except TimeoutError:
        timed_out = True
    finally:  # also for what it left in the background, and when the rollout is cancelled
        await _end(process, mark)
        await asyncio.wait(pipes, timeout=KILL_S)  # nobody holds the pipes any more
        for pipe in pipes:
            pipe.cancel()

    returncode = process.returncode
    assert returncode is not None, "`_end` returns once the process is gone"
    return Finished(returncode, stdout.text(), stderr.text(), timed_out)


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:  # `wait` would also wait for whoever else holds the pipes
        await asyncio.sleep(POLL_S)


async def _read(stream: asyncio.StreamReader | None, output: Output) -> None:
    assert stream is not None, "the process was started with pipes"
    while True:
        chunk = await stream.read(CHUNK_BYTES)
        if not chunk:
            return
        output.add(chunk)


async def _write(stream: asyncio.StreamWriter | None, text: str) -> None:
    assert stream is not None, "the process was started with pipes"
    with contextlib.suppress(ConnectionError):  # it may end without reading
        stream.write(text.encode())
        await stream.drain()
        stream.close()


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """End the process and all that it started: by SIGTERM, then by SIGKILL."""
    strays: set[psutil.Process] = set()
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_S)):
        # Found before their parents end: after that nothing says who started them.
        parent = process.pid if process.returncode is None else None
        strays |= await asyncio.get_running_loop().run_in_executor(_SEARCH, _strays, parent, mark)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for stray in strays:
            with contextlib.suppress(psutil.NoSuchProcess):
                stray.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await _wait_for_exit(process)


def _strays(parent: int | None, mark: str) -> set[psutil.Process]:
    """The descendants of `parent`, and all processes with `mark` in the environment."""
    strays: set[psutil.Process] = set()
    if parent is not None:
        with contextlib.suppress(psutil.Error):
            strays.update(psutil.Process(parent).children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                strays.add(process)
    return strays
