"""A training batch → which rank runs which sample, in which micro-batch of which optimizer step.

Pure, on the driver, from the light records alone: rewards and token counts are enough to compute
group advantages and token weights; the arrays are fetched by the rank that trains on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from molt.algo.advantage import Estimator
from molt.algo.reduce import token_weights
from molt.algo.shaping import shape_reward
from molt.batch.balance import micro_batches, partition
from molt.types import RolloutInfo


@dataclass(frozen=True)
class SampleTask:
    """One sample to train on, and everything the driver knows about it."""

    group: int
    """Index in the training batch, then of the rollout in its group, then of the segment in its rollout."""
    rollout: int
    segment: int
    reward: float
    """Shaped; what a token estimator reads."""
    advantage: float | None
    """Of the rollout, from a group estimator, before whitening; None for a token estimator."""
    weight: float
    """Weight of each trained token in the loss of its optimizer step."""


RankPlan = list[list[list[SampleTask]]]
"""Optimizer steps of micro-batches of samples; an empty micro-batch is a dummy."""


def advantages(groups: Sequence[Sequence[RolloutInfo]], estimator: Estimator, clip_range: tuple[float, float]):
    """`(shaped rewards, group advantages)`, one list per group; advantages are None for a token estimator."""
    shaped = [[shape_reward(r.reward, clip_range=clip_range) for r in rollouts] for rollouts in groups]
    if estimator.level == "token":
        return shaped, [[None] * len(rewards) for rewards in shaped]
    flat = torch.tensor([reward for rewards in shaped for reward in rewards], dtype=torch.float64)
    labels = torch.tensor([index for index, rewards in enumerate(shaped) for _ in rewards])
    values = iter(estimator.fn(flat, labels).tolist())
    return shaped, [[next(values) for _ in rewards] for rewards in shaped]


def plan_batch(
    groups: Sequence[Sequence[RolloutInfo]],
    *,
    rewards: Sequence[Sequence[float]],
    group_advantages: Sequence[Sequence[float | None]],
    groups_per_step: int,
    micro_batch_size: int,
    ranks: int,
    max_tokens: int | None = None,
    packed: bool = False,
) -> list[RankPlan]:
    """One plan per rank. A batch is split *by groups* into optimizer steps; no remainder is dropped.

    Every rank gets the same number of micro-batches in every step (collectives need equal counts). With `max_tokens`
    they are filled up to that many tokens instead of with `micro_batch_size` samples, laid out `packed` or padded.
    """
    plans: list[RankPlan] = [[] for _ in range(ranks)]
    for start in range(0, len(groups), groups_per_step):
        tasks, lengths, trained = [], [], []
        for g in range(start, min(start + groups_per_step, len(groups))):
            for r, rollout in enumerate(groups[g]):
                for s, info in enumerate(rollout.samples):
                    if info.trained_tokens:
                        tasks.append((g, r, s))
                        lengths.append(info.tokens)
                        trained.append(info.trained_tokens)
        if not tasks:
            continue
        weights = token_weights(trained)
        shares = partition(lengths, ranks)
        step = micro_batches(shares, lengths, size=micro_batch_size, max_tokens=max_tokens, packed=packed)
        for rank, batches in enumerate(step):
            plans[rank].append([[_task(tasks[i], weights[i], rewards, group_advantages) for i in b] for b in batches])
    return plans


def _task(at: tuple[int, int, int], weight: float, rewards, group_advantages) -> SampleTask:
    g, r, s = at
    return SampleTask(g, r, s, rewards[g][r], group_advantages[g][r], weight)
