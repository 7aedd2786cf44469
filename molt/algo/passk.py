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

    subsets = comb(n, k)
    terms = []
    for below, score in enumerate(sorted(scores)):
        # The score is the maximum of the k-subsets whose other k - 1 members come from the ones below it.
        share = comb(below, k - 1) / subsets
        terms.append(score * share)
    return sum(terms)
