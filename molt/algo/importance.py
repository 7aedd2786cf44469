"""Importance correction: what the trainer thinks of the tokens that the engine sampled.

Named schemes: TIS is level token, mode trunc; IcePop is level token, mode mask; MIS is level geo, mode mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio, of_sample

MODES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "mask": lambda w, statistic, low, high: torch.where((statistic >= low) & (statistic <= high), w, 0.0),
    "clip": lambda w, statistic, low, high: w.clamp(low, high),
    "trunc": lambda w, statistic, low, high: w.clamp(max=high),
}
"""`(w, statistic, low, high) -> coefficient`; w > 0. Only mask reads the statistic: the others are of level token."""


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
    gating: str = "ratio",
) -> tuple[Tensor, Tensor]:
    """Coefficient of the per-token loss from `w_t = exp(old_t - rollout_t)`.

    mask: `w` where the statistic is in [low, high], else 0. The statistic is `w_t` (level token), and, over the trained
    tokens of a sample, `exp(sum log w)` (seq) or `exp(mean log w)` (geo): a sample is kept or dropped as a whole.
    With another `gating` it is that divergence of the token's two probabilities, or its mean over the sample (seq).
    clip: `clamp(w, low, high)`. trunc: `min(w, high)`; low is unused.

    old_logprobs, rollout_logprobs: float [...], one entry per token. mask: bool [...], trained tokens. segments:
    int64 [...], the sample of each token, from 0. Returns (coefficient float [...], inside bool [...]), without
    gradient; 0 and False outside the mask. `inside` is where the bounds changed nothing. Raises `TrainingError` on a
    NaN.
    Source: TIS, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); IcePop, arXiv 2510.18855; sequence levels, Liu et
    al. 2025 (When Speed Kills Stability); the mean of the logarithm is that of GSPO, arXiv 2507.18071.
    """
    log_w = log_ratio(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    if gating == "ratio":
        statistic = (log_w if level == "token" else of_sample(log_w, mask, segments, mean=level == "geo")).exp()
    else:
        statistic = GATINGS[gating](rollout_logprobs.double(), old_logprobs.double())
        statistic = statistic if level == "token" else of_sample(statistic, mask, segments, mean=True)
    w = log_w.exp()
    coefficient = MODES[mode](w, statistic, low, high)
    return coefficient * mask, (coefficient == w) & mask


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p ln(p/q) + (1-p) ln((1-p)/(1-q))`, the KL of "this token or another"; finite and >= 0 for p, q in [0, 1].

    log_p, log_q: float64 [...]; rounding may have left them above 0. Both logarithms are clamped to +-30. Returns
    float64 [...].
    """
    not_p, not_q = -torch.expm1(log_p), -torch.expm1(log_q)  # 1 - p without cancellation
    log_rest = log_ratio(not_p=not_p.clamp(min=1e-300).log(), not_q=not_q.clamp(min=1e-300).log())
    # Rounding may leave -1e-17 at p = q, which a band from 0 would drop.
    return (log_p.exp() * log_ratio(log_p=log_p, log_q=log_q) + not_p * log_rest).clamp(min=0)


GATINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_kl": binary_kl,
    "tv": lambda log_p, log_q: (log_p.exp() - log_q.exp()).abs(),
}
"""`(log p, log q) -> statistic`, with p = exp(rollout) and q = exp(old), the probabilities of the sampled token."""


def describe(level: str, mode: str, gating: str, low: float, high: float) -> str:
    """The coefficient in words, of any level but off; `w` is left for the caller to define."""
    if (level, gating) == ("token", "ratio"):
        return f"{mode}(w, {low:g}, {high:g})"
    if gating == "ratio":
        statistic = f"exp({'mean' if level == 'geo' else 'sum'} of log w over the sample)"
    else:
        statistic = f"{gating}(exp(rollout), exp(old))"
        statistic = statistic if level == "token" else f"mean of {statistic} over the sample"
    return f"w if {low:g} <= {statistic} <= {high:g} else 0"
