"""What is wrong with a run, before a model is loaded.

Both trainers start with it; `molt check` and `molt rl` add `advice.py`. Takes seconds: no
engine, no Ray, no weights.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.load import load_runner
from molt.chat.chat_renderer import load_chat_renderer
from molt.chat.render import Renderer, load_tokenizer
from molt.chat.round_trip import check_round_trip
from molt.config import CkptConfig, FsdpConfig, ModelConfig, RefConfig, RLConfig
from molt.data.prompts import PromptDataset
from molt.data.rows import DropReport, Rows, load_rows
from molt.errors import CheckpointError, ConfigError, DataError, MoltError, UnusableRow
from molt.rules import ESTIMATOR_RULES, ESTIMATOR_WARNINGS, EVAL_RULES, EVAL_WARNINGS, RULES, WARNINGS, Rule, broken

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
    trains, found = not config.eval.eval_only, Findings()
    estimator = check_algorithm(found, config) if trains else None
    found = check_settings(config, *((RULES, WARNINGS) if trains else (EVAL_RULES, EVAL_WARNINGS)), found)
    device = check_device(found, config.fsdp, trains=trains)
    on_cpu = device is not None and device.type == "cpu"
    tokenizer = check_model(found, config, config.actor, "actor", cpu_engine=on_cpu, trains=trains)
    if estimator is not None:
        check_scoring_models(found, config, estimator, tokenizer)
    if config.train.agent_path and (runner := found.attempt(load_runner, config.train.agent_path)):
        found.add("ok", f"agent: {config.train.agent_path} can be run")
        if isinstance(runner, ChatAgentRunner) and tokenizer:
            found.attempt(_check_chat, found, config)
    if trains and config.data.prompt_dataset:
        found.attempt(_check_prompts, found, config, "data.prompt_dataset", first_prompts, tokenizer)
    if config.eval.dataset:
        found.attempt(_check_prompts, found, config, "eval.dataset", first_held_out, tokenizer)
    return found


def _check_chat(found: Findings, config: RLConfig) -> None:
    """Whether a `ChatAgent` can talk to the model, and how its conversations become ids."""
    if not config.data.apply_chat_template:
        raise ConfigError(
            f"`data.apply_chat_template` (=False) with `train.agent_path` (={config.train.agent_path}): a ChatAgent "
            "talks in messages, so plain prompts would reach no client. Pass --data.apply_chat_template."
        )
    retention = config.rollout.thinking_retention
    model, template = config.actor.model_name_or_path, config.data.chat_template
    renderer = load_chat_renderer(model, template, thinking_retention=retention)
    found.add("warning", *check_round_trip(renderer, tools=config.data.tools_key is not None))
    found.add("ok", f"chat: rendered and parsed as {renderer.family or 'the template says'}")


def check_or_raise(config: Any, checks: Callable[[Any], Findings] = static_checks) -> Findings:
    """For trainers: the findings if none is an error, else one MoltError with all errors."""
    found = checks(config)
    if found.errors:
        raise MoltError("\n".join(found.errors))
    return found


def check_algorithm(found: Findings, config: RLConfig) -> Any:
    """The estimator, or None; adds what is wrong with it or its settings, or with a loss of the user's."""
    from molt.algo.plugin import load_estimator, load_loss

    if config.algo.loss and ":" in config.algo.loss:
        found.attempt(load_loss, config.algo.loss)
    estimator = found.attempt(load_estimator, config.algo.advantage.estimator)
    if estimator is not None:
        found.add("error", *broken(ESTIMATOR_RULES, config, estimator))
        found.add("warning", *broken(ESTIMATOR_WARNINGS, config, estimator))
    return estimator


def check_settings(config: Any, rules: list[Rule], warnings: list[Rule], found: Sequence = ()) -> Findings:
    """The rules and, unless the run only evaluates and writes nothing, the output directory; after what is `found`."""
    found = Findings(found)
    found.add("error", *broken(rules, config))
    if not found.errors:
        found.add("ok", "settings: all rules hold")
    found.add("warning", *broken(warnings, config))
    if not getattr(config.eval, "eval_only", False):
        found.attempt(check_output_dir, config.ckpt)
    return found


def check_device(found: Findings, fsdp: FsdpConfig, *, trains: bool = True) -> Any:
    """The torch device, or None; adds what is wrong with it, or with the attention that the trainer would run on it."""
    from molt.models.build import attention_implementation
    from molt.parallel.mesh import resolve_device

    device = found.attempt(resolve_device, fsdp.device)
    if device is not None and trains:
        found.attempt(attention_implementation, fsdp, device)
    return device


def check_output_dir(ckpt: CkptConfig) -> None:
    """Raise if the run could not be written, or would be mixed with another one."""
    there = nearest_existing(ckpt.output_dir)
    if not there.is_dir() or not _writable(there):
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


def _writable(folder: Path) -> bool:
    # Asking for permission is not enough: root has it on a file system that takes no files.
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _tokenizer(path: str, chat_template: str | None, flag: str) -> Any:
    """As `load_tokenizer`; of a training checkpoint it says so and names the nearest model of its run."""
    folder = Path(path).resolve()
    if not re.fullmatch(r"step_\d+", folder.name) or not folder.is_dir() or (folder / "config.json").is_file():
        return load_tokenizer(path, chat_template, flag=flag)
    output = folder.parent.parent
    models = [model for model in (folder / "hf", output / "best", output) if (model / "config.json").is_file()]
    fix = f"Use --{flag} {models[0]}" if models else "Let the run end, or pass --ckpt.save_hf to it"
    raise ConfigError(
        f"`{flag}` (={path}) is a training checkpoint (shards and optimizer state), not a Hugging Face model, so it "
        f"cannot be loaded. {fix}."
    )


