"""`varlen`: exact causal attention over packed sequences without a [T, T] mask.

Registered in transformers' attention registry. `cu_seq_lens_q` (int32 `[S + 1]`) says where sequences start and end;
each is attended to alone. Without it rows are plain causal, which is all that right padding needs: no real token looks
to its right. On CUDA, `flash_attention_2` takes the same keyword arguments, so `forward` makes one call for both (that
half was not run here).
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """`[B, heads, T, D]` each; a token sees itself and, with a window, the `window - 1` tokens before it."""
    length = query.shape[2]
    band = None
    if window is not None and length > window:
        all_pairs = torch.ones(length, length, dtype=torch.bool, device=query.device)
        band = all_pairs.tril().triu(1 - window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=band,
        dropout_p=0.0,
        is_causal=band is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _neighbours(states: Tensor, start: int, count: int, length: int) -> Tensor:
    """`[heads, T, D]` to `[count, heads, length, D]`: `count` sequences of one length, from cell `start` on."""
    cells = states[:, start : start + count * length]
    return cells.unflatten(1, (count, length)).transpose(0, 1)


def _packed(
    lengths: list[int], query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """`[heads, T, D]` each, sequences of `lengths` end to end along T.

    Neighbours of one length share a call: micro-batches come sorted by length, and a call costs more than a short
    sequence.
    """
    outputs = []
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        output = _causal(
            _neighbours(query, start, count, length),
            _neighbours(key, start, count, length),
            _neighbours(value, start, count, length),
            scaling,
            window,
        )
        outputs.append(output.transpose(0, 1).flatten(1, 2))
        start += count * length
    return torch.cat(outputs, 1)


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attention output `[B, T, heads, D]` for query `[B, heads, T, D]`, key and value `[B, kv_heads, T, D]`.

    settings: of transformers' interface; read are `scaling` (float), `sliding_window` (int) and `cu_seq_lens_q`.
    Raises `NotImplementedError` for score capping and attention sinks, which SDPA cannot express.
    """
    if settings.get("softcap") is not None or settings.get("s_aux") is not None:
        raise NotImplementedError(
            "varlen attention has no score capping and no sinks: use --fsdp.attn_implementation eager"
        )
    scaling = settings.get("scaling")
    window = settings.get("sliding_window")
    cu_seq_lens = settings.get("cu_seq_lens_q")
    if cu_seq_lens is None:
        output = _causal(query, key, value, scaling, window)
    else:
        lengths = cu_seq_lens.diff().tolist()
        output = _packed(lengths, query[0], key[0], value[0], scaling, window)[None]
    return output.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Nothing reads a mask."""


AttentionInterface.register("varlen", varlen)
AttentionMaskInterface.register("varlen", _no_mask)
