"""Everything that can be said about a run before a model is loaded.

`molt check rl|sft ...flags` prints it, and both trainers start with it. Takes seconds: no engine, no
Ray, no weights.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from molt.agents.load import load_runner
from molt.chat.render import Renderer, load_tokenizer
from molt.config import CkptConfig, ModelConfig, PromptDataConfig, RLConfig
from molt.data.prompts import PromptDataset
from molt.data.rows import DropReport, Rows, UnusableRow, load_rows
from molt.errors import CheckpointError, ConfigError, DataError, MoltError
from molt.rules import RULES, WARNINGS, Rule, broken

Level = Literal["error", "warning", "ok"]
COLOURS = {"error": "bold red", "warning": "yellow", "ok": "green"}
LOOK_ROWS = 1_000
"""Rows that are rendered."""
MOST_ROWS = 20_000
"""Rows that are read, and compared with those of the evaluation."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""What vLLM's CPU attention runs; with another size it starts and dies at the first request."""
CHECKPOINT_BYTES = 12
"""Per parameter: a float32 master and two moments."""


class Findings(list[tuple[Level, str]]):
    """The report as it grows, one line each."""

    def add(self, level: Level, *texts: str) -> None:
        self += [(level, text) for text in texts]

    def attempt(self, function: Callable, *args, **kwargs) -> Any:
        """What the function returns, or None and an error in the report if it raises a MoltError."""
        try:
            return function(*args, **kwargs)
        except MoltError as error:
            self.add("error", str(error))

    @property
    def errors(self) -> list[str]:
        return [text for level, text in self if level == "error"]


def static_checks(config: RLConfig) -> Findings:
    """Everything found about an RL run, errors included; never raises for what is wrong with the settings."""
    from molt.parallel.mesh import resolve_device

    found = check_settings(config, RULES, WARNINGS)
    device = found.attempt(resolve_device, config.fsdp.device)
    on_cpu = device is not None and device.type == "cpu"
    tokenizer = check_model(found, config, config.actor, "actor", cpu_engine=on_cpu)
    if config.train.agent_path and found.attempt(load_runner, config.train.agent_path):
        found.add("ok", f"agent: {config.train.agent_path} exports an AgentRunner")
    if config.data.prompt_dataset:
        found.attempt(_check_prompts, found, config.data, config.eval.dataset, tokenizer)
    if device is not None:
        _check_resources(found, config, on_cpu)
    return found


def check_or_raise(config: Any, checks: Callable[[Any], Findings] = static_checks) -> Findings:
    """For trainers: the findings if none is an error, else one MoltError with all errors."""
    found = checks(config)
    if found.errors:
        raise MoltError("\n".join(found.errors))
    return found


def check_settings(config: Any, rules: list[Rule], warnings: list[Rule]) -> Findings:
    """The rules and the output directory."""
    found = Findings()
    found.add("error", *broken(rules, config))
    found.add("warning", *broken(warnings, config))
    if not found:
        found.add("ok", "settings: all rules hold")
    found.attempt(check_output_dir, config.ckpt)
    return found


def check_output_dir(ckpt: CkptConfig) -> None:
    """Raise if the run could not be written, or would be mixed with another one."""
    there = _nearest_existing(ckpt.output_dir)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"`ckpt.output_dir` (={ckpt.output_dir}): {there} is {'not writable' if there.is_dir() else 'a file'}, so "
            "nothing of the run could be saved. Use a directory that you may write to."
        )
    metrics = ckpt.run_dir / "metrics.jsonl"  # a start that failed leaves it empty
    trained = (metrics.is_file() and metrics.stat().st_size > 0) or any(ckpt.checkpoints.glob("*"))
    if trained and not ckpt.load_enable:
        raise CheckpointError(
            f"`ckpt.output_dir` (={ckpt.output_dir}) holds a run, which would be overwritten. Pass --ckpt.load_enable "
            "to resume it, or another --ckpt.output_dir."
        )


def _nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def check_model(found: Findings, config: Any, model: ModelConfig, section: str, *, cpu_engine: bool) -> Any:
    """The tokenizer, or None; adds what the model's configuration says against the settings."""
    from molt.models.build import load_config

    path, flag = model.model_name_or_path, f"{section}.model_name_or_path"
    if not path or (tokenizer := found.attempt(load_tokenizer, path, config.data.chat_template, flag=flag)) is None:
        return None
    if (known := found.attempt(load_config, path, config.data.max_len, flag=flag)) is not None:
        head = getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads
        if cpu_engine and head not in CPU_HEAD_SIZES:
            found.add(
                "error",
                f"`{flag}` (={path}): its attention heads have size {head}, so the CPU engine would die at the first "
                f"request. Use a model with size {', '.join(map(str, CPU_HEAD_SIZES))}.",
            )
        else:
            found.add("ok", f"model: {known.model_type} at {path}")
        _check_disk(found, config.ckpt, Path(path), 4 if "32" in str(known.dtype) else 2)
    return tokenizer


