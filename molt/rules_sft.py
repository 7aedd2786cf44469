"""Rules across the settings of SFT; see `rules.py`."""

from molt import rules
from molt.config_sft import SftConfig
from molt.rules import Message, message, required, rule, warning, wrong_shares
from molt.setting import names

SFT = names(SftConfig)


def errors(config: SftConfig) -> list[str]:
    """What is wrong with the settings."""
    return rules.errors("sft", config)


def warnings(config: SftConfig) -> list[str]:
    """What is allowed but probably not meant."""
    return rules.warnings("sft", config)


@rule("sft")
def sft_needs_a_model(c: SftConfig) -> Message:
    return required(c, SFT.model.model_name_or_path, "there is nothing to train", "DIR")


@rule("sft")
def sft_needs_a_dataset(c: SftConfig) -> Message:
    return required(c, SFT.data.dataset, "there is nothing to learn from", "FILE.jsonl")


@rule("sft")
def sft_shares_mix_the_datasets(c: SftConfig) -> Message:
    return wrong_shares(c, SFT.data.dataset_probs, SFT.data.dataset)


@warning("sft")
def warn_micro_batch_never_full(c: SftConfig) -> Message:
    if c.train.max_tokens_per_gpu is not None or c.train.micro_batch_size <= c.train.batch_size:
        return None
    return message(
        c,
        [SFT.train.micro_batch_size, SFT.train.batch_size],
        "no forward pass is ever full",
        f"Use --train.micro_batch_size {c.train.batch_size}, or raise --train.batch_size",
    )
