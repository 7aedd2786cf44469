"""What transformers' classes and those that keep to transformers' interface have in common."""

from typing import Any

from torch import Tensor

from molt.batch.collate import Batch
from molt.models.backends.protocol import CausalLM


def decoder_inputs(batch: Batch) -> dict[str, Tensor | int | bool | None]:
    """The keyword arguments of a decoder's forward. Where a packed batch has its sequences, its attention is told."""
    # attention_mask must be None: an all-ones mask silently turns packing off; so does a cache.
    inputs: dict[str, Tensor | int | bool | None] = {
        "input_ids": batch.token_ids,
        "attention_mask": None,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    if batch.cu_seqlens is not None:
        inputs |= {
            "cu_seq_lens_q": batch.cu_seqlens,
            "cu_seq_lens_k": batch.cu_seqlens,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
        }
    return inputs


def tied_aliases(causal_lm: CausalLM) -> set[str]:
    """Names that `save_pretrained` leaves out because they are the same parameter as another (a tied head)."""
    params = dict(causal_lm.named_parameters(remove_duplicate=False))
    tied: dict[str, Any] = getattr(causal_lm, "all_tied_weights_keys", {})
    aliases = set()
    for alias, source in tied.items():
        if params[alias] is params[source]:
            aliases.add(alias)
    return aliases
