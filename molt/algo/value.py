"""The loss of a critic, and how much of the returns it explains."""

import torch
from torch import Tensor

from molt.algo.ratio import refuse_nan


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """`0.5 * max((V - ret)^2, (V_old + clip(V - V_old, -c, c) - ret)^2)`, per token.

    All float [...], one entry per token; the gradient flows through `values` alone. Returns (loss [...],
    clipped bool [...]): where `clipped`, the bound is active and the gradient is 0. Raises `TrainingError` on a NaN.
    Source: arXiv 1707.06347 and its code (openai/baselines, ppo2).
    """
    refuse_nan(values=values, old_values=old_values, returns=returns)
    old_values = old_values.detach()
    returns = returns.detach()

    near_old = old_values + (values - old_values).clamp(-clip, clip)
    free = (values - returns).square()
    bounded = (near_old - returns).square()

    loss = 0.5 * torch.maximum(free, bounded)
    clipped = bounded > free
    return loss, clipped


def variance_sums(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`(n, sum ret, sum ret^2, sum err, sum err^2)` inside the mask, `err = ret - values`: ranks add them up.

    returns, values: float [...]. mask: bool [...]. Returns float64 [5].
    """
    returns = returns[mask].detach().double()
    values = values[mask].detach().double()
    err = returns - values

    n = mask.sum().double()
    return torch.stack(
        [
            n,
            returns.sum(),
            returns.square().sum(),
            err.sum(),
            err.square().sum(),
        ]
    )


def explained_variance(sums: Tensor) -> float:
    """`1 - Var(err) / Var(ret)`: 1 is a perfect critic, 0 a constant one; 0 where the returns do not vary.

    sums: float64 [5], `variance_sums` added over the training batch.
    """
    n, ret, ret_square, err, err_square = sums.tolist()
    # Both times n: the quotient is the same.
    ret_variance = ret_square - ret**2 / max(n, 1)
    if ret_variance <= 1e-12 * ret_square:  # equal returns leave a rounding error
        return 0.0

    err_variance = err_square - err**2 / n
    return 1 - err_variance / ret_variance
