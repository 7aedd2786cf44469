"""The processes of a user's scorer (`agents/scorer_process.py`), and the calls that they have.

Each runner owns such a pool. Its processes are plain children of the runner and not Ray actors: a child is killed by
one signal in a millisecond and started in a few tenths of a second, without a scheduler; it needs nothing of Ray's; and
Linux kills it when its runner dies, however that dies. Trajectories and scores go through pipes, so the event loop of
the runner only copies bytes. A child gets a short list of environment variables, without keys or
tokens (`child_environment.py`).

A synchronous scorer has one call a process, an `async def` up to `OVERLAP`. What goes wrong with a call costs that
call alone, which fails for one of these reasons:

    scorer_timeout                     no end within `reward.scorer_timeout_s`: the process is killed; an async call is
                                       cancelled instead where its process still answers
    scorer_exit                        the process exited, or somebody else killed it
    scorer_memory                      the process grew by `KILL_BYTES` and was killed
    scorer_start, scorer_changed       the file cannot be loaded, or is another one than when the run began
    scorer_<error>                     the function raised this error
    scorer_result, reward_not_finite   the function returned no number, or no finite one

If several calls were in a process that had to be killed, nobody knows which of them is to blame. Each is repeated in a
process of its own, uncounted, and there the guilty one fails by name. A process that has grown by `RETIRE_BYTES` since
its scorer was loaded, or that has had `MOST_CALLS` calls, is replaced between two calls.
"""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from molt.agents.child_environment import for_scorer
from molt.agents.scorer_process import LENGTH, encode, file_digest, resident_bytes
from molt.errors import AgentError
from molt.types import InfraFailure, Json

OVERLAP = 16
"""Calls of an async scorer in one process."""
MOST_CALLS = 10_000
"""Of one process."""
RETIRE_BYTES = 512 << 20
"""A process that has grown by so much since its scorer was loaded is replaced once its calls have ended."""
KILL_BYTES = 2 << 30
"""A process that has grown by so much is killed in the middle of a call."""
LOOK_S = 0.25
"""Between two looks at the memory of a process that has calls."""
START_S = 120.0
"""For loading the scorer and what it imports."""
CANCEL_S = 1.0
"""What an async call may take to end once it is cancelled; a process that does not answer by then is killed."""
MOST_PROCESSES = 16
"""Of a runner, where `reward.num_scorers` is unset."""


@dataclass(frozen=True)
class ScorerFacts:
    """What a process says of its scorer."""

    wants_judge: bool
    overlaps: bool
    digest: str
    """SHA-256 of the file."""


