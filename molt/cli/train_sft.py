"""`molt sft`: supervised fine-tuning.

    molt sft ...flags                                             one process
    torchrun --nproc_per_node 2 -m molt.cli.train_sft ...flags    two

The first rank checks the settings; the others wait for it in the process group.
"""

import os
import sys

from molt.cli.advice import disk, overlap
from molt.cli.args import parse, run_command
from molt.cli.check import (
    LOOK_ROWS,
    Findings,
    add_rows,
    check_device,
    check_model,
    check_or_raise,
    check_settings,
    first_rows,
    show,
)
from molt.config_file import dump
from molt.config_sft import SftConfig
from molt.rules_sft import RULES, WARNINGS


def static_checks(config: SftConfig) -> Findings:
    """Everything found about an SFT run, errors included; never raises for what is wrong with the settings."""
    found = check_settings(config, RULES, WARNINGS)
    check_device(found, config.fsdp)
    tokenizer = check_model(found, config, config.model, "model", cpu_engine=False)
    disk(found, config.ckpt, config.model.model_name_or_path)
    if config.data.dataset:
        found.attempt(_check_conversations, found, config, tokenizer)
    return found


def _check_conversations(found: Findings, config: SftConfig, tokenizer) -> None:
    from molt.data.conversations import build_conversations

    data = config.data
    mixed = data.dataset_probs is not None
    rows = first_rows(data.dataset, "data.dataset", data.dataset_split, data.max_samples, mixed=mixed)
    if config.eval.dataset:
        found.attempt(overlap, found, rows, config)
    if tokenizer is not None:
        most = max(1, LOOK_ROWS // len(rows.sizes))
        some = first_rows(data.dataset, "data.dataset", data.dataset_split, len(rows), mixed=True, most=most)
        _, report = build_conversations(some, data, tokenizer)
        add_rows(found, "conversations", report)


def main(argv: list[str] | None = None) -> None:
    """Check, then train. Raises a MoltError when something is wrong."""
    config = parse(SftConfig, sys.argv[1:] if argv is None else argv, prog="molt sft")
    if int(os.environ.get("RANK", 0)) == 0:  # torchrun's protocol
        show(check_or_raise(config, static_checks))
    from molt.train.sft import run_sft

    run_sft(config, dump(config))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
