"""A Hugging Face causal LM as a sharded `PolicyModel` or `ValueModel`; with `automodel.py` all that knows back ends.

Masters are float32; compute runs in `fsdp.param_dtype`. Gradients are *summed* over ranks in float32: the loss of every
rank already carries its weights of the whole step (`algo/reduce.py`), so nothing is averaged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils.import_utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

import molt.models.attention  # noqa: F401  registers "varlen"
from molt.config import FsdpConfig, ModelConfig
from molt.errors import ConfigError, did_you_mean
from molt.hub import only_local
from molt.models import automodel
from molt.models.causal_lm import CausalLM, ToDisk, decoder_layers
from molt.models.forward import PolicyModel, ValueModel
from molt.parallel.mesh import Mesh, param_dtype

Model = TypeVar("Model", PolicyModel, ValueModel)
ATTENTIONS = ("varlen", "sdpa", "eager")
GPU_ATTENTIONS = ("flash_attention_2", "flash_attention_3")
WHY_NO_ATTENTION = {
    ("te", "cpu"): "it needs TransformerEngine, which runs on GPUs only",
    ("flex", "cpu"): "FlexAttention has no backward pass there",
    ("flex_attention", "cpu"): "FlexAttention has no backward pass there",
}
SINKS = ("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
"""Types of models whose attention has sinks: no configuration says so."""
LOGIT_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings of scalings between the last hidden state and the logits, which the head does not reproduce."""


def attention_implementation(config: FsdpConfig, device: torch.device) -> str:
    """The name in transformers' registry. Raises `ConfigError` for one that the device cannot run."""
    name = config.attn_implementation
    on_gpu = device.type == "cuda"
    if name == "auto":
        if on_gpu and is_flash_attn_2_available():
            return "flash_attention_2"
        return "varlen"

    known = ATTENTIONS
    if on_gpu:
        known = ATTENTIONS + GPU_ATTENTIONS
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
    config = _read_config(path, setting)
    _refuse_other_kinds(config, setting, trained=fsdp is not None)
    _refuse_scaled_logits(config, setting)
    _refuse_long_context(config, max_len)
    if fsdp is not None:
        _refuse_attention_terms(config, fsdp, setting)
        _refuse_backend(config, fsdp, setting)
    return config


def _read_config(path: str, setting: str) -> PreTrainedConfig:
    is_local = path.startswith(("/", ".", "~"))
    if not path or (is_local and not Path(path).is_dir()):
        raise ConfigError(f"{setting}: no such directory, so there is nothing to train. Give a Hugging Face model.")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=only_local(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: not a model that can be loaded ({str(error).splitlines()[0]}). "
            "Give a local directory with config.json, or a hub name that transformers knows."
        ) from error


