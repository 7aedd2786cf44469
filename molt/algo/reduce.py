"""Aggregation: every trained token gets its weight beforehand, and nothing divides later.

The loss is `sum(weight * loss_t)`, so the gradient is the same for any split into micro-batches,
ranks and packs.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCounts:
    """What the weights are computed from: the samples of one optimizer step, over all ranks."""

    trained_tokens: Sequence[int]
    """[S] trained tokens per sample."""
    groups: Sequence[Hashable] | None
    """[S] any labels."""
    max_len: int | None
    """Tokens of the context."""

    @property
    def samples(self) -> int:
        """Samples that have a trained token."""
        return sum(1 for tokens in self.trained_tokens if tokens > 0)


def _token_mean(counts: StepCounts) -> list[int]:
    total = sum(counts.trained_tokens)
    return [total for _ in counts.trained_tokens]


def _seq_mean_token_mean(counts: StepCounts) -> list[int]:
    samples = counts.samples
    return [samples * tokens for tokens in counts.trained_tokens]


def _prompt_mean_token_mean(counts: StepCounts) -> list[int]:
    if counts.groups is None:
        raise ValueError("prompt-mean-token-mean without groups: its weights are 1 / (G tokens_g). Pass groups.")
    tokens_of: Counter[Hashable] = Counter()
    for group, tokens in zip(counts.groups, counts.trained_tokens, strict=True):
        tokens_of[group] += tokens

    trained_groups = sum(1 for tokens in tokens_of.values() if tokens > 0)
    return [trained_groups * tokens_of[group] for group in counts.groups]


def _seq_mean_token_sum_norm(counts: StepCounts) -> list[int]:
    if counts.max_len is None:
        raise ValueError("seq-mean-token-sum-norm without max_len: its weights are 1 / (S max_len). Pass max_len.")
    samples = counts.samples
    return [samples * counts.max_len for _ in counts.trained_tokens]


@dataclass(frozen=True)
class Aggregation:
    """One way to weigh the trained tokens of an optimizer step."""

    denominators: Callable[[StepCounts], list[int]]
    """[S]: the weight of a trained token of sample s is 1 over entry s."""
    formula: str
    """The weight of a trained token, for the header of a run."""


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": Aggregation(_token_mean, "1/N"),
    "seq-mean-token-mean": Aggregation(_seq_mean_token_mean, "1/(S len_s)"),
    "prompt-mean-token-mean": Aggregation(_prompt_mean_token_mean, "1/(G tokens_g)"),
    "seq-mean-token-sum-norm": Aggregation(_seq_mean_token_sum_norm, "1/(S max_len)"),
}


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
    counts = StepCounts(trained_tokens, groups, max_len)
    denominators = AGGREGATIONS[mode].denominators(counts)

    weights = []
    for tokens, denominator in zip(trained_tokens, denominators, strict=True):
        weights.append(1 / denominator if tokens else 0.0)
    return weights
