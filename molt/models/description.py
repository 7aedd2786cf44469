"""A model's configuration, checked before any weight is read. Importing this imports no model class."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from molt.config import FsdpConfig
from molt.errors import ConfigError
from molt.hub import only_local
from molt.models.backends.choice import load_backend

SINKS = ("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
"""Types of models whose attention has sinks: no configuration says so."""
LOGIT_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings of scalings between the last hidden state and the logits, which the head does not reproduce."""


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


def embedding_rows(config: PreTrainedConfig) -> int | None:
    """How many tokens the model knows: ids are below it. None if the configuration does not say."""
    return getattr(config.get_text_config(), "vocab_size", None)


def model_embedding_rows(path: str) -> int | None:
    """`embedding_rows` of the model at `path`; None where there is no configuration that can be read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=only_local(path))
    except (OSError, ValueError):
        return None
    return embedding_rows(config)


def configured_ends(path: str) -> int | list[int] | None:
    """The end tokens that the configuration of the model at `path` names itself: not the default of its class."""
    try:
        written, _ = PreTrainedConfig.get_config_dict(path, local_files_only=only_local(path))
    except (OSError, ValueError):
        return None
    of_text = written.get("text_config") or {}
    return written.get("eos_token_id", of_text.get("eos_token_id"))


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
    fix = "Use --fsdp.attn_implementation eager"
    if fsdp.packing_samples:  # the eager attention of gpt_oss, for one, mixes packed samples
        fix += " and leave out --fsdp.packing_samples"
    raise ConfigError(
        f"`fsdp.attn_implementation` (={fsdp.attn_implementation}): {setting} {term}, which only eager computes: "
        f"the log-probs would be those of another model. {fix}."
    )


def _refuse_backend(config: PreTrainedConfig, fsdp: FsdpConfig, setting: str) -> None:
    if fsdp.backend == "auto":
        return
    obstacle = load_backend(fsdp.backend).obstacle(config, fsdp.attn_implementation)
    if obstacle is not None:
        raise ConfigError(
            f"`fsdp.backend` (={fsdp.backend}): {setting}: {obstacle}, so another model would be trained, or none. "
            "Use --fsdp.backend auto, which takes one that can."
        )
