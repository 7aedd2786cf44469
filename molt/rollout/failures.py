"""How many of the recent rollout attempts failed, and why: above `rollout.max_failure_rate` a run stops."""

from collections import Counter, deque
from collections.abc import Sequence

from molt.errors import FailureRateError, plural
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
        """Count the attempts at one rollout: its failures, and the one that succeeded, if any.

        A rollout that failed in every attempt counts once: otherwise a prompt that always fails would weigh as much as
        several that do not. Raises `FailureRateError` if too many failed.
        """
        for failure in failures:
            self.details[failure.reason] = failure.detail
        if succeeded:
            for failure in failures:
                self._append(failure.reason)
            self._append(None)
        elif failures:
            self._append(failures[-1].reason)
        self._check()

    def check_lost(self, *, lost: int, complete: int) -> None:
        """Raise `FailureRateError` if too many groups were lost in a run that was too short for `add` to say so.

        lost: groups of which a rollout failed in every attempt. complete: the other groups.
        """
        groups = lost + complete
        if len(self.recent) >= MIN_ATTEMPTS or lost <= self.limit * groups:
            return
        raise self._error(
            f"{plural(lost, 'group')} of {groups} had a rollout that failed in every attempt, above "
            f"rollout.max_failure_rate (={self.limit:g}). What could be trained is trained and saved."
        )

    def _check(self) -> None:
        attempts = len(self.recent)
        if attempts < MIN_ATTEMPTS or self.failed <= self.limit * attempts:
            return
        raise self._error(
            f"{self.failed} of the last {attempts} rollout attempts failed, above rollout.max_failure_rate "
            f"(={self.limit:g}). Training on would see a biased part of the task, so the run stops."
        )

    def _error(self, what: str) -> FailureRateError:
        return FailureRateError(
            f"{what} Nothing that failed was trained. Fix what the reasons name, then resume with "
            f"--ckpt.load_enable. By reason:\n{self._table()}"
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
