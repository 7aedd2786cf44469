"""What is wrong with a run, before a model is loaded.

Both trainers start with it; `molt check` and `molt rl` add `advice.py`. Takes seconds: no
engine, no Ray, no weights.
"""

import os
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
"""Rows that are read."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""What vLLM's CPU attention runs; with another size it starts and dies at the first request."""


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
    for flag, paths in (("data.prompt_dataset", config.data.prompt_dataset), ("eval.dataset", config.eval.dataset)):
        if paths:
            found.attempt(_check_prompts, found, config.data, paths, flag, tokenizer)
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
    if not found:
        found.add("ok", "settings: all rules hold")
    found.add("warning", *broken(warnings, config))
    found.attempt(check_output_dir, config.ckpt)
    return found


def check_output_dir(ckpt: CkptConfig) -> None:
    """Raise if the run could not be written, or would be mixed with another one."""
    there = nearest_existing(ckpt.output_dir)
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


def nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def check_model(found: Findings, config: Any, model: ModelConfig, section: str, *, cpu_engine: bool) -> Any:
    """The tokenizer, or None; adds what the model's configuration says against the settings."""
    from molt.models.build import load_config

    path, flag = model.model_name_or_path, f"{section}.model_name_or_path"
    if not path or (tokenizer := found.attempt(load_tokenizer, path, config.data.chat_template, flag=flag)) is None:
        return None
    if (known := found.attempt(load_config, path, config.data.max_len, flag=flag)) is not None:
        heads = getattr(known, "num_attention_heads", None)
        head = getattr(known, "head_dim", None) or (heads and known.hidden_size // heads)
        if cpu_engine and head and head not in CPU_HEAD_SIZES:
            found.add(
                "error",
                f"`{flag}` (={path}): its attention heads have size {head}, so the CPU engine would die at the first "
                f"request. Use a model with size {', '.join(map(str, CPU_HEAD_SIZES))}.",
            )
        else:
            found.add("ok", f"model: {known.model_type} at {path}")
    return tokenizer


def first_rows(paths: str, flag: str, max_samples: int | None, most: int = MOST_ROWS) -> Rows:
    """As `load_rows`, but bounded."""
    return load_rows(paths, flag=flag, max_samples=min(max_samples or most, most))


def _check_prompts(found: Findings, data: PromptDataConfig, paths: str, flag: str, tokenizer: Any) -> None:
    dataset = PromptDataset(first_rows(paths, flag, data.max_samples), data)
    renderer = tokenizer and Renderer(tokenizer, apply_chat_template=data.apply_chat_template)
    report = DropReport(min(len(dataset), LOOK_ROWS))
    for i in range(report.total):
        try:
            prompt = dataset.prompt(i)
            if renderer and len(renderer.prompt_ids(prompt)) >= data.max_len:
                raise UnusableRow(f"not shorter than `data.max_len` (={data.max_len}); raise it to use them")
        except UnusableRow as error:
            report.add(i, error)
    if report.dropped == report.total:
        raise DataError(
            f"`{flag}` (={paths}): no prompt is left. {report.message()} Or name the column that holds the prompts "
            f"with `data.input_key` (={data.input_key})."
        )
    if renderer:
        add_rows(found, f"prompts of {flag}", report)


def add_rows(found: Findings, what: str, report: DropReport) -> None:
    """Which of the first rows can be used, from their DropReport."""
    if report.dropped:
        found.add("warning", f"{what}: {report.message()}")
    found.add("ok", f"{what}: {report.total - report.dropped:,} of the first {report.total:,} rows can be used")


def show(found: Findings) -> None:
    """Print the report, one finding a line."""
    for level, text in found:
        Console().print(Text.assemble((f"{level:<9}", COLOURS[level]), text), soft_wrap=True)
