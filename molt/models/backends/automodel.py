"""NVIDIA AutoModel's native classes as a back end: for the models that they compute as transformers does.

AutoModel is imported where it is used: a run with transformers does not pay for it. What it would silently compute
in another way than transformers is an obstacle, found by comparing the two (`tests/models/test_backends.py`).
"""

import io
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import molt.models.attention  # noqa: F401  registers "varlen"
from molt.batch.collate import Batch
from molt.models.backends.automodel_cpu import build_on_host
from molt.models.backends.protocol import CausalLM, ModuleValues, Route, Router, ToDisk
from molt.models.backends.shared import decoder_inputs, tied_aliases

MASKLESS_ATTENTIONS = ("varlen", "flash_attention_2", "flash_attention_3")
"""The others learn from a mask where packed sequences end, and AutoModel's MoE classes make none."""

DENSE = {
    "LlamaForCausalLM": ("default", "llama3"),
    "Qwen2ForCausalLM": ("default",),
    "Qwen3ForCausalLM": ("default",),
}
MOE = {
    "DeepseekV3ForCausalLM": ("default", "yarn"),
    "Glm4MoeForCausalLM": ("default",),
    "Qwen3MoeForCausalLM": ("default",),
}
"""AutoModel's classes that are tested against transformers, with the rotary embeddings that agree. Many of its others
have another attention (linear, sparse), which would not see where packed sequences end."""

MOE_IGNORES = {"tie_word_embeddings": False, "sliding_window": None, "hidden_act": "silu"}
DEEPSEEK_IGNORES = {"attention_bias": False, "rope_interleave": True}
"""Settings of a configuration that these classes do not read, with the values that they take for granted."""
ROUTER = "_GateRoutingCore"
"""Name of the class of its routers, once they are modules of their own."""


class AutoModelLM(CausalLM):
    """What all of its classes above have. A type only."""

    model: nn.Module
    """What is below the head."""

    def get_output_embeddings(self) -> nn.Linear | None:
        """The head; None: it was dropped."""
        raise NotImplementedError

    def set_output_embeddings(self, new_embeddings: nn.Module | None) -> None:
        raise NotImplementedError

    def tie_weights(self) -> None:
        raise NotImplementedError


def _of_library(causal_lm: CausalLM) -> AutoModelLM:
    return cast(AutoModelLM, causal_lm)  # `build` made it


def _architecture(config: PreTrainedConfig) -> str:
    """The name of the model's class."""
    if config.architectures:
        return config.architectures[0]
    return "(unnamed)"


def obstacle(config: PreTrainedConfig, attention: str) -> str | None:
    """Why AutoModel cannot train this model with this attention, or would silently train another one; or None."""
    name = _architecture(config)
    known = DENSE | MOE
    if find_spec("nemo_automodel") is None:
        return "nemo-automodel is not installed (pip install 'molt[automodel]'; on a CPU `--no-deps nemo-automodel`)"
    if name not in known:
        return f"none of its classes that molt supports is for {name}, but for {', '.join(known)}"

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    scales_differ = kind == "yarn" and rope.get("mscale", 0) != rope.get("mscale_all_dim")
    if kind not in known[name] or scales_differ:
        return f"its {name} computes other rotary embeddings than {rope}"

    if attention not in ("auto", *MASKLESS_ATTENTIONS):
        return f"it needs an attention that knows packing without a mask, which {attention} is not"

    ignored = _ignored_settings(config, name)
    if ignored:
        return f"its {name} ignores {ignored}"
    return None


