from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.batch.partition import micro_batches, partition


def test_partition_by_hand():
    # Longest first: 9 -> rank 0; 7 -> rank 1; 5 -> rank 1 (12); 4 -> rank 0 (13); 1 -> rank 1 (13); 1 -> rank 0.
    assert partition([1, 9, 4, 7, 5, 1], 2) == [[1, 2, 5], [3, 4, 0]]
    assert partition([3], 2) == [[0], []]
    assert partition([], 2) == [[], []]
    assert partition([5, 5, 5], 3) == [[0], [1], [2]]


def flat(lists):
    """The entries of all lists, in order."""
    entries = []
    for each in lists:
        entries.extend(each)
    return entries


def chosen(lengths, indices):
    return [lengths[index] for index in indices]


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 9))
def test_partition_takes_every_index_once_and_balances(lengths, ranks):
    shares = partition(lengths, ranks)
    assert len(shares) == ranks
    assert sorted(flat(shares)) == list(range(len(lengths)))

    loads = [sum(chosen(lengths, share)) for share in shares]
    # The last sample given to a rank went to the least loaded one, so no gap exceeds one sample.
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert shares == partition(lengths, ranks)


def test_micro_batches_of_a_size_by_hand():
    ranks = micro_batches([[4, 2, 0, 1, 3], [5]], [1] * 6, size=2)
    assert ranks == [
        [[4, 2], [0, 1], [3]],
        [[5], [], []],
    ]
    assert micro_batches([[], []], [], size=2) == [[], []]


shares_of_ranks = st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=5)


@given(shares_of_ranks, st.integers(1, 7))
def test_all_ranks_run_the_same_number_of_micro_batches(shares, size):
    ranks = micro_batches(shares, [1] * 100, size=size)
    counts = {len(batches) for batches in ranks}
    assert len(counts) == 1

    for share, batches in zip(shares, ranks, strict=True):
        assert flat(batches) == share
        assert all(len(batch) <= size for batch in batches)
    if counts != {0}:
        assert any(batches[-1] for batches in ranks)  # no micro-batch is a dummy on every rank


def padded(shares, lengths, budget):
    return micro_batches(shares, lengths, size=1, max_tokens=budget, packed=False)


def packed(shares, lengths, budget):
    return micro_batches(shares, lengths, size=1, max_tokens=budget, packed=True)


def padded_cost(lengths):
    return len(lengths) * max(lengths, default=0)


@dataclass(frozen=True)
class Filling:
    """A way to fill micro-batches, and what one of them costs."""

    fill: object
    cost: object


LAYOUTS = {
    "padded": Filling(padded, padded_cost),
    "packed": Filling(packed, sum),
}


def test_a_token_budget_by_hand():
    lengths = [6, 6, 4, 4, 25]
    # Packed, budget 10: 25 is too long and runs alone, the others fit in two of 6 + 4 = 10.
    assert packed([[4, 0, 1, 2, 3]], lengths, 10) == [[[4], [0, 2], [1, 3]]]
    # Padded, 6 and 6 are 12 tokens and do not fit; 4 and 4 are 8 and do.
    assert padded([[4, 0, 1, 2, 3]], lengths, 10) == [[[4], [0], [1], [2, 3]]]
    # Padded, not 5 samples and 1, but 3 and 3.
    assert padded([[0, 1, 2, 3, 4, 5]], [2] * 6, 10) == [[[0, 1, 2], [3, 4, 5]]]


def test_ranks_with_fewer_tokens_split_them_alike_or_get_dummies():
    assert packed([[0, 1], [2, 3], [4], []], [9, 9, 1, 1, 1], 10) == [
        [[0], [1]],
        [[2], [3]],
        [[4], []],
        [[], []],
    ]
    assert padded([[0, 1], [2, 3]], [9, 9, 1, 1], 10) == [[[0], [1]], [[2], [3]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_without_samples_has_no_micro_batches(layout):
    assert LAYOUTS[layout].fill([[], []], [], 10) == [[], []]


lengths_of_a_step = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 3000)), min_size=1, max_size=60)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths_of_a_step, st.integers(1, 5), st.integers(1, 4000))
def test_a_token_budget_is_kept_and_nothing_lost(layout, lengths, ranks, budget):
    shares = partition(lengths, ranks)
    filling = LAYOUTS[layout]
    batches_of_ranks = filling.fill(shares, lengths, budget)

    assert len({len(batches) for batches in batches_of_ranks}) == 1
    for share, batches in zip(shares, batches_of_ranks, strict=True):
        assert sorted(flat(batches)) == sorted(share)
        for batch in batches:
            assert len(batch) == 1 or filling.cost(chosen(lengths, batch)) <= budget
        are_dummies = [not batch for batch in batches]
        assert are_dummies == sorted(are_dummies)  # dummies stand at the end
    assert any(batches[-1] for batches in batches_of_ranks)  # no micro-batch is a dummy on every rank
    assert batches_of_ranks == filling.fill(shares, lengths, budget)


def fewest(lengths, budget, cost):
    """By trying every partition into sets, the number of micro-batches of the best."""

    def best(rest, bins):
        if not rest:
            return len(bins)
        first, *others = rest
        counts = [best(others, [*bins, [first]])]
        for i, content in enumerate(bins):
            grown = [*content, first]
            if cost(grown) <= budget:
                counts.append(best(others, [*bins[:i], grown, *bins[i + 1 :]]))
        return min(counts)

    return best(list(lengths), [])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 24))
def test_few_micro_batches(lengths, budget):
    share = list(range(len(lengths)))

    (padded_batches,) = padded([share], lengths, budget)
    assert len(padded_batches) == fewest(lengths, budget, padded_cost)

    (packed_batches,) = packed([share], lengths, budget)
    assert len(packed_batches) < 1.5 * fewest(lengths, budget, sum) + 1


@given(lengths_of_a_step, st.integers(3000, 9000))
def test_packed_micro_batches_are_nearly_as_few_as_the_tokens_allow_and_nearly_equal(lengths, budget):
    share = list(range(len(lengths)))
    (batches,) = packed([share], lengths, budget)
    loads = [sum(chosen(lengths, batch)) for batch in batches]
    assert max(loads) - min(loads) <= max(lengths)
    # They are one more than a number that did not fit, where all were filled above the budget less one sample.
    assert len(loads) == 1 or (len(loads) - 1) * (budget - max(lengths)) < sum(lengths)


@pytest.mark.parametrize(("count", "largest"), [(2, 120), (3, 80)])
def test_padded_micro_batches_have_the_smallest_largest_area(count, largest):
    # Two runs: 3 x 40 and 6 x 20 = 120 (one more in the first is 160, one less 2 x 40 and 7 x 22 = 154).
    # Three runs: 2 x 40, then 80 is enough for 3 x 22 and 4 x 9; with 1 x 40 the rest needs 31 x 2 and 20 x 6.
    lengths = [40, 31, 22, 20, 17, 9, 9, 5, 2]
    share = list(range(len(lengths)))
    for budget in (largest, largest + 20):  # the larger budget is not used up
        (batches,) = padded([share], lengths, budget)
        costs = [padded_cost(chosen(lengths, batch)) for batch in batches]
        assert len(costs) == count
        assert max(costs) == largest

    (batches,) = padded([share], lengths, largest - 1)
    assert len(batches) == count + 1
