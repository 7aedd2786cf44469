"""Rewards to advantages. One estimator is one function and one row of `ADVANTAGES`.

A *group* estimator reads one reward per rollout of the training batch and returns one number per
rollout, which its caller spreads over the rollout's generated tokens. A *token* estimator reads one
segment: segments are separate time lines, and tokens that were not generated take no time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Need = Literal["ref_logprobs", "values", "teacher"]
"""What an estimator may need: log-probs of a reference, values of a critic, a reference that is another model."""
SMALLEST_ADVANTAGE = 1e-9
"""Below it an advantage is the rounding of a mean."""


@dataclass(frozen=True)
class Estimator:
    """All that the rest of molt knows of an estimator; nothing tests its name."""

    level: Literal["group", "token"]
    """group: `fn(rewards [R], groups [R], ctx: GroupContext | None) -> [R]`;
    token: `fn(reward, mask [T], *, kl [T], values [T], gamma, lam) -> [T]`."""
    whiten: bool
    """Whitened over the generated tokens of the training batch, unless the user turns it off."""
    fn: Callable[..., Tensor]
    formula: str
    """For the header of a run."""
    needs: tuple[Need, ...] = ()
    """What must be there for it."""
    baseline: Literal["group", "batch", "none"] = "none"
    """Which rollouts a reward is compared with. One rollout alone in its group (batch) has an advantage of 0."""
    kl_coef: float = 0.0
    """Its own coefficient of the KL, where `algo.kl.init_coef` is not set."""

    @property
    def symbols(self) -> frozenset[str]:
        """The names in the formula: those that depend on settings are defined in the header of a run."""
        return frozenset(re.findall(r"\w+", self.formula))


@dataclass(frozen=True)
class GroupContext:
    """What else a group estimator may read of the rollouts of the training batch; all [R], ordered like the rewards."""

    scores: Tensor
    """float64 [R]: 1.0 is a solved prompt, or whatever the agent reports."""
    lengths: Tensor
    """int64 [R]: generated tokens, over all segments."""
    truncated: Tensor
    """bool [R]: cut by a limit before its end."""


class _Centred(NamedTuple):
    """Rewards measured from the mean of their group, all [R]."""

    rewards: Tensor
    """float64: `R_i - mean over G(i)`; exactly 0 in a group of equal rewards."""
    counts: Tensor
    """float64: the n rollouts of G(i)."""
    group: Tensor
    """int64: which group, 0 .. G-1."""


def _sum_in_group(values: Tensor, index: Tensor) -> Tensor:
    """Each entry becomes the sum over its group. `index` holds 0 .. G-1, so G <= R."""
    sums = torch.zeros_like(values)
    sums.index_add_(0, index, values)
    return sums[index]


def _centre(rewards: Tensor, groups: Tensor) -> _Centred:
    _, index = groups.unique(return_inverse=True)
    counts = _sum_in_group(torch.ones_like(rewards), index)

    # 0.1 + 0.1 + 0.1 is not 3 * 0.1: measured from its smallest reward, an all-equal group has no residue.
    lowest = torch.zeros_like(rewards)
    lowest.scatter_reduce_(0, index, rewards, "amin", include_self=False)
    above = rewards - lowest[index]

    mean = _sum_in_group(above, index) / counts
    return _Centred(above - mean, counts, index)


def group_mean(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = R_i - mean(R over G(i))`, the estimators reinforce_baseline (whitened) and dr_grpo (not).

    rewards: float64 [R], one per rollout. groups: int64 [R], any labels. Returns float64 [R]; 0 when n = 1.
    Source: Dr. GRPO, arXiv 2503.20783; REINFORCE++-baseline, arXiv 2501.03262.
    """
    return _centre(rewards, groups).rewards


