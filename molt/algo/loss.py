"""Policy losses: per-token values that nothing here averages (`reduce` has the weights)."""

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio, refuse_nan


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)` with `r = exp(logprobs - old_logprobs)`.

    All tensors float [...], one entry per token; the gradient flows through `logprobs` alone. Returns
    (loss [...], clipped bool [...]): where `clipped`, the bound is active and the gradient is 0.
    Raises `TrainingError` on a NaN.
    Source: arXiv 1707.06347; separate bounds, arXiv 2503.14476.
    """
    refuse_nan(advantages=advantages)
    ratio = log_ratio(logprobs=logprobs, old_logprobs=old_logprobs.detach()).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(free, bounded), bounded < free
