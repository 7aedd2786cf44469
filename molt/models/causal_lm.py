"""The type of a causal LM, whichever library made it."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

ToDisk = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""(name, tensor) of a model's state to the (name, tensor) pairs that `from_pretrained` reads, which are more where
experts are fused in memory."""


class CausalLM(nn.Module):
    """What molt uses of a causal LM of transformers or AutoModel.

    A type only: the libraries make the models, and their classes share no base class that has all of this.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    model: nn.Module
    """What is below the head, in a class of AutoModel."""

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        raise NotImplementedError

    def set_output_embeddings(self, new_embeddings: nn.Module | None) -> None:
        raise NotImplementedError

    def tie_weights(self) -> None:
        raise NotImplementedError

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """Only in a class of transformers."""
        raise NotImplementedError


def decoder_of(causal_lm: CausalLM) -> nn.Module:
    """What is below the head: token ids in, hidden states out."""
    if isinstance(causal_lm, PreTrainedModel):
        return causal_lm.base_model
    return causal_lm.model


def decoder_layers(causal_lm: CausalLM) -> list[nn.Module]:
    """The modules that are sharded, and recomputed in the backward pass, as one."""
    if not isinstance(causal_lm, PreTrainedModel):  # a mixture of experts of AutoModel
        layers = causal_lm.model.get_submodule("layers")
        return list(layers.children())

    class_names = causal_lm._no_split_modules or ()
    return [module for module in causal_lm.modules() if type(module).__name__ in class_names]
