"""Importance correction: what the trainer thinks of the tokens that the engine sampled.

Named schemes: TIS is mode trunc, IcePop is mode mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio

MODES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "mask": lambda w, low, high: torch.where((w >= low) & (w <= high), w, 0.0),
    "clip": lambda w, low, high: w.clamp(low, high),
    "trunc": lambda w, low, high: w.clamp(max=high),
}
"""`(w, low, high) -> coefficient`; w > 0."""


@torch.no_grad()
def token_correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, mode: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Coefficient of the per-token loss from `w_t = exp(old_t - rollout_t)`.

    mask: `w` in [low, high], else 0. clip: `clamp(w, low, high)`. trunc: `min(w, high)`; low is unused.

    old_logprobs, rollout_logprobs: float [...], one entry per token. mask: bool [...], trained tokens. Returns
    (coefficient float [...], inside bool [...]), without gradient; 0 and False outside the mask. `inside` is
    where the bounds changed nothing. Raises `TrainingError` on a NaN.
    Source: TIS, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); IcePop, arXiv 2510.18855.
    """
    w = log_ratio(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs).exp()
    coefficient = MODES[mode](w, low, high)
    return coefficient * mask, (coefficient == w) & mask