class ProcessGoneError(Exception):
    """The process of a call is gone. The reason and the detail are those of an `InfraFailure`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(eq=False)
class Call:
    """A call that a process has."""

    answer: asyncio.Future[Json]
    has_company: bool = False
    """Other calls were in the process when it ended."""


class ScorerProcess:
    """One process."""

    def __init__(self, path: str):
        self.path = path
        self.facts: asyncio.Future[ScorerFacts] = asyncio.get_running_loop().create_future()
        self.calls: dict[int, Call] = {}
        self.is_gone = False
        self.is_retiring = False
        """It gets no further calls."""
        self.promised = 0
        """Places that belong to calls which have not begun."""
        self._served = 0
        self._process: asyncio.subprocess.Process | None = None
        self._loaded_bytes = 0
        self._task = asyncio.create_task(self._run())

    @property
    def room(self) -> int:
        """How many calls it can take now. One that is being loaded takes one."""
        if self.is_gone or self.is_retiring:
            return 0
        limit = 1
        if self._is_loaded() and self.facts.result().overlaps:
            limit = OVERLAP
        return limit - len(self.calls) - self.promised

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def loaded(self) -> ScorerFacts:
        """What the scorer is. Raises `ProcessGoneError` if it cannot be loaded."""
        return await asyncio.shield(self.facts)

    def begin(self, number: int) -> Call:
        """Reserve a place for a call, before the process is loaded."""
        call = Call(asyncio.get_running_loop().create_future())
        self.calls[number] = call
        return call

    def end(self, number: int) -> None:
        """The call is over, or nobody waits for it."""
        del self.calls[number]
        self._served += 1
        if self._served >= MOST_CALLS:
            self.is_retiring = True
        if self.is_retiring and not self.calls:
            self.kill("retired", "")

    def send(self, message: Json) -> None:
        """Raises `ProcessGoneError`."""
        if self.is_gone or self._process is None or self._process.stdin is None:
            raise ProcessGoneError("scorer_exit", "the process has ended")
        self._process.stdin.write(encode(message))

    def kill(self, reason: str, detail: str) -> None:
        """End the process, and what it started, at once. Its calls fail with `ProcessGoneError`."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                self._process.kill()  # it may not have its group yet
        self._over(reason, detail)

    async def close(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill("closed", "")
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_S):
                    await self._process.wait()

    def _is_loaded(self) -> bool:
        return self.facts.done() and not self.facts.cancelled() and self.facts.exception() is None

    def _over(self, reason: str, detail: str) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        error = ProcessGoneError(reason, detail)
        if not self.facts.done():
            self.facts.set_exception(error)
            self.facts.exception()  # retrieved: perhaps nobody waits for it
        for call in self.calls.values():
            call.has_company = len(self.calls) > 1
            if not call.answer.done():
                call.answer.set_exception(error)
                call.answer.exception()

    async def _run(self) -> None:
        """Start the process, load the scorer, and pass its answers on until it ends."""
        try:
            self._process = await _spawn(self.path)
        except OSError as error:
            self._over("scorer_start", f"no process could be started: {error}")
            return
        if self.is_gone:
            self.kill("closed", "")
            return

        answers = self._process.stdout
        assert answers is not None, "the process was started with pipes"
        try:
            async with asyncio.timeout(START_S):
                first = await _read(answers)
        except TimeoutError:
            self.kill("scorer_start", f"{self.path} was not imported within {START_S:.0f} s")
            return
        if self.is_gone:
            return
        if first is None:
            self.kill("scorer_start", f"{self.path} ended its process when it was imported{await self._exit()}")
            return
        if "error" in first:
            self.kill("scorer_start", first["error"])
            return

        self._loaded_bytes = resident_bytes(self._process.pid)
        self.facts.set_result(ScorerFacts(first["judge"], first["overlaps"], first["digest"]))
        watching = asyncio.create_task(self._watch_memory())
        try:
            await self._pass_on(answers)
        finally:
            watching.cancel()
        self.kill("scorer_exit", f"`score` ended its process{await self._exit()}")

    async def _pass_on(self, answers: asyncio.StreamReader) -> None:
        while True:
            message = await _read(answers)
            if message is None:
                return
            if message["memory"] - self._loaded_bytes > RETIRE_BYTES:
                self.is_retiring = True
            call = self.calls.get(message["call"])
            if call is not None and not call.answer.done():
                call.answer.set_result(message)

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.calls or self.pid is None:
                continue
            grown = resident_bytes(self.pid) - self._loaded_bytes
            if grown > KILL_BYTES:
                limit = f"{KILL_BYTES >> 20:,} MiB"
                self.kill("scorer_memory", f"`score` took more than {limit} beyond what {self.path} needs when loaded")

    async def _exit(self) -> str:
        """How the process ended, for a message."""
        assert self._process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                code = await self._process.wait()
                return f" with exit code {code}" if code >= 0 else f" by signal {-code}"
        return ""


