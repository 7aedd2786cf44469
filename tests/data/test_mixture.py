"""An epoch of a mixture has exactly its shares, never a row twice, and is a pure function of (seed, epoch)."""

import json
from collections import Counter
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from molt.data.mixture import EpochOrder, mixture
from molt.errors import DataError


@st.composite
def mixtures(draw):
    """Sizes, and shares as they are written on the command line."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=2, max_size=4))
    shares = [f"{draw(st.integers(1, 400)) / 100:g}" for _ in sizes]
    return sizes, ",".join(shares)


def build(sizes, shares, seed=0):
    try:
        return EpochOrder(sizes, seed=seed, shares=shares, flag="data.prompt_probs")
    except DataError:
        assume(False)


def by_dataset(sizes, rows):
    ends = list(accumulate(sizes))
    return Counter(next(i for i, end in enumerate(ends) if row < end) for row in rows)


def brute_force(sizes, shares):
    """The definition, one N after the other."""
    parts = [Fraction(share) / sum(map(Fraction, shares)) for share in shares]
    counts = [0] * len(sizes)
    for n in range(1, 100_000):
        larger = [int(n * p + Fraction(1, 2)) for p in parts]
        if any(c > size for c, size in zip(larger, sizes, strict=True)):
            return counts
        counts = larger


@given(mixtures())
@settings(max_examples=100)
def test_counts_are_those_of_the_largest_epoch(case):
    sizes, shares = case
    assert mixture(sizes, [Fraction(share) for share in shares.split(",")]) == brute_force(sizes, shares.split(","))


def test_counts_by_hand():
    # 100 rows are 0.7 of an epoch: N = 143 gives 100.1 -> 100 and 42.9 -> 43; N = 144 would give 101.
    assert mixture([100, 1000], [Fraction("0.7"), Fraction("0.3")]) == [100, 43]
    # Equal shares: the smaller dataset ends the epoch.
    assert mixture([10, 500], [Fraction(3), Fraction(3)]) == [10, 10]
    # 1 : 2 : 1 of 8 rows each: the second one ends it at N = 16 (N = 17 would give 8.5 -> 9 of it).
    assert mixture([8, 8, 8], [Fraction(1), Fraction(2), Fraction(1)]) == [4, 8, 4]


@given(mixtures(), st.integers(-3, 2**66))
@settings(max_examples=100)
def test_every_epoch_has_the_same_composition_and_no_row_twice(case, seed):
    sizes, shares = case
    order = build(sizes, shares, seed)
    for epoch in range(4):
        rows = order.rows(epoch).tolist()
        assert len(rows) == len(order) == len({*rows})
        assert all(0 <= row < sum(sizes) for row in rows)
        assert by_dataset(sizes, rows) == dict(enumerate(order.counts))


@given(mixtures())
@settings(max_examples=50)
def test_no_row_comes_again_before_all_others_of_its_dataset_came(case):
    sizes, shares = case
    order = build(sizes, shares)
    drawn = Counter()
    for epoch in range(8):
        drawn.update(order.rows(epoch).tolist())
        first = 0
        for size in sizes:
            times = [drawn[row] for row in range(first, first + size)]
            assert max(times) - min(times) <= 1
            first += size


@given(mixtures(), st.data())
@settings(max_examples=50)
def test_an_order_is_a_pure_function_of_seed_and_epoch(case, data):
    sizes, shares = case
    whole = [build(sizes, shares, 7).rows(epoch).tolist() for epoch in range(3)]
    jumping = build(sizes, shares, 7)
    for epoch in data.draw(st.lists(st.integers(0, 2), max_size=6)):
        assert jumping.rows(epoch).tolist() == whole[epoch]


def test_datasets_are_well_mixed():
    """Of 10,000 rows, 3 of 4 from one dataset: any 1,000 neighbours have about 750 of it (sigma 13)."""
    order = EpochOrder([7500, 9000], seed=1, shares="3,1")
    assert order.counts == [7500, 2500]
    ours = (order.rows(0) < 7500).reshape(10, 1000).sum(axis=1)
    assert np.abs(ours - 750).max() < 5 * 13


def test_seeds_epochs_and_datasets_have_orders_of_their_own():
    def rows(seed, epoch):
        return EpochOrder([50, 50], seed=seed, shares="1,1").rows(epoch).tolist()

    assert rows(0, 0) != rows(0, 1) and rows(0, 0) != rows(1, 0) and rows(0, 1) != rows(1, 0)
    part = EpochOrder([40, 40, 40], seed=0, shares="1,1,4")  # 10 rows of each of the first two
    first, second = ({row % 40 for row in part.rows(0).tolist() if row // 40 == i} for i in (0, 1))
    assert len(first) == len(second) == 10 and first != second


def test_without_shares_it_is_one_permutation_of_all_rows():
    order = EpochOrder([3, 5], seed=11)
    assert len(order) == 8
    for epoch in range(3):
        assert order.rows(epoch).tolist() == np.random.default_rng([11, epoch]).permutation(8).tolist()


def test_the_order_of_a_mixture_is_pinned():
    """A checkpoint holds only an index: this order may never change between versions of molt."""
    order = EpochOrder([4, 9], seed=42, shares="0.5,0.5")
    assert [order.rows(epoch).tolist() for epoch in (0, 1)] == PINNED


PINNED = [[0, 9, 2, 4, 11, 3, 10, 1], [1, 12, 7, 3, 2, 6, 0, 5]]


def test_identity_tells_different_orders_apart_and_survives_json():
    def identity(sizes, shares=None):
        return json.loads(json.dumps(EpochOrder(sizes, seed=0, shares=shares).identity))

    assert identity([3, 5]) == identity([8]) == {"rows": 8}
    assert (
        identity([30, 50], "1,3")
        == identity([30, 50], "0.25, 0.75")
        == EpochOrder([30, 50], seed=0, shares="1,3").identity
    )
    different = [identity([30, 50], "1,3"), identity([30, 50], "1,2"), identity([30, 51], "1,3"), identity([30, 50])]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])


@pytest.mark.parametrize("sizes", [[100, 100], [0, 100]])
def test_a_dataset_that_is_never_used_is_an_error(sizes):
    with pytest.raises(
        DataError, match=r"`data.prompt_probs` \(=1,999\): .*one dataset is never used. Raise its share"
    ):
        EpochOrder(sizes, seed=0, shares="1,999", flag="data.prompt_probs")
