"""Rewards to advantages. One estimator is one function and one row of `ADVANTAGES`.

A *group* estimator sees one reward per rollout of the training batch and gives one number per
rollout, which its caller spreads over the rollout's generated tokens. A *token* estimator sees one
segment: each segment is a time line of its own, and tokens that were not generated are transparent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimator:
    """What the rest of molt may ask about an estimator; nothing tests its name."""

    level: Literal["group", "token"]
    """group: `fn(rewards [R], groups [R], ctx: GroupContext | None) -> [R]`;
    token: `fn(reward, mask [T], *, kl [T], values [T], gamma, lam) -> [T]`."""
    whiten: bool
    """Whitened over the generated tokens of the training batch, unless the user says no."""
    fn: Callable[..., Tensor]
    formula: str
    """For the header of a run."""
    needs: tuple[str, ...] = ()
    """What must be computed for it beforehand: `ref_logprobs`, `values`."""
    baseline: Literal["group", "batch"] | None = None
    """Which other rollouts the reward is compared with: those of the prompt, or those of the training batch."""
    teacher: bool = False
    """It learns from the reference model alone, which therefore must be another model than the policy."""


@dataclass(frozen=True)
class GroupContext:
    """What else a group estimator may read of the rollouts of the training batch; all [R], ordered like the rewards."""

    scores: Tensor
    """float64: 1.0 is a solved prompt, or whatever the agent says."""
    lengths: Tensor
    """int64: generated tokens, over all segments."""
    truncated: Tensor
    """bool: cut by a limit before its end."""


def _sum_in_group(values: Tensor, index: Tensor) -> Tensor:
    """Each entry becomes the sum over its group. `index` holds 0 .. G-1, so G <= R."""
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def _centre(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(R_i - mean over G(i), n of G(i), group index)`; exactly 0 in a group of equal rewards."""
    index = groups.unique(return_inverse=True)[1]
    n = _sum_in_group(torch.ones_like(rewards), index)
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1: measured from its smallest reward, an all-equal group has no residue.
    lowest = torch.zeros_like(rewards).scatter_reduce_(0, index, rewards, "amin", include_self=False)[index]
    above = rewards - lowest
    return above - _sum_in_group(above, index) / n, n, index


