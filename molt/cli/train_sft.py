"""`molt sft`: supervised fine-tuning.

    molt sft ...flags                                             one process
    torchrun --nproc_per_node 2 -m molt.cli.train_sft ...flags    two

The first rank checks the settings; the others wait for it in the process group.
"""

import math
import os
import sys
from typing import TYPE_CHECKING

from molt.cli.args import parse, run_command
from molt.config_file import dump
from molt.config_sft import SftConfig

if TYPE_CHECKING:  # imported once the flags are known to be right
    from transformers import PreTrainedTokenizerBase

    from molt.cli.check import Column, Dataset
    from molt.cli.findings import Findings


def static_checks(config: SftConfig) -> "Findings":
    """Everything found about an SFT run, errors included; never raises for what is wrong with the settings."""
    from molt import rules_sft
    from molt.cli import advice, check
    from molt.cli.model_directory import ModelDirectory
    from molt.cli.overlap import check_overlap
    from molt.setting import name_of

    found = check.Findings()
    check.add_rules(found, rules_sft.errors(config), rules_sft.warnings(config))
    found.attempt(check.check_output_dir, config.ckpt)
    _check_places(found, config)
    device = check.check_device(found, config.fsdp)
    if device is not None:
        found.attempt(check.check_attention, config.fsdp, device)
    tokenizer = check.check_trained_model(
        found,
        rules_sft.SFT.model.model_name_or_path,
        config.model.model_name_or_path,
        config.data.chat_template,
        config.data.max_len,
        config.fsdp,
        device,
    )
    if tokenizer is not None:
        directory = ModelDirectory(
            flag=name_of(rules_sft.SFT.model.model_name_or_path),
            path=config.model.model_name_or_path,
            tokenizer=tokenizer,
            chats=True,
            exports=True,
        )
        found.attempt(check.check_directory, found, directory, endless="error")
    advice.check_disk(found, config.ckpt, config.model.model_name_or_path)

    conversations = found.attempt(_first_conversations, config) if config.data.dataset else None
    held_out = found.attempt(_first_held_out, config) if config.eval.dataset else None
    datasets = [dataset for dataset in (conversations, held_out) if dataset is not None]
    columns = _columns(config)
    if not check.has_columns(found, datasets, columns):
        return found
    check.check_unread_columns(found, datasets, [column.name for column in columns])
    if conversations is not None and held_out is not None:
        trained = _first_conversations(config, most=sys.maxsize)
        evaluated = _first_held_out(config, most=sys.maxsize)
        check_overlap(found, trained.rows, evaluated.rows, evaluated.label, config.data.input_key)
    if conversations is not None and tokenizer is not None:
        found.attempt(_check_conversations, found, config, conversations, tokenizer)
    return found


def _check_places(found: "Findings", config: SftConfig) -> None:
    """Add what is wrong with the directories that the run writes."""
    from molt.cli.places import Place, check_places, datasets_here, models_here
    from molt.rules_sft import SFT

    written = [Place(SFT.ckpt.output_dir, config.ckpt.output_dir), Place(SFT.ckpt.path, config.ckpt.checkpoints)]
    if config.logger.tensorboard_dir is not None:
        written.append(Place(SFT.logger.tensorboard_dir, config.logger.tensorboard_dir))
    models = [(SFT.model.model_name_or_path, config.model.model_name_or_path)]
    datasets = [(SFT.data.dataset, config.data.dataset), (SFT.eval.dataset, config.eval.dataset)]
    check_places(found, config.ckpt, written, [*models_here(models), *datasets_here(datasets)])


def _first_conversations(config: SftConfig, most: int | None = None) -> "Dataset":
    from molt.cli.check import MOST_ROWS, Dataset, first_rows
    from molt.rules_sft import SFT

    data = config.data
    rows = first_rows(
        data.dataset,
        "data.dataset",
        data.dataset_split,
        data.max_samples,
        mixed=data.dataset_probs is not None,
        most=most or MOST_ROWS,
    )
    return Dataset(SFT.data.dataset, data.dataset, rows)


def _first_held_out(config: SftConfig, most: int | None = None) -> "Dataset":
    from molt.cli.check import MOST_ROWS, Dataset, first_rows
    from molt.rules_sft import SFT

    paths = config.eval.dataset or ""
    rows = first_rows(paths, "eval.dataset", config.eval.split, most=most or MOST_ROWS)
    return Dataset(SFT.eval.dataset, paths, rows)


def _columns(config: SftConfig) -> "list[Column]":
    from molt.cli.check import Column
    from molt.rules_sft import SFT

    columns = [Column(SFT.data.input_key, config.data.input_key)]
    if config.data.output_key is not None:
        columns.append(Column(SFT.data.output_key, config.data.output_key))
    if config.data.tools_key is not None:
        columns.append(Column(SFT.data.tools_key, config.data.tools_key, everywhere=False))
    return columns


def _check_conversations(
    found: "Findings", config: SftConfig, dataset: "Dataset", tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Add which of the first rows can be trained on, and how many steps there will be."""
    from molt.cli.check import LOOK_ROWS, StepPlan, add_rows, add_steps, first_rows, is_cut
    from molt.data.conversations import build_conversations
    from molt.models.description import model_embedding_rows
    from molt.rules_sft import SFT

    data = config.data
    most = max(1, LOOK_ROWS // len(dataset.rows.sizes))
    rows = first_rows(data.dataset, "data.dataset", data.dataset_split, len(dataset.rows), mixed=True, most=most)
    rows_of_model = model_embedding_rows(config.model.model_name_or_path)
    _, report = build_conversations(rows, data, tokenizer, rows_of_model)
    add_rows(found, "conversations", report)
    if data.dataset_probs is None:  # a mixture draws its share of each dataset
        epochs = config.train.max_epochs
        batch_size = config.train.batch_size
        plan = StepPlan(
            rows=len(dataset.rows),
            rows_are_cut=is_cut(dataset.rows, data.max_samples),
            passes=epochs,
            batch_size=batch_size,
            steps=math.ceil(len(dataset.rows) / batch_size) * epochs,
            max_steps=config.train.max_steps,
        )
        add_steps(found, plan, SFT.train.batch_size)


def main(argv: list[str] | None = None) -> None:
    """Check, then train. Raises a MoltError when something is wrong."""
    if argv is None:
        argv = sys.argv[1:]
    config = parse(SftConfig, argv, prog="molt sft")
    if int(os.environ.get("RANK", 0)) == 0:  # torchrun's protocol
        from molt.cli.check import check_or_raise, show

        show(check_or_raise(config, static_checks))
    from molt.train.sft import run_sft

    run_sft(config, dump(config))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
