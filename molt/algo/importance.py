"""Importance correction: what the trainer thinks of the tokens that the engine sampled.

Named schemes: TIS is level token, mode trunc; IcePop is level token, mode mask; MIS is level geo, mode mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio

MODES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "mask": lambda w, statistic, low, high: torch.where((statistic >= low) & (statistic <= high), w, 0.0),
    "clip": lambda w, statistic, low, high: w.clamp(low, high),
    "trunc": lambda w, statistic, low, high: w.clamp(max=high),
}
"""`(w, statistic, low, high) -> coefficient`; w > 0. Only mask reads the statistic: the others are of level token."""

FORMULAS = {
    "token": "{mode}(w, {low:g}, {high:g})",
    "seq": "w if {low:g} <= exp(sum of log w over the sample) <= {high:g} else 0",
    "geo": "w if {low:g} <= exp(mean of log w over the sample) <= {high:g} else 0",
}
"""The coefficient in words, by level."""


@torch.no_grad()
def correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    level: str,
    mode: str,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Coefficient of the per-token loss from `w_t = exp(old_t - rollout_t)`.

    mask: `w` where the statistic is in [low, high], else 0. The statistic is `w_t` (level token), and, over the trained
    tokens of a sample, `exp(sum log w)` (seq) or `exp(mean log w)` (geo): a sample is kept or dropped as a whole.
    clip: `clamp(w, low, high)`. trunc: `min(w, high)`; low is unused.

    old_logprobs, rollout_logprobs: float [...], one entry per token. mask: bool [...], trained tokens. segments:
    int64 [...], the sample of each token, from 0. Returns (coefficient float [...], inside bool [...]), without
    gradient; 0 and False outside the mask. `inside` is where the bounds changed nothing. Raises `TrainingError` on a
    NaN.
    Source: TIS, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); IcePop, arXiv 2510.18855; sequence levels, Liu et
    al. 2025 (When Speed Kills Stability); the mean of the logarithm is that of GSPO, arXiv 2507.18071.
    """
    log_w = log_ratio(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    statistic = log_w if level == "token" else _of_sample(log_w, mask, segments, mean=level == "geo")
    w = log_w.exp()
    coefficient = MODES[mode](w, statistic.exp(), low, high)
    return coefficient * mask, (coefficient == w) & mask


def _of_sample(log_w: Tensor, mask: Tensor, segments: Tensor, *, mean: bool) -> Tensor:
    """float64 [...]: sum or mean of `log_w` over the trained tokens of each token's sample."""
    index, sums = segments.flatten(), log_w.new_zeros(2, int(segments.max()) + 1, dtype=torch.float64)
    values = torch.stack([log_w.double() * mask, mask.double()]).flatten(1)
    total, count = sums.index_add_(1, index, values)
    return (total / count.clamp(min=1) if mean else total)[segments]
