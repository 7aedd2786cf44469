"""Everything that can be said about a run before a model is loaded.

`molt check rl|sft ...flags` prints it, and both trainers start with it. Takes seconds: no engine, no
Ray, no weights; the model's config.json is read as the JSON it is.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from molt import rules
from molt.cli.args import parse
from molt.config import CkptConfig, RLConfig, SftConfig
from molt.errors import CheckpointError, ConfigError, DataError, MoltError, did_you_mean

CONFIGS: dict[str, type] = {"rl": RLConfig, "sft": SftConfig}
LOOK_ROWS = 1_000
"""Rows that are rendered."""
MOST_ROWS = 20_000
"""Rows that are read, and compared with those of the evaluation."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""What vLLM's CPU attention runs; with another size it starts and dies at the first request."""
CHECKPOINT_BYTES = 12
"""Per parameter: a float32 master and two moments."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["error", "warning", "ok"]
    text: str


class Findings(list[Finding]):
    """The report as it grows."""

    def add(self, level: Literal["error", "warning", "ok"], *texts: str) -> None:
        self += [Finding(level, text) for text in texts]

    def attempt(self, function: Callable, *args, **kwargs) -> Any:
        """What the function returns, or None and an error in the report if it raises a MoltError."""
        try:
            return function(*args, **kwargs)
        except MoltError as error:
            self.add("error", str(error))


def static_checks(config: RLConfig | SftConfig) -> list[Finding]:
    """Everything found, errors included; never raises for what is wrong with the settings."""
    found = Findings()
    found.add("error", *rules.errors(config))
    found.add("warning", *rules.warnings(config))
    if not found:
        found.add("ok", "settings: all rules hold")
    found.attempt(check_output_dir, config.ckpt)
    from molt.agents.load import load_runner
    from molt.parallel.mesh import resolve_device

    device = found.attempt(resolve_device, config.fsdp)
    tokenizer = _check_model(config, device and device.type, found)
    if isinstance(config, RLConfig):
        if config.train.agent_path and found.attempt(load_runner, config.train.agent_path):
            found.add("ok", f"agent: {config.train.agent_path} exports an AgentRunner")
        if config.data.prompt_dataset:
            found.attempt(_check_prompts, config, tokenizer, found)
        if device is not None:
            _check_resources(config, device.type, found)
    elif config.data.dataset:
        found.attempt(_check_conversations, config, tokenizer, found)
    return found


def check_or_raise(config: RLConfig | SftConfig) -> list[Finding]:
    """For trainers: the findings if none is an error, else one MoltError with all errors."""
    findings = static_checks(config)
    if wrong := [finding.text for finding in findings if finding.level == "error"]:
        raise MoltError("\n".join(wrong))
    return findings


def check_output_dir(ckpt: CkptConfig) -> None:
    """Raise if the run could not be written, or would be mixed with another one."""
    there = _nearest_existing(ckpt.output_dir)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"`ckpt.output_dir` (={ckpt.output_dir}): {there} is {'not writable' if there.is_dir() else 'a file'}, so "
            "nothing of the run could be saved. Use a directory that you may write to."
        )
    for path in (ckpt.run_dir, ckpt.checkpoints):
        if not ckpt.load_enable and path.is_dir() and any(path.iterdir()):
            raise CheckpointError(
                f"`ckpt.output_dir` (={ckpt.output_dir}) holds a run ({path}), which would be overwritten. Pass "
                "--ckpt.load_enable to resume it, or another --ckpt.output_dir."
            )


def _nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _check_model(config: RLConfig | SftConfig, device: str | None, found: Findings) -> Any:
    """The tokenizer, or None; adds what config.json says against the settings."""
    name, section = ("actor", config.actor) if isinstance(config, RLConfig) else ("model", config.model)
    path, flag = section.model_name_or_path, f"{name}.model_name_or_path"
    if not path:
        return None
    from molt.chat.render import load_tokenizer

    tokenizer = found.attempt(load_tokenizer, path, config.data.chat_template, flag=flag)
    if tokenizer is not None and (settings := found.attempt(_model_settings, path, flag)):
        wrong = list(_misfits(config, settings, isinstance(config, RLConfig) and device == "cpu"))
        found.add("error", *wrong)
        if not wrong:
            found.add("ok", f"model: {settings.get('model_type', 'unknown type')} at {path}")
        found.add("warning", *_disk_misfits(config.ckpt, Path(path), settings))
    return tokenizer


def _model_settings(path: str, flag: str) -> dict[str, Any]:
    """The model's config.json; for a model with images the part about text comes on top."""
    from transformers.utils import cached_file

    try:
        settings = json.loads(Path(cached_file(path, "config.json")).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`{flag}` (={path}): no readable config.json ({str(error).splitlines()[0]}), so no model could be built. "
            "Give a Hugging Face model directory or a hub name."
        ) from error
    return settings | settings.get("text_config", {})


