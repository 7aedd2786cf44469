"""`python -m molt.agents.scorer_process FILE PARENT`: the process in which a user's scorer runs.

`rollout/scorer_pool.py` starts it and speaks with it over its standard input and output, in frames: 4 bytes of length,
then a JSON object.

    from the process   {"judge", "overlaps", "digest"}               once, when FILE is loaded; or {"error"}
    to the process     {"call", "trajectory", "judge_url"}           a trajectory to score
                       {"cancel"}                                    end this call of an async scorer
    from the process   {"call", "memory", "reward", "score", "info"} a score
                       {"call", "memory", "reward", "reason"}        a `PolicyFailure`
                       {"call", "memory", "failure": [reason, detail]}

What the scorer prints goes to standard error. The process ends with its parent, however that ends, and the event loops
of runners go before it. Few modules are imported, so that it starts quickly.
"""

import asyncio
import ctypes
import hashlib
import inspect
import json
import math
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.agents.env import Result, info_numbers
from molt.agents.trajectory import Trajectory
from molt.agents.user_errors import contain_tasks
from molt.errors import AgentError, MoltError, described, did_you_mean
from molt.types import InfraFailure, Json, PolicyFailure
from molt.user_module import load_module, raised_at

FUNCTION = "score"
"""What a scorer file exports."""
JUDGE = "judge_url"
"""The name of its second parameter, if it has one."""
NICENESS = 5
SLICE_S = 0.1
"""The longest time slice that Linux gives."""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call, by machine."""
SIGNAL_AT_PARENTS_DEATH = 1
"""`PR_SET_PDEATHSIG` of Linux."""
LENGTH = struct.Struct("!I")
"""Of a frame."""
LONGEST_DETAIL = 2000
"""Characters."""


class Channel:
    """The pipes to and from the parent, away from where the scorer could print into them."""

    def __init__(self):
        self._incoming = os.dup(0)
        self._outgoing = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)

    def read(self) -> Json | None:
        """The next message; None when the parent has closed the pipe."""
        head = self._read_exactly(LENGTH.size)
        if head is None:
            return None
        body = self._read_exactly(LENGTH.unpack(head)[0])
        if body is None:
            return None
        return json.loads(body)

    def write(self, message: Json) -> None:
        frame = memoryview(encode(message))
        while frame:
            frame = frame[os.write(self._outgoing, frame) :]

    def _read_exactly(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            chunk = os.read(self._incoming, count - len(data))
            if not chunk:
                return None
            data += chunk
        return bytes(data)


def encode(message: Json) -> bytes:
    """The frame of a message."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


@dataclass(frozen=True)
class Scorer:
    """The user's function."""

    function: Callable[..., Any]
    wants_judge: bool
    digest: str
    """SHA-256 of the file."""

    @property
    def overlaps(self) -> bool:
        """Whether several calls may run at the same time."""
        return inspect.iscoroutinefunction(self.function)

    def call(self, request: Json) -> Any:
        """What the function returns: the score, or a coroutine that does."""
        trajectory = Trajectory.from_json(request["trajectory"])
        if self.wants_judge:
            return self.function(trajectory, request["judge_url"])
        return self.function(trajectory)


def load_scorer(path: str) -> Scorer:
    """Import FILE.py and find its function. Raises `AgentError` with what is wrong and the fix."""
    digest = file_digest(path)
    module = load_module(path, "reward.scorer", AgentError)
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        near = did_you_mean(FUNCTION, vars(module))
        raise AgentError(
            f"`reward.scorer` (={path}) exports no function `{FUNCTION}`: no reward can arise.{near} Add `def "
            f"{FUNCTION}(trajectory)`, or an `async def`, that returns a number."
        )
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) not in (1, 2) or parameters[1:] not in ([], [JUDGE]):
        raise AgentError(
            f"`reward.scorer` (={path}): `{FUNCTION}` takes ({', '.join(parameters)}), but molt gives it a trajectory, "
            f"and the address of a judge where it asks for one. Use `{FUNCTION}(trajectory)` or "
            f"`{FUNCTION}(trajectory, {JUDGE})`."
        )
    return Scorer(function, wants_judge=len(parameters) == 2, digest=digest)


def file_digest(path: str) -> str:
    """SHA-256 of a file, hexadecimal; "" if it cannot be read, which loading it reports."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """The memory of a process; 0 if it is gone, or on a system without /proc."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


# From what the function does to a message.


