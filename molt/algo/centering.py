"""Score centering: REINFORCE on tokens of older weights, without an importance sampling ratio."""

from collections.abc import Callable

import torch
from torch import Tensor

from molt.algo.importance import MODES
from molt.algo.ratio import log_ratio

SMALLEST_TAIL = 1e-6
"""The probability that the tokens outside the candidates have at least: the ratio of two empty tails means nothing."""

Weighting = Callable[[Tensor], Tensor]
"""`f` of the formula: ratios [...] to coefficients [...]."""


def unweighted(ratio: Tensor) -> Tensor:
    """`f = 1`: no importance correction."""
    return torch.ones_like(ratio)


def weighting(level: str, mode: str, low: float, high: float) -> Weighting:
    """`f` as the importance correction is set: 1 when it is off, else a row of `importance.MODES` at level token."""
    if level == "off":
        return unweighted

    def weighted(ratio: Tensor) -> Tensor:
        return MODES[mode](ratio, ratio, low, high)

    return weighted


def centered_loss(
    logprobs: Tensor,
    candidate_logprobs: Tensor,
    advantages: Tensor,
    rollout_logprobs: Tensor,
    rollout_candidate_logprobs: Tensor,
    mask: Tensor,
    *,
    weight: Weighting = unweighted,
) -> Tensor:
    """`-A (f(p_y/q_y) log p_y - sum over v in H of [q_v f(p_v/q_v) - alpha p_v] log p_v)`.

    p is the policy now, q the sampler at that token, y the sampled token, and H the sampler's k likeliest tokens there.
    Only the logarithms of p have a gradient. With `rho = (1 - sum_H q) / (1 - sum_H p)`, the ratio of what is left
    outside H, `alpha = rho f(1/rho)` stands in for `q_v f(p_v/q_v) / p_v` there. What is subtracted is the mean of the
    first term's gradient over the sampler's own draws, exactly if H is the vocabulary or p = q: without it, tokens that
    the sampler drew too often for the policy drift even when all rewards are equal.

    logprobs, rollout_logprobs, advantages: float [...]. candidate_logprobs, rollout_candidate_logprobs: float [..., k],
    of the same k tokens. mask: bool [...]. Returns float [...], 0 outside the mask. Raises `TrainingError` on a NaN.
    Source: arXiv 2609.20807.
    """
    ratio = log_ratio(logprobs=logprobs.detach(), rollout_logprobs=rollout_logprobs).exp()
    score = weight(ratio) * logprobs

    coefficients = _centering_coefficients(
        torch.where(mask[..., None], candidate_logprobs.detach(), 0.0),
        torch.where(mask[..., None], rollout_candidate_logprobs, 0.0),
        weight,
    )
    center = (coefficients * candidate_logprobs).sum(-1)
    return torch.where(mask, -advantages * (score - center), 0.0)


def _centering_coefficients(logprobs: Tensor, rollout_logprobs: Tensor, weight: Weighting) -> Tensor:
    """`q_v f(p_v/q_v) - alpha p_v`, float [..., k]."""
    p = logprobs.exp()
    q = rollout_logprobs.exp()
    ratio = log_ratio(logprobs=logprobs, rollout_logprobs=rollout_logprobs).exp()

    q_tail = (1 - q.sum(-1)).clamp(min=SMALLEST_TAIL)
    p_tail = (1 - p.sum(-1)).clamp(min=SMALLEST_TAIL)
    rho = q_tail / p_tail
    alpha = rho * weight(1 / rho)
    return q * weight(ratio) - alpha[..., None] * p
