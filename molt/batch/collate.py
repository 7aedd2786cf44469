"""How the sequences of a micro-batch become one rectangle, and back.

Packed: one row, sequences end to end, positions restart at 0. Unpacked: one row each, padded on the
right. `real` marks the cells that hold a token; in row-major order they are the sequences in order,
so one boolean index serves both layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch of S sequences, laid out as [B, T]."""

    token_ids: Tensor
    """int64 [B, T], `pad_id` in padding."""
    position_ids: Tensor
    """int64 [B, T], from 0 in every sequence."""
    cu_seqlens: Tensor | None
    """int32 [S + 1], where sequences start and end in the row; None when not packed."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    real: Tensor
    """bool [B, T], False in padding."""

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each sequence."""
        if self.cu_seqlens is None:
            return self.real.sum(1).tolist()
        return self.cu_seqlens.diff().tolist()

    @property
    def segments(self) -> Tensor:
        """int64 [B, T], which of the S sequences a cell belongs to; padding belongs to its row's."""
        if self.cu_seqlens is None:
            rows = torch.arange(len(self.real))
            return rows[:, None].expand_as(self.real)
        lengths = self.cu_seqlens.diff()
        sequences = torch.arange(len(lengths))
        return sequences.repeat_interleave(lengths)[None]


def collate(sequences: Sequence[np.ndarray | Tensor], *, packed: bool, pad_id: int = 0) -> Batch:
    """Lay out token ids for one forward.

    sequences: S >= 1 integer arrays [T_i], T_i >= 1. Returns a `Batch` of [1, sum T_i] when packed, else of
    [S, max T_i]. Raises `ValueError` when there is no sequence, or an empty one.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"sequences of {lengths} tokens: a forward needs at least one, and none may be empty")

    tokens = torch.cat([_tensor(sequence) for sequence in sequences]).long()
    if packed:
        return _packed(tokens, lengths)
    return _padded(tokens, lengths, pad_id)


def _packed(tokens: Tensor, lengths: list[int]) -> Batch:
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return Batch(
        token_ids=tokens[None],
        position_ids=positions[None],
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        real=torch.ones(1, len(tokens), dtype=torch.bool),
    )


def _padded(tokens: Tensor, lengths: list[int], pad_id: int) -> Batch:
    longest = max(lengths)
    positions = torch.arange(longest)
    real = positions < torch.tensor(lengths)[:, None]
    padding = torch.full(real.shape, pad_id)
    return Batch(
        token_ids=padding.masked_scatter(real, tokens),
        position_ids=positions.repeat(len(lengths), 1),
        cu_seqlens=None,
        max_seqlen=longest,
        real=real,
    )


def _tensor(array: np.ndarray | Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array
    # A copy: arrays from Ray's object store are read-only, which torch.as_tensor warns about.
    return torch.tensor(array)


def scatter(batch: Batch, arrays: Sequence[np.ndarray | Tensor], *, fill: float = 0) -> Tensor:
    """Lay per-token arrays (advantages, log-probs, masks, a token column) out like `batch.token_ids`.

    arrays: one [T_i, ...] per sequence, all of one dtype. Returns [B, T, ...] of that dtype, `fill` in padding.
    Raises `ValueError` when an array has not the length of its sequence.
    """
    lengths = [len(array) for array in arrays]
    if lengths != batch.lengths:
        raise ValueError(f"arrays of {lengths} entries for sequences of {batch.lengths} tokens: not aligned")

    values = torch.cat([_tensor(array) for array in arrays])
    rectangle = values.new_full((*batch.real.shape, *values.shape[1:]), fill)
    rectangle[batch.real] = values
    return rectangle


def gather(batch: Batch, values: Tensor) -> list[Tensor]:
    """Inverse of `scatter`: [B, T] to one [T_i] per sequence, padding removed; gradients flow."""
    tokens = values[batch.real]
    return list(tokens.split(batch.lengths))