def scored(value: object) -> Json:
    """The message for what the function returned. Raises `InfraFailure` if that is no score."""
    if isinstance(value, Result):
        score = value.reward if value.score is None else value.score
        return {
            "reward": _finite("reward", value.reward),
            "score": _finite("score", score),
            "info": info_numbers(value.info),
        }
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise InfraFailure(
            "scorer_result",
            f"`{FUNCTION}` returned {value!r:.80}, a {type(value).__name__}. Return a number, or "
            "molt.agents.Result(reward=...)",
        )
    reward = _finite("reward", value)
    return {"reward": reward, "score": reward, "info": {}}


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise InfraFailure("reward_not_finite", f"`{FUNCTION}` returned {name} {number}")
    return number


def failed(error: BaseException) -> Json:
    """The message for what the function raised."""
    if isinstance(error, PolicyFailure):
        if not math.isfinite(error.reward):
            return failed(InfraFailure("reward_not_finite", f"`{FUNCTION}` raised a PolicyFailure of {error.reward}"))
        return {"reward": error.reward, "reason": str(error.reason)}
    if isinstance(error, InfraFailure):
        return {"failure": [str(error.reason), str(error.detail)[:LONGEST_DETAIL]]}
    reason = f"scorer_{type(error).__name__}"
    if isinstance(error, SystemExit):
        reason = "scorer_exit"
    detail = f"{described(error)[:LONGEST_DETAIL]} at {raised_at(error)}"
    return {"failure": [reason, detail]}


# Serving.


def serve_in_turn(scorer: Scorer, channel: Channel) -> None:
    """One call after another, until the parent closes the pipe."""
    while True:
        request = channel.read()
        if request is None:
            return
        try:
            message = scored(scorer.call(request))
        except BaseException as error:  # fault boundary: one call of the user's function
            message = failed(error)
        _answer(channel, request, message)


async def serve_overlapping(scorer: Scorer, channel: Channel) -> None:
    """Calls of a coroutine function side by side, until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    contain_tasks(loop)  # an exit in one call's task would end those of all
    requests: asyncio.Queue[Json | None] = asyncio.Queue()

    def read_all() -> None:
        while True:
            request = channel.read()
            loop.call_soon_threadsafe(requests.put_nowait, request)
            if request is None:
                return

    threading.Thread(target=read_all, daemon=True).start()
    running: dict[int, asyncio.Task[None]] = {}
    while True:
        request = await requests.get()
        if request is None:
            return
        if "cancel" in request:
            task = running.get(request["cancel"])
            if task is not None:
                task.cancel()
            continue
        number = request["call"]
        running[number] = asyncio.create_task(_serve(scorer, channel, request))
        running[number].add_done_callback(_Forget(running, number))


@dataclass(frozen=True)
class _Forget:
    """Takes a call that has ended out of the running ones."""

    running: dict[int, asyncio.Task[None]]
    number: int

    def __call__(self, _: asyncio.Task[None]) -> None:
        self.running.pop(self.number, None)


async def _serve(scorer: Scorer, channel: Channel, request: Json) -> None:
    try:
        message = scored(await scorer.call(request))
    except BaseException as error:  # fault boundary: one call of the user's function
        message = failed(error)
    _answer(channel, request, message)


def _answer(channel: Channel, request: Json, message: Json) -> None:
    channel.write({"call": request["call"], "memory": resident_bytes(os.getpid()), **message})


# The process.


def end_with(parent: int) -> None:
    """From now on the process is killed when its parent dies."""
    with suppress(OSError, AttributeError):  # there is no such call outside of Linux; there it ends with its pipe
        ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class SchedulingAttributes(ctypes.Structure):
    """`struct sched_attr` of Linux, sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def _run_after_event_loops() -> None:
    """A process that wakes takes the core at once, and this one gets less of the cores while all are busy.

    By niceness alone it would wait for the end of this one's slice, up to a tick of 4 ms. A process with a longer slice
    is interrupted, and keeps its share of the cores. Linux before 6.12 ignores the slice.
    """
    os.nice(NICENESS)
    call = SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or call is None:
        return
    attributes = SchedulingAttributes(nice=os.nice(0), runtime=int(SLICE_S * 1e9))
    attributes.size = ctypes.sizeof(attributes)
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(attributes), 0)


def _die_first() -> None:
    """Where memory runs out, the kernel kills this process before a runner or an engine."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(path: str, parent: int) -> None:
    """Load FILE, say what it is, and serve until the parent has no more calls."""
    os.setpgrp()  # what the scorer starts is killed with it
    end_with(parent)
    _run_after_event_loops()
    _die_first()
    channel = Channel()
    try:
        scorer = load_scorer(path)
    except MoltError as error:
        channel.write({"error": str(error)})
        return

    channel.write({"judge": scorer.wants_judge, "overlaps": scorer.overlaps, "digest": scorer.digest})
    if scorer.overlaps:
        asyncio.run(serve_overlapping(scorer, channel))
    else:
        serve_in_turn(scorer, channel)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that the scorer left do not keep the process
