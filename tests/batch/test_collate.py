import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.batch.collate import collate, gather, scatter


def test_packed_by_hand():
    batch = collate([np.array([5, 6, 7], np.int32), np.array([8], np.int32)], packed=True)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3 and batch.lengths == [3, 1]
    assert batch.real.tolist() == [[True] * 4]
    assert batch.segments.tolist() == [[0, 0, 0, 1]]
    assert batch.token_ids.dtype == batch.position_ids.dtype == torch.int64


def test_unpacked_by_hand():
    batch = collate([np.array([5, 6, 7], np.int32), torch.tensor([8])], packed=False, pad_id=9)
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.cu_seqlens is None and batch.max_seqlen == 3 and batch.lengths == [3, 1]
    assert batch.real.tolist() == [[True, True, True], [True, False, False]]
    assert batch.segments.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch.token_ids.dtype == batch.position_ids.dtype == torch.int64
    assert scatter(batch, [np.array([True, False, True]), np.array([True])]).tolist() == [
        [True, False, True],
        [True, False, False],
    ]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.booleans(), st.sampled_from(["f4", "bool", "i4"]))
def test_scatter_then_gather_is_the_identity(lengths, packed, dtype):
    rng = np.random.default_rng(sum(lengths))
    sequences = [rng.integers(0, 1000, n).astype(np.int32) for n in lengths]
    arrays = [rng.integers(-1, 2, n).astype(dtype) for n in lengths]
    for array in sequences + arrays:
        array.flags.writeable = False  # as Ray's object store hands them out
    batch = collate(sequences, packed=packed)
    assert [t.tolist() for t in gather(batch, batch.token_ids)] == [s.tolist() for s in sequences]
    assert [p.tolist() for p in gather(batch, batch.position_ids)] == [list(range(n)) for n in lengths]
    laid_out = scatter(batch, arrays)
    assert laid_out.shape == batch.token_ids.shape
    assert not laid_out[~batch.real].any()
    assert [(t.numpy().dtype, t.tolist()) for t in gather(batch, laid_out)] == [(a.dtype, a.tolist()) for a in arrays]


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_pass_through_scatter_and_gather(packed):
    batch = collate([torch.tensor([1, 2]), torch.tensor([3])], packed=packed)
    values = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    back = gather(batch, scatter(batch, values))
    (back[0].sum() + 5 * back[1].sum()).backward()
    assert values[0].grad.tolist() == [1, 1] and values[1].grad.tolist() == [5]


def test_what_is_not_aligned_is_refused():
    batch = collate([torch.tensor([1, 2]), torch.tensor([3])], packed=True)
    with pytest.raises(ValueError, match="not aligned"):
        scatter(batch, [torch.zeros(1), torch.zeros(2)])  # three entries in all, but not these three
    for sequences in ([], [torch.tensor([1]), torch.tensor([], dtype=torch.int64)]):
        with pytest.raises(ValueError, match="none may be empty"):
            collate(sequences, packed=True)