def _refuse_other_kinds(config: PreTrainedConfig, setting: str, *, trained: bool) -> None:
    """Raise `ConfigError` for what is not a causal LM, or reads images and is to be trained."""
    names = config.architectures or []
    generates = all(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    is_causal_lm = generates and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_causal_lm:
        return

    shown = names or type(config).__name__
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(f"{setting} is {shown}, not a causal LM: it cannot generate text. Use one.")
    if trained:
        raise ConfigError(
            f"{setting} is {shown}, which reads images: training such models is not built "
            "yet. Use a causal LM, or measure this one with `molt eval`."
        )


def _refuse_scaled_logits(config: PreTrainedConfig, setting: str) -> None:
    text_config = config.get_text_config()
    scales = {}
    for name in LOGIT_SCALES:
        scale = getattr(text_config, name, None)
        if scale not in (None, 1.0):
            scales[name] = scale
    if scales:
        raise ConfigError(f"{setting} scales its logits ({scales}): log-probs would be wrong. Use another model.")


def _refuse_long_context(config: PreTrainedConfig, max_len: int | None) -> None:
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if max_len and context and max_len > context and "factor" not in rope:
        raise ConfigError(
            f"`data.max_len` (={max_len}) is above the model's max_position_embeddings (={context}): it has never seen "
            f"such positions and engines refuse them. Use --data.max_len {context}."
        )


def _refuse_attention_terms(config: PreTrainedConfig, fsdp: FsdpConfig, setting: str) -> None:
    if fsdp.attn_implementation == "eager":
        return
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap:
        term = f"caps its attention scores (attn_logit_softcapping {cap})"
    elif config.model_type in SINKS:
        term = "has attention sinks"
    else:
        return
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


@dataclass(frozen=True)
class Backend:
    """How a library's causal LM is built, loaded and written."""

    build: Callable[[str, PreTrainedConfig, str, torch.device, torch.dtype], CausalLM]
    """`(path, config, attention, device, dtype)` to the model; its weights may be missing."""
    load_weights: Callable[[CausalLM, str, torch.device], None]
    """`(model, path, device)`: read the weights that `build` left out. Every rank calls it, after sharding."""
    drop_head: Callable[[CausalLM], None]
    """Keep `load_weights` from loading the head, for a model that has no use for it."""
    to_disk: Callable[[CausalLM], ToDisk]
    """How its tensors are written to files. Raises `ConfigError` when they cannot be."""


def _from_transformers(
    path: str, config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype
) -> CausalLM:
    # On the host first: `fully_shard` moves one layer at a time, so a GPU never holds a whole float32 model.
    disable_progress_bar()
    causal_lm = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    causal_lm.config.use_cache = False
    return cast(CausalLM, causal_lm)  # transformers has no type for what all its causal LMs have


def _nothing_to_load(causal_lm: CausalLM, path: str, device: torch.device) -> None:
    """`from_pretrained` has read the weights."""


def _nothing_to_drop(causal_lm: CausalLM) -> None:
    """Nothing loads the head again."""


def _transformers_to_disk(causal_lm: CausalLM) -> ToDisk:
    conversions = getattr(causal_lm, "_weight_conversions", None) or ()
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            raise ConfigError(
                f"`model_name_or_path` (={causal_lm.config._name_or_path}): {type(causal_lm).__name__} splits tensors "
                "of its files, and molt gathers one at a time, so it could not be published or exported. Use another "
                "model."
            )

    of_transformers = cast(PreTrainedModel, causal_lm)  # this back end made it

    def to_disk(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        converted = revert_weight_conversion(of_transformers, {name: tensor})
        return list(converted.items())

    return to_disk


def _drop_automodel_head(causal_lm: CausalLM) -> None:
    causal_lm.set_output_embeddings(None)


TRANSFORMERS = Backend(
    build=_from_transformers,
    load_weights=_nothing_to_load,
    drop_head=_nothing_to_drop,
    to_disk=_transformers_to_disk,
)
AUTOMODEL = Backend(
    build=automodel.build_empty,
    load_weights=automodel.load_weights,
    drop_head=_drop_automodel_head,
    to_disk=automodel.to_disk,
)


def backend_of(fsdp: FsdpConfig, config: PreTrainedConfig, device: torch.device, attention: str) -> Backend:
    """The back end that builds the model; `load_config` has refused what cannot be built."""
    if fsdp.backend == "automodel":
        return AUTOMODEL
    if fsdp.backend == "auto" and device.type == "cuda" and automodel.obstacle(config, attention) is None:
        return AUTOMODEL
    return TRANSFORMERS


@dataclass(frozen=True)
class Prepared:
    """A causal LM that is ready to be sharded, its directory or hub name, and the back end that made it."""

    causal_lm: CausalLM
    path: str
    backend: Backend


def build_policy(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: Mesh,
    device: torch.device,
    max_len: int | None = None,
) -> PolicyModel:
    """Load, prepare and shard the policy. Every rank of `mesh` calls it; each ends with its shard on `device`.

    Raises `ConfigError` as `load_config` and `attention_implementation` do, and for a model that cannot be exported.
    """
    prepared = _prepare(model_config, fsdp_config, device, max_len, dtype=torch.float32, flag="model_name_or_path")
    model = PolicyModel(
        prepared.causal_lm,
        compute_dtype=param_dtype(fsdp_config, device),
        to_disk=prepared.backend.to_disk(prepared.causal_lm),
    )
    return _place(model.train(), prepared, mesh, device)


def build_critic(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    mesh: Mesh,
    device: torch.device,
    max_len: int | None = None,
) -> ValueModel:
    """The value model on the decoder of a causal LM, trained as the policy is; as `build_policy`, but never exported.

    Its head is drawn from torch's generator, which every rank must have seeded alike.
    """
    prepared = _prepare(
        model_config, fsdp_config, device, max_len, dtype=torch.float32, flag="critic.model_name_or_path"
    )
    prepared.backend.drop_head(prepared.causal_lm)
    model = ValueModel(prepared.causal_lm, compute_dtype=param_dtype(fsdp_config, device))
    return _place(model.train(), prepared, mesh, device)


def build_frozen(
    path: str, fsdp_config: FsdpConfig, mesh: Mesh, device: torch.device, max_len: int | None = None
) -> PolicyModel:
    """A model that only runs under `torch.no_grad()`: no gradients, weights held in the compute dtype.

    Every rank of `mesh` calls it; each ends with its shard. Raises `ConfigError` as `load_config` does.
    """
    dtype = param_dtype(fsdp_config, device)
    model_config = ModelConfig(path, gradient_checkpoint="none")
    prepared = _prepare(model_config, fsdp_config, device, max_len, dtype=dtype, flag="ref.model_name_or_path")
    model = PolicyModel(prepared.causal_lm, compute_dtype=dtype)
    model.requires_grad_(False)
    return _place(model.eval(), prepared, mesh, device)


def _prepare(
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    device: torch.device,
    max_len: int | None,
    *,
    dtype: torch.dtype,
    flag: str,
) -> Prepared:
    """The causal LM with weights of `dtype`, without dropout, its layers recomputed if the settings say so."""
    path = model_config.model_name_or_path
    attention = attention_implementation(fsdp_config, device)
    config = load_config(path, max_len, flag, fsdp_config)
    backend = backend_of(fsdp_config, config, device, attention)
    causal_lm = backend.build(path, config, attention, device, dtype)

    _disable_dropout(causal_lm)
    if model_config.gradient_checkpoint == "full":
        _recompute_layers(causal_lm)
    return Prepared(causal_lm, path, backend)


def _place(model: Model, prepared: Prepared, mesh: Mesh, device: torch.device) -> Model:
    """Shard the model around the causal LM, read the weights that are not there yet, and move it to the device."""
    # One rank without mixed precision has nothing to shard or cast; FSDP would cost a tiny model 12-32 %. With it a
    # frozen model is wrapped too: FSDP also casts what layers are called with, and a reference computes as the policy.
    if mesh.size > 1 or model.compute_dtype != torch.float32:
        shard(model, decoder_layers(prepared.causal_lm), mesh)
    prepared.backend.load_weights(prepared.causal_lm, prepared.path, device)
    return model.to(device)


def _recompute_layers(causal_lm: CausalLM) -> None:
    """Let the backward pass compute each layer again instead of keeping its activations."""
    if isinstance(causal_lm, PreTrainedModel):
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for layer in decoder_layers(causal_lm):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _disable_dropout(model: nn.Module) -> None:
    """The engine has none; with it, trainer and engine would disagree by design."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            _disable_attention_dropout(module)


def _disable_attention_dropout(attention: Any) -> None:
    attention.attention_dropout = 0.0


def shard(model: PolicyModel | ValueModel, layers: Sequence[nn.Module], mesh: Mesh) -> None:
    """FSDP2 over each decoder layer, a scalar head and the root; gradients are summed over `mesh.fsdp` in float32."""
    of_compute_dtype = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    of_float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)

    # The root comes last: it holds what no other module holds.
    sharded = []
    for layer in layers:
        sharded.append(fully_shard(layer, mesh=mesh.fsdp, mp_policy=of_compute_dtype))
    if isinstance(model, ValueModel):
        sharded.append(fully_shard(model.head, mesh=mesh.fsdp, mp_policy=of_float32))
    sharded.append(fully_shard(model, mesh=mesh.fsdp, mp_policy=of_compute_dtype))

    # Neither setting is recursive, and gloo needs the first for the second.
    for module in sharded:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    model.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    # FSDP keeps the root unsharded until its backward. Without one, `parameters()` would go on to yield whole
    # tensors that the optimizer does not know and that FSDP frees later: a checkpoint of them crashed.
    if not torch.is_grad_enabled() and isinstance(model, FSDPModule):
        model.reshard()
