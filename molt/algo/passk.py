"""pass@k: the expected best of k samples."""

from collections.abc import Sequence
from math import comb


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Mean of the maximum over all subsets of k scores: `sum_i s_(i) C(i-1, k-1) / C(n, k)`, `s_(i)` ascending.

    For scores in {0, 1} with c ones that is the unbiased estimator `1 - C(n-c, k) / C(n, k)`.

    scores: n samples of one prompt, in any order. Raises `ValueError` unless 1 <= k <= n.
    Source: arXiv 2107.03374.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be between 1 and the number of samples")
    # C(i, k-1) of the k-subsets have the score at index i as their maximum: the others come from the i below it.
    return sum(score * (comb(i, k - 1) / comb(n, k)) for i, score in enumerate(sorted(scores)))