def check_model(
    found: Findings, config: Any, model: ModelConfig | RefConfig, section: str, *, cpu_engine: bool, trains: bool = True
) -> Any:
    """The tokenizer, or None; adds what the model's configuration says against the settings."""
    from molt.models.build import load_config
    from molt.models.load_balance import refuse_balance

    path, flag = model.model_name_or_path, f"{section}.model_name_or_path"
    if not path or (tokenizer := found.attempt(_tokenizer, path, config.data.chat_template, flag)) is None:
        return None
    fsdp = config.fsdp if trains else None
    if (known := found.attempt(load_config, path, config.data.max_len, flag=flag, fsdp=fsdp)) is not None:
        if trains and (coefficient := getattr(model, "aux_loss_coef", 0)):
            found.attempt(refuse_balance, known, f"`{section}.aux_loss_coef` (={coefficient:g})")
        of_text = known.get_text_config()
        heads = getattr(of_text, "num_attention_heads", None)
        head = getattr(of_text, "head_dim", None) or (heads and of_text.hidden_size // heads)
        if cpu_engine and head and head not in CPU_HEAD_SIZES:
            found.add(
                "error",
                f"`{flag}` (={path}): its attention heads have size {head}, so the CPU engine would die at the first "
                f"request. Use a model with size {', '.join(map(str, CPU_HEAD_SIZES))}.",
            )
        else:
            found.add("ok", f"model: {known.model_type} at {path}")
    return tokenizer


def check_scoring_models(found: Findings, config: RLConfig, estimator: Any, tokenizer: Any) -> None:
    """Adds what is wrong with a reference and a critic that are used and are not the actor's model."""
    models = {"ref": config.ref} if config.algo.reads_reference_model else {}
    models |= {"critic": config.critic} if "values" in estimator.needs else {}
    for section, model in models.items():
        path, actor = model.model_name_or_path, config.actor.model_name_or_path
        if path in ("", actor):
            continue
        other = check_model(found, config, model, section, cpu_engine=False)
        if tokenizer and other and (differ := tokenizer.get_vocab().items() ^ other.get_vocab().items()):
            found.add(
                "error",
                f"`{section}.model_name_or_path` (={path}) has another vocabulary than `actor.model_name_or_path` "
                f"(={actor}), first at id {min(i for _, i in differ)}: the ids of a rollout are another text there, so "
                "its numbers would be of that text. Use a model with the actor's tokenizer.",
            )


def first_rows(
    paths: str, flag: str, split: str, max_samples: int | None = None, *, mixed: bool = False, most: int = MOST_ROWS
) -> Rows:
    """As `load_rows`, but at most `most` rows: of each dataset, if all of them are used."""
    each = mixed or max_samples is None
    return load_rows(paths, flag=flag, split=split, max_samples=min(max_samples or most, most), each=each)


def first_prompts(config: RLConfig) -> Rows:
    data = config.data
    mixed = data.prompt_probs is not None
    return first_rows(data.prompt_dataset, "data.prompt_dataset", data.prompt_split, data.max_samples, mixed=mixed)


def first_held_out(config: Any) -> Rows:
    return first_rows(config.eval.dataset, "eval.dataset", config.eval.split)


def _check_prompts(
    found: Findings, config: RLConfig, flag: str, load: Callable[[RLConfig], Rows], tokenizer: Any
) -> None:
    data, dataset = config.data, PromptDataset(load(config), config.data)
    renderer = tokenizer and Renderer(tokenizer, apply_chat_template=data.apply_chat_template)
    looked_at = _first_of_each(dataset.rows.sizes)
    report = DropReport(len(looked_at))
    for i in looked_at:
        try:
            prompt = dataset.prompt(i)
            if renderer and len(renderer.prompt_ids(prompt)) >= data.max_len:
                raise UnusableRow(f"not shorter than `data.max_len` (={data.max_len}); raise it to use them")
        except UnusableRow as error:
            report.add(i, error)
    if report.dropped == report.total:
        raise DataError(
            f"`{flag}` (={attrgetter(flag)(config)}): no prompt is left. {report.message()} Or name the column that "
            f"holds the prompts with `data.input_key` (={data.input_key})."
        )
    if renderer:
        add_rows(found, f"prompts of {flag}", report)


def _first_of_each(sizes: list[int]) -> list[int]:
    """The numbers of the first rows of each dataset, `LOOK_ROWS` in all."""
    most = max(1, LOOK_ROWS // len(sizes))
    starts = accumulate([0, *sizes[:-1]])
    return [start + i for start, size in zip(starts, sizes, strict=True) for i in range(min(size, most))]


def add_rows(found: Findings, what: str, report: DropReport) -> None:
    """Which of the first rows can be used, from their DropReport."""
    if report.dropped:
        found.add("warning", f"{what}: {report.message()}")
    found.add("ok", f"{what}: {report.total - report.dropped:,} of the first {report.total:,} rows can be used")


def show(found: Findings) -> None:
    """Print the report, one finding a line."""
    for level, text in found:
        Console().print(Text.assemble((f"{level:<9}", COLOURS[level]), text), soft_wrap=True)
