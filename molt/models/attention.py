"""`varlen`: exact causal attention over packed sequences without a [T, T] mask.

Registered in transformers' attention registry. `cu_seq_lens_q` (int32 [S + 1]) says where sequences
start and end; each is attended to on its own. Without it rows are plain causal, which is all that
right padding needs: no real token looks to its right. On CUDA, `flash_attention_2` takes the same
keyword arguments, so `forward` makes one call for both (that half was not run here).
"""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[B, heads, T, D] each; a token sees itself and, with a window, the `window - 1` tokens before it."""
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    band = None
    if window is not None and length > window:
        band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(query, key, value, band, 0.0, band is None, scale=scaling, enable_gqa=grouped)


def _packed(
    lengths: list[int], query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[heads, T, D] each, sequences of `lengths` end to end along T.

    Neighbours of one length share a call: micro-batches come sorted by length, and short calls cost more than they do.
    """
    outs, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        cells = slice(start, start + count * length)
        rows = (t[:, cells].unflatten(1, (count, length)).transpose(0, 1) for t in (query, key, value))
        outs.append(_causal(*rows, scaling, window).transpose(0, 1).flatten(1, 2))
        start = cells.stop
    return torch.cat(outs, 1)


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attention output [B, T, heads, D] for query [B, heads, T, D], key and value [B, kv_heads, T, D].

    settings: of transformers' interface; read are `scaling` (float), `sliding_window` (int) and `cu_seq_lens_q`.
    Raises `NotImplementedError` for score capping and attention sinks, which SDPA cannot express.
    """
    scaling, window, cu_seq_lens = (settings.get(name) for name in ("scaling", "sliding_window", "cu_seq_lens_q"))
    if settings.get("softcap") is not None or settings.get("s_aux") is not None:
        raise NotImplementedError(
            "varlen attention has no score capping and no sinks: use --fsdp.attn_implementation eager"
        )
    if cu_seq_lens is None:
        out = _causal(query, key, value, scaling, window)
    else:
        out = _packed(cu_seq_lens.diff().tolist(), query[0], key[0], value[0], scaling, window)[None]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("varlen", varlen)
AttentionMaskInterface.register("varlen", lambda *args, **kwargs: None)
