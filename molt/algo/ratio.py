"""The log-ratio that losses, KL and importance corrections start from, and its sum or mean over a sample."""

from torch import Tensor

from molt.errors import TrainingError

BOUND = 30.0
"""Log-ratios are clamped to +-BOUND: exp(30) = 1e13 still squares in float32."""


def refuse_nan(**tensors: Tensor) -> None:
    """Raise `TrainingError` naming the first of `tensors` that holds a NaN."""
    for name, tensor in tensors.items():
        count = int(tensor.isnan().sum())
        if count:
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


def sum_of_sample(values: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """Sum of `values` over the trained tokens of each token's sample.

    values: float [...], one entry per token. mask: bool [...]. segments: int64 [...], the sample of each token,
    from 0. Returns float64 [...]; 0 in a sample without trained tokens.
    """
    total = _per_sample(values.double() * mask, segments)
    return total[segments]


def mean_of_sample(values: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """Mean of `values` over the trained tokens of each token's sample. Shapes as in `sum_of_sample`."""
    total = _per_sample(values.double() * mask, segments)
    count = _per_sample(mask.double(), segments)
    mean = total / count.clamp(min=1)
    return mean[segments]


def _per_sample(values: Tensor, segments: Tensor) -> Tensor:
    """float64 [...] per token to its sum, float64 [S], per sample."""
    samples = int(segments.max()) + 1
    sums = values.new_zeros(samples)
    return sums.index_add_(0, segments.flatten(), values.flatten())
