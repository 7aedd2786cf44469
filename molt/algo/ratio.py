"""The log-ratio that losses and importance corrections start from."""

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