def _ignored_settings(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """What the configuration says otherwise than the class takes for granted."""
    granted: dict[str, Any] = {}
    if name in MOE:
        granted |= MOE_IGNORES
    if name == "DeepseekV3ForCausalLM":
        granted |= DEEPSEEK_IGNORES

    ignored = {}
    for setting, default in granted.items():
        value = getattr(config, setting, default)
        if value != default:
            ignored[setting] = value
    return ignored


def build(path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """AutoModel's class with its parameters on the meta device: they are loaded once each rank holds only a shard."""
    causal_lm = _without_weights(config, attention, device, dtype)
    try:
        causal_lm.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # the file is optional
        causal_lm.generation_config = GenerationConfig.from_model_config(config)
    return causal_lm


def random_model(config: PreTrainedConfig, attention: str) -> CausalLM:
    """A model of the class that `build` returns, on the host. Weights are around 0, those of norms around 1."""
    from nemo_automodel.components.checkpoint.checkpointing import to_empty_parameters_only

    host = torch.device("cpu")
    causal_lm = _without_weights(config, attention, host, torch.float32)
    to_empty_parameters_only(causal_lm, device=host)
    _tie(causal_lm)
    for parameter in causal_lm.parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        nn.init.normal_(parameter, mean=mean, std=0.02)
    return causal_lm


def _without_weights(config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype) -> AutoModelLM:
    """The model with its parameters on the meta device.

    Our attention stands in for AutoModel's, which on a CPU ignores where packed sequences end.
    """
    from nemo_automodel.components.utils.model_utils import init_empty_weights

    config.dtype = dtype
    config.use_cache = False
    config._attn_implementation = attention

    make = partial(_make, config)
    with init_empty_weights(), redirect_stdout(io.StringIO()):  # some of its classes print
        if device.type == "cuda":
            causal_lm = make()
        else:
            causal_lm = build_on_host(make)
    _tie(causal_lm)  # FSDP must see one parameter, not two

    for module in causal_lm.modules():
        if hasattr(module, "attn_func"):
            _use_attention(module, attention, config)
        if hasattr(module, "use_routing_core"):
            _separate_routing(module)
    return causal_lm


def _make(config: PreTrainedConfig) -> AutoModelLM:
    from nemo_automodel._transformers.registry import ModelRegistry
    from nemo_automodel.components.models.common import BackendConfig

    name = _architecture(config)
    settings: dict[str, Any] = {"backend": BackendConfig(attn="flex", linear="torch", dispatcher="torch")}
    if name in MOE:
        # Otherwise it is added in the backward pass, whatever the loss is.
        settings["moe_overrides"] = {"aux_loss_coeff": 0.0}
    model_class = ModelRegistry.get_model_cls_from_model_arch(name)
    return cast(AutoModelLM, model_class(config, **settings))  # AutoModel's registry knows them as any module


def _separate_routing(module: Any) -> None:
    """Let a router choose experts in a submodule, whose forward `_route_of` can read."""
    module.use_routing_core = True


def _use_attention(module: Any, attention: str, config: PreTrainedConfig) -> None:
    """Let a MoE attention of AutoModel call one of transformers' registry (only varlen was run here: no GPU).

    With `attn="flex"` it passes query, key, value as `[B, heads, T, D]` and every keyword, and expects that layout
    back.
    """
    registered = ALL_ATTENTION_FUNCTIONS[attention]
    scaling = getattr(module, "softmax_scale", None)

    def attend(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        output, _ = registered(module, query, key, value, None, scaling=scaling, **settings)
        return output.transpose(1, 2)

    module.config = config
    module.is_causal = True
    module.attn_module = None
    module.attn_func = attend


def decoder(causal_lm: CausalLM) -> nn.Module:
    """What is below the head."""
    return _of_library(causal_lm).model


def head(causal_lm: CausalLM) -> nn.Linear:
    """The linear map from hidden states to logits."""
    head = _of_library(causal_lm).get_output_embeddings()
    assert head is not None, "`drop_head` is for a model without head"
    return head


def drop_head(causal_lm: CausalLM) -> None:
    """Take it out of the model, so that `load_weights` finds none."""
    _of_library(causal_lm).set_output_embeddings(None)


def layers(causal_lm: CausalLM) -> list[nn.Module]:
    """Its classes keep them in a list, or by number."""
    return list(_of_library(causal_lm).model.get_submodule("layers").children())


def recompute_layers(causal_lm: CausalLM) -> None:
    """Let the backward pass compute each layer again instead of keeping its activations."""
    for layer in layers(causal_lm):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def load_weights(causal_lm: CausalLM, path: str, device: torch.device) -> None:
    """Read the weights into the (sharded) parameters. Every rank calls it: a rank reads what its shards need."""
    from nemo_automodel.components.checkpoint.checkpointing import (
        Checkpointer,
        CheckpointingConfig,
        to_empty_parameters_only,
    )

    if Path(path).is_dir():
        directory = path
    else:
        directory = snapshot_download(path, allow_patterns=["*.safetensors*", "*.json"])
    to_empty_parameters_only(causal_lm, device=device)
    _tie(_of_library(causal_lm))
    checkpointer = Checkpointer(CheckpointingConfig(save_consolidated=False), 0, 0, 0)
    checkpointer.load_base_model(causal_lm, device, "", directory)


def _tie(causal_lm: AutoModelLM) -> None:
    # Making parameters on the meta device, and again on the real one, undoes it.
    if causal_lm.config.tie_word_embeddings and causal_lm.get_output_embeddings() is not None:
        causal_lm.tie_weights()


def hidden_states(decoder: nn.Module, batch: Batch) -> Tensor:
    """`[B, T, H]` after the final norm. A mixture of experts returns them as they are."""
    output = decoder(**decoder_inputs(batch))
    if isinstance(output, Tensor):
        return output
    return output.last_hidden_state


def routers(causal_lm: CausalLM) -> list[Router]:
    """Every router: its classes have one kind."""
    return [Router(module, _route_of) for module in causal_lm.modules() if type(module).__name__ == ROUTER]


def _route_of(inputs: ModuleValues, outputs: ModuleValues) -> Route:
    """It takes the logits and returns (weights, chosen, affinities)."""
    return Route(logits=inputs[0], chosen=outputs[1])


def aliases(causal_lm: CausalLM) -> set[str]:
    """Names of a tied head."""
    return tied_aliases(causal_lm)


def to_disk(causal_lm: CausalLM) -> ToDisk:
    """The conversion of the class, if it has one."""
    adapter = getattr(causal_lm, "state_dict_adapter", None)
    if adapter is None:  # the class has the names of the files
        return _unchanged
    return adapter.convert_single_tensor_to_hf


def _unchanged(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor)]
