"""Aggregations: by hand, against the means of their names, and what does not count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.reduce import AGGREGATIONS, token_weights


def test_token_mean_by_hand():
    # 3 + 0 + 1 + 4 = 8 trained tokens: each weighs 1/8, wherever it is.
    assert token_weights([3, 0, 1, 4]) == [0.125, 0, 0.125, 0.125]
    assert token_weights([0, 0]) == [0, 0]
    assert token_weights([1]) == [1]
    assert token_weights([]) == []


@pytest.mark.parametrize(("mode", "weights"), [
    ("token-mean", [1 / 10, 0, 1 / 10, 1 / 10, 0]),  # N = 3 + 1 + 6
    ("seq-mean-token-mean", [1 / 9, 0, 1 / 3, 1 / 18, 0]),  # S = 3 samples count: 1 / (3 * 3), 1 / (3 * 1), 1 / (3 * 6)
    ("prompt-mean-token-mean", [1 / 18, 0, 1 / 2, 1 / 18, 0]),  # G = 2: a has 9 tokens, b 1; c does not count
    ("seq-mean-token-sum-norm", [1 / 60, 0, 1 / 60, 1 / 60, 0]),  # 1 / (3 * 20)
])  # fmt: skip
def test_every_mode_by_hand(mode, weights):
    got = token_weights([3, 0, 1, 6, 0], ["a", "a", "b", "a", "c"], mode=mode, max_len=20)
    assert got == pytest.approx(weights)


samples = st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 3)), max_size=20)


def reference(mode, losses, groups, max_len):
    """The mean of the mode's name over per-token losses, sample by sample, without any weight."""
    there = [(sample, group) for sample, group in zip(losses, groups, strict=True) if sample]
    if not there:
        return 0.0
    if mode == "token-mean":
        tokens = [x for sample, _ in there for x in sample]
        return sum(tokens) / len(tokens)
    if mode == "seq-mean-token-mean":
        return sum(sum(sample) / len(sample) for sample, _ in there) / len(there)
    if mode == "seq-mean-token-sum-norm":
        return sum(sum(sample) / max_len for sample, _ in there) / len(there)
    means = []
    for label in {group for _, group in there}:
        tokens = [x for sample, group in there if group == label for x in sample]
        means.append(sum(tokens) / len(tokens))
    return sum(means) / len(means)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(samples, st.integers(1, 100), st.integers(0, 999))
def test_the_weighted_sum_is_the_mean_of_the_name(mode, rows, max_len, seed):
    trained = [n for n, _ in rows]
    groups = [g for _, g in rows]
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=n).tolist() for n in trained]
    weights = token_weights(trained, groups, mode=mode, max_len=max_len)
    got = sum(w * x for w, sample in zip(weights, losses, strict=True) for x in sample)
    assert got == pytest.approx(reference(mode, losses, groups, max_len), rel=1e-6, abs=1e-9)
    assert all((w > 0) == (n > 0) for w, n in zip(weights, trained, strict=True))


@pytest.mark.parametrize("mode", sorted(set(AGGREGATIONS) - {"seq-mean-token-sum-norm"}))
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5)), max_size=40).filter(lambda r: any(n for n, _ in r)))
def test_all_weights_of_a_step_sum_to_one(mode, rows):
    trained, groups = zip(*rows, strict=True)
    weights = token_weights(trained, groups, mode=mode, max_len=5000)
    assert sum(w * n for w, n in zip(weights, trained, strict=True)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_sample_without_trained_tokens_changes_no_weight(mode):
    few = token_weights([2, 5], [0, 1], mode=mode, max_len=9)
    more = token_weights([2, 0, 5, 0], [0, 0, 1, 2], mode=mode, max_len=9)
    assert [more[0], more[2]] == few and more[1] == more[3] == 0
    assert token_weights([0, 0], [0, 1], mode=mode, max_len=9) == [0, 0]
    assert token_weights([], [], mode=mode, max_len=9) == []


def test_every_row_has_a_formula():
    assert all(aggregation.formula.startswith("1/") for aggregation in AGGREGATIONS.values())
