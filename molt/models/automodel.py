"""NVIDIA AutoModel's native classes as a back end: which models it may train, and how they are built and loaded.

AutoModel is imported where it is used: a run with transformers does not pay for it. What it would silently compute
in another way than transformers is an obstacle, found by comparing the two (`tests/models/test_backends.py`).
"""

import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from molt.models.automodel_cpu import build_on_host

# The others learn from a mask where packed sequences end, and AutoModel's MoE classes make none.
MASKLESS_ATTENTIONS = ("varlen", "flash_attention_2", "flash_attention_3")
# AutoModel's classes that are tested against transformers, with the rotary embeddings that agree. Many of its others
# have an attention of their own (linear, sparse), which would not see where packed sequences end.
DENSE = {"LlamaForCausalLM": ("default", "llama3"), "Qwen2ForCausalLM": ("default",), "Qwen3ForCausalLM": ("default",)}
MOE = {
    "DeepseekV3ForCausalLM": ("default", "yarn"),
    "Glm4MoeForCausalLM": ("default",),
    "Qwen3MoeForCausalLM": ("default",),
}
# What they take for granted.
MOE_IGNORES = {"tie_word_embeddings": False, "sliding_window": None, "hidden_act": "silu"}
DEEPSEEK_IGNORES = {"attention_bias": False, "rope_interleave": True}


def obstacle(config: PreTrainedConfig, attention: str) -> str | None:
    """Why AutoModel cannot train this model with this attention, or would silently train another one; or None."""
    name, known = (config.architectures or ["(unnamed)"])[0], DENSE | MOE
    if find_spec("nemo_automodel") is None:
        return "nemo-automodel is not installed (pip install 'molt[automodel]'; on a CPU `--no-deps nemo-automodel`)"
    if name not in known:
        return f"none of its classes that molt supports is for {name}, but for {', '.join(known)}"
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in known[name] or (kind == "yarn" and rope.get("mscale", 0) != rope.get("mscale_all_dim")):
        return f"its {name} computes other rotary embeddings than {rope}"
    if attention not in ("auto", *MASKLESS_ATTENTIONS):
        return f"it needs an attention that knows packing without a mask, which {attention} is not"
    ignored = MOE_IGNORES if name in MOE else {}
    ignored = ignored | (DEEPSEEK_IGNORES if name == "DeepseekV3ForCausalLM" else {})
    differs = {key: value for key in ignored if (value := getattr(config, key, ignored[key])) != ignored[key]}
    return f"its {name} ignores {differs}" if differs else None


def build_empty(
    path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """AutoModel's class with its parameters on the meta device: they are loaded once each rank holds only a shard.

    Our attention stands in for AutoModel's, which on a CPU ignores where packed sequences end.
    """
    from nemo_automodel._transformers.registry import ModelRegistry
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.utils.model_utils import init_empty_weights

    config.dtype, config.use_cache, config._attn_implementation = dtype, False, attention
    name = config.architectures[0]
    settings = {"backend": BackendConfig(attn="flex", linear="torch", dispatcher="torch")}
    if name in MOE:
        settings["moe_overrides"] = {"aux_loss_coeff": 0.0}  # else it is added in the backward, whatever the loss is
    build = partial(ModelRegistry.get_model_cls_from_model_arch(name), config, **settings)
    with init_empty_weights(), redirect_stdout(io.StringIO()):  # some of its classes print
        causal_lm = build() if device.type == "cuda" else build_on_host(build)
    _tie(causal_lm)  # FSDP must see one parameter, not two
    for module in causal_lm.modules():
        if hasattr(module, "attn_func"):
            _use_attention(module, attention, config)
        if hasattr(module, "use_routing_core"):
            module.use_routing_core = True  # a module of its own, which `balance.py` can watch
    try:
        causal_lm.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # the file is optional
        causal_lm.generation_config = GenerationConfig.from_model_config(config)
    return causal_lm


def _use_attention(module: nn.Module, attention: str, config: PreTrainedConfig) -> None:
    """Let a MoE attention of AutoModel call one of transformers' registry (only varlen was run here: no GPU).

    With `attn="flex"` it passes query, key, value as [B, heads, T, D] and every keyword, and expects that layout back.
    """
    function, scaling = ALL_ATTENTION_FUNCTIONS[attention], getattr(module, "softmax_scale", None)
    module.config, module.is_causal, module.attn_module = config, True, None
    module.attn_func = lambda query, key, value, **settings: function(
        module, query, key, value, None, scaling=scaling, **settings
    )[0].transpose(1, 2)


def load_weights(causal_lm: nn.Module, path: str, device: torch.device) -> None:
    """Read the weights into the (sharded) parameters. Every rank calls it: a rank reads what its shards need."""
    from nemo_automodel.components.checkpoint.checkpointing import (
        Checkpointer,
        CheckpointingConfig,
        to_empty_parameters_only,
    )

    directory = path if Path(path).is_dir() else snapshot_download(path, allow_patterns=["*.safetensors*", "*.json"])
    to_empty_parameters_only(causal_lm, device=device)
    _tie(causal_lm)
    checkpointer = Checkpointer(CheckpointingConfig(save_consolidated=False), 0, 0, 0)
    checkpointer.load_base_model(causal_lm, device, "", directory)


def _tie(causal_lm: nn.Module) -> None:
    # Making parameters on the meta device, and again on the real one, undoes it.
    if causal_lm.config.tie_word_embeddings and causal_lm.get_output_embeddings() is not None:
        causal_lm.tie_weights()


def to_disk(causal_lm: nn.Module) -> Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]:
    adapter = getattr(causal_lm, "state_dict_adapter", None)  # a class without one has the names of the files
    return adapter.convert_single_tensor_to_hf if adapter else lambda name, tensor: [(name, tensor)]