def group_mean(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = R_i - mean(R over G(i))`, the estimators reinforce_baseline (whitened) and dr_grpo (not).

    rewards: float64 [R], one per rollout. groups: int64 [R], any labels. Returns float64 [R]; 0 when n = 1.
    Source: Dr. GRPO, arXiv 2503.20783; REINFORCE++-baseline, arXiv 2501.03262.
    """
    return _centre(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = R_i - (sum - R_i) / (n - 1)`: the baseline is the mean of the other rollouts.

    rewards: float64 [R], one per rollout. groups: int64 [R], any labels. Returns float64 [R]; 0 when n = 1.
    Source: arXiv 2402.14740.
    """
    centred, n, _ = _centre(rewards, groups)
    return centred * n / (n - 1).clamp(min=1)  # the same number: (n R_i - sum) / (n - 1)


def grpo(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = (R_i - mean) / (std + 1e-6)` over G(i), with the unbiased standard deviation.

    rewards: float64 [R], one per rollout. groups: int64 [R], any labels. Returns float64 [R]; 0 when n = 1
    or all rewards of the group are equal.
    Source: arXiv 2402.03300.
    """
    centred, n, index = _centre(rewards, groups)
    variance = _sum_in_group(centred.square(), index) / (n - 1).clamp(min=1)
    return centred / (variance.sqrt() + 1e-6)


def flash_reinforce(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = R_i - mean(R over all rollouts of the training batch)`.

    rewards: float64 [R], one per rollout. groups: unused. Returns float64 [R]; 0 when all rewards are equal.
    Source: Williams 1992 (the reinforcement baseline), over the batch.
    """
    return _centre(rewards, torch.zeros_like(groups))[0]


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """`y_t = sum_{u>=t} discount^(u-t) x_u` by doubling: after k rounds, y_t has the terms below t + 2^k.

    x: float64 [n]. discount: at most 1. Returns float64 [n], in log2(n) passes.
    """
    y, shift = x.double(), 1
    while shift < len(y):
        y = y + discount**shift * torch.cat([y[shift:], y.new_zeros(shift)])
        shift *= 2
    return y


def gae(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """`A_t = delta_t + gamma lam A_next` with `delta_t = r_t + gamma V_next - V_t` and `r_t = -kl_t`.

    `reward` is added to r_t at the last generated token. Next is the next *generated* token: the others are
    transparent. After the last, V and A are 0. Returns (what the critic learns) are `A + V`.

    reward: the rollout's shaped reward. mask: bool [T], generated tokens of one segment. kl: float64 [T], `beta KL_t`.
    values: float64 [T], of the state before token t. gamma, lam: per generated token. Returns float32 [T], 0
    outside the mask.
    Source: arXiv 1506.02438.
    """
    rewards, v = -kl[mask].double(), values[mask].double()
    rewards[-1:] += reward
    v_next = torch.cat([v, v.new_zeros(1)])[1:]
    return _at(mask, discounted_sums(rewards + gamma * v_next - v, gamma * lam))


def reinforce(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """`A_t = sum_{u>=t} gamma^(u-t) r_u` over generated tokens: `gae` with lam = 1 and no critic. Values, lam: unused.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    return gae(reward, mask, kl=kl, values=torch.zeros_like(kl), gamma=gamma, lam=1.0)


def on_policy_distill(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """`A_t = -kl_t`, with kl = `beta (student - teacher)`: k1 to the teacher. The others are unused.

    mask, kl and what it returns: as in `gae`.
    Source: Thinking Machines Lab 2025 (On-Policy Distillation).
    """
    return _at(mask, -kl[mask])


def _at(mask: Tensor, generated: Tensor) -> Tensor:
    """float32 [T] with `generated`, in order, inside the mask and 0 outside."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, generated.float())


ADVANTAGES: dict[str, Estimator] = {
    "reinforce": Estimator("token", True, reinforce, "sum_u>=t gamma^(u-t) r_u"),
    "reinforce_baseline": Estimator("group", True, group_mean, "R - mean(group)", baseline="group"),
    "rloo": Estimator("group", False, rloo, "R - mean(others in group)", baseline="group"),
    "grpo": Estimator("group", False, grpo, "(R - mean(group)) / (std(group) + 1e-6)", baseline="group"),
    "dr_grpo": Estimator("group", False, group_mean, "R - mean(group)", baseline="group"),
    "flash_reinforce": Estimator("group", False, flash_reinforce, "R - mean(batch)", baseline="batch"),
    "gae": Estimator("token", True, gae, "sum_u>=t (gamma lam)^(u-t) (r_u + gamma V_next - V_u)", ("values",)),
    "on_policy_distill": Estimator(
        "token", False, on_policy_distill, "-beta (old - teacher)", ("ref_logprobs",), teacher=True
    ),
}


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """`(count, sum, sum of squares)` of the advantages inside the mask: what ranks add up before `whiten`.

    advantages: float [T]. mask: bool [T]. Returns float64 [3].
    """
    inside = advantages.double() * mask
    return torch.stack([mask.sum().double(), inside.sum(), inside.square().sum()])


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """`(A - mean) * rsqrt(var + 1e-8)` with the biased variance, and 0 outside the mask.

    advantages: float [T]. mask: bool [T]. sums: float64 [3], `whitening_sums` added over the whole training
    batch. Returns [T] in the dtype of `advantages`.
    """
    _, mean, mean_square = sums / sums[0].clamp(min=1)
    variance = (mean_square - mean.square()).clamp(min=0)
    white = (advantages.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white, 0.0).to(advantages.dtype)
