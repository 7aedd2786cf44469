"""A Hugging Face causal LM as a trainable, sharded `PolicyModel`. The only file that knows model back ends.

Masters are float32; compute runs in `fsdp.param_dtype`. Gradients are *summed* over ranks in float32:
the loss of every rank already carries its weights of the whole step (`algo/reduce.py`), so nothing is
averaged.
"""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

import molt.models.attention  # noqa: F401  registers "varlen"
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError, did_you_mean
from molt.models.forward import PolicyModel
from molt.parallel.mesh import param_dtype

ATTENTIONS = ("varlen", "sdpa", "eager")
GPU_ATTENTIONS = ("flash_attention_2", "flash_attention_3")
# Scalings between the last hidden state and the logits that the head does not reproduce.
LOGIT_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")


def attention_implementation(config: FsdpConfig, device: torch.device) -> str:
    """The name in transformers' registry. Raises `ConfigError` for one that the device cannot run."""
    name, known = config.attn_implementation, ATTENTIONS + GPU_ATTENTIONS * (device.type == "cuda")
    if name == "auto":
        return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "varlen"
    if name not in known:
        why = "it needs TransformerEngine, which runs on GPUs only" if name == "te" else "there is no such kernel"
        raise ConfigError(
            f"`fsdp.attn_implementation` (={name}) on {device.type}: {why}. "
            f"Use auto, or one of {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return name


def load_config(path: str, max_len: int | None = None, flag: str = "model_name_or_path") -> PreTrainedConfig:
    """The model's configuration, checked before any weight is read.

    Raises `ConfigError` when there is no model at `path`, when it is not a causal LM that transformers itself
    knows (code from a model directory is never run), or when `max_len` exceeds its context.
    """
    setting = f"`{flag}` (={path})"
    if not path or (path[0] in "/.~" and not Path(path).is_dir()):
        raise ConfigError(f"{setting}: no such directory, so there is nothing to train. Give a Hugging Face model.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: not a model that can be loaded ({str(error).splitlines()[0]}). "
            "Give a local directory with config.json, or a hub name that transformers knows."
        ) from error
    names = config.architectures or []
    generates = all(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not generates:
        raise ConfigError(
            f"{setting} is {names or type(config).__name__}, not a causal LM: it cannot generate text. Use one."
        )
    scales = {name: getattr(config, name) for name in LOGIT_SCALES if getattr(config, name, 1.0) not in (None, 1.0)}
    if scales:
        raise ConfigError(f"{setting} scales its logits ({scales}): log-probs would be wrong. Use another model.")
    context, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if max_len and context and max_len > context and "factor" not in rope:
        raise ConfigError(
            f"`data.max_len` (={max_len}) is above the model's max_position_embeddings (={context}): it has never seen "
            f"such positions and engines refuse them. Use --data.max_len {context}."
        )
    return config


def build_policy(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: DeviceMesh,
    device: torch.device,
    max_len: int | None = None,
) -> PolicyModel:
    """Load, prepare and shard the policy. Every rank of `mesh` calls it; each ends with its shard on `device`.

    Raises `ConfigError` as `load_config` and `attention_implementation` do.
    """
    attention = attention_implementation(fsdp_config, device)
    config = load_config(model_config.model_name_or_path, max_len)
    disable_progress_bar()
    # On the host first: `fully_shard` moves one layer at a time, so a GPU never holds a whole float32 model.
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model_config.model_name_or_path,
        config=config,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=False,
    )
    causal_lm.config.use_cache = False
    _disable_dropout(causal_lm)
    if model_config.gradient_checkpoint == "full":
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    dtype = param_dtype(fsdp_config, device)
    model = PolicyModel(causal_lm, dtype).train()
    if mesh.size() == 1 and dtype == torch.float32:
        # One rank without mixed precision has nothing to shard or cast; FSDP would cost a tiny model 12-32 %.
        return model.to(device)
    return shard(model, mesh)


def _disable_dropout(model: nn.Module) -> None:
    # The engine has none; with it, trainer and engine would disagree by design.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def shard(model: PolicyModel, mesh: DeviceMesh) -> PolicyModel:
    """FSDP2 over each decoder layer and the root; gradients are summed over ranks in float32."""
    policy = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    layers = set(model.causal_lm._no_split_modules or ())
    modules = [m for m in model.modules() if type(m).__name__ in layers and m is not model] + [model]
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in modules:  # neither setting is recursive, and gloo needs the first for the second
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    model.register_forward_hook(_reshard_without_backward)
    return model


def _reshard_without_backward(model: nn.Module, args: tuple, output: object) -> None:
    # FSDP keeps the root unsharded until its backward. Without one, `parameters()` would go on to yield whole
    # tensors that the optimizer does not know and that FSDP frees later: a checkpoint of them crashed.
    if not torch.is_grad_enabled():
        model.reshard()
