"""What a run says once when its rollouts teach nothing: advantages are 0, rewards equal, or no score is above 0."""

from collections.abc import Sequence

from molt.algo.advantage import SMALLEST_ADVANTAGE
from molt.types import Group, RolloutInfo, Scored

STEPS_WITHOUT_ADVANTAGE = 5
"""In a row. A few batches without a mixed group happen to a run that learns, at its start or near its end."""
STEPS_WITHOUT_SCORE = 10
"""From the start of the driver."""

Advantages = Sequence[Sequence[float | None]]
"""By group and rollout; None where a token estimator computes them on the ranks."""


class NoSignal:
    """Looks at the batches of a run in order. Each of its two notices is due at most once."""

    def __init__(self, *, reads_rewards: bool = True) -> None:
        """reads_rewards: whether the estimator does; a distillation does not, and its rewards may all be equal."""
        self._reads_rewards = reads_rewards
        self._steps_without_advantage = 0
        """In a row, up to now."""
        self._rewards: set[float] = set()
        """Of the rollouts in these steps."""
        self._steps = 0
        self._best_score = float("-inf")
        self._scored: set[float] = set()
        """The distinct scores of rollouts that ended as `Scored`; at most two are kept."""
        self._advantage_notice_is_given = False
        self._score_notice_is_given = False

    def look(self, groups: Sequence[Group], advantages: Advantages) -> list[str]:
        """The notices that are due after this batch."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._count(rollouts, advantages)
        notices = []
        if self._steps_without_advantage == STEPS_WITHOUT_ADVANTAGE and not self._advantage_notice_is_given:
            self._advantage_notice_is_given = True
            notices.append(self._nothing_to_learn())
        elif self._score_never_moves() and not self._score_notice_is_given:
            self._score_notice_is_given = True
            notices.append(self._no_score())
        return notices

    def forget(self) -> None:
        """The batches so far are not of the run any more; what was said stays said."""
        self._steps_without_advantage = 0
        self._rewards.clear()
        self._steps = 0
        self._best_score = float("-inf")
        self._scored.clear()

    def _count(self, rollouts: Sequence[RolloutInfo], advantages: Advantages) -> None:
        rewards = {rollout.reward for rollout in rollouts}
        if _teaches_nothing(advantages):
            self._steps_without_advantage += 1
            self._rewards |= rewards
        elif self._reads_rewards and _is_uniform(rewards, advantages):
            if self._rewards != rewards:  # it differs from that of the step before, which may teach something
                self._steps_without_advantage = 0
            self._steps_without_advantage += 1
            self._rewards = rewards
        else:
            self._steps_without_advantage = 0
            self._rewards.clear()

        self._steps += 1
        for rollout in rollouts:
            self._best_score = max(self._best_score, rollout.score)
            if isinstance(rollout.outcome, Scored) and len(self._scored) < 2:
                self._scored.add(rollout.score)

    def _score_never_moves(self) -> bool:
        """Scores that differ say how good a rollout was, even where all are below 0: a negative distance, say.

        A run without advantages has a notice of its own, which covers this. A distillation needs no score.
        """
        if not self._reads_rewards:
            return False
        has_advantages = self._steps_without_advantage == 0
        return has_advantages and self._steps >= STEPS_WITHOUT_SCORE and self._best_score <= 0 and len(self._scored) < 2

    def _nothing_to_learn(self) -> str:
        steps = f"in {STEPS_WITHOUT_ADVANTAGE} steps in a row"
        consequence = "so no rollout was better than another and nothing was learned"
        if len(self._rewards) > 1:
            return (
                f"the rollouts of each prompt had the same reward as one another {steps} (`rollout/mixed_groups` is "
                f"0), {consequence}. Look at the rollouts in the report; raise --rollout.n_samples_per_prompt or "
                "--rollout.temperature, or use prompts that the model solves sometimes."
            )
        (reward,) = self._rewards
        if self._best_score > 0:
            return (
                f"every rollout has the same reward ({reward:g}) {steps} (`rollout/mixed_groups` is 0): nothing is "
                "left to learn. If the task is solved, end the run (Ctrl-C saves) or use harder prompts."
            )
        return (
            f"every rollout had the same reward ({reward:g}) {steps} (`rollout/mixed_groups` is 0), {consequence}. "
            "Look at the rollouts in the report. If the reward is right, the task is too hard for the model: start "
            "with some SFT, or give a part of the reward for a part of the way (docs/first_hour.md, 'Your own task')."
        )

    def _no_score(self) -> str:
        return (
            f"no rollout has a score above 0 so far (`rollout/score`, best {self._best_score:g} in {self._steps} "
            "steps), so pass@1 stays 0 however the reward moves. Look at the rollouts in the report: the model earns "
            "reward without a success, or `Result.score` is never set to one."
        )


def _teaches_nothing(advantages: Advantages) -> bool:
    """Whether all advantages are 0. Those of a token estimator are not known here."""
    known = [advantage for of_group in advantages for advantage in of_group if advantage is not None]
    return bool(known) and all(abs(advantage) < SMALLEST_ADVANTAGE for advantage in known)


def _is_uniform(rewards: set[float], advantages: Advantages) -> bool:
    """Whether the rollouts of a batch have one reward, and nothing else that an advantage follows from.

    Advantages that the ranks compute are None. An estimator of the user's may tell equal rewards apart, by length say.
    """
    count = sum(len(of_group) for of_group in advantages)
    known = {advantage for of_group in advantages for advantage in of_group if advantage is not None}
    return count > 1 and len(rewards) == 1 and len(known) < 2
