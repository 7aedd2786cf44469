"""From sharded parameters to whole tensors under their Hugging Face names.

Publication and export share it, so what an engine receives is what `from_pretrained` would load: also where a
back end fuses the experts of a layer in memory, which have a tensor each on disk.
Tensors come one at a time: no rank ever holds more than one whole parameter because of this.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def _aliases(causal_lm: nn.Module) -> set[str]:
    """Names that `save_pretrained` leaves out because they are the same parameter as another (a tied head)."""
    params = dict(causal_lm.named_parameters(remove_duplicate=False))
    tied = getattr(causal_lm, "all_tied_weights_keys", {})
    return {alias for alias, source in tied.items() if params[alias] is params[source]}


def named_full_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything `save_pretrained` would write, parameters in `dtype`, on the model's device.

    model: a `PolicyModel`. Every rank must iterate to the end, in lockstep with the others: each tensor is a
    collective, and a rank that stops early leaves the others waiting.
    """
    aliases = _aliases(model.causal_lm)
    buffers = dict(model.causal_lm.named_buffers())  # a router's correction bias is float32 for a reason
    for name, tensor in model.causal_lm.state_dict().items():
        if name in aliases:
            continue
        # All-gather over the fsdp group: every rank, in this order.
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for disk_name, part in model.to_disk(name, whole if name in buffers else whole.to(dtype)):
            # An expert is a view of all experts, which would travel with it.
            shares = part.untyped_storage().nbytes() != part.nbytes
            yield disk_name, part.clone(memory_format=torch.contiguous_format) if shares else part
