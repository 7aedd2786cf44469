"""The engines as the driver sees them: it starts, watches and restarts them, and publishes weights to them.

The states of an engine, and what moves it from one to the next:

    SERVING ──dead, silent or wrong weights──> LOST ──restart──> WAITING_FOR_WEIGHTS ──weight sync──> SERVING
                                                 ^                        │
                                                 └────dead or silent──────┘

A restarted engine is the same Ray actor in a new process, so every handle stays valid.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from molt.errors import EngineError
from molt.publish.proof import Receipt
from molt.rollout.engine_worker import Sampling
from molt.rollout.handles import ANSWER_S, DEAD, HEARTBEAT_S, Answer, EngineHandle, ignore_event, last_line


class EngineState(Enum):
    SERVING = auto()
    """It answers requests, or holds them while a weight sync runs."""
    LOST = auto()
    """Its process is dead, silent or wrong; `watch` restarts it."""
    WAITING_FOR_WEIGHTS = auto()
    """It was restarted, and refuses requests until it has the trainer's weights."""


@dataclass(eq=False)
class EngineRecord:
    """One engine, as the driver knows it."""

    index: int
    handle: EngineHandle
    state: EngineState = EngineState.SERVING
    life: int = 0
    """Restarts so far; tells the processes behind one handle apart."""
    restarts_since_weights: int = 0
    """Attempts to restart it since its last weight sync."""


