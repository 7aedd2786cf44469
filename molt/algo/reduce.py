"""Aggregation: every trained token gets its weight beforehand, and nothing divides later.

The loss is `sum(weight * loss_t)`, so the gradient is the same for any split into micro-batches,
ranks and packs.
"""

from collections.abc import Callable, Sequence


def _token_mean(trained_tokens: Sequence[int]) -> list[float]:
    total = sum(trained_tokens)
    return [1 / total if tokens else 0.0 for tokens in trained_tokens]


AGGREGATIONS: dict[str, Callable[[Sequence[int]], list[float]]] = {"token-mean": _token_mean}


def token_weights(trained_tokens: Sequence[int], *, mode: str = "token-mean") -> list[float]:
    """Weight of each trained token, one number per sample. token-mean: `1 / N`, `N = sum(trained_tokens)`.

    trained_tokens: [S], trained tokens per sample of the *step batch*, over all ranks. Returns [S]; 0 for a sample
    without trained tokens. A mask that shrinks later (importance gate) keeps its weight in the denominator.
    Source: token-mean, DAPO, arXiv 2503.14476.
    """
    return AGGREGATIONS[mode](trained_tokens)
