"""The runners as the driver sees them: which one has a group, and what happens when one dies or hangs."""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto

import ray
from ray.exceptions import ObjectLostError

from molt.agents.loop_lag import Block
from molt.errors import LostError
from molt.rollout.group_task import GroupResult, GroupTask
from molt.rollout.handles import DEAD, RunnerHandle, SamplesRef, ignore_event, last_line
from molt.rollout.watchdog import LoopTimes, RolloutState, table
from molt.types import InfraFailure

GRACE_S = 60.0
"""What a runner may take beyond the deadlines that it enforces itself."""
BLOCKS_ANSWER_S = 5.0
"""What a runner may take to say what blocks it."""
LOOP_TIMES_ANSWER_S = 1.0
"""What a runner may take to say how late its event loop was; a step waits for it."""
LOADING_S = 300.0
"""A new runner may be silent for so long: it loads its agent."""

Answer = tuple[GroupResult, SamplesRef]
"""What is known of a group that a runner has, or had."""
OnProgress = Callable[[GroupResult, SamplesRef | None], None]
"""Told when a group is past generation, when a rollout of it is sampled anew after that, and when all is lost."""
NOTHING = GroupResult([])
"""What there is of a group that starts again."""


def ignore_progress(result: GroupResult, samples: SamplesRef | None) -> None:
    """For a caller to whom it makes no difference whether a group generates."""


@dataclass(eq=False)
class RunnerRecord:
    """One place in the pool, and the process that fills it now."""

    index: int
    handle: RunnerHandle
    started: float
    """When the process was started, as of `time.monotonic`."""
    last_states: list[RolloutState] | None = None
    """What its rollouts did when it last answered; None before its first answer."""
    in_flight: int = 0
    """Groups that wait for the runner."""
    suspects: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a group in its last attempt that lost two runners before: one at a time."""
    restarts_since_answer: int = 0
    """How many processes were lost here since one last answered."""


class Ending(Enum):
    """Why the pool stopped waiting for a runner's answer."""

    ANSWERED = auto()
    RETRY_REQUESTED = auto()
    DEADLINE = auto()


@dataclass(frozen=True)
class Dispatch:
    """A group that a runner has."""

    runner: RunnerHandle
    since: float
    """As of `time.monotonic`."""
    retry: asyncio.Event
    """Set to take the group away from the runner and start it again."""


