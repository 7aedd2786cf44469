"""Aggregation: every trained token gets its weight beforehand, and nothing divides later.

The loss is `sum(weight * loss_t)`, so the gradient is the same for any split into micro-batches,
ranks and packs.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence


def _of_prompts(trained: Sequence[int], groups: Sequence[Hashable], max_len: int | None) -> list[int]:
    tokens = Counter()
    for label, n in zip(groups, trained, strict=True):
        tokens[label] += n
    return [sum(n > 0 for n in tokens.values()) * tokens[label] for label in groups]


def _samples(trained: Sequence[int]) -> int:
    return sum(n > 0 for n in trained)


AGGREGATIONS: dict[str, Callable[..., list[int]]] = {
    "token-mean": lambda trained, groups, max_len: [sum(trained)] * len(trained),
    "seq-mean-token-mean": lambda trained, groups, max_len: [_samples(trained) * n for n in trained],
    "prompt-mean-token-mean": _of_prompts,
    "seq-mean-token-sum-norm": lambda trained, groups, max_len: [_samples(trained) * max_len] * len(trained),
}
"""`(trained tokens [S], groups [S], max_len) -> denominators [S]` of the weights."""

FORMULAS = {
    "token-mean": "1/N",
    "seq-mean-token-mean": "1/(S len_s)",
    "prompt-mean-token-mean": "1/(G tokens_g)",
    "seq-mean-token-sum-norm": "1/(S max_len)",
}
"""The weight of a trained token, for the header of a run."""


def token_weights(
    trained_tokens: Sequence[int],
    groups: Sequence[Hashable] | None = None,
    *,
    mode: str = "token-mean",
    max_len: int | None = None,
) -> list[float]:
    """Weight of each trained token, one number per sample, by the counts of the *step batch* over all ranks.

    token-mean: `1 / N`, N trained tokens. seq-mean-token-mean: `1 / (S len_s)`, S samples, len_s trained tokens of this
    one. prompt-mean-token-mean: `1 / (G tokens_g)`, G groups, tokens_g trained tokens of its group.
    seq-mean-token-sum-norm: `1 / (S max_len)`. Samples without trained tokens count neither in S nor in G.

    trained_tokens: [S], trained tokens per sample. groups: [S], any labels; only prompt-mean-token-mean reads them, and
    only seq-mean-token-sum-norm reads max_len. Returns [S]; 0 for a sample without trained tokens. A mask that shrinks
    later (importance gate) keeps its weight in the denominator.
    Source: token-mean, DAPO, arXiv 2503.14476; seq-mean-token-mean, GRPO, arXiv 2402.03300; seq-mean-token-sum-norm,
    Dr. GRPO, arXiv 2503.20783.
    """
    denominators = AGGREGATIONS[mode](trained_tokens, groups, max_len)
    return [1 / d if n else 0.0 for n, d in zip(trained_tokens, denominators, strict=True)]
