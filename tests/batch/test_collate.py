import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.batch.collate import collate, gather, scatter


def test_packed_by_hand():
    sequences = [np.array([5, 6, 7], np.int32), np.array([8], np.int32)]
    batch = collate(sequences, packed=True)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.token_ids.dtype == torch.int64
    assert batch.position_ids.tolist() == [[0, 1, 2, 0]]
    assert batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 3, 4]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3
    assert batch.lengths == [3, 1]
    assert batch.real.tolist() == [[True, True, True, True]]
    assert batch.segments.tolist() == [[0, 0, 0, 1]]


def test_unpacked_by_hand():
    sequences = [np.array([5, 6, 7], np.int32), torch.tensor([8])]
    batch = collate(sequences, packed=False, pad_id=9)
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.token_ids.dtype == torch.int64
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens is None
    assert batch.max_seqlen == 3
    assert batch.lengths == [3, 1]
    assert batch.real.tolist() == [[True, True, True], [True, False, False]]
    assert batch.segments.tolist() == [[0, 0, 0], [1, 1, 1]]

    masks = scatter(batch, [np.array([True, False, True]), np.array([True])])
    assert masks.tolist() == [[True, False, True], [True, False, False]]


def read_only(array):
    """As Ray's object store hands arrays out."""
    array.flags.writeable = False
    return array


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.booleans(), st.sampled_from(["f4", "bool", "i4"]))
def test_scatter_then_gather_is_the_identity(lengths, packed, dtype):
    generator = np.random.default_rng(sum(lengths))
    sequences = [read_only(generator.integers(0, 1000, n).astype(np.int32)) for n in lengths]
    arrays = [read_only(generator.integers(-1, 2, n).astype(dtype)) for n in lengths]

    batch = collate(sequences, packed=packed)
    for ids, sequence in zip(gather(batch, batch.token_ids), sequences, strict=True):
        assert ids.tolist() == sequence.tolist()
    for positions, length in zip(gather(batch, batch.position_ids), lengths, strict=True):
        assert positions.tolist() == list(range(length))

    laid_out = scatter(batch, arrays)
    assert laid_out.shape == batch.token_ids.shape
    assert not laid_out[~batch.real].any()
    for back, array in zip(gather(batch, laid_out), arrays, strict=True):
        assert back.numpy().dtype == array.dtype
        assert back.tolist() == array.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_pass_through_scatter_and_gather(packed):
    batch = collate([torch.tensor([1, 2]), torch.tensor([3])], packed=packed)
    first = torch.tensor([1.0, 2.0], requires_grad=True)
    second = torch.tensor([3.0], requires_grad=True)

    first_back, second_back = gather(batch, scatter(batch, [first, second]))
    loss = first_back.sum() + 5 * second_back.sum()
    loss.backward()
    assert first.grad.tolist() == [1, 1]
    assert second.grad.tolist() == [5]


def test_what_is_not_aligned_is_refused():
    batch = collate([torch.tensor([1, 2]), torch.tensor([3])], packed=True)
    with pytest.raises(ValueError, match="not aligned"):
        scatter(batch, [torch.zeros(1), torch.zeros(2)])  # three entries in all, but not these three


@pytest.mark.parametrize("lengths", [[], [1, 0]])
def test_a_forward_without_a_token_is_refused(lengths):
    sequences = [torch.ones(length, dtype=torch.int64) for length in lengths]
    with pytest.raises(ValueError, match="none may be empty"):
        collate(sequences, packed=True)
