"""An attempt at a rollout while it runs: what it waits for, and since when."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from molt.rollout.watchdog import RolloutState


class Attempt:
    """One attempt at one rollout of a group, or at its score."""

    def __init__(self, group_id: str, index: int, number: int = 0, *, code: str = "agent", turns: int = 0):
        """index: of the rollout in its group. number: of the attempt, from 0.

        code: whose code runs outside of model calls, `agent` or `scorer`. turns: that have ended before.
        """
        self.group_id = group_id
        self.index = index
        self.number = number
        self.turns = turns
        """Model calls that have ended."""
        self._code = code
        self._started = time.monotonic()
        self._enter(code)

    @property
    def rollout(self) -> str:
        """Unique among the rollouts of a run that are in flight."""
        return f"{self.group_id}:{self.index}"

    @contextmanager
    def model_call(self) -> Iterator[None]:
        """The block waits for the engine; outside of it the user's code runs."""
        self._enter("engine")
        try:
            yield
        finally:
            self.turns += 1
            self._enter(self._code)

    def state(self, runner: str) -> RolloutState:
        """What the watchdog sees; `runner` names the process."""
        now = time.monotonic()
        return RolloutState(
            group_id=self.group_id,
            index=self.index,
            runner=runner,
            doing=self._doing,
            turns=self.turns,
            age_s=now - self._started,
            silent_s=now - self._since,
        )

    def _enter(self, doing: str) -> None:
        self._doing = doing
        self._since = time.monotonic()
