"""Who waits for whom: what every rollout in flight does, and what happens when nothing does anything any more."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from molt.types import Metric

ROWS = 20
LAG_S = 0.05
LOOK_S = 10.0
"""At most, between two looks."""


@dataclass(frozen=True)
class RolloutState:
    """A rollout in flight, as its runner sees it."""

    group_id: str
    index: int
    runner: str
    doing: str
    """`agent`: the user's code runs; `engine`: a model call does."""
    turns: int
    age_s: float
    silent_s: float
    """Since its last event."""


class Runners(Protocol):
    """The runners as the watchdog sees them."""

    async def states(self) -> list[RolloutState]: ...
    def again(self, group_ids: set[str]) -> None: ...
    def take_lag_s(self) -> float: ...


class Watchdog:
    """Says who waits for whom when all rollouts have been silent for `silence_s`; begins them again after `patience_s`.

    A rollout may be silent for as long as its own deadline allows: a long answer, a slow grader.
    """

    def __init__(
        self,
        runners: Runners,
        silence_s: float,
        on_event: Callable[..., Any],
        mending: Callable[[], bool],
        patience_s: float = 0.0,
    ):
        """mending: whether somebody repairs already what the rollouts may be waiting for."""
        self.runners, self.silence_s, self.on_event, self.mending = runners, silence_s, on_event, mending
        self.patience_s = max(silence_s, patience_s)
        self.mended = 0.0
        """When somebody was last seen to repair, as of `time.monotonic`."""
        self.said = False
        """Whether this silence is shown already."""
        self.lag = LoopLag()

    async def run(self) -> None:
        """Look, for ever. Waits for: the time. A runner that does not answer is replaced by the pool."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lag.run())
            while True:
                await asyncio.sleep(min(self.silence_s / 4, LOOK_S))
                self.look(await self.runners.states())

    def look(self, states: Sequence[RolloutState]) -> None:
        if self.mending():
            self.mended = time.monotonic()
        silent_s = min((state.silent_s for state in states), default=0.0)
        silent_s = min(silent_s, time.monotonic() - self.mended)
        if silent_s <= self.silence_s:
            self.said = False
            return
        groups = {state.group_id for state in states}
        if not self.said:
            self.said = True
            print(
                f"no rollout has done anything for train.watchdog_s (={self.silence_s:g}); {len(states)} are in flight "
                f"and begin again after {self.patience_s:g} s:\n{table(states)}",
                file=sys.stderr,
            )
            self.on_event("silence", groups=sorted(groups), table=table(states))
        if silent_s > self.patience_s:
            self.said = False
            self.on_event("begun_again", groups=sorted(groups))
            self.runners.again(groups)

    def take_metrics(self) -> dict[str, Metric]:
        """Since the last call."""
        lags = {"driver": self.lag.take_s(), "runner": self.runners.take_lag_s()}
        return {f"perf/{process}_lag_max": Metric(seconds) for process, seconds in lags.items()}


class LoopLag:
    """How much later than asked for an event loop wakes a sleeper: what blocks it blocks every rollout."""

    def __init__(self):
        self.worst_s = 0.0

    async def run(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(LAG_S)
            self.worst_s = max(self.worst_s, time.monotonic() - asleep - LAG_S)

    def take_s(self) -> float:
        """Seconds, the worst since the last call."""
        worst, self.worst_s = self.worst_s, 0.0
        return worst


def table(states: Sequence[RolloutState]) -> str:
    """The most silent ones first."""
    rows = [f"  {'rollout':12} {'runner':10} {'waits for':10} {'turns':>5} {'age':>8} {'silent':>8}"]
    for state in sorted(states, key=lambda state: -state.silent_s)[:ROWS]:
        rollout = f"{state.group_id}:{state.index}"
        seconds = f"{state.age_s:7.1f}s {state.silent_s:7.1f}s"
        rows.append(f"  {rollout:12} {state.runner:10} {state.doing:10} {state.turns:5} {seconds}")
    return "\n".join(rows + [f"  and {len(states) - ROWS} more"] * (len(states) > ROWS))
