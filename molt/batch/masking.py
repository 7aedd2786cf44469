"""Which rollouts take part in training: all, or with `reward.mask_truncated` those that no length limit cut.

Pure, from the light records: the cut reason is stored with a rollout, so a resume and a replay mask the same ones.
"""

from collections.abc import Sequence

from molt.config import RewardConfig
from molt.types import RolloutInfo

Participation = Sequence[Sequence[bool]]
"""By group and rollout: whether it takes part in baseline and loss."""


def takes_part(rollout: RolloutInfo, reward: RewardConfig) -> bool:
    """Whether the rollout takes part in filter, baseline and loss.

    Source: overlong filtering, DAPO, arXiv 2503.14476.
    """
    return not (reward.mask_truncated and rollout.cut == "length")


def participation(groups: Sequence[Sequence[RolloutInfo]], reward: RewardConfig) -> Participation:
    """`takes_part` of every rollout, by group."""
    found = []
    for rollouts in groups:
        found.append([takes_part(rollout, reward) for rollout in rollouts])
    return found


def fewest_left(n_samples_per_prompt: int) -> int:
    """How many rollouts of a group must take part: one alone has no group to be compared with, unless it always is."""
    return min(2, n_samples_per_prompt)
