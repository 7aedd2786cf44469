"""Policy losses: per-token values. Nothing here averages them: `reduce` has the weights.

One loss is one function and one row of `LOSSES`, all with the same signature. Per-token tensors have one shape [...]:
logprobs, old_logprobs, advantages float; mask bool, the trained tokens; segments int64, the sample of each token, from
0. The gradient flows through `logprobs` alone. Each returns (loss float [...], clipped bool [...]): where `clipped`, a
bound is active.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from molt.algo.ratio import log_ratio, mean_of_sample, refuse_nan


@dataclass(frozen=True)
class PolicyLoss:
    """All that the rest of molt knows of a loss; nothing tests its name."""

    fn: Callable[..., tuple[Tensor, Tensor]]
    """`fn(logprobs, old_logprobs, advantages, mask, segments, *, low, high, dual_clip=None)`."""
    formula: str
    """For the header of a run: `str.format` text with the scalars of `fn`."""
    where: tuple[str, str] | None = None
    """A symbol of the formula and its definition."""
    bounds: Literal["token_ratio", "sample_ratio", "weight"] | None = None
    """What `low` and `high` bound: the ratio of a token, the mean ratio of a sample, or, with `high`, the weight of a
    token. None: a user's loss decides."""
    allows_dual_clip: bool = True
    """Whether `actor.dual_clip` may be set."""


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)` with `r = exp(logprobs - old_logprobs)`.

    With `dual_clip` c > 1, where A < 0: `-max(min(...), c A)`. Where `clipped`, the gradient is 0.
    Raises `TrainingError` on a NaN.
    Source: arXiv 1707.06347; separate bounds, arXiv 2503.14476; dual clip, arXiv 1912.09729.
    """
    log_r = log_ratio(logprobs=logprobs, old_logprobs=old_logprobs.detach())
    ratio = log_r.exp()
    return _clipped(ratio, advantages, low, high, dual_clip)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """ppo with one ratio per sample, `s = exp(mean over its trained tokens of (logprobs - old_logprobs))`.

    The gradient goes through each token: `s_t = exp(logprobs - sg(logprobs) + sg(log s))`. The tokens of a sample are
    clipped together if its advantages have one sign. Raises `TrainingError` on a NaN.
    Source: GSPO-token, arXiv 2507.18071.
    """
    detached = logprobs.detach()
    log_r = log_ratio(logprobs=detached, old_logprobs=old_logprobs.detach())
    log_s = mean_of_sample(log_r, mask, segments)

    zero_with_gradient = log_ratio(logprobs=logprobs, detached=detached)
    ratio = (zero_with_gradient + log_s.to(detached.dtype)).exp()
    return _clipped(ratio, advantages, low, high, dual_clip)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`-sg(min(r, high)) A logprobs` with `r = exp(logprobs - old_logprobs)`; `high` is the ceiling itself.

    `low` and `dual_clip` are unused. Where `clipped`, the token keeps a gradient, of weight `high`.
    Raises `TrainingError` on a NaN.
    Source: arXiv 2506.13585.
    """
    refuse_nan(advantages=advantages)
    log_r = log_ratio(logprobs=logprobs.detach(), old_logprobs=old_logprobs.detach())
    ratio = log_r.exp()

    weight = ratio.clamp(max=high)
    loss = -weight * advantages * logprobs
    clipped = ratio > high
    return loss, clipped


def _clipped(
    ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    """The loss of ppo for any ratio, and where a bound is active."""
    refuse_nan(advantages=advantages)
    free = ratio * advantages
    near = ratio.clamp(1 - low, 1 + high) * advantages
    bounded = torch.minimum(free, near)

    if dual_clip is not None:
        floor = dual_clip * advantages
        bounded = torch.where(advantages < 0, torch.maximum(bounded, floor), bounded)
    return -bounded, bounded != free


LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        fn=ppo,
        formula="-min(r A, clip(r, 1 - {low:g}, 1 + {high:g}) A)",
        bounds="token_ratio",
    ),
    "gspo": PolicyLoss(
        fn=gspo,
        formula="-min(s A, clip(s, 1 - {low:g}, 1 + {high:g}) A)",
        where=("s", "exp(mean of log r over the sample)"),
        bounds="sample_ratio",
        allows_dual_clip=False,
    ),
    "cispo": PolicyLoss(
        fn=cispo,
        formula="-sg(min(r, {high:g})) A logprob",
        bounds="weight",
        allows_dual_clip=False,
    ),
}
