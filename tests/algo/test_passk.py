from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.passk import pass_at_k


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.data())
def test_it_is_the_mean_of_the_maxima_of_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    maxima = [max(subset) for subset in combinations(scores, k)]
    assert pass_at_k(scores, k) == pytest.approx(sum(maxima) / len(maxima), abs=1e-9)


@given(st.integers(1, 64), st.data())
def test_binary_scores_give_the_unbiased_estimator(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    scores = data.draw(st.permutations([1.0] * c + [0.0] * (n - c)))
    assert pass_at_k(scores, k) == pytest.approx(1 - comb(n - c, k) / comb(n, k), abs=1e-9)


def test_by_hand():
    # Pairs of (1, 0, 3): maxima 1, 3, 3, mean 7/3.
    assert pass_at_k([1, 0, 3], 2) == pytest.approx(7 / 3)
    assert pass_at_k([1, 0, 3], 1) == pytest.approx(4 / 3)
    assert pass_at_k([1, 0, 3], 3) == 3


def test_large_n_does_not_overflow():
    assert pass_at_k([1.0] + [0.0] * 4095, 2048) == pytest.approx(0.5)


@pytest.mark.parametrize("k", [0, 3])
def test_k_outside_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 2 samples"):
        pass_at_k([0, 1], k)
