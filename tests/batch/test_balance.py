from hypothesis import given
from hypothesis import strategies as st

from molt.batch.balance import micro_batches, partition


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


def test_micro_batches_by_hand():
    assert micro_batches([[4, 2, 0, 1, 3], [5]], 2) == [[[4, 2], [0, 1], [3]], [[5], [], []]]
    assert micro_batches([[], []], 2) == [[], []]


@given(st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=5), st.integers(1, 7))
def test_all_ranks_run_the_same_number_of_micro_batches(shares, size):
    runs = micro_batches(shares, size)
    assert len({len(run) for run in runs}) == 1
    for share, run in zip(shares, runs, strict=True):
        assert [i for micro_batch in run for i in micro_batch] == share
        assert all(len(micro_batch) <= size for micro_batch in run)
    assert not runs[0] or any(run[-1] for run in runs)  # no run is a dummy on every rank
