"""From sharded parameters to whole tensors under their Hugging Face names.

Weight sync and export share it, so what an engine receives is what `from_pretrained` would load: also where a back end
fuses the experts of a layer in memory, which have a tensor each on disk.
Tensors come one at a time: no rank ever holds more than one whole parameter because of this.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from molt.models.forward import PolicyModel
from molt.parallel.mesh import full_tensor


def named_full_tensors(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything `save_pretrained` would write, parameters in `dtype`, on the model's device.

    Every rank must iterate to the end, in lockstep with the others: each tensor is a collective, and a rank that stops
    early leaves the others waiting.
    """
    assert model.to_disk is not None, "the model was built to be written"
    aliases = model.backend.aliases(model.causal_lm)
    buffers = dict(model.causal_lm.named_buffers())
    for name, tensor in model.causal_lm.state_dict().items():
        if name in aliases:
            continue
        # All-gather over the axes that shard the tensor: every rank, in this order.
        whole = full_tensor(tensor).detach()
        if name not in buffers:  # a router's correction bias is float32 for a reason
            whole = whole.to(dtype)
        for disk_name, part in model.to_disk(name, whole):
            yield disk_name, _alone(part)


def _alone(tensor: Tensor) -> Tensor:
    """The same values in memory of their own size: one expert is a view of all, which would travel with it."""
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    if is_view:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor
