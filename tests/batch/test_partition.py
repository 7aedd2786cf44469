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


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 9))
def test_partition_takes_every_index_once_and_balances(lengths, ranks):
    shares = partition(lengths, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    # The last sample given to a rank went to the least loaded one, so no gap exceeds one sample.
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert shares == partition(lengths, ranks)


def test_micro_batches_of_a_size_by_hand():
    assert micro_batches([[4, 2, 0, 1, 3], [5]], [1] * 6, size=2) == [[[4, 2], [0, 1], [3]], [[5], [], []]]
    assert micro_batches([[], []], [], size=2) == [[], []]


@given(st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=5), st.integers(1, 7))
def test_all_ranks_run_the_same_number_of_micro_batches(shares, size):
    runs = micro_batches(shares, [1] * 100, size=size)
    assert len({len(run) for run in runs}) == 1
    for share, run in zip(shares, runs, strict=True):
        assert [i for micro_batch in run for i in micro_batch] == share
        assert all(len(micro_batch) <= size for micro_batch in run)
    assert not runs[0] or any(run[-1] for run in runs)  # no run is a dummy on every rank


def filled(shares, lengths, budget, packed):
    return micro_batches(shares, lengths, size=1, max_tokens=budget, packed=packed)


def test_a_token_budget_by_hand():
    lengths = [6, 6, 4, 4, 25]
    # Packed, budget 10: 25 is too long and runs alone, the others fit in two of 6 + 4 = 10.
    assert filled([[4, 0, 1, 2, 3]], lengths, 10, True) == [[[4], [0, 2], [1, 3]]]
    # Padded, 6 and 6 are 12 tokens and do not fit; 4 and 4 are 8 and do.
    assert filled([[4, 0, 1, 2, 3]], lengths, 10, False) == [[[4], [0], [1], [2, 3]]]
    # Padded, not 5 samples and 1, but 3 and 3.
    assert filled([list(range(6))], [2] * 6, 10, False) == [[[0, 1, 2], [3, 4, 5]]]
    # A rank with fewer tokens splits them alike, or gets dummies.
    assert filled([[0, 1], [2, 3], [4], []], [9, 9, 1, 1, 1], 10, True) == [[[0], [1]], [[2], [3]], [[4], []], [[], []]]
    assert filled([[0, 1], [2, 3]], [9, 9, 1, 1], 10, False) == [[[0], [1]], [[2], [3]]]
    assert filled([[], []], [], 10, True) == filled([[], []], [], 10, False) == [[], []]


def cost(lengths, packed):
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


lengths_of_a_step = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 3000)), min_size=1, max_size=60)


@given(lengths_of_a_step, st.integers(1, 5), st.integers(1, 4000), st.booleans())
def test_a_token_budget_is_kept_and_nothing_lost(lengths, ranks, budget, packed):
    shares = partition(lengths, ranks)
    runs = filled(shares, lengths, budget, packed)
    assert len({len(run) for run in runs}) == 1
    for share, run in zip(shares, runs, strict=True):
        assert sorted(i for micro_batch in run for i in micro_batch) == sorted(share)
        assert all(len(m) == 1 or cost([lengths[i] for i in m], packed) <= budget for m in run)
        assert run == sorted(run, key=lambda m: not m)  # dummies stand at the end
    assert any(run[-1] for run in runs)  # no run is a dummy on every rank
    assert runs == filled(shares, lengths, budget, packed)


def fewest(lengths, budget, packed):
    """By trying every partition into sets, the number of micro-batches of the best."""

    def best(rest, bins):
        if not rest:
            return len(bins)
        first, *others = rest
        tried = [best(others, [*bins, [first]])]
        for i, content in enumerate(bins):
            grown = [*content, first]
            if cost(grown, packed) <= budget:
                tried.append(best(others, [*bins[:i], grown, *bins[i + 1 :]]))
        return min(tried)

    return best(list(lengths), [])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 24))
def test_few_micro_batches(lengths, budget):
    share = [list(range(len(lengths)))]
    assert len(filled(share, lengths, budget, False)[0]) == fewest(lengths, budget, False)
    packed = len(filled(share, lengths, budget, True)[0])
    assert packed < 1.5 * fewest(lengths, budget, True) + 1


@given(lengths_of_a_step, st.integers(3000, 9000))
def test_packed_micro_batches_are_nearly_as_few_as_the_tokens_allow_and_nearly_equal(lengths, budget):
    (run,) = filled([list(range(len(lengths)))], lengths, budget, True)
    loads = [sum(lengths[i] for i in m) for m in run]
    assert max(loads) - min(loads) <= max(lengths)
    # They are one more than a number that did not fit, where all were filled above the budget less one sample.
    assert len(loads) == 1 or (len(loads) - 1) * (budget - max(lengths)) < sum(lengths)


@pytest.mark.parametrize(("count", "largest"), [(2, 120), (3, 80)])
def test_padded_micro_batches_have_the_smallest_largest_area(count, largest):
    # Two runs: 3 x 40 and 6 x 20 = 120 (one more in the first is 160, one less 2 x 40 and 7 x 22 = 154).
    # Three runs: 2 x 40, then 80 is enough for 3 x 22 and 4 x 9; with 1 x 40 the rest needs 31 x 2 and 20 x 6.
    lengths = [40, 31, 22, 20, 17, 9, 9, 5, 2]
    for budget in (largest, largest + 20):  # the larger budget is not used up
        (run,) = filled([list(range(9))], lengths, budget, False)
        assert len(run) == count and max(cost([lengths[i] for i in m], False) for m in run) == largest
    assert len(filled([list(range(9))], lengths, largest - 1, False)[0]) == count + 1
