"""Importance sampling correction: how likely the trainer finds the tokens that the engine sampled.

Named schemes: TIS is level token, mode trunc; IcePop is level token, mode mask; MIS is level geo, mode mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio, mean_of_sample, sum_of_sample


def _mask(w: Tensor, statistic: Tensor, low: float, high: float) -> Tensor:
    inside = (statistic >= low) & (statistic <= high)
    return torch.where(inside, w, 0.0)


def _clip(w: Tensor, statistic: Tensor, low: float, high: float) -> Tensor:
    return w.clamp(low, high)


def _trunc(w: Tensor, statistic: Tensor, low: float, high: float) -> Tensor:
    return w.clamp(max=high)


MODES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "mask": _mask,
    "clip": _clip,
    "trunc": _trunc,
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
    tokens of a sample, `exp(sum log w)` (seq) or `exp(mean log w)` (geo): all tokens of a sample are kept or dropped
    together. With another `gating` it is that divergence of the token's two probabilities, or its mean over the sample
    (seq). clip: `clamp(w, low, high)`. trunc: `min(w, high)`; low is unused.

    old_logprobs, rollout_logprobs: float [...], one entry per token. mask: bool [...], trained tokens. segments:
    int64 [...], the sample of each token, from 0. Returns (coefficient float [...], inside bool [...]), without
    gradient; 0 and False outside the mask. `inside` is where the bounds changed nothing. Raises `TrainingError` on a
    NaN.
    Source: TIS, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); IcePop, arXiv 2510.18855; sequence levels, Liu et
    al. 2025 (When Speed Kills Stability); the mean of the logarithm is that of GSPO, arXiv 2507.18071.
    """
    log_w = log_ratio(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    w = log_w.exp()

    if gating == "ratio":
        statistic = _ratio_statistic(log_w, mask, segments, level)
    else:
        divergence = GATINGS[gating](rollout_logprobs.double(), old_logprobs.double())
        statistic = _divergence_statistic(divergence, mask, segments, level)

    coefficient = MODES[mode](w, statistic, low, high)
    inside = (coefficient == w) & mask
    return coefficient * mask, inside


def _ratio_statistic(log_w: Tensor, mask: Tensor, segments: Tensor, level: str) -> Tensor:
    """The ratio of a token, or the product (seq) or geometric mean (geo) of its sample's."""
    if level == "token":
        return log_w.exp()
    if level == "geo":
        return mean_of_sample(log_w, mask, segments).exp()
    return sum_of_sample(log_w, mask, segments).exp()


def _divergence_statistic(divergence: Tensor, mask: Tensor, segments: Tensor, level: str) -> Tensor:
    if level == "token":
        return divergence
    return mean_of_sample(divergence, mask, segments)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p ln(p/q) + (1-p) ln((1-p)/(1-q))`, the KL of "this token or another"; finite and >= 0 for p, q in [0, 1].

    log_p, log_q: float64 [...]; rounding may have left them above 0. Both logarithms are clamped to +-30. Returns
    float64 [...].
    """
    # 1 - p without cancellation.
    not_p = -torch.expm1(log_p)
    not_q = -torch.expm1(log_q)

    log_not_p = not_p.clamp(min=1e-300).log()
    log_not_q = not_q.clamp(min=1e-300).log()
    this_token = log_p.exp() * log_ratio(log_p=log_p, log_q=log_q)
    another = not_p * log_ratio(not_p=log_not_p, not_q=log_not_q)

    # Rounding may leave -1e-17 at p = q, which a band from 0 would drop.
    return (this_token + another).clamp(min=0)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`|p - q|`, the total variation of "this token or another". log_p, log_q, returned: float64 [...]."""
    return (log_p.exp() - log_q.exp()).abs()


GATINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_kl": binary_kl,
    "tv": total_variation,
}
"""`(log p, log q) -> statistic`, with p = exp(rollout) and q = exp(old), the probabilities of the sampled token."""


def describe(level: str, mode: str, gating: str, low: float, high: float) -> str:
    """The coefficient as a formula, of any level but off; `w` is left for the caller to define."""
    if gating == "ratio" and level == "token":
        return f"{mode}(w, {low:g}, {high:g})"

    if gating == "ratio":
        average = "mean" if level == "geo" else "sum"
        statistic = f"exp({average} of log w over the sample)"
    else:
        statistic = f"{gating}(exp(rollout), exp(old))"
        if level != "token":
            statistic = f"mean of {statistic} over the sample"
    return f"w if {low:g} <= {statistic} <= {high:g} else 0"
