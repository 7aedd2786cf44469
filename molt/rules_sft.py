"""Rules across the settings of SFT; see `rules.py`."""

from molt.config_sft import SftConfig
from molt.rules import Message, Rule, message, required, warn_eval_without_dataset, warn_nothing_saved, wrong_shares


def sft_needs_a_model(c: SftConfig) -> Message:
    return required(c, "model.model_name_or_path", "there is nothing to train", "DIR")


def sft_needs_a_dataset(c: SftConfig) -> Message:
    return required(c, "data.dataset", "there is nothing to learn from", "FILE.jsonl")


def sft_shares_mix_the_datasets(c: SftConfig) -> Message:
    if c.data.dataset and (wrong := wrong_shares(c.data.dataset_probs, c.data.dataset)):
        return message(c, "data.dataset_probs data.dataset", *wrong)


def warn_micro_batch_never_full(c: SftConfig) -> Message:
    if c.train.max_tokens_per_gpu is None and c.train.micro_batch_size > c.train.batch_size:
        fix = f"Use --train.micro_batch_size {c.train.batch_size}, or raise --train.batch_size"
        return message(c, "train.micro_batch_size train.batch_size", "no forward pass is ever full", fix)


RULES: list[Rule] = [sft_needs_a_model, sft_needs_a_dataset, sft_shares_mix_the_datasets]
WARNINGS: list[Rule] = [warn_micro_batch_never_full, warn_eval_without_dataset, warn_nothing_saved]