class RunnerPool:
    """Dispatches groups to runners, the least loaded first; retries elsewhere when a runner dies or hangs.

    `spawn(name)` starts a runner process; the pool owns the processes and replaces those it loses.
    """

    def __init__(
        self,
        spawn: Callable[[str], RunnerHandle],
        count: int,
        *,
        deadline_s: float,
        attempts: int,
        calls: int = 1,
        silence_s: float = 600.0,
        max_restarts: int = 3,
        on_event: Callable[..., None] = ignore_event,
    ):
        """deadline_s: for one call about a group. silence_s: a runner silent for longer is replaced.

        calls: in one attempt at a group that goes well: 2 with a scorer, since it is rolled out and then scored.
        max_restarts: of one runner, without an answer in between. on_event: called with the kind of an event and its
        fields by name.
        """
        self.spawn = spawn
        self.deadline_s = deadline_s
        self.attempts = attempts
        self.calls = calls
        self.silence_s = silence_s
        self.max_restarts = max_restarts
        self.on_event = on_event
        self._names = itertools.count()
        self._records = [RunnerRecord(index, self._start(), time.monotonic()) for index in range(count)]
        self._dispatches: dict[str, Dispatch] = {}
        """By the id of a group in flight."""
        self._worst = LoopTimes()

    @property
    def runners(self) -> list[RunnerHandle]:
        return [record.handle for record in self._records]

    @property
    def in_flight(self) -> list[int]:
        """Groups in flight, runner by runner."""
        return [record.in_flight for record in self._records]

    @property
    def patience_s(self) -> float:
        """No group takes longer than this to finish or fail."""
        return self.deadline_s * self.attempts * self.calls + GRACE_S

    async def ready(self) -> None:
        """Returns when every runner has loaded its agent; raises what its constructor raised."""
        await asyncio.gather(*(runner.ready.remote() for runner in self.runners))
        for record in self._records:
            record.last_states = []

    async def run_group(
        self, task: GroupTask, on_progress: OnProgress = ignore_progress, begun: Answer | None = None
    ) -> Answer:
        """The light result, and a reference to the samples.

        begun: a group that is past generation; what it has is kept. Raises `InfraFailure("runner")` after `attempts`,
        `LostError` when a runner had too many restarts.
        """
        answer = begun
        lost_runners = 0
        for attempt in range(1, self.attempts + 1):
            record = min(self._records, key=_load)
            # Of groups that lost two runners one may be to blame: it must not take the others' last attempts.
            is_suspect = lost_runners >= 2 and attempt == self.attempts
            async with record.suspects if is_suspect else nullcontext():
                runner = record.handle
                is_finished, answer = await self._advance(record, task, on_progress, answer)
            if is_finished and answer is not None:
                return answer
            if record.handle is not runner:
                lost_runners += 1
        raise InfraFailure("runner", f"no runner finished the group in {self.attempts} attempts")

    def again(self, group_ids: set[str]) -> None:
        """Take these groups away from their runners and retry them, which counts as an attempt at each."""
        for group_id in group_ids & self._dispatches.keys():
            self._dispatches[group_id].retry.set()

    async def states(self) -> list[RolloutState]:
        """What every rollout does whose group is in flight. A runner that is dead or silent is replaced."""
        per_runner = await asyncio.gather(*(self._states_of(record) for record in self._records))
        # A cancelled agent that goes on regardless is left out: nobody waits for it.
        return [state for states in per_runner for state in states if state.group_id in self._dispatches]

    async def blocks(self) -> list[tuple[str, Block]]:
        """The lines that blocked a runner since the last call, or do now, each with the runner."""
        per_runner = await asyncio.gather(*(self._blocks_of(record) for record in self._records))
        return [found for blocks in per_runner for found in blocks]

    async def loop_times(self) -> LoopTimes:
        """The worst delays of a runner's event loop since the last call, with one that lasts."""
        await asyncio.gather(*(self._ask_for_loop_times(record) for record in self._records))
        worst = self._worst
        self._worst = LoopTimes()
        return worst

    async def _advance(
        self, record: RunnerRecord, task: GroupTask, on_progress: OnProgress, answer: Answer | None
    ) -> tuple[bool, Answer | None]:
        """Let one runner finish the group. Whether it did, and the last answer about the group."""
        while True:
            try:
                latest = await self._attempt(record, task, answer)
            except ObjectLostError:  # the node of this runner is gone, or that of the arrays: nothing is left
                on_progress(NOTHING, None)
                if answer is not None:
                    self.on_event("group_lost", group=task.prompt.group_id)
                return False, None
            if latest is None:
                return False, answer
            answer = latest
            result, samples = answer
            if result.is_finished:
                return True, answer
            on_progress(result, samples)

    async def _attempt(self, record: RunnerRecord, task: GroupTask, before: Answer | None) -> Answer | None:
        """One call about a group on one runner; None if it must be tried again. Raises `ObjectLostError`.

        before: the last answer about the group.
        """
        runner = record.handle
        group_id = task.prompt.group_id
        result_ref, samples_ref = _call(runner, task, before)
        answer = asyncio.ensure_future(result_ref)  # the samples stay where they are
        dispatch = Dispatch(runner, time.monotonic(), asyncio.Event())

        record.in_flight += 1
        self._dispatches[group_id] = dispatch
        try:
            ending = await self._wait(answer, dispatch.retry)
            if ending is Ending.ANSWERED:
                result = answer.result()
                record.restarts_since_answer = 0
                return result, samples_ref
            if ending is Ending.RETRY_REQUESTED:
                ray.cancel(result_ref)
            else:
                # An environment that never awaits blocks the event loop: only a new process helps.
                self._replace(record, runner, f"no end of a group within {self.deadline_s:.0f} s")
        except DEAD as error:
            self._replace(record, runner, last_line(error))
        except asyncio.CancelledError:
            ray.cancel(result_ref)
            raise
        finally:
            answer.add_done_callback(_retrieve_exception)
            answer.cancel()
            record.in_flight -= 1
            del self._dispatches[group_id]
        return None

    async def _wait(self, answer: asyncio.Future, retry: asyncio.Event) -> Ending:
        """Wait for the runner's answer, for a request to retry, or for the deadline."""
        retry_requested = asyncio.create_task(retry.wait())
        try:
            await asyncio.wait((answer, retry_requested), timeout=self.deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            retry_requested.cancel()
        if answer.done():
            return Ending.ANSWERED
        if retry.is_set():
            return Ending.RETRY_REQUESTED
        return Ending.DEADLINE

    async def _states_of(self, record: RunnerRecord) -> list[RolloutState]:
        """What the rollouts of one runner do; none if it must be replaced, or was in the meantime."""
        runner = record.handle
        try:
            async with asyncio.timeout(self.silence_s):
                states, times = await runner.states.remote()
        except TimeoutError:
            loading = record.last_states is None and time.monotonic() - record.started < LOADING_S
            if not loading:
                self._replace(record, runner, f"no answer within train.watchdog_s (={self.silence_s:g})")
            return []
        except DEAD as error:
            self._replace(record, runner, last_line(error))
            return []

        if record.handle is not runner:
            return []
        record.last_states = states
        record.restarts_since_answer = 0
        self._count_loop_times(times)
        return states

    async def _ask_for_loop_times(self, record: RunnerRecord) -> None:
        """Not of a runner that is dead or does not answer: `states` takes care of it."""
        with suppress(TimeoutError, ObjectLostError, *DEAD):
            async with asyncio.timeout(LOOP_TIMES_ANSWER_S):
                self._count_loop_times(await record.handle.loop_times.remote())

    def _count_loop_times(self, times: LoopTimes) -> None:
        self._worst = LoopTimes(
            lag_s=max(self._worst.lag_s, times.lag_s),
            blocked_s=max(self._worst.blocked_s, times.blocked_s),
        )

    async def _blocks_of(self, record: RunnerRecord) -> list[tuple[str, Block]]:
        """None of a runner that is dead or does not answer: `states` takes care of it."""
        try:
            async with asyncio.timeout(BLOCKS_ANSWER_S):
                blocks = await record.handle.blocks.remote()
        except (TimeoutError, ObjectLostError, *DEAD):
            return []
        return [(f"runner{record.index}", block) for block in blocks]

    def _replace(self, record: RunnerRecord, lost: RunnerHandle, reason: str) -> None:
        """Start a new process in the place of `lost`. Raises `LostError` after too many restarts."""
        if record.handle is not lost:
            return  # every group that the runner had reports it; the first report replaced it
        states = self._unreported(record) + (record.last_states or [])
        print(f"runner {record.index} is replaced: {reason}\n{table(states)}", file=sys.stderr)
        self.on_event("runner_lost", runner=record.index, in_flight=record.in_flight, reason=reason)

        _kill(lost)
        record.restarts_since_answer += 1
        if record.restarts_since_answer > self.max_restarts:
            raise LostError(
                f"runner {record.index} was replaced {self.max_restarts} times in a row (train.max_restarts) and never "
                f"answered: the run stops. The last time: {reason}. Fix what its output says (a lack of memory?), then "
                "resume with --ckpt.load_enable."
            )
        record.handle = self._start()
        record.started = time.monotonic()
        record.last_states = None

    def _start(self) -> RunnerHandle:
        return self.spawn(f"runner{next(self._names)}")

    def _unreported(self, record: RunnerRecord) -> list[RolloutState]:
        """The groups that a runner has, and that were not in its last answer."""
        reported = {state.group_id for state in record.last_states or []}
        states = []
        for group_id, dispatch in self._dispatches.items():
            if dispatch.runner is record.handle and group_id not in reported:
                age_s = time.monotonic() - dispatch.since
                states.append(
                    RolloutState(
                        group_id=group_id,
                        index=0,
                        runner=f"runner{record.index}",
                        doing="runner",
                        turns=0,
                        age_s=age_s,
                        silent_s=age_s,
                    )
                )
        return states


def _call(
    runner: RunnerHandle, task: GroupTask, before: Answer | None
) -> tuple[ray.ObjectRef[GroupResult], SamplesRef]:
    """Generate, unless only scores are missing; the samples are the same then."""
    if before is None:
        return runner.run_group.options(num_returns=2).remote(task)
    result, samples = before
    if result.sampling:
        return runner.run_group.options(num_returns=2).remote(task, result, samples)
    return runner.score_group.remote(task, result, samples), samples


def _load(record: RunnerRecord) -> int:
    return record.in_flight


def _retrieve_exception(answer: asyncio.Future) -> None:
    """Take the exception of an answer that nobody awaits any more, which asyncio would print."""
    if not answer.cancelled():
        answer.exception()


def _kill(runner: RunnerHandle) -> None:
    ray.kill(runner)  # pyright: ignore[reportArgumentType]  # an `ActorHandle` at run time
