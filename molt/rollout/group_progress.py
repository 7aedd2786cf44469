"""A group while a runner has it: each of its rollouts is generating, scoring or finished.

    generating ──► scoring ──► finished        without a scorer: generating ──► finished
        └──◄── a score that failed ──┘         failed in every attempt: finished, too

The driver waits twice (`RunnerPool.run_group`): until no rollout is generating, when the group no longer takes a
generation slot, and until none is scoring.
"""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from molt.rollout.group_task import GroupResult
from molt.types import InfraFailure, RolloutInfo, Sample, Scoring, Turn, Unscored


class Stage(Enum):
    """Where a rollout is."""

    GENERATING = auto()
    SCORING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class RolloutProgress:
    """One rollout of the group."""

    group_id: str
    index: int
    started: float = field(default_factory=time.monotonic)
    stage: Stage = Stage.GENERATING
    failures: list[InfraFailure] = field(default_factory=list)
    """Attempts that failed."""
    score_failures: list[InfraFailure] = field(default_factory=list)
    """Scores that failed and were repeated on the same trajectory."""
    info: RolloutInfo | None = None
    """Its record, from the end of its episode on."""
    samples: list[Sample] = field(default_factory=list)
    turns: Sequence[Turn] = ()
    """Its model calls, for a scheme."""

    @property
    def record(self) -> RolloutInfo:
        """Its record now. A rollout that generates again has its last failure."""
        if self.info is not None:
            return self.info
        return self.lost()

    def lost(self) -> RolloutInfo:
        """The record of a rollout whose last attempt failed."""
        return RolloutInfo(
            group_id=self.group_id,
            index=self.index,
            outcome=self.failures[-1],
            cut=None,
            turns=0,
            samples=(),
            failures=tuple(self.failures[:-1]),
            duration_s=time.monotonic() - self.started,
            scoring=self._failed_scoring(),
        )

    def _failed_scoring(self) -> Scoring | None:
        if not self.score_failures:
            return None
        return Scoring(seconds=0.0, is_cached=None, failures=tuple(self.score_failures))


class GroupProgress:
    """The rollouts of one group, and the tasks that work on them."""

    def __init__(self, rollouts: Sequence[RolloutProgress]):
        self.key = secrets.token_hex(8)
        """Tells it from what another runner, or an earlier call, made of the same group."""
        self.rollouts = list(rollouts)
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return not self._any(Stage.GENERATING) and not self._any(Stage.SCORING)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Work on a rollout from now on."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._notify)
        self._tasks.append(task)

    def enter(self, rollout: RolloutProgress, stage: Stage, info: RolloutInfo | None = None) -> None:
        """The rollout is in this stage now."""
        rollout.stage = stage
        rollout.info = info
        self._notify()

    async def until_none_is(self, stage: Stage) -> None:
        """Returns when no rollout is in the stage. Raises what a task raised; then, or cancelled, all tasks end."""
        try:
            while True:
                for task in self._tasks:
                    if task.done():
                        task.result()
                if not self._any(stage):
                    return
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            await self.cancel()
            raise

    async def cancel(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def result(self) -> GroupResult:
        """Where the rollouts are."""
        records = [rollout.record for rollout in self.rollouts]
        sampling = [rollout.index for rollout in self.rollouts if rollout.stage is Stage.GENERATING]
        key = "" if self.is_finished else self.key
        return GroupResult(records, sampling=tuple(sampling), progress=key)

    def samples(self) -> list[list[Sample]]:
        return [rollout.samples for rollout in self.rollouts]

    def _any(self, stage: Stage) -> bool:
        return any(rollout.stage is stage for rollout in self.rollouts)

    def _notify(self, _: object = None) -> None:
        self._changed.set()


def new_rollouts(group_id: str, count: int) -> list[RolloutProgress]:
    """The rollouts of a group that has not begun."""
    return [RolloutProgress(group_id, index) for index in range(count)]


def begun_rollouts(begun: GroupResult, samples: Sequence[list[Sample]]) -> list[RolloutProgress]:
    """The rollouts of a group that another runner began, or an earlier run."""
    return [_begun(info, samples[info.index], begun) for info in begun.rollouts]


def _begun(info: RolloutInfo, samples: list[Sample], begun: GroupResult) -> RolloutProgress:
    rollout = RolloutProgress(info.group_id, info.index, started=time.monotonic() - info.duration_s)
    rollout.failures = list(info.failures)
    if info.index in begun.sampling:
        assert isinstance(info.outcome, InfraFailure), "a rollout is sampled anew because it failed"
        rollout.failures.append(info.outcome)
        return rollout
    rollout.info = info
    rollout.samples = samples
    rollout.stage = Stage.SCORING if isinstance(info.outcome, Unscored) else Stage.FINISHED
    return rollout
