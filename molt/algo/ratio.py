"""The log-ratio that losses, KL and importance corrections start from, and what becomes of it per sample."""

import torch
from torch import Tensor

from molt.errors import TrainingError

BOUND = 30.0
"""Log-ratios are clamped to +-BOUND: exp(30) = 1e13 still squares in float32."""


def refuse_nan(**tensors: Tensor) -> None:
    """Raise `TrainingError` naming the first of `tensors` that holds a NaN."""
    for name, tensor in tensors.items():
        if count := int(tensor.isnan().sum()):
            raise TrainingError(
                f"{name} holds {count} NaN in {tensor.numel()} tokens: the loss would be NaN and the step would "
                "destroy the weights. Look for an overflow in the forward pass, or use float32."
            )


def log_ratio(**pair: Tensor) -> Tensor:
    """`clamp(a - b, -30, 30)` of exactly two named tensors, in the order they are passed.

    Both float [...], one entry per token. The names serve the error message.
    Raises `TrainingError` when one holds a NaN, or both the same infinity.
    """
    a, b = pair.values()
    ratio = a - b
    if ratio.isnan().any():
        refuse_nan(**pair, log_ratio=ratio)
    return ratio.clamp(-BOUND, BOUND)


def of_sample(values: Tensor, mask: Tensor, segments: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean of `values` over the trained tokens of each token's sample.

    values: float [...], one entry per token. mask: bool [...]. segments: int64 [...], the sample of each token,
    from 0. Returns float64 [...]; 0 in a sample without trained tokens.
    """
    index, sums = segments.flatten(), values.new_zeros(2, int(segments.max()) + 1, dtype=torch.float64)
    both = torch.stack([values.double() * mask, mask.double()]).flatten(1)
    total, count = sums.index_add_(1, index, both)
    return (total / count.clamp(min=1) if mean else total)[segments]