def _misfits(config: RLConfig | SftConfig, settings: dict[str, Any], cpu_engine: bool) -> Iterator[str]:
    heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
    head = settings.get("head_dim") or (hidden // heads if heads and hidden else None)
    if cpu_engine and head and head not in CPU_HEAD_SIZES:
        yield (
            f"`actor.model_name_or_path` (={config.actor.model_name_or_path}): its attention heads have size {head}: "
            f"the CPU engine would die at the first request. Use a model with {', '.join(map(str, CPU_HEAD_SIZES))}."
        )
    most = settings.get("max_position_embeddings")
    scaled = "factor" in (settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    if most and config.data.max_len > most and not scaled:
        yield (
            f"`data.max_len` (={config.data.max_len}) is above the model's max_position_embeddings (={most}): it has "
            f"no such positions. Use --data.max_len {most}."
        )


def _disk_misfits(ckpt: CkptConfig, model: Path, settings: dict[str, Any]) -> Iterator[str]:
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    bytes_each = 4 if "32" in str(settings.get("dtype") or settings.get("torch_dtype")) else 2
    one = stored // bytes_each * CHECKPOINT_BYTES + stored * ckpt.save_hf
    # A checkpoint is written aside before the oldest one is removed.
    need = stored + one * (1 if ckpt.save_steps == -1 else ckpt.max_num + 1)
    free = shutil.disk_usage(_nearest_existing(ckpt.checkpoints)).free
    if need > free:
        yield (
            f"`ckpt.max_num` (={ckpt.max_num}): checkpoints may take {need / 2**30:.1f} GiB, and a save would fail: "
            f"{ckpt.checkpoints} has {free / 2**30:.1f} GiB. Keep fewer, or use another --ckpt.output_dir."
        )


def _check_prompts(config: RLConfig, tokenizer: Any, found: Findings) -> None:
    from molt.chat.render import Renderer
    from molt.data.prompts import PromptDataset
    from molt.data.rows import DropReport, UnusableRow

    data = config.data
    rows = _rows(data.prompt_dataset, "data.prompt_dataset", data.max_samples)
    dataset = PromptDataset(rows, data)
    if config.eval.dataset:
        held_out = _rows(config.eval.dataset, "eval.dataset")
        found.attempt(PromptDataset, held_out, data)
        found.add("warning", *_overlap(rows, held_out, data.input_key))
    if tokenizer is None:
        return
    renderer = Renderer(tokenizer, apply_chat_template=data.apply_chat_template)
    report = DropReport(min(len(rows), LOOK_ROWS))
    for i in range(report.total):
        try:
            dataset.check_length(len(renderer.prompt_ids(dataset.prompt(i))))
        except UnusableRow as error:
            report.add(i, error)
    if report.dropped == report.total:
        raise DataError(f"`data.prompt_dataset` (={data.prompt_dataset}): no prompt is left. {report.message()}")
    _add_rows(found, "prompts", report)


def _check_conversations(config: SftConfig, tokenizer: Any, found: Findings) -> None:
    from molt.data.conversations import build_conversations

    data = config.data
    rows = _rows(data.dataset, "data.dataset", data.max_samples)
    if config.eval.dataset:
        found.add("warning", *_overlap(rows, _rows(config.eval.dataset, "eval.dataset"), data.input_key))
    if tokenizer is not None:
        first = _rows(data.dataset, "data.dataset", min(len(rows), LOOK_ROWS))
        _add_rows(found, "conversations", build_conversations(first, data, tokenizer)[1])


def _add_rows(found: Findings, what: str, report: Any) -> None:
    if report.dropped:
        found.add("warning", f"{what}: {report.message()}")
    found.add("ok", f"{what}: {report.total - report.dropped:,} of the first {report.total:,} rows can be used")


def _rows(paths: str, flag: str, max_samples: int | None = None) -> Any:
    from molt.data.rows import load_rows

    return load_rows(paths, flag=flag, max_samples=min(max_samples or MOST_ROWS, MOST_ROWS))


def _prompt_text(row: dict[str, Any], column: str) -> str:
    return json.dumps(row.get(column), sort_keys=True, default=str)


def _overlap(rows: Any, held_out: Any, column: str) -> Iterator[str]:
    seen = {_prompt_text(row, column) for row in rows}
    both = [i for i, row in enumerate(held_out) if _prompt_text(row, column) in seen]
    if both:
        yield (
            f"`eval.dataset`: {len(both):,} of {len(held_out):,} prompts are trained on too (first: row {both[0]}), so "
            "the evaluation says little about new ones. Remove them from one side."
        )


def _check_resources(config: RLConfig, device: str, found: Findings) -> None:
    """Processes against cores, or GPUs asked for against GPUs present."""
    import torch

    nodes, ranks = config.actor.num_nodes, config.actor.num_gpus_per_node or 1
    engines, tp = config.vllm.num_engines, config.vllm.tensor_parallel_size
    asked, on_cpu = nodes * ranks + engines * tp, device == "cpu"
    present, what = (os.cpu_count() or 1, "cores") if on_cpu else (torch.accelerator.device_count(), "GPUs")
    text = f"resources: policy {nodes} x {ranks} + engines {engines} x {tp} = {asked}, {present} {what} here"
    if asked <= present:
        found.add("ok", text)
    elif on_cpu:
        found.add("warning", f"{text}: they take turns, so steps are slower. Use fewer ranks or engines.")
    elif max(ranks, tp) > present:
        found.add("error", f"{text}: no node could hold them. Use fewer GPUs per node.")
    else:
        found.add("warning", f"{text}: the Ray cluster must bring the others. Use fewer, or start Ray on more nodes.")


def show(findings: list[Finding]) -> None:
    """Print the report, one finding a line."""
    from rich.console import Console
    from rich.text import Text

    colours = {"error": "bold red", "warning": "yellow", "ok": "green"}
    for level, text in ((finding.level, finding.text) for finding in findings):
        Console().print(Text.assemble((f"{level:<7}", colours[level]), "  ", text), soft_wrap=True)


def main(argv: list[str]) -> int:
    """`molt check [rl|sft] ...flags`; the exit code is 1 if something is wrong."""
    kind = "rl"
    if argv and not argv[0].startswith("-"):
        kind, argv = argv[0], argv[1:]
    if kind not in CONFIGS:
        raise ConfigError(f"`molt check` has no {kind!r}.{did_you_mean(kind, CONFIGS)} Use rl or sft, then the flags.")
    findings = static_checks(parse(CONFIGS[kind], argv, prog=f"molt check {kind}"))
    show(findings)
    wrong = sum(finding.level == "error" for finding in findings)
    print(f"{wrong} error{'s' if wrong != 1 else ''}" if wrong else "ready to run")
    return 1 if wrong else 0
