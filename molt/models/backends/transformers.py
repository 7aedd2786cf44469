"""The classes of transformers as a back end: every causal LM that transformers knows."""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

import molt.models.attention  # noqa: F401  registers "varlen"
from molt.batch.collate import Batch
from molt.errors import ConfigError
from molt.models.backends.protocol import CausalLM, ModuleValues, Route, Router, ToDisk
from molt.models.backends.shared import decoder_inputs, tied_aliases

ROUTERS = ("Qwen3MoeTopKRouter", "DeepseekV3TopkRouter", "Glm4MoeTopkRouter")
"""Names of the classes of routers that return (logits, weights, chosen)."""


def obstacle(config: PreTrainedConfig, attention: str) -> str | None:
    """None: `load_config` refuses what transformers does not know."""
    return None


def build(path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The model with its weights, on the host."""
    # Not on the device: `fully_shard` moves one layer at a time, so a GPU never holds a whole float32 model.
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    model.config.use_cache = False
    return cast(CausalLM, model)  # transformers has no type for what all its causal LMs have


def random_model(config: PreTrainedConfig, attention: str) -> CausalLM:
    """A model of the class that `build` returns, on the host."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )
    model.config.use_cache = False
    return cast(CausalLM, model.float())  # as in `build`


def _of_library(causal_lm: CausalLM) -> PreTrainedModel:
    return cast(PreTrainedModel, causal_lm)  # `build` made it


def decoder(causal_lm: CausalLM) -> nn.Module:
    """What is below the head."""
    return _of_library(causal_lm).base_model


def head(causal_lm: CausalLM) -> nn.Linear:
    """The linear map from hidden states to logits."""
    return cast(nn.Linear, _of_library(causal_lm).get_output_embeddings())


def drop_head(causal_lm: CausalLM) -> None:
    """Nothing loads the head again."""


def layers(causal_lm: CausalLM) -> list[nn.Module]:
    """The modules that transformers itself never splits over devices."""
    class_names = _of_library(causal_lm)._no_split_modules or ()
    return [module for module in causal_lm.modules() if type(module).__name__ in class_names]


def recompute_layers(causal_lm: CausalLM) -> None:
    """Let the backward pass compute each layer again instead of keeping its activations."""
    _of_library(causal_lm).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def load_weights(causal_lm: CausalLM, path: str, device: torch.device) -> None:
    """`build` has read them."""


def hidden_states(decoder: nn.Module, batch: Batch) -> Tensor:
    """`[B, T, H]` after the final norm."""
    return decoder(**decoder_inputs(batch)).last_hidden_state


def routers(causal_lm: CausalLM) -> list[Router]:
    """The routers whose outputs are known."""
    return [Router(module, _route_of) for module in causal_lm.modules() if type(module).__name__ in ROUTERS]


def _route_of(inputs: ModuleValues, outputs: ModuleValues) -> Route:
    logits, _, chosen = outputs
    return Route(logits=logits, chosen=chosen)


def aliases(causal_lm: CausalLM) -> set[str]:
    """Names of a tied head."""
    return tied_aliases(causal_lm)


def to_disk(causal_lm: CausalLM) -> ToDisk:
    """The conversion of `save_pretrained`, of one tensor at a time. Raises `ConfigError` where that is not enough."""
    of_library = _of_library(causal_lm)
    conversions = getattr(of_library, "_weight_conversions", None) or ()
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            raise ConfigError(
                f"`model_name_or_path` (={causal_lm.config._name_or_path}): {type(causal_lm).__name__} splits tensors "
                "of its files, and molt gathers one at a time, so it could not be published or exported. Use another "
                "model."
            )

    def convert(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        converted = revert_weight_conversion(of_library, {name: tensor})
        return list(converted.items())

    return convert
