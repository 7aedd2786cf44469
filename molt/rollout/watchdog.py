"""Who waits for whom: the state of every rollout in flight, and what happens when none makes progress."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from molt.agents.loop_lag import Block, LoopLag
from molt.types import Metric, OnEvent

SHOWN_ROLLOUTS = 20
"""Rows of the table."""
LOOK_S = 10.0
"""At most, between two looks at the rollouts."""
BLOCKS_S = 1.0
"""Between two questions to the runners which lines block them."""


@dataclass(frozen=True)
class RolloutState:
    """A rollout in flight, as its runner sees it."""

    group_id: str
    index: int
    runner: str
    doing: str
    """`agent`: the user's code runs; `engine`: a model call does; `scorer`: it waits for its score."""
    turns: int
    age_s: float
    silent_s: float
    """Since its last event."""


@dataclass(frozen=True)
class LoopTimes:
    """The worst delays of a runner's event loop since its last answer, in seconds."""

    lag_s: float = 0.0
    blocked_s: float = 0.0
    """The part of a lag in which the loop's thread was not waiting for a core."""


class Runners(Protocol):
    """The runners as the watchdog sees them."""

    async def states(self) -> list[RolloutState]: ...
    def again(self, group_ids: set[str]) -> None: ...
    async def blocks(self) -> list[tuple[str, Block]]: ...
    async def loop_times(self) -> LoopTimes: ...


class Watchdog:
    """Shows who waits for whom when all rollouts have been silent for `silence_s`; restarts them after `patience_s`.

    A rollout may be silent for as long as its own deadline allows: a long answer, a slow grader.
    """

    def __init__(
        self,
        runners: Runners,
        silence_s: float,
        on_event: OnEvent,
        repairing: Callable[[], bool],
        patience_s: float = 0.0,
    ):
        """repairing: whether something that the rollouts may wait for is being restarted already."""
        self.runners = runners
        self.silence_s = silence_s
        self.on_event = on_event
        self.repairing = repairing
        self.patience_s = max(silence_s, patience_s)
        self.last_repair = 0.0
        """When a repair was last seen, as of `time.monotonic`."""
        self.reported = False
        """Whether this silence has been shown."""
        self.lag = LoopLag()

    async def run(self) -> None:
        """Look, for ever. Waits for: the time. The pool replaces a runner that does not answer."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lag.run())
            tasks.create_task(self._record_blocks())
            while True:
                await asyncio.sleep(min(self.silence_s / 4, LOOK_S))
                self.look(await self.runners.states())

    def look(self, states: Sequence[RolloutState]) -> None:
        """Show the silence of these rollouts, or restart them, if it is time."""
        silent_s = self._silent_s(states)
        if silent_s <= self.silence_s:
            self.reported = False
            return
        if not self.reported:
            self._report(states)
        if silent_s > self.patience_s:
            self._restart(states)

    async def take_metrics(self) -> dict[str, Metric]:
        """The worst lags of driver and runners since the last call, with those that last."""
        runners = await self.runners.loop_times()
        return {
            "perf/driver_lag_max": Metric(self.lag.take_s()),
            "perf/runner_lag_max": Metric(runners.lag_s),
            "perf/runner_blocked_max": Metric(runners.blocked_s),
        }

    async def _record_blocks(self) -> None:
        """An event for every line that blocks a runner, while it does; the runner prints it. For ever."""
        while True:
            await asyncio.sleep(BLOCKS_S)
            for runner, block in await self.runners.blocks():
                self.on_event("runner_blocked", runner=runner, at=block.place, seconds=round(block.seconds, 1))

    def _silent_s(self, states: Sequence[RolloutState]) -> float:
        """How long no rollout has made progress; the time of a repair does not count."""
        now = time.monotonic()
        if self.repairing():
            self.last_repair = now
        shortest = min((state.silent_s for state in states), default=0.0)
        return min(shortest, now - self.last_repair)

    def _report(self, states: Sequence[RolloutState]) -> None:
        self.reported = True
        print(
            f"no rollout has made progress for train.watchdog_s (={self.silence_s:g}); {len(states)} are in flight and "
            f"restart after {self.patience_s:g} s:\n{table(states)}",
            file=sys.stderr,
        )
        self.on_event("silence", groups=sorted(_groups(states)), table=table(states))

    def _restart(self, states: Sequence[RolloutState]) -> None:
        groups = _groups(states)
        self.reported = False
        self.on_event("begun_again", groups=sorted(groups))
        self.runners.again(groups)


def table(states: Sequence[RolloutState]) -> str:
    """One row per rollout, the longest silent first."""
    rows = [f"  {'rollout':12} {'runner':10} {'waits for':10} {'turns':>5} {'age':>8} {'silent':>8}"]
    longest_silent_first = sorted(states, key=lambda state: -state.silent_s)
    for state in longest_silent_first[:SHOWN_ROLLOUTS]:
        rollout = f"{state.group_id}:{state.index}"
        seconds = f"{state.age_s:7.1f}s {state.silent_s:7.1f}s"
        rows.append(f"  {rollout:12} {state.runner:10} {state.doing:10} {state.turns:5} {seconds}")
    if len(states) > SHOWN_ROLLOUTS:
        rows.append(f"  and {len(states) - SHOWN_ROLLOUTS} more")
    return "\n".join(rows)


def _groups(states: Sequence[RolloutState]) -> set[str]:
    return {state.group_id for state in states}
