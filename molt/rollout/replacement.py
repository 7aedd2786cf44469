"""Groups that are not trained, for whatever reason: another prompt takes the place of each.

| reason            | when                                                                                        |
|-------------------|---------------------------------------------------------------------------------------------|
| `filtered`        | dynamic sampling: all rollouts solve the prompt, or none does                               |
| `too_few_left`    | `reward.mask_truncated` left too few rollouts for a baseline                                |
| `prompt_too_long` | the prompt leaves no room for an answer, or the template rejects it                         |
| `unusable_row`    | no prompt could be made of the row                                                          |
| of a failure      | the infrastructure failed a rollout in every attempt: `timeout`, `engine`, `KeyError`, ...  |
| of the user's     | the agent raised `ReplaceGroup`                                                             |
"""

import sys
from collections import Counter
from dataclasses import dataclass

from molt.errors import NoProgressError
from molt.types import PROMPT_TOO_LONG, InfraFailure, Metric, OnEvent, ReplaceGroup

FILTERED = "filtered"
TOO_FEW_LEFT = "too_few_left"
UNUSABLE_ROW = "unusable_row"

LEAST_LIMIT = 200
"""Fewer replaced groups in a row never stop a run: of hard prompts one group in twenty may be kept, or fewer."""
TIMES_OPEN = 4
"""So many times the groups that may be open at once, in a row, stop a run."""

FIXES = {
    FILTERED: "Use prompts of which the model solves some but not all, or widen --algo.dynamic_filtering_range",
    TOO_FEW_LEFT: "Raise --rollout.max_new_tokens or --data.max_len, or drop --reward.mask_truncated",
    PROMPT_TOO_LONG: "Raise --data.max_len, or use shorter prompts",
    UNUSABLE_ROW: "Correct the rows, or --data.input_key",
}
OTHER_FIX = "Fix what the detail says"


@dataclass(frozen=True)
class Replacement:
    """Why a group is replaced."""

    reason: str
    detail: str
    is_fault: bool = False
    """The prompt or the infrastructure is to blame, and not what the policy answered."""


def of_failure(failure: InfraFailure) -> Replacement:
    """A rollout of the group, or the whole group, failed in every attempt."""
    return Replacement(failure.reason, failure.detail, is_fault=True)


def of_user(replaced: ReplaceGroup) -> Replacement:
    """The agent does not want the group to be trained."""
    return Replacement(replaced.reason, replaced.detail)


class Replacements:
    """Counts the replaced groups by reason, and stops a run in which nothing else happens."""

    def __init__(self, *, most_open: int, on_event: OnEvent):
        """most_open: groups that may be open at once, (1 + queue) * batch size."""
        self.limit = max(LEAST_LIMIT, TIMES_OPEN * most_open)
        """So many groups that were replaced for one reason since one was last kept stop the run; half of it warns."""
        self.on_event = on_event
        self.metrics: list[dict[str, Metric]] = []
        self._since_kept: Counter[str] = Counter()
        """Groups replaced since one was last kept, by reason."""

    def kept(self) -> None:
        """A group is going to be trained."""
        self._since_kept.clear()

    def forget(self) -> None:
        """The run continues from a checkpoint."""
        self._since_kept.clear()
        self.metrics = []

    def add(self, group_id: str | None, replacement: Replacement) -> None:
        """Count one. Raises `NoProgressError` at the limit. group_id: None for a row that no group could be made of."""
        reason = replacement.reason
        self.metrics.append({f"rollout/replaced_{reason}_count": Metric(1.0)})
        if replacement.is_fault:
            self.metrics.append({"faults/discarded_groups": Metric(1.0)})
        self.on_event("group_discarded", group=group_id, reason=reason, detail=replacement.detail)

        self._since_kept[reason] += 1
        count = self._since_kept[reason]
        if count == self.limit // 2:
            print(f"{_no_progress(count, replacement)} At {self.limit} the run stops.", file=sys.stderr)
        if count >= self.limit:
            raise NoProgressError(
                f"{_no_progress(count, replacement)} The run stops; resume with --ckpt.load_enable when that is fixed."
            )

    def take_metrics(self) -> list[dict[str, Metric]]:
        """Those since the last call."""
        taken = self.metrics
        self.metrics = []
        return taken


def _no_progress(count: int, last: Replacement) -> str:
    """The value, the consequence, the fix."""
    fix = FIXES.get(last.reason, OTHER_FIX)
    return (
        f"{count} groups were replaced for the reason `{last.reason}` since one was last kept for training, so nothing "
        f"is learned. The last one: {last.detail}. {fix}."
    )
