"""What molt needs of a library of model classes: a module with the functions of `Backend`."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from molt.batch.collate import Batch

ToDisk = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""(name, tensor) of a model's state to the (name, tensor) pairs that `from_pretrained` reads, which are more where
experts are fused in memory."""
ModuleValues = tuple[Any, ...]
"""The inputs, or the outputs, of a module's forward."""


class CausalLM(nn.Module):
    """What every causal LM has, whichever library made it.

    A type only: the libraries' classes share no base class that has all of this.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig


class Route(NamedTuple):
    """What the router of one layer did in a forward."""

    logits: Tensor
    """`[cells, E]`, one row for each cell of the batch, padding included."""
    chosen: Tensor
    """int64 `[cells, K]`, the experts chosen."""


class Router(NamedTuple):
    """The module that chooses the experts of one layer."""

    module: nn.Module
    route_of: Callable[[ModuleValues, ModuleValues], Route]
    """The inputs and outputs of a forward of the module to its `Route`."""


class Backend(Protocol):
    """A library of model classes: how its models are built, how they run, how they are written.

    Between `build` and `load_weights` molt switches off dropout and shards the `layers` and the rest.
    """

    def obstacle(self, config: PreTrainedConfig, attention: str) -> str | None:
        """Why it cannot train this model with this attention, or would silently train another one; or None.

        attention: of transformers' registry, or `auto`. A causal LM that transformers itself knows, whatever else.
        """
        ...

    def build(
        self, path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype
    ) -> CausalLM:
        """The model with parameters of `dtype`, on the host or on the meta device. It may change `config`."""
        ...

    def random_model(self, config: PreTrainedConfig, attention: str) -> CausalLM:
        """A small model with random float32 weights on the host, of the class that `build` returns.

        It reads no files. It may change `config`. Raises whatever the class raises for sizes that do not fit.
        """
        ...

    def drop_head(self, causal_lm: CausalLM) -> None:
        """Keep `load_weights` from loading the head, for a model that has no use for it."""
        ...

    def recompute_layers(self, causal_lm: CausalLM) -> None:
        """Let the backward pass compute each layer again instead of keeping its activations."""
        ...

    def layers(self, causal_lm: CausalLM) -> list[nn.Module]:
        """The modules that are sharded as one; none is inside another."""
        ...

    def load_weights(self, causal_lm: CausalLM, path: str, device: torch.device) -> None:
        """Read the weights that `build` left out into the parameters. Every rank calls it, after sharding."""
        ...

    def decoder(self, causal_lm: CausalLM) -> nn.Module:
        """What is below the head: the module that `hidden_states` takes."""
        ...

    def hidden_states(self, decoder: nn.Module, batch: Batch) -> Tensor:
        """`[B, T, H]` after the final norm, of a batch on the device of the decoder. No sequence sees another one."""
        ...

    def head(self, causal_lm: CausalLM) -> nn.Linear:
        """The linear map from hidden states to logits, `[V, H]`."""
        ...

    def routers(self, causal_lm: CausalLM) -> list[Router]:
        """The routers of its mixtures of experts, of those kinds whose routes it can read; [] without experts."""
        ...

    def to_disk(self, causal_lm: CausalLM) -> ToDisk:
        """How the tensors of its state are written to files. Raises `ConfigError` when they cannot be."""
        ...

    def aliases(self, causal_lm: CausalLM) -> set[str]:
        """Names in the state of parameters that have another name too, under which they are written (a tied head)."""
        ...