class EngineGroup:
    """All engines of a run.

    `EngineGroup` alone changes the state of an engine. What else it says about the engines follows from the states.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        *,
        timeout_s: float,
        silence_s: float = 600.0,
        start_timeout_s: float = 1800.0,
        max_restarts: int = 3,
        on_event: Callable[..., None] = ignore_event,
    ):
        """timeout_s: for a call of a weight sync; an engine that takes longer is lost, even if others reach it.

        silence_s: an engine silent for longer is restarted.

        max_restarts: of one engine, without a weight sync in between. on_event: called with the kind of an event and
        its fields by name.
        """
        self.timeout_s = timeout_s
        self.silence_s = silence_s
        self.start_timeout_s = start_timeout_s
        self.max_restarts = max_restarts
        self.on_event = on_event
        self.restarted = asyncio.Event()
        """Set while an engine waits for weights."""
        self.unserved = asyncio.Event()
        """Set while an engine waits for weights and none serves."""
        self._records = [EngineRecord(index, handle) for index, handle in enumerate(engines)]
        self._changed = asyncio.Event()
        """Set whenever a state changed, and when `watch` fails."""
        self._failure: EngineError | None = None
        """What `watch` raised."""

    @property
    def engines(self) -> list[EngineHandle]:
        return [record.handle for record in self._records]

    @property
    def present(self) -> dict[int, int]:
        """The engines that can take weights (all but the lost ones), and the life that each is in."""
        return {record.index: record.life for record in self._records if record.state is not EngineState.LOST}

    @property
    def repairing(self) -> bool:
        """Whether an engine is lost or waits for weights."""
        return any(record.state is not EngineState.SERVING for record in self._records)

    async def start(self) -> None:
        """Load the models and serve the weights that are on disk."""
        await asyncio.gather(*(record.handle.start.remote() for record in self._records))
        await self.resume(self.present)

    async def some(self) -> dict[int, int]:
        """Wait until `present` is not empty, and return it. Raises the `EngineError` that stopped `watch`."""
        while not self.present:
            if self._failure:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return self.present

    async def commit(self, version: int, engines: Iterable[int]) -> list[Receipt]:
        """End a weight sync; the receipts of all workers, engine by engine."""
        records = self._select(engines)
        receipts = await self._answers("commit", records, [record.handle.commit.remote(version) for record in records])
        return [receipt for per_engine in receipts for receipt in per_engine]

    async def resume(self, engines: Iterable[int]) -> None:
        """Let `engines`, which have the trainer's weights, serve."""
        records = self._select(engines)
        await self._answers("resume", records, [record.handle.resume.remote() for record in records])
        for record in records:
            record.restarts_since_weights = 0
            if record.state is EngineState.WAITING_FOR_WEIGHTS:
                self._enter(record, EngineState.SERVING)

    async def logprobs(self, sequences: list[list[int]], engines: Iterable[int]) -> list[list[np.ndarray]]:
        """The probe's log-probs float32 `[T]` of every sequence, engine by engine."""
        records = self._select(engines)
        calls = [record.handle.logprobs.remote(sequences) for record in records]
        return await self._answers("logprobs", records, calls)

    async def complete(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        """The ids of each prompt and of one turn of the first engine."""
        first = self._records[0]
        calls = [first.handle.complete.remote(f"complete-{i}", ids, sampling) for i, ids in enumerate(prompts)]
        try:
            async with asyncio.timeout(self.start_timeout_s):
                return await asyncio.gather(*calls)
        except (TimeoutError, RayError) as error:
            raise _engine_error(
                f"engine 0 is dead, or did not answer within {self.start_timeout_s:.0f} s", error
            ) from error

    def give_up(self, engine: int, reason: str) -> None:
        """The engine is of no use, though it may answer: `watch` restarts it."""
        self._lose(self._records[engine], reason)

    async def watch(self) -> None:
        """Restart every engine that is dead or silent, for ever.

        Raises `EngineError` after `max_restarts` restarts of one engine without a weight sync in between.
        """
        async with asyncio.TaskGroup() as tasks:
            for record in self._records:
                tasks.create_task(self._watch(record))

    async def serve(self) -> None:
        """Without a trainer: let every engine that `watch` restarts serve the weights on disk, for ever."""
        while True:
            await self.restarted.wait()
            waiting = self._in_state(EngineState.WAITING_FOR_WEIGHTS)
            await self.resume([record.index for record in waiting])

    async def examine(self, suspects: Iterable[int] = ()) -> bool:
        """Check all engines now and mark the bad ones as lost; whether there is any.

        suspects: engines that hold wrong weights, and are lost even if they answer.
        """
        suspected = set(suspects)
        present = self._select(self.present)
        problems = await asyncio.gather(*(self._problem(record) for record in present))

        for record, problem in zip(present, problems, strict=True):
            if problem is None and record.index in suspected:
                problem = "its weights are not the trainer's"
            if problem is not None:
                self._lose(record, problem)
        return bool(suspected) or any(problems)

    async def _watch(self, record: EngineRecord) -> None:
        while True:
            if record.state is EngineState.LOST:
                await self._restart(record)
            await asyncio.sleep(HEARTBEAT_S)
            if record.state is not EngineState.LOST:
                problem = await self._problem(record)
                if problem is not None:
                    self._lose(record, problem)

    async def _problem(self, record: EngineRecord) -> str | None:
        """Why the engine must be restarted, or None."""
        try:
            async with asyncio.timeout(self.silence_s):
                serves = await record.handle.alive.remote()
        except TimeoutError:
            return f"no answer within train.watchdog_s (={self.silence_s:g})"
        except (EngineError, RayTaskError, *DEAD) as error:
            return last_line(error)

        if not serves and record.state is not EngineState.WAITING_FOR_WEIGHTS:
            return "its process is a new one"
        return None

    async def _restart(self, record: EngineRecord) -> None:
        """Try once to replace the process of a lost engine. Raises `EngineError` when there were too many attempts."""
        record.restarts_since_weights += 1
        if record.restarts_since_weights > self.max_restarts:
            self._fail(record)
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await self._end_process(record.handle)
                await self._start_process(record.handle)
        except (TimeoutError, RayError) as error:
            self.on_event("engine_lost", engine=record.index, reason=f"restart failed: {error!r}")
            return  # still lost: `_watch` tries again

        record.life += 1
        self._enter(record, EngineState.WAITING_FOR_WEIGHTS)
        self.on_event("engine_restarted", engine=record.index)

    def _lose(self, record: EngineRecord, reason: str) -> None:
        if record.state is not EngineState.LOST:
            self._enter(record, EngineState.LOST)
            self.on_event("engine_lost", engine=record.index, reason=reason)

    def _fail(self, record: EngineRecord) -> None:
        """Stop `watch`, and whoever waits in `some`."""
        self._failure = EngineError(
            f"engine {record.index} was restarted {self.max_restarts} times in a row (train.max_restarts), without a "
            "weight sync in between: the run stops. Fix what its output says, then resume with --ckpt.load_enable."
        )
        self._changed.set()
        raise self._failure

    def _enter(self, record: EngineRecord, state: EngineState) -> None:
        """Change the state of an engine, and set the events that follow from the states of all."""
        record.state = state
        waiting = bool(self._in_state(EngineState.WAITING_FOR_WEIGHTS))
        serving = bool(self._in_state(EngineState.SERVING))
        _set_if(self.restarted, waiting)
        _set_if(self.unserved, waiting and not serving)
        self._changed.set()

    def _in_state(self, state: EngineState) -> list[EngineRecord]:
        return [record for record in self._records if record.state is state]

    def _select(self, engines: Iterable[int]) -> list[EngineRecord]:
        return [self._records[index] for index in engines]

    async def _end_process(self, engine: EngineHandle) -> None:
        """Kill the process, and return once it is gone: the next call must not reach it."""
        _kill(engine)  # requests that it has fail now
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await engine.alive.remote()
            except DEAD:
                return
            except (TimeoutError, RayTaskError):
                continue
            await asyncio.sleep(HEARTBEAT_S / 10)

    async def _start_process(self, engine: EngineHandle) -> None:
        """Load the model, once Ray has made the new process. Raises `RayError` when that process dies or cannot."""
        while True:
            with suppress(ActorUnavailableError):
                await engine.alive.remote()
                break
            await asyncio.sleep(HEARTBEAT_S / 2)
        await engine.start.remote()

    async def _answers(
        self, method: str, records: Sequence[EngineRecord], calls: Sequence["ray.ObjectRef[Answer]"]
    ) -> list[Answer]:
        """The answers of all calls, one per record.

        Raises `EngineError` when one fails, or after `timeout_s`; the engines that have not answered by then are lost.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*tasks)
        except TimeoutError as error:
            silent = [record for record, task in zip(records, tasks, strict=True) if task.cancelled()]
            reason = f"no answer to `{method}` within train.watchdog_s (={self.timeout_s:g})"
            for record in silent:
                self._lose(record, reason)
            numbers = ", ".join(str(record.index) for record in silent)
            raise _engine_error(f"engines {numbers}: {reason}", error) from error
        except RayError as error:
            raise _engine_error(f"an engine is dead, or failed in `{method}`", error) from error


def _engine_error(what: str, error: Exception) -> EngineError:
    return EngineError(
        f"{what}. If this stops the run, fix what its output says, then resume with --ckpt.load_enable. The error: "
        f"{last_line(error)}"
    )


def _set_if(event: asyncio.Event, condition: bool) -> None:
    if condition:
        event.set()
    else:
        event.clear()


def _kill(engine: EngineHandle) -> None:
    """Ray restarts the actor in a new process."""
    ray.kill(engine, no_restart=False)  # pyright: ignore[reportArgumentType]  # an `ActorHandle` at run time
