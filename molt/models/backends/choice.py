"""Which back end trains a model, and with which attention. Importing this imports no back end."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from molt.config import FsdpConfig
from molt.errors import ConfigError, did_you_mean
from molt.models.backends.protocol import Backend

ATTENTIONS = ("varlen", "sdpa", "eager")
GPU_ATTENTIONS = ("flash_attention_2", "flash_attention_3")
WHY_NO_ATTENTION = {
    ("te", "cpu"): "it needs TransformerEngine, which runs on GPUs only",
    ("flex", "cpu"): "FlexAttention has no backward pass there",
    ("flex_attention", "cpu"): "FlexAttention has no backward pass there",
}


@dataclass(frozen=True)
class Row:
    """A back end that can be chosen."""

    load: Callable[[], Backend]
    """Imports it: a run pays for the one that it takes."""
    auto_on: tuple[str, ...]
    """The types of devices on which `fsdp.backend auto` takes it, if it has no obstacle to the model."""


def _automodel() -> Backend:
    from molt.models.backends import automodel

    return automodel


def _transformers() -> Backend:
    from molt.models.backends import transformers

    return transformers


BACKENDS: dict[str, Row] = {
    "automodel": Row(_automodel, auto_on=("cuda",)),
    "transformers": Row(_transformers, auto_on=("cuda", "cpu")),
}
"""By value of `fsdp.backend`; auto takes the first that it can."""


def load_backend(name: str) -> Backend:
    """The back end of that name in the table. Raises `ConfigError` for another name."""
    row = BACKENDS.get(name)
    if row is None:
        raise ConfigError(
            f"`fsdp.backend` (={name}): there is no such back end, so nothing can be trained. "
            f"Use auto, or one of {', '.join(BACKENDS)}.{did_you_mean(name, BACKENDS)}"
        )
    return row.load()


def choose_backend(fsdp: FsdpConfig, config: PreTrainedConfig, device: torch.device, attention: str) -> Backend:
    """The back end that builds the model. `load_config` has refused a setting that names one with an obstacle.

    attention: what `attention_implementation` returned. Raises `ConfigError` when none can train the model.
    """
    if fsdp.backend != "auto":
        return load_backend(fsdp.backend)

    obstacles = []
    for name, row in BACKENDS.items():
        if device.type not in row.auto_on:
            continue
        backend = row.load()
        obstacle = backend.obstacle(config, attention)
        if obstacle is None:
            return backend
        obstacles.append(f"{name}: {obstacle}")
    raise ConfigError(
        f"`fsdp.backend` (=auto): nothing trains this model on {device.type} ({'; '.join(obstacles)}). "
        "Use another model."
    )


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