def rloo(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = R_i - (sum - R_i) / (n - 1)`: the baseline is the mean of the other rollouts.

    rewards: float64 [R], one per rollout. groups: int64 [R], any labels. Returns float64 [R]; 0 when n = 1.
    Source: arXiv 2402.14740.
    """
    centred = _centre(rewards, groups)
    others = (centred.counts - 1).clamp(min=1)
    # The same number: R_i - (sum - R_i) / (n - 1) = (n R_i - sum) / (n - 1) = n (R_i - mean) / (n - 1).
    return centred.rewards * centred.counts / others


def grpo(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = (R_i - mean) / (std + 1e-6)` over G(i), with the unbiased standard deviation.

    rewards: float64 [R], one per rollout. groups: int64 [R], any labels. Returns float64 [R]; 0 when n = 1
    or all rewards of the group are equal.
    Source: arXiv 2402.03300.
    """
    centred = _centre(rewards, groups)
    squares = _sum_in_group(centred.rewards.square(), centred.group)
    variance = squares / (centred.counts - 1).clamp(min=1)
    return centred.rewards / (variance.sqrt() + 1e-6)


def flash_reinforce(rewards: Tensor, groups: Tensor, ctx: GroupContext | None = None) -> Tensor:
    """`A_i = R_i - mean(R over all rollouts of the training batch)`.

    rewards: float64 [R], one per rollout. groups: unused. Returns float64 [R]; 0 when all rewards are equal.
    Source: Williams 1992 (the reinforcement baseline), over the batch.
    """
    one_group = torch.zeros_like(groups)
    return _centre(rewards, one_group).rewards


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """`y_t = sum_{u>=t} discount^(u-t) x_u` by doubling: after k rounds, y_t has the terms below t + 2^k.

    x: float64 [n]. discount: at most 1. Returns float64 [n], in log2(n) passes.
    """
    y = x.double()
    shift = 1
    while shift < len(y):
        shifted = torch.cat([y[shift:], y.new_zeros(shift)])
        y = y + discount**shift * shifted
        shift *= 2
    return y


def gae(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """`A_t = delta_t + gamma lam A_next` with `delta_t = r_t + gamma V_next - V_t` and `r_t = -kl_t`.

    `reward` is added to r_t at the last generated token. Next is the next *generated* token: the others are
    skipped. After the last, V and A are 0. The critic learns the returns, `A + V`.

    reward: the rollout's shaped reward. mask: bool [T], generated tokens of one segment. kl: float64 [T], `beta KL_t`.
    values: float64 [T], of the state before token t. gamma, lam: per generated token. Returns float32 [T], 0
    outside the mask.
    Source: arXiv 1506.02438.
    """
    rewards = -kl[mask].double()
    rewards[-1:] += reward

    v = values[mask].double()
    v_next = torch.cat([v, v.new_zeros(1)])[1:]

    delta = rewards + gamma * v_next - v
    return _spread(discounted_sums(delta, gamma * lam), mask)


def reinforce(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """`A_t = sum_{u>=t} gamma^(u-t) r_u` over generated tokens: `gae` with lam = 1 and no critic. Values, lam: unused.

    reward, mask, kl and the returned float32 [T]: as in `gae`.
    Source: REINFORCE++, arXiv 2501.03262.
    """
    no_values = torch.zeros_like(kl)
    return gae(reward, mask, kl=kl, values=no_values, gamma=gamma, lam=1.0)


def on_policy_distill(reward: float, mask: Tensor, *, kl: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """`A_t = -kl_t`, with kl = `beta (student - teacher)`: k1 to the teacher. The others are unused.

    mask, kl and the returned float32 [T]: as in `gae`.
    Source: Thinking Machines Lab 2025 (On-Policy Distillation).
    """
    return _spread(-kl[mask], mask)


def _spread(generated: Tensor, mask: Tensor) -> Tensor:
    """float32 [T] with `generated`, in order, inside the mask and 0 outside."""
    everywhere = torch.zeros(mask.shape, device=mask.device)
    return everywhere.masked_scatter_(mask, generated.float())


ADVANTAGES: dict[str, Estimator] = {
    "reinforce": Estimator(
        level="token",
        whiten=True,
        fn=reinforce,
        formula="sum_u>=t gamma^(u-t) r_u",
    ),
    "reinforce_baseline": Estimator(
        level="group",
        whiten=True,
        fn=group_mean,
        formula="R - mean(group)",
        baseline="group",
    ),
    "rloo": Estimator(
        level="group",
        whiten=False,
        fn=rloo,
        formula="R - mean(others in group)",
        baseline="group",
    ),
    "grpo": Estimator(
        level="group",
        whiten=False,
        fn=grpo,
        formula="(R - mean(group)) / (std(group) + 1e-6)",
        baseline="group",
    ),
    "dr_grpo": Estimator(
        level="group",
        whiten=False,
        fn=group_mean,
        formula="R - mean(group)",
        baseline="group",
    ),
    "flash_reinforce": Estimator(
        level="group",
        whiten=False,
        fn=flash_reinforce,
        formula="R - mean(batch)",
        baseline="batch",
    ),
    "gae": Estimator(
        level="token",
        whiten=True,
        fn=gae,
        formula="sum_u>=t (gamma lam)^(u-t) (r_u + gamma V_next - V_u)",
        needs=("values",),
    ),
    "on_policy_distill": Estimator(
        level="token",
        whiten=False,
        fn=on_policy_distill,
        formula="-beta (old - teacher)",
        needs=("ref_logprobs", "teacher"),
        kl_coef=1.0,
    ),
}


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """`(count, sum, sum of squares)` of the advantages inside the mask: ranks add them up before `whiten`.

    advantages: float [T]. mask: bool [T]. Returns float64 [3].
    """
    inside = advantages.double() * mask
    count = mask.sum().double()
    return torch.stack([count, inside.sum(), inside.square().sum()])


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """`(A - mean) * rsqrt(var + 1e-8)` with the biased variance, and 0 outside the mask.

    advantages: float [T]. mask: bool [T]. sums: float64 [3], `whitening_sums` added over the training
    batch. Returns [T] in the dtype of `advantages`.
    """
    count = sums[0].clamp(min=1)
    _, mean, mean_square = sums / count
    variance = (mean_square - mean.square()).clamp(min=0)
    white = (advantages.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white, 0.0).to(advantages.dtype)