def _check_disk(found: Findings, ckpt: CkptConfig, model: Path, bytes_each: int) -> None:
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    one = stored // bytes_each * CHECKPOINT_BYTES + stored * ckpt.save_hf
    # A checkpoint is written aside before the oldest one is removed.
    need = stored + one * (1 if ckpt.save_steps == -1 else ckpt.max_num + 1)
    free = shutil.disk_usage(_nearest_existing(ckpt.checkpoints)).free
    if need > free:
        found.add(
            "warning",
            f"`ckpt.max_num` (={ckpt.max_num}): checkpoints may take {need / 2**30:.1f} GiB, and a save would fail: "
            f"{ckpt.checkpoints} has {free / 2**30:.1f} GiB. Keep fewer, or use another --ckpt.output_dir.",
        )


def first_rows(paths: str, flag: str, max_samples: int | None, most: int = MOST_ROWS) -> Rows:
    """As `load_rows`, but bounded."""
    return load_rows(paths, flag=flag, max_samples=min(max_samples or most, most))


def _check_prompts(found: Findings, data: PromptDataConfig, evaluation: str | None, tokenizer: Any) -> None:
    rows = first_rows(data.prompt_dataset, "data.prompt_dataset", data.max_samples)
    dataset = PromptDataset(rows, data)
    if evaluation and (held_out := found.attempt(check_overlap, found, rows, evaluation, data.input_key)):
        found.attempt(PromptDataset, held_out, data)
    if tokenizer is None:
        return
    renderer = Renderer(tokenizer, apply_chat_template=data.apply_chat_template)
    report = DropReport(min(len(rows), LOOK_ROWS))
    for i in range(report.total):
        try:
            if len(renderer.prompt_ids(dataset.prompt(i))) >= data.max_len:
                raise UnusableRow(f"not shorter than `data.max_len` (={data.max_len}); raise it to use them")
        except UnusableRow as error:
            report.add(i, error)
    if report.dropped == report.total:
        raise DataError(f"`data.prompt_dataset` (={data.prompt_dataset}): no prompt is left. {report.message()}")
    add_rows(found, "prompts", report)


def add_rows(found: Findings, what: str, report: DropReport) -> None:
    """Which of the first rows can be used, from their DropReport."""
    if report.dropped:
        found.add("warning", f"{what}: {report.message()}")
    found.add("ok", f"{what}: {report.total - report.dropped:,} of the first {report.total:,} rows can be used")


def check_overlap(found: Findings, rows: Rows, evaluation: str, column: str) -> Rows:
    """The rows of the evaluation; warns of prompts that are trained on too."""
    held_out = first_rows(evaluation, "eval.dataset", None)
    trained, asked = ([json.dumps(row.get(column), sort_keys=True) for row in some] for some in (rows, held_out))
    seen = set(trained)
    both = [i for i, prompt in enumerate(asked) if prompt in seen]
    if both:
        found.add(
            "warning",
            f"`eval.dataset` (={evaluation}): {len(both):,} of {len(held_out):,} prompts are trained on too (first: "
            f"row {both[0]}), so it says little about new ones. Remove them from one side.",
        )
    return held_out


def _check_resources(found: Findings, config: RLConfig, on_cpu: bool) -> None:
    """Processes against cores, or GPUs asked for against GPUs present."""
    from molt.parallel.mesh import device_count

    nodes, ranks = config.actor.num_nodes, config.actor.num_gpus_per_node or 1
    engines, tp = config.vllm.num_engines, config.vllm.tensor_parallel_size
    asked = nodes * ranks + engines * tp
    present, what = (os.cpu_count() or 1, "cores") if on_cpu else (device_count(), "GPUs")
    text = f"resources: policy {nodes} x {ranks} + engines {engines} x {tp} = {asked}, {present} {what} here"
    if asked <= present:
        found.add("ok", text)
    elif on_cpu:
        found.add("warning", f"{text}: they take turns, so steps are slower. Use fewer ranks or engines.")
    elif max(ranks, tp) > present:
        found.add("error", f"{text}: no node could hold them. Use fewer GPUs per node.")
    else:
        found.add("warning", f"{text}: the Ray cluster must bring the others. Use fewer, or start Ray on more nodes.")


def show(found: Findings) -> None:
    """Print the report, one finding a line."""
    for level, text in found:
        Console().print(Text.assemble((f"{level:<9}", COLOURS[level]), text), soft_wrap=True)
