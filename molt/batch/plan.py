"""A training batch → which rank runs which sample, in which micro-batch of which optimizer step.

Pure, on the driver, from the light records alone: rewards and token counts are enough to compute
group advantages and token weights; the arrays are fetched by the rank that trains on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from molt.algo.advantage import Estimator, GroupContext
from molt.algo.reduce import token_weights
from molt.algo.shaping import shape_reward
from molt.batch.partition import micro_batches, partition
from molt.config import RewardConfig
from molt.types import RolloutInfo

Groups = Sequence[Sequence[RolloutInfo]]

Place = tuple[int, int, int]
"""Of a sample in the training batch: its group, the rollout in the group, the segment in the rollout."""


@dataclass(frozen=True)
class SampleTask:
    """One sample to train on, and everything the driver knows about it."""

    at: Place
    reward: float
    """Shaped; what a token estimator reads."""
    advantage: float | None
    """Of the rollout, from a group estimator, before whitening; None for a token estimator."""
    weight: float
    """Weight of each trained token in the loss of its optimizer step."""
    share: float = 0.0
    """Weight of the sample as a whole: 1 / samples of its optimizer step."""


RankPlan = list[list[list[SampleTask]]]
"""Optimizer steps of micro-batches of samples; an empty micro-batch is a dummy."""


def shaped_rewards(groups: Groups, config: RewardConfig, max_len: int) -> list[list[float]]:
    """The reward of every rollout after `shape_reward`, by group."""
    return [
        [
            shape_reward(
                rollout.reward,
                peak=max((sample.tokens for sample in rollout.samples), default=0),
                truncated=rollout.truncated,
                max_len=max_len,
                **vars(config),
            )
            for rollout in rollouts
        ]
        for rollouts in groups
    ]


def advantages(groups: Groups, rewards: list[list[float]], estimator: Estimator) -> list[list[float | None]]:
    """Advantages of a group estimator from shaped rewards, by group; None for a token estimator, which runs later."""
    if estimator.level == "token":
        return [[None] * len(of_group) for of_group in rewards]
    flat = [rollout for rollouts in groups for rollout in rollouts]
    context = GroupContext(
        scores=torch.tensor([r.outcome.score for r in flat], dtype=torch.float64),
        lengths=torch.tensor([r.generated_tokens for r in flat]),
        truncated=torch.tensor([r.truncated for r in flat]),
    )
    values = torch.tensor([reward for of_group in rewards for reward in of_group], dtype=torch.float64)
    labels = torch.tensor([index for index, of_group in enumerate(rewards) for _ in of_group])
    found = iter(estimator.fn(values, labels, context).tolist())
    return [[next(found) for _ in of_group] for of_group in rewards]


def plan_batch(
    groups: Groups,
    *,
    rewards: Sequence[Sequence[float]],
    group_advantages: Sequence[Sequence[float | None]],
    groups_per_step: int,
    micro_batch_size: int,
    max_len: int,
    ranks: int,
    aggregation: str = "token-mean",
    max_tokens: int | None = None,
    packed: bool = False,
) -> list[RankPlan]:
    """One plan per rank. A batch is split *by groups* into optimizer steps; no remainder is dropped.

    Every rank gets the same number of micro-batches in every step (collectives need equal counts). With `max_tokens`
    they are filled up to that many tokens instead of with `micro_batch_size` samples, laid out `packed` or padded.
    """
    plans: list[RankPlan] = [[] for _ in range(ranks)]
    for start in range(0, len(groups), groups_per_step):
        found = [
            ((g, r, s), info)
            for g in range(start, min(start + groups_per_step, len(groups)))
            for r, rollout in enumerate(groups[g])
            for s, info in enumerate(rollout.samples)
            if info.trained_tokens
        ]
        if not found:
            continue
        lengths = [info.tokens for _, info in found]
        trained, labels = [info.trained_tokens for _, info in found], [g for (g, _, _), _ in found]
        weights = token_weights(trained, labels, mode=aggregation, max_len=max_len)
        tasks = [
            SampleTask((g, r, s), rewards[g][r], group_advantages[g][r], weight, 1 / len(found))
            for ((g, r, s), _), weight in zip(found, weights, strict=True)
        ]
        shares = partition(lengths, ranks)
        step = micro_batches(shares, lengths, size=micro_batch_size, max_tokens=max_tokens, packed=packed)
        for rank, batches in enumerate(step):
            plans[rank].append([[tasks[i] for i in batch] for batch in batches])
    return plans
