"""A Hugging Face causal LM as a sharded `PolicyModel` or `ValueModel`; with `automodel.py` all that knows back ends.

Masters are float32; compute runs in `fsdp.param_dtype`. Gradients are *summed* over ranks in float32:
the loss of every rank already carries its weights of the whole step (`algo/reduce.py`), so nothing is
averaged.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

import molt.models.attention  # noqa: F401  registers "varlen"
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError, did_you_mean
from molt.hub import only_local
from molt.models import automodel
from molt.models.forward import PolicyModel, ValueModel
from molt.parallel.mesh import param_dtype

Model = TypeVar("Model", PolicyModel, ValueModel)
ATTENTIONS = ("varlen", "sdpa", "eager")
GPU_ATTENTIONS = ("flash_attention_2", "flash_attention_3")
WHY_NO_ATTENTION = {
    ("te", "cpu"): "it needs TransformerEngine, which runs on GPUs only",
    ("flex", "cpu"): "FlexAttention has no backward pass there",
    ("flex_attention", "cpu"): "FlexAttention has no backward pass there",
}
# Models whose attention has sinks: no configuration says so.
SINKS = ("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
# Scalings between the last hidden state and the logits that the head does not reproduce.
LOGIT_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")


def attention_implementation(config: FsdpConfig, device: torch.device) -> str:
    """The name in transformers' registry. Raises `ConfigError` for one that the device cannot run."""
    name, known = config.attn_implementation, ATTENTIONS + GPU_ATTENTIONS * (device.type == "cuda")
    if name == "auto":
        return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "varlen"
    if name not in known:
        why = WHY_NO_ATTENTION.get((name, device.type), "there is no such kernel")
        raise ConfigError(
            f"`fsdp.attn_implementation` (={name}) on {device.type}: {why}. "
            f"Use auto, or one of {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return name


def load_config(
    path: str, max_len: int | None = None, flag: str = "model_name_or_path", fsdp: FsdpConfig | None = None
) -> PreTrainedConfig:
    """The model's configuration, checked before any weight is read.

    fsdp: how it would be trained; None: it is not. Raises `ConfigError` when there is no model at `path`, when it is
    not a causal LM that transformers itself knows (code from a model directory is never run), or one that also reads
    images if it is not trained, when `max_len` exceeds its context, or when it cannot be trained as `fsdp` says.
    """
    setting = f"`{flag}` (={path})"
    if not path or (path[0] in "/.~" and not Path(path).is_dir()):
        raise ConfigError(f"{setting}: no such directory, so there is nothing to train. Give a Hugging Face model.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=only_local(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: not a model that can be loaded ({str(error).splitlines()[0]}). "
            "Give a local directory with config.json, or a hub name that transformers knows."
        ) from error
    names = config.architectures or []
    generates = all(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    reads = generates and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    sees = not reads and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if sees and fsdp is not None:
        raise ConfigError(
            f"{setting} is {names or type(config).__name__}, which reads images: training such models is not built "
            "yet. Use a causal LM, or measure this one with `molt eval`."
        )
    if not reads and not sees:
        raise ConfigError(
            f"{setting} is {names or type(config).__name__}, not a causal LM: it cannot generate text. Use one."
        )
    of_text = config.get_text_config()
    scales = {name: getattr(of_text, name) for name in LOGIT_SCALES if getattr(of_text, name, 1.0) not in (None, 1.0)}
    if scales:
        raise ConfigError(f"{setting} scales its logits ({scales}): log-probs would be wrong. Use another model.")
    context, rope = getattr(of_text, "max_position_embeddings", None), getattr(of_text, "rope_parameters", None) or {}
    if max_len and context and max_len > context and "factor" not in rope:
        raise ConfigError(
            f"`data.max_len` (={max_len}) is above the model's max_position_embeddings (={context}): it has never seen "
            f"such positions and engines refuse them. Use --data.max_len {context}."
        )
    if fsdp is not None:
        _refuse_attention_terms(config, fsdp, setting)
        _refuse_backend(config, fsdp, setting)
    return config


def _refuse_attention_terms(config: PreTrainedConfig, fsdp: FsdpConfig, setting: str) -> None:
    cap = getattr(config, "attn_logit_softcapping", None)
    if (cap or config.model_type in SINKS) and fsdp.attn_implementation != "eager":
        term = f"caps its attention scores (attn_logit_softcapping {cap})" if cap else "has attention sinks"
        raise ConfigError(
            f"`fsdp.attn_implementation` (={fsdp.attn_implementation}): {setting} {term}, which only eager computes: "
            "the log-probs would be those of another model. Use --fsdp.attn_implementation eager."
        )


def _refuse_backend(config: PreTrainedConfig, fsdp: FsdpConfig, setting: str) -> None:
    obstacle = automodel.obstacle(config, fsdp.attn_implementation)
    if fsdp.backend == "automodel" and obstacle:
        raise ConfigError(
            f"`fsdp.backend` (=automodel): {setting}: {obstacle}, so another model would be trained, or none. "
            "Use --fsdp.backend auto, which takes transformers then."
        )


def uses_automodel(fsdp: FsdpConfig, config: PreTrainedConfig, device: torch.device, attention: str) -> bool:
    """Whether AutoModel's class is built; `load_config` has refused what cannot be."""
    if fsdp.backend == "auto":
        return device.type == "cuda" and automodel.obstacle(config, attention) is None
    return fsdp.backend == "automodel"


def build_policy(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: DeviceMesh,
    device: torch.device,
    max_len: int | None = None,
) -> PolicyModel:
    """Load, prepare and shard the policy. Every rank of `mesh` calls it; each ends with its shard on `device`.

    Raises `ConfigError` as `load_config` and `attention_implementation` do, and for a model that cannot be exported.
    """
    causal_lm, native = _prepare(model_config, fsdp_config, device, max_len)
    to_disk = automodel.to_disk(causal_lm) if native else _transformers_to_disk(causal_lm)
    model = PolicyModel(causal_lm, param_dtype(fsdp_config, device), to_disk).train()
    return _place(model, causal_lm, native, mesh, device)


def build_critic(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: DeviceMesh,
    device: torch.device,
    max_len: int | None = None,
) -> ValueModel:
    """The value model on the decoder of a causal LM, trained as the policy is; as `build_policy`, but never exported.

    Its head is drawn from torch's generator, which every rank must have seeded alike.
    """
    causal_lm, native = _prepare(model_config, fsdp_config, device, max_len, flag="critic.model_name_or_path")
    if native:
        causal_lm.set_output_embeddings(None)  # what is there is loaded
    model = ValueModel(causal_lm, param_dtype(fsdp_config, device)).train()
    return _place(model, causal_lm, native, mesh, device)


def build_frozen(
    path: str, fsdp_config: FsdpConfig, mesh: DeviceMesh, device: torch.device, max_len: int | None = None
) -> PolicyModel:
    """A policy that is only asked, under `torch.no_grad()`: no gradients, weights held in the compute dtype.

    Every rank of `mesh` calls it; each ends with its shard. Raises `ConfigError` as `load_config` does.
    """
    dtype = param_dtype(fsdp_config, device)
    config = ModelConfig(path, gradient_checkpoint="none")
    causal_lm, native = _prepare(config, fsdp_config, device, max_len, dtype, flag="ref.model_name_or_path")
    return _place(PolicyModel(causal_lm, dtype).requires_grad_(False).eval(), causal_lm, native, mesh, device)


def _prepare(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    device: torch.device,
    max_len: int | None,
    dtype: torch.dtype = torch.float32,
    flag: str = "model_name_or_path",
) -> tuple[nn.Module, bool]:
    """The causal LM with weights of `dtype`, and whether it is AutoModel's, whose weights `_place` loads."""
    path, attention = model_config.model_name_or_path, attention_implementation(fsdp_config, device)
    config = load_config(path, max_len, flag, fsdp_config)
    native = uses_automodel(fsdp_config, config, device, attention)
    causal_lm = (automodel.build_empty if native else _from_transformers)(path, config, attention, device, dtype)
    _disable_dropout(causal_lm)
    if model_config.gradient_checkpoint == "full":
        _recompute_layers(causal_lm)
    return causal_lm, native


def _place(model: Model, causal_lm: nn.Module, native: bool, mesh: DeviceMesh, device: torch.device) -> Model:
    """Shard the model around `causal_lm`, read the weights that are not there yet, and move it to the device."""
    # One rank without mixed precision has nothing to shard or cast; FSDP would cost a tiny model 12-32 %. With it a
    # frozen model is wrapped too: FSDP also casts what layers are called with, and a reference computes as the policy.
    if mesh.size() > 1 or model.compute_dtype != torch.float32:
        shard(model, decoder_layers(causal_lm), mesh)
    if native:
        automodel.load_weights(causal_lm, causal_lm.config.name_or_path, device)
    return model.to(device)


def _from_transformers(
    path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    # On the host first: `fully_shard` moves one layer at a time, so a GPU never holds a whole float32 model.
    disable_progress_bar()
    causal_lm = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    causal_lm.config.use_cache = False
    return causal_lm


def _transformers_to_disk(causal_lm: nn.Module) -> Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]:
    conversions = getattr(causal_lm, "_weight_conversions", None) or ()
    if any(isinstance(c, WeightConverter) and len(c.target_patterns) > 1 for c in conversions):
        raise ConfigError(
            f"`model_name_or_path` (={causal_lm.config._name_or_path}): {type(causal_lm).__name__} splits tensors of "
            "its files, and molt gathers one at a time, so it could not be published or exported. Use another model."
        )
    return lambda name, tensor: revert_weight_conversion(causal_lm, {name: tensor}).items()


def _recompute_layers(causal_lm: nn.Module) -> None:
    if isinstance(causal_lm, PreTrainedModel):
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for layer in decoder_layers(causal_lm):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def decoder_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """What is sharded, and recomputed, as a whole."""
    if not isinstance(causal_lm, PreTrainedModel):  # a MoE class of AutoModel
        return list(causal_lm.model.layers.values())
    names = causal_lm._no_split_modules or ()
    return [module for module in causal_lm.modules() if type(module).__name__ in names]


def _disable_dropout(model: nn.Module) -> None:
    # The engine has none; with it, trainer and engine would disagree by design.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def shard(model: PolicyModel | ValueModel, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """FSDP2 over each decoder layer, a scalar head and the root; gradients are summed over ranks in float32."""
    heads = [model.head] if isinstance(model, ValueModel) else []
    modules = [*layers, *heads, model]
    for module in modules:
        dtype = torch.float32 if module in heads else model.compute_dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in modules:  # neither setting is recursive, and gloo needs the first for the second
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, args: tuple, output: object) -> None:
    # FSDP keeps the root unsharded until its backward. Without one, `parameters()` would go on to yield whole
    # tensors that the optimizer does not know and that FSDP frees later: a checkpoint of them crashed.
    if not torch.is_grad_enabled():
        model.reshard()
