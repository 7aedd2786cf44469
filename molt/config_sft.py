"""The settings of SFT; see `config.py` for how a setting is written."""

from dataclasses import dataclass, field
from typing import Annotated

from molt.config import (
    CADENCE,
    AdamConfig,
    CkptConfig,
    FsdpConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    Section,
    at_least,
)
from molt.paths import PATHS, TEMPLATE


@dataclass(frozen=True)
class SftDataConfig(Section, prefix="data."):
    """The conversations of SFT."""

    dataset: Annotated[str, PATHS] = ""
    """Comma list of json, jsonl, csv, parquet or arrow files, saved dataset directories, hub names, each with an
    optional `@data_dir`. Required."""
    dataset_probs: str | None = None
    """Comma list of shares, one per dataset, that mix them. Unset: one after the other."""
    dataset_split: str = "train"
    """The split of saved directories and hub datasets."""
    max_samples: Annotated[int | None, at_least(1, "no row would be left")] = None
    """Use only the first rows; of each dataset, where shares mix them."""
    max_len: Annotated[int, at_least(1, "no row would be left")] = 2048
    """Longest conversation in tokens; longer ones are dropped, counted and named."""
    input_key: str = "input"
    """Column with the prompt, or with the whole conversation."""
    output_key: str | None = None
    """Column with the answer. Unset: the input column holds the whole conversation."""
    tools_key: str | None = None
    """Column with the tools offered in the conversation."""
    chat_template: Annotated[str | None, TEMPLATE] = None
    """A template file or text that overrides the model's."""
    train_on_last_turn_only: bool = False
    """Only the last assistant turn enters the loss."""


@dataclass(frozen=True)
class SftTrainConfig(Section, prefix="train."):
    """The SFT loop."""

    micro_batch_size: Annotated[int, at_least(1, "nothing would be trained")] = 8
    """Conversations per forward/backward."""
    batch_size: Annotated[int, at_least(1, "nothing would be trained")] = 128
    """Conversations per optimizer step."""
    max_tokens_per_gpu: Annotated[int | None, at_least(1, "no conversation would fit")] = None
    """Tokens per forward/backward and rank, padding included, instead of `micro_batch_size` conversations; a longer
    one runs alone."""
    max_epochs: Annotated[int, at_least(1, "nothing would be trained")] = 2
    """Passes over the data."""
    max_steps: Annotated[int | None, at_least(1, "nothing would be trained")] = None
    """Stop after this many optimizer steps."""
    seed: int = 42
    """Controls the order of the data."""


@dataclass(frozen=True)
class SftEvalConfig(Section, prefix="eval."):
    """Held-out loss during SFT."""

    dataset: Annotated[str | None, PATHS] = None
    """Comma list of datasets as in --data.dataset; columns as in --data."""
    split: str = "train"
    """The split of saved directories and hub datasets."""
    steps: Annotated[int, CADENCE] = -1
    """Cadence in optimizer steps; -1: after each epoch."""


def _default_adam() -> AdamConfig:
    return AdamConfig(lr=5e-6)


def _default_ckpt() -> CkptConfig:
    return CkptConfig(save_steps=-1)


@dataclass(frozen=True)
class SftConfig(OptimizerConfig):
    """`molt sft`: supervised fine-tuning."""

    adam: AdamConfig = field(default_factory=_default_adam)
    model: ModelConfig = field(default_factory=ModelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    train: SftTrainConfig = field(default_factory=SftTrainConfig)
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)
    ckpt: CkptConfig = field(default_factory=_default_ckpt)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
