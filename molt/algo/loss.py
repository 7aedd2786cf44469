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
    low_high: tuple[float, float] = (0.2, 0.2)
    """Its own `low` and `high`, where `actor.eps_clip_low_high` is not set."""
    bounds: Literal["token_ratio", "token_log_ratio", "sample_ratio", "weight"] | None = None
    """What `low` and `high` bound: the ratio of a token or its logarithm, the mean ratio of a sample, or, with `high`,
    the weight of a token. None: the loss alone knows."""
    reads_dual_clip: bool = False
    """Whether `actor.dual_clip` may be set."""
    where: tuple[str, str] | None = None
    """A symbol of the formula and its definition, which is `str.format` text too."""


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


def gmpo(
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
    """`-s A` with one ratio per sample, `s = exp(mean over its trained tokens of l_t)`.

    `l_t = min(log r, high)` where A > 0 and `max(log r, -low)` where A < 0, with `log r = logprobs - old_logprobs`: the
    bounds are of the logarithm, each on one side. The gradient goes through each token as in `gspo`; where `clipped`,
    it is 0. `dual_clip` is unused. With one advantage per sample and the weights of seq-mean-token-mean it is the
    objective of the paper. Raises `TrainingError` on a NaN.
    Source: GMPO, arXiv 2507.20673.
    """
    refuse_nan(advantages=advantages)
    log_r = log_ratio(logprobs=logprobs, old_logprobs=old_logprobs.detach())
    bounded = torch.where(advantages > 0, log_r.clamp(max=high), log_r)
    bounded = torch.where(advantages < 0, log_r.clamp(min=-low), bounded)

    detached = bounded.detach()
    log_s = mean_of_sample(detached, mask, segments)
    zero_with_gradient = bounded - detached
    ratio = (zero_with_gradient + log_s.to(detached.dtype)).exp()
    return -ratio * advantages, bounded != log_r


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
        reads_dual_clip=True,
    ),
    "gspo": PolicyLoss(
        fn=gspo,
        formula="-min(s A, clip(s, 1 - {low:g}, 1 + {high:g}) A)",
        low_high=(3e-4, 4e-4),
        bounds="sample_ratio",
        where=("s", "exp(mean of log r over the sample)"),
    ),
    "cispo": PolicyLoss(
        fn=cispo,
        formula="-sg(min(r, {high:g})) A logprob",
        low_high=(0.2, 5.0),
        bounds="weight",
    ),
    "gmpo": PolicyLoss(
        fn=gmpo,
        formula="-s A",
        low_high=(0.4, 0.4),
        bounds="token_log_ratio",
        where=("s", "exp(mean of min(log r, {high:g}) if A > 0, max(log r, -{low:g}) if A < 0, over the sample)"),
    ),
}
