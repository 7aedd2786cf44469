"""How many of the recent rollout attempts failed, and why: above `rollout.max_failure_rate` a run stops."""

from collections import Counter, deque
from collections.abc import Sequence

from molt.errors import FailureRateError
from molt.types import InfraFailure

MIN_ATTEMPTS = 50
"""Rollout attempts before a failure rate means anything."""
MIN_WINDOW = 200
"""Attempts that the window holds at least."""


class FailureWindow:
    """The outcomes of the last `size` rollout attempts."""

    def __init__(self, limit: float, size: int):
        """limit: the fraction of failed attempts above which a run stops."""
        self.limit = limit
        self.recent: deque[str | None] = deque(maxlen=size)
        """The reason of a failed attempt, None for one that succeeded."""
        self.details: dict[str, str] = {}
        """The last detail for each reason."""
        self.failed = 0
        """How many of `recent` failed."""

    def add(self, failures: Sequence[InfraFailure], *, succeeded: bool) -> None:
        """Count the attempts at one rollout: its failures, and the one that succeeded, if any. Raises like `check`."""
        for failure in failures:
            self.details[failure.reason] = failure.detail
            self._append(failure.reason)
        if succeeded:
            self._append(None)
        self.check(MIN_ATTEMPTS)

    def check(self, min_attempts: int) -> None:
        """Raise `FailureRateError` with a table of reasons if too many of at least `min_attempts` failed."""
        attempts = len(self.recent)
        if attempts < min_attempts or self.failed <= self.limit * attempts:
            return
        raise FailureRateError(
            f"{self.failed} of the last {attempts} rollout attempts failed, above rollout.max_failure_rate "
            f"(={self.limit:g}). Training on would see a biased part of the task, so the run stops; nothing that "
            f"failed was trained. Fix the agent or the engine, then resume with --ckpt.load_enable. By reason:\n"
            f"{self._table()}"
        )

    def _append(self, reason: str | None) -> None:
        window_is_full = len(self.recent) == self.recent.maxlen
        if window_is_full and self.recent[0] is not None:
            self.failed -= 1
        self.recent.append(reason)
        if reason is not None:
            self.failed += 1

    def _table(self) -> str:
        reasons = Counter(reason for reason in self.recent if reason is not None)
        rows = [f"  {count:5d}  {reason}: {self.details[reason]}" for reason, count in reasons.most_common()]
        return "\n".join(rows)