class ScorerPool:
    """Calls of one scorer, in as many processes as they need, up to `size`."""

    def __init__(self, path: str, size: int | None, timeout_s: float):
        """size: None: half the cores, 2 to `MOST_PROCESSES`. timeout_s: of one call, from when a process has it."""
        self.path = path
        self.size = size or default_size()
        self.timeout_s = timeout_s
        self.digest = file_digest(path)
        """Of the file as the run began; another one would give other scores."""
        self._processes: list[ScorerProcess] = []
        self._known: ScorerFacts | None = None
        self._waiting: deque[asyncio.Future[ScorerProcess]] = deque()
        """Calls without a process, the first first."""
        self._alone = asyncio.Semaphore(self.size)
        """For processes that have one call and end with it."""
        self._numbers = iter(range(1, sys.maxsize))

    @property
    def processes(self) -> list[ScorerProcess]:
        """Those that are alive or being loaded."""
        return [process for process in self._processes if not process.is_gone]

    async def facts(self) -> ScorerFacts:
        """What the scorer is, from the first process. Raises `InfraFailure` if it cannot be loaded."""
        if self._known is None:
            processes = self.processes or [self._start()]
            try:
                self._known = self._checked(await processes[0].loaded())
            except ProcessGoneError as gone:
                raise InfraFailure(gone.reason, gone.detail) from None
        return self._known

    async def call(self, trajectory: str, judge_url: str | None = None) -> Json:
        """The scorer's message for a trajectory (`agents/scorer_process.py`).

        Raises `InfraFailure`, with a reason of the table above.
        """
        request = {"trajectory": trajectory, "judge_url": judge_url}
        process = await self._with_room()
        message = await self._in(process, request)
        if message is None:
            message = await self._by_itself(request)
        if "failure" in message:
            reason, detail = message["failure"]
            raise InfraFailure(reason, detail)
        return message

    async def close(self) -> None:
        """End all processes."""
        processes = self._processes
        self._processes = []
        await asyncio.gather(*(process.close() for process in processes))

    async def _with_room(self) -> ScorerProcess:
        """A process that can take one more call. Calls are served in their order."""
        process = None
        if not self._waiting:
            process = self._find_room()
        while process is None or process.is_gone:
            process = await self._turn()
        return process

    async def _turn(self) -> ScorerProcess:
        """A process, as soon as one has room and all calls before have one."""
        turn: asyncio.Future[ScorerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._next_turns()
        try:
            process = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                turn.result().promised -= 1
                self._next_turns()
            raise
        process.promised -= 1
        return process

    def _find_room(self) -> ScorerProcess | None:
        """The least busy process with room, or a new one while there may be more."""
        self._processes = self.processes
        with_room = [process for process in self._processes if process.room > 0]
        if with_room:
            return min(with_room, key=_calls)
        if len(self._processes) < self.size:
            return self._start()
        return None

    def _start(self) -> ScorerProcess:
        process = ScorerProcess(self.path)
        self._processes.append(process)
        return process

    def _next_turns(self) -> None:
        """Give the room that there is to the calls that wait."""
        while self._waiting:
            if self._waiting[0].done():  # nobody waits for it any more
                self._waiting.popleft()
                continue
            process = self._find_room()
            if process is None:
                return
            process.promised += 1
            self._waiting.popleft().set_result(process)

    async def _by_itself(self, request: Json) -> Json:
        """The call in a process of its own."""
        async with self._alone:
            process = ScorerProcess(self.path)
            try:
                message = await self._in(process, request)
            finally:
                await process.close()
        assert message is not None, "a call that is alone has nobody to share the blame"
        return message

    async def _in(self, process: ScorerProcess, request: Json) -> Json | None:
        """The call in this process; None if it must be repeated because it shared a process that ended."""
        number = next(self._numbers)
        call = process.begin(number)
        try:
            facts = self._checked(await process.loaded())
            self._next_turns()  # now it is known whether calls may overlap
            process.send({"call": number, **request})
            return await self._answer(process, number, call, overlaps=facts.overlaps)
        except ProcessGoneError as gone:
            if call.has_company:
                return None
            raise InfraFailure(gone.reason, gone.detail) from None
        finally:
            if call.answer.done():
                process.end(number)
            else:  # given up in the middle of it
                self._give_up(process, number)
            self._next_turns()

    async def _answer(self, process: ScorerProcess, number: int, call: Call, *, overlaps: bool) -> Json:
        """What the process answers within the deadline. Raises `InfraFailure`, `ProcessGoneError`."""
        late = f"`score` did not return within reward.scorer_timeout_s (={self.timeout_s:g})"
        await asyncio.wait({call.answer}, timeout=self.timeout_s)
        if call.answer.done():
            return call.answer.result()
        if overlaps:
            process.send({"cancel": number})
            await asyncio.wait({call.answer}, timeout=CANCEL_S)
            if call.answer.done():
                call.answer.result()  # raises what ended the process
                raise InfraFailure("scorer_timeout", late)
        process.kill("scorer_timeout", late)
        return call.answer.result()

    def _give_up(self, process: ScorerProcess, number: int) -> None:
        """Nobody waits for the call any more: a process that has it alone goes with it."""
        is_alone = len(process.calls) == 1
        if is_alone:
            process.kill("closed", "")
        else:
            with suppress(ProcessGoneError):
                process.send({"cancel": number})
        process.end(number)

    def _checked(self, facts: ScorerFacts) -> ScorerFacts:
        """Raises `InfraFailure` if the file has changed since the run began."""
        if facts.digest != self.digest:
            raise InfraFailure(
                "scorer_changed", f"{self.path} has changed since the run began. Restart with --ckpt.load_enable"
            )
        return facts


def default_size() -> int:
    """Processes of a runner: half the cores, 2 to `MOST_PROCESSES`."""
    cores = os.cpu_count() or 1
    return min(MOST_PROCESSES, max(2, cores // 2))


async def inspect_scorer(path: str) -> ScorerFacts:
    """Load a scorer in a process of its own. Raises `AgentError` with what is wrong and the fix."""
    pool = ScorerPool(path, 1, timeout_s=START_S)
    try:
        return await pool.facts()
    except InfraFailure as failure:
        raise AgentError(failure.detail) from None
    finally:
        await pool.close()


def child_environment() -> dict[str, str]:
    """The environment of a scorer's process."""
    kept = for_scorer(os.environ)
    molt_root = str(Path(__file__).resolve().parents[2])
    paths = [kept["PYTHONPATH"], molt_root] if kept.get("PYTHONPATH") else [molt_root]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    kept["PYTHONHASHSEED"] = "0"  # a scorer that walks over a set scores alike in every process
    kept["OMP_NUM_THREADS"] = "1"
    return kept


async def _spawn(path: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "molt.agents.scorer_process",
        path,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )


async def _read(stream: asyncio.StreamReader) -> Json | None:
    """The next message; None at the end."""
    try:
        head = await stream.readexactly(LENGTH.size)
        body = await stream.readexactly(LENGTH.unpack(head)[0])
        return json.loads(body)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return None


def _calls(process: ScorerProcess) -> int:
    return len(process.calls)
