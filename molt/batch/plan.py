"""A training batch to the plan of its optimizer steps: which rank runs which sample, in which micro-batch.

Pure, on the driver, from the light records alone: rewards and token counts are enough to compute
group advantages and token weights; the arrays are fetched by the rank that trains on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from molt.algo.advantage import Estimator, GroupContext
from molt.algo.reduce import token_weights
from molt.algo.shaping import Shaping, shape_reward
from molt.batch.masking import Participation
from molt.batch.partition import micro_batches, partition
from molt.types import InfraFailure, RolloutInfo, SampleInfo

Groups = Sequence[Sequence[RolloutInfo]]


class Place(NamedTuple):
    """Where a sample is in the training batch."""

    group: int
    rollout: int
    """In its group."""
    segment: int
    """In its rollout."""


@dataclass(frozen=True)
class SampleTask:
    """One sample to train on, and everything the driver knows about it."""

    at: Place
    reward: float
    """Shaped; token estimators read it."""
    advantage: float | None
    """Of the rollout, from a group estimator, before whitening; None for a token estimator."""
    weight: float
    """Weight of each trained token in the loss of its optimizer step."""
    share: float = 0.0
    """Weight of the sample: 1 / samples of its optimizer step."""


RankPlan = list[list[list[SampleTask]]]
"""Optimizer steps of micro-batches of samples; an empty micro-batch is a dummy."""


def shaped_rewards(groups: Groups, shaping: Shaping) -> list[list[float]]:
    """The reward of every rollout after `shape_reward`, by group."""
    rewards = []
    for rollouts in groups:
        rewards.append([_shaped_reward(rollout, shaping) for rollout in rollouts])
    return rewards


def _shaped_reward(rollout: RolloutInfo, shaping: Shaping) -> float:
    longest_segment = max((sample.tokens for sample in rollout.samples), default=0)
    return shape_reward(rollout.reward, shaping, peak=longest_segment, truncated=rollout.truncated)


def advantages(
    groups: Groups, rewards: list[list[float]], estimator: Estimator, taking_part: Participation | None = None
) -> list[list[float | None]]:
    """Advantages of a group estimator from shaped rewards, by group; None for a token estimator, which runs later.

    taking_part: the rollouts that the estimator sees, by default all. The others have no advantage (None).
    """
    by_group: list[list[float | None]] = [[None] * len(group_rewards) for group_rewards in rewards]
    places = _places_of_rollouts(groups, taking_part)
    if estimator.level == "token" or not places:
        return by_group

    rollouts = [groups[group][index] for group, index in places]
    labels = [group for group, _ in places]
    flat_rewards = [rewards[group][index] for group, index in places]
    context = GroupContext(
        scores=torch.tensor([_score(rollout) for rollout in rollouts], dtype=torch.float64),
        lengths=torch.tensor([rollout.generated_tokens for rollout in rollouts]),
        truncated=torch.tensor([rollout.truncated for rollout in rollouts]),
    )
    flat = estimator.fn(
        torch.tensor(flat_rewards, dtype=torch.float64),
        torch.tensor(labels),
        context,
    )

    for (group, index), advantage in zip(places, flat.tolist(), strict=True):
        by_group[group][index] = advantage
    return by_group


def _places_of_rollouts(groups: Groups, taking_part: Participation | None) -> list[tuple[int, int]]:
    """Group and index of every rollout that takes part, in order."""
    places = []
    for group, rollouts in enumerate(groups):
        for index in range(len(rollouts)):
            if taking_part is None or taking_part[group][index]:
                places.append((group, index))
    return places


def _score(rollout: RolloutInfo) -> float:
    if isinstance(rollout.outcome, InfraFailure):
        raise ValueError(
            f"rollout {rollout.index} of group {rollout.group_id} failed ({rollout.outcome.reason}): it has no score, "
            "and a group with it has no baseline. Train groups of finished rollouts only."
        )
    return rollout.score


def plan_batch(
    groups: Groups,
    *,
    rewards: Sequence[Sequence[float]],
    group_advantages: Sequence[Sequence[float | None]],
    taking_part: Participation | None = None,
    groups_per_step: int,
    micro_batch_size: int,
    max_len: int,
    ranks: int,
    aggregation: str = "token-mean",
    max_tokens: int | None = None,
    packed: bool = False,
) -> list[RankPlan]:
    """One plan per data-parallel rank. A batch is split *by groups* into optimizer steps; no remainder is dropped.

    ranks: data-parallel ranks; the peers of one (`parallel/shape.py`) share its plan. Every rank gets the same number
    of micro-batches in every step (collectives need equal counts). With `max_tokens` they are filled up to that many
    tokens instead of with `micro_batch_size` samples, laid out `packed` or padded.

    taking_part: the rollouts that are trained, by default all. The others count in no weight either; the split into
    steps does not depend on it.
    """
    plans: list[RankPlan] = [[] for _ in range(ranks)]
    for start in range(0, len(groups), groups_per_step):
        stop = min(start + groups_per_step, len(groups))
        samples = _trained_samples(groups, range(start, stop), taking_part)
        if not samples:
            continue

        tasks = _tasks(samples, rewards, group_advantages, aggregation, max_len)
        lengths = [sample.tokens for sample in samples.values()]
        step = micro_batches(
            partition(lengths, ranks),
            lengths,
            size=micro_batch_size,
            max_tokens=max_tokens,
            packed=packed,
        )
        for plan, batches in zip(plans, step, strict=True):
            plan.append(_chosen_tasks(tasks, batches))
    return plans


def _trained_samples(groups: Groups, chosen: range, taking_part: Participation | None) -> dict[Place, SampleInfo]:
    """The samples of the chosen groups that have a trained token, in order."""
    samples = {}
    for group in chosen:
        for rollout, info in enumerate(groups[group]):
            if taking_part is not None and not taking_part[group][rollout]:
                continue
            for segment, sample in enumerate(info.samples):
                if sample.trained_tokens:
                    samples[Place(group, rollout, segment)] = sample
    return samples


def _tasks(
    samples: dict[Place, SampleInfo],
    rewards: Sequence[Sequence[float]],
    group_advantages: Sequence[Sequence[float | None]],
    aggregation: str,
    max_len: int,
) -> list[SampleTask]:
    """One task per sample of an optimizer step, in the order of `samples`."""
    weights = token_weights(
        [sample.trained_tokens for sample in samples.values()],
        [place.group for place in samples],
        mode=aggregation,
        max_len=max_len,
    )
    tasks = []
    for place, weight in zip(samples, weights, strict=True):
        task = SampleTask(
            at=place,
            reward=rewards[place.group][place.rollout],
            advantage=group_advantages[place.group][place.rollout],
            weight=weight,
            share=1 / len(samples),
        )
        tasks.append(task)
    return tasks


def _chosen_tasks(tasks: list[SampleTask], batches: list[list[int]]) -> list[list[SampleTask]]:
    """Micro-batches of indices to micro-batches of tasks."""
    chosen = []
    for indices in batches:
        chosen.append([tasks[index] for index in indices])
    return chosen
