"""What is wrong with a run, before a model is loaded.

Both trainers start with it; `molt check` and `molt rl` add `advice.py`. Takes seconds: no
engine, no Ray, no weights.
"""

import asyncio
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.text import Text

from molt import rules
from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.load import load_runner, scorer_of
from molt.agents.scheme import load_scheme
from molt.algo.plugin import load_estimator
from molt.algorithm import Algorithm, policy_loss
from molt.chat.chat_renderer import load_chat_renderer
from molt.chat.render import Renderer, for_template, load_tokenizer, render_text
from molt.chat.round_trip import check_round_trip
from molt.chat.shown import Part, hidden_parts, ignored_keys
from molt.cli.environment import check_environment
from molt.cli.findings import Findings, Level
from molt.cli.model_directory import ModelDirectory, doubts, new_end, require_exportable, without_end
from molt.cli.model_size import model_size
from molt.cli.places import Place, check_rl_places, check_writable
from molt.config import CkptConfig, FsdpConfig, RLConfig
from molt.data.mixture import EpochOrder
from molt.data.prompts import PromptDataset
from molt.data.rows import DropReport, Rows, load_rows, require_column
from molt.errors import CheckpointError, ConfigError, DataError, MoltError, UnusableRow, did_you_mean, plural
from molt.records.leftovers import holds_run
from molt.roles import roles
from molt.rules import RL
from molt.setting import name_of
from molt.types import Prompt

if TYPE_CHECKING:  # `molt check` imports them when it needs them
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from molt.rollout.scorer_pool import ScorerFacts

COLOURS = {"error": "bold red", "warning": "yellow", "ok": "green"}
NOT_READ = "Put it into the messages, or remove the column."
UNREAD_COLUMNS = {
    "tools": "Pass --data.tools_key tools, or remove the column.",
    "functions": "Pass --data.tools_key with a column of tool schemas, or remove the column.",
    "parallel_tool_calls": NOT_READ,
    "chat_template_kwargs": "Set them in the template of `data.chat_template`, or remove the column.",
    "system": NOT_READ,
    "history": NOT_READ,
    "image": NOT_READ,
    "images": NOT_READ,
    "audio": NOT_READ,
    "videos": NOT_READ,
    "weight": "All rows weigh alike: repeat rows instead, or remove the column.",
}
"""Columns that other trainers read, and what to do about one that no setting names."""
LOOK_ROWS = 1_000
"""Rows that are rendered."""
MOST_ROWS = 20_000
"""Rows that are read."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""The sizes of vLLM's CPU attention; with another size an engine starts and dies at the first request."""

Config = TypeVar("Config")


def static_checks(config: RLConfig) -> Findings:
    """Everything found about an RL run, errors included; never raises for what is wrong with the settings."""
    if config.eval.eval_only:
        return evaluation_checks(config)
    return training_checks(config)


def training_checks(config: RLConfig) -> Findings:
    """Everything found about a training run."""
    found = Findings()
    algorithm = load_algorithm(found, config)
    add_rules(found, rules.errors("rl", config, algorithm), rules.warnings("rl", config, algorithm))
    found.attempt(check_output_dir, config.ckpt)
    check_rl_places(found, config)

    device = check_device(found, config.fsdp)
    found.extend(check_environment(os.environ, weights_in_shared_memory(config, device)))
    if device is not None:
        found.attempt(check_attention, config.fsdp, device)
    tokenizer = check_policy(found, config, device, config.fsdp)
    if algorithm is not None:
        check_scoring_models(found, config, algorithm, tokenizer, device)
    check_agent(found, config, tokenizer)
    check_scheme(found, config)
    check_scorer(found, config)

    prompts = found.attempt(first_prompts, config) if config.data.prompt_dataset else None
    held_out = found.attempt(first_held_out, config) if config.eval.dataset else None
    check_datasets(found, config, [prompts, held_out], tokenizer)
    has_usable_shares = rules.shares_mix_the_datasets(config) is None
    if prompts is not None and has_usable_shares and config.train.rollout_replay_dir is None:
        found.attempt(check_steps, found, config, prompts.rows)
    return found


def evaluation_checks(config: RLConfig) -> Findings:
    """Everything found about an evaluation, which trains and writes nothing."""
    found = Findings()
    add_rules(found, rules.errors("eval", config), rules.warnings("eval", config))
    device = check_device(found, config.fsdp)
    found.extend(check_environment(os.environ))
    tokenizer = check_policy(found, config, device, fsdp=None)
    check_agent(found, config, tokenizer)
    check_scorer(found, config)
    held_out = found.attempt(first_held_out, config) if config.eval.dataset else None
    check_datasets(found, config, [held_out], tokenizer)
    return found


def check_or_raise(config: Config, checks: Callable[[Config], Findings]) -> Findings:
    """For trainers: the findings if none is an error, else one MoltError with all errors."""
    found = checks(config)
    if found.errors:
        raise MoltError("\n".join(found.errors))
    return found


# Settings, device, output.


def add_rules(found: Findings, errors: Sequence[str], warnings: Sequence[str]) -> None:
    """Add the messages of the rules."""
    found.add("error", *errors)
    if not found.errors:
        found.add("ok", "settings: all rules hold")
    found.add("warning", *warnings)


def load_algorithm(found: Findings, config: RLConfig) -> Algorithm | None:
    """The estimator and the loss that the settings name; None if one of them cannot be used."""
    estimator = found.attempt(load_estimator, config.algo.advantage.estimator)
    loss = None
    if rules.one_loss(config) is None:  # else that rule says what is wrong
        loss = found.attempt(policy_loss, config.algo, config.actor)
    if estimator is None or loss is None:
        return None
    return Algorithm(estimator, loss, config.algo, config.actor)


def check_device(found: Findings, fsdp: FsdpConfig) -> "torch.device | None":
    """The device that would be used, or None if it is not there."""
    from molt.parallel.mesh import resolve_device

    return found.attempt(resolve_device, fsdp.device)


def weights_in_shared_memory(config: RLConfig, device: "torch.device | None") -> int:
    """The bytes that each weight sync writes there: engines on a CPU map the weights of the trainer."""
    on_cpu = device is not None and device.type == "cpu"
    by_files = config.vllm.weight_transfer in ("auto", "shm")
    if not on_cpu or not by_files or config.train.rollout_replay_dir is not None:
        return 0
    dtype = config.vllm.dtype
    if dtype == "auto":
        dtype = config.fsdp.param_dtype or "fp32"
    parameter_bytes = 4 if dtype == "fp32" else 2
    return model_size(config.actor.model_name_or_path).parameters * parameter_bytes


def check_attention(fsdp: FsdpConfig, device: "torch.device") -> None:
    """Raise if the device cannot run the attention that trains."""
    from molt.models.backends.choice import attention_implementation

    attention_implementation(fsdp, device)


def check_output_dir(ckpt: CkptConfig) -> None:
    """Raise if the run could not be written, or would be mixed with another one."""
    check_writable(Place(RL.ckpt.output_dir, ckpt.output_dir))
    if holds_run(ckpt) and not ckpt.load_enable:
        raise CheckpointError(
            f"`ckpt.output_dir` (={ckpt.output_dir}) holds a run, which would be overwritten. Pass --ckpt.load_enable "
            "to resume it, or another --ckpt.output_dir."
        )


# Models.


def check_policy(
    found: Findings, config: RLConfig, device: "torch.device | None", fsdp: FsdpConfig | None
) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of the policy, or None. fsdp: how the model would be trained; None: it is not."""
    setting = RL.actor.model_name_or_path
    path = config.actor.model_name_or_path
    tokenizer = check_tokenizer(found, setting, path, config.data.chat_template)
    if tokenizer is None:
        return None

    description = check_description(found, setting, path, config.data.max_len, fsdp)
    if description is None:
        return tokenizer
    directory = ModelDirectory(
        flag=name_of(setting),
        path=path,
        tokenizer=tokenizer,
        chats=config.data.apply_chat_template,
        exports=fsdp is not None,
    )
    found.attempt(check_directory, found, directory, endless="warning")
    if fsdp is not None:
        check_balance(found, RL.actor.aux_loss_coef, config.actor.aux_loss_coef, description)
        check_packing(found, setting, path, description, fsdp, device)
    head_size = attention_head_size(description)
    if device is not None and device.type == "cpu" and head_size not in (None, *CPU_HEAD_SIZES):
        usable_sizes = ", ".join(str(size) for size in CPU_HEAD_SIZES)
        found.add(
            "error",
            f"`{name_of(setting)}` (={path}): its attention heads have size {head_size}, so the CPU engine would die "
            f"at the first request. Use a model with size {usable_sizes}.",
        )
    else:
        found.add("ok", f"model: {description.model_type} at {path}")
    return tokenizer


def check_directory(found: Findings, directory: ModelDirectory, *, endless: Level) -> None:
    """Add what does not fit together in a model's directory. Raises MoltError if no run could use it.

    endless: how bad it is that nothing ends an answer.
    """
    problem = without_end(directory)
    if problem is not None:
        found.add(endless, problem)
    end = new_end(directory)
    if end is not None:
        found.add("ok", end)
    found.add("warning", *doubts(directory))
    if directory.exports:
        require_exportable(directory)


def check_trained_model(
    found: Findings,
    setting: object,
    path: str,
    chat_template: str | None,
    max_len: int,
    fsdp: FsdpConfig,
    device: "torch.device | None",
) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a model that no engine loads, or None."""
    tokenizer = check_tokenizer(found, setting, path, chat_template)
    if tokenizer is None:
        return None
    description = check_description(found, setting, path, max_len, fsdp)
    if description is not None:
        check_packing(found, setting, path, description, fsdp, device)
        found.add("ok", f"model: {description.model_type} at {path}")
    return tokenizer


def check_tokenizer(
    found: Findings, setting: object, path: str, chat_template: str | None
) -> "PreTrainedTokenizerBase | None":
    """The tokenizer, or None."""
    if not path:
        return None
    return found.attempt(_tokenizer, path, chat_template, name_of(setting))


def _tokenizer(path: str, chat_template: str | None, flag: str) -> "PreTrainedTokenizerBase":
    """As `load_tokenizer`; of a training checkpoint it says so and names the nearest model of its run."""
    folder = Path(path).resolve()
    is_checkpoint = re.fullmatch(r"step_\d+", folder.name) and folder.is_dir()
    if not is_checkpoint or (folder / "config.json").is_file():
        return load_tokenizer(path, chat_template, flag=flag)

    output = folder.parent.parent
    models = [model for model in (folder / "hf", output / "best", output) if (model / "config.json").is_file()]
    if models:
        fix = f"Use --{flag} {models[0]}"
    else:
        fix = "Let the run end, or pass --ckpt.save_hf to it"
    raise ConfigError(
        f"`{flag}` (={path}) is a training checkpoint (shards and optimizer state), not a Hugging Face model, so it "
        f"cannot be loaded. {fix}."
    )


def check_description(
    found: Findings, setting: object, path: str, max_len: int, fsdp: FsdpConfig | None
) -> "PreTrainedConfig | None":
    """The configuration in the model directory, or None if the model cannot be used."""
    from molt.models.description import load_config

    return found.attempt(load_config, path, max_len, flag=name_of(setting), fsdp=fsdp)


def check_balance(found: Findings, setting: object, coefficient: float, description: "PreTrainedConfig") -> None:
    """Add an error if there are no experts to balance."""
    from molt.models.load_balance import refuse_balance

    if coefficient > 0:
        found.attempt(refuse_balance, description, f"`{name_of(setting)}` (={coefficient:g})")


def check_packing(
    found: Findings,
    setting: object,
    path: str,
    description: "PreTrainedConfig",
    fsdp: FsdpConfig,
    device: "torch.device | None",
) -> None:
    """Add an error if samples are packed and the model would not keep them apart."""
    if not fsdp.packing_samples or device is None:
        return
    from molt.models.packing import refuse_packing  # it imports model classes, which takes seconds

    found.attempt(refuse_packing, description, fsdp, device, f"`{name_of(setting)}` (={path})")


def attention_head_size(description: "PreTrainedConfig") -> int | None:
    """None if the configuration does not say."""
    text_config = description.get_text_config()
    head_size = getattr(text_config, "head_dim", None)
    heads = getattr(text_config, "num_attention_heads", None)
    if head_size is None and heads:
        head_size = text_config.hidden_size // heads
    return head_size


def check_scoring_models(
    found: Findings,
    config: RLConfig,
    algorithm: Algorithm,
    tokenizer: "PreTrainedTokenizerBase | None",
    device: "torch.device | None",
) -> None:
    """Add what is wrong with a reference and a critic that are used and are not the actor's model."""
    settings: dict[str, object] = {
        "reference": RL.ref.model_name_or_path,
        "critic": RL.critic.model_name_or_path,
    }
    policy, *others = roles(config, algorithm)
    actor = policy.model
    for role in others:
        setting = settings[role.name]
        path = role.model
        if path == actor:
            continue
        other = check_trained_model(
            found, setting, path, config.data.chat_template, config.data.max_len, config.fsdp, device
        )
        if tokenizer is None or other is None:
            continue
        different = tokenizer.get_vocab().items() ^ other.get_vocab().items()
        if different:
            first_id = min(token_id for _, token_id in different)
            found.add(
                "error",
                f"`{name_of(setting)}` (={path}) has another vocabulary than `actor.model_name_or_path` (={actor}), "
                f"first at id {first_id}: the ids of a rollout are another text there, so its numbers would be of that "
                "text. Use a model with the actor's tokenizer.",
            )


# The agent.


def check_agent(found: Findings, config: RLConfig, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Add whether the agent file imports, and whether its agent can talk to the model."""
    path = config.train.agent_path
    if not path:
        return
    runner = found.attempt(load_runner, path)
    if runner is None:
        return
    found.add("ok", f"agent: {path} imports")
    if tokenizer is None:
        return
    if isinstance(runner, ChatAgentRunner):
        found.attempt(_check_chat, found, config)
    elif config.data.tools_key is not None and config.data.apply_chat_template:
        found.attempt(_check_rendering, found, config)


def check_scheme(found: Findings, config: RLConfig) -> None:
    """Add whether the file of a scheme imports."""
    path = config.rollout.scheme
    if path is not None and found.attempt(load_scheme, path) is not None:
        found.add("ok", f"scheme: {path} imports")


def _check_chat(found: Findings, config: RLConfig) -> None:
    """Whether a `ChatAgent` can talk to the model, and how its conversations become ids."""
    if not config.data.apply_chat_template:
        raise ConfigError(
            f"`data.apply_chat_template` (=False) with `train.agent_path` (={config.train.agent_path}): a ChatAgent "
            "talks in messages, so plain prompts would reach no client. Pass --data.apply_chat_template."
        )
    _check_rendering(found, config)


def _check_rendering(found: Findings, config: RLConfig) -> None:
    """Whether conversations, with calls where tools are offered, are read as the template writes them."""
    renderer = load_chat_renderer(
        config.actor.model_name_or_path,
        config.data.chat_template,
        thinking_retention=config.rollout.thinking_retention,
    )
    found.add("warning", *check_round_trip(renderer, tools=config.data.tools_key is not None))
    found.add("ok", f"chat: rendered and parsed as {renderer.family or 'the template says'}")


def check_scorer(found: Findings, config: RLConfig) -> None:
    """Add whether the scorer can be loaded in a process of its own; nothing where the agent gives the reward."""
    path = scorer_of(config.train.agent_path, config.reward.scorer)
    if path is None or config.train.rollout_replay_dir is not None:
        return
    facts = found.attempt(_inspect_scorer, path)
    if facts is None:
        return
    found.add("ok", f"scorer: {path} loads; its reward replaces the agent's")
    if facts.wants_judge and config.reward.cache_dir is not None:
        found.add(
            "warning",
            f"`reward.cache_dir` (={config.reward.cache_dir}) with the judge of {path}: what a judge says depends on "
            "the weights, but kept scores do not, so they may be those of older weights. Drop --reward.cache_dir if "
            "that matters.",
        )


def _inspect_scorer(path: str) -> "ScorerFacts":
    from molt.rollout.scorer_pool import inspect_scorer

    return asyncio.run(inspect_scorer(path))


# Datasets.


@dataclass(frozen=True)
class Dataset:
    """The first rows of the datasets that a setting names."""

    setting: object
    paths: str
    rows: Rows

    @property
    def label(self) -> str:
        return f"`{name_of(self.setting)}` (={self.paths})"


@dataclass(frozen=True)
class Column:
    """A column that a setting names."""

    setting: object
    name: str
    everywhere: bool = True
    """Every file must have it, not only one."""


def first_rows(
    paths: str, flag: str, split: str, max_samples: int | None = None, *, mixed: bool = False, most: int = MOST_ROWS
) -> Rows:
    """As `load_rows`, but at most `most` rows: of each dataset, if all of them are used."""
    each = mixed or max_samples is None
    return load_rows(paths, flag=flag, split=split, max_samples=min(max_samples or most, most), each=each)


def first_prompts(config: RLConfig, most: int = MOST_ROWS) -> Dataset:
    """The prompts of training, `most` of each dataset. Raises DataError."""
    data = config.data
    rows = first_rows(
        data.prompt_dataset,
        "data.prompt_dataset",
        data.prompt_split,
        data.max_samples,
        mixed=data.prompt_probs is not None,
        most=most,
    )
    return Dataset(RL.data.prompt_dataset, data.prompt_dataset, rows)


def first_held_out(config: RLConfig, most: int = MOST_ROWS) -> Dataset:
    """The prompts of the evaluation, `most` of each dataset. Raises DataError."""
    paths = config.eval.dataset or ""
    rows = first_rows(paths, "eval.dataset", config.eval.split, most=most)
    return Dataset(RL.eval.dataset, paths, rows)


def check_unread_columns(found: Findings, datasets: Sequence[Dataset], read: Sequence[str]) -> None:
    """Add a warning for each column that means something to a conversation and that no setting reads."""
    for dataset in datasets:
        for name in dataset.rows.columns:
            fix = UNREAD_COLUMNS.get(name)
            if fix is None or name in read:
                continue
            rows = [number for number in _first_of_each(dataset.rows.sizes) if dataset.rows[number].get(name)]
            if rows:
                found.add(
                    "warning",
                    f"{dataset.label}: the column `{name}` (in {plural(len(rows), 'row')}, first row {rows[0]}) is not "
                    f"read, so the model is not shown it. {fix}",
                )


def check_datasets(
    found: Findings,
    config: RLConfig,
    datasets: Sequence[Dataset | None],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    """Look at the columns of the datasets, and at their first rows if the columns are there."""
    loaded = [dataset for dataset in datasets if dataset is not None]
    columns = [Column(RL.data.input_key, config.data.input_key)]
    if config.data.label_key is not None:
        columns.append(Column(RL.data.label_key, config.data.label_key))
    if config.data.tools_key is not None:
        columns.append(Column(RL.data.tools_key, config.data.tools_key, everywhere=False))

    if has_columns(found, loaded, columns):
        check_unread_columns(found, loaded, [column.name for column in columns])
        for dataset in loaded:
            found.attempt(_check_prompts, found, config, dataset, tokenizer)


def has_columns(found: Findings, datasets: Sequence[Dataset], columns: Sequence[Column]) -> bool:
    """Whether the datasets have the columns. A missing one is one error, which names all datasets that lack it."""
    missing = [message for column in columns for message in _missing(column, datasets)]
    found.add("error", *missing)
    return not missing


def _missing(column: Column, datasets: Sequence[Dataset]) -> Iterator[str]:
    lacking = [dataset for dataset in datasets if column.name not in dataset.rows.columns]
    if lacking:
        labels = " and ".join(dataset.label for dataset in lacking)
        has = "has" if len(lacking) == 1 else "have"
        known = list(lacking[0].rows.columns)
        yield (
            f"`{name_of(column.setting)}` (={column.name}): {labels} {has} no such column, so no row could be used."
            f"{did_you_mean(column.name, known)} Use one of: {', '.join(known)}."
        )
        return
    for dataset in datasets:
        try:
            require_column(dataset.rows, column.name, name_of(column.setting), everywhere=column.everywhere)
        except DataError as error:  # some files have it
            yield str(error)


def _check_prompts(
    found: Findings, config: RLConfig, dataset: Dataset, tokenizer: "PreTrainedTokenizerBase | None"
) -> None:
    data = config.data
    from molt.models.description import model_embedding_rows

    prompts = PromptDataset(dataset.rows, data)
    renderer = None
    if tokenizer is not None:
        renderer = Renderer(
            tokenizer,
            apply_chat_template=data.apply_chat_template,
            embedding_rows=model_embedding_rows(config.actor.model_name_or_path),
        )

    numbers = _first_of_each(dataset.rows.sizes)
    report = DropReport(len(numbers))
    lengths: dict[int, int] = {}  # of the prompts that can be used, in tokens, by row
    for number in numbers:
        try:
            prompt = prompts.prompt(number)
            if renderer is not None:
                lengths[number] = _usable_length(renderer.prompt_ids(prompt), data.max_len)
                for part in hidden_of_prompt(tokenizer, prompt):
                    report.hide(number, part)
        except UnusableRow as error:
            report.add(number, error)

    if report.dropped == report.total:
        raise DataError(
            f"{dataset.label}: no prompt is left. {report.message()} Or name the column that "
            f"holds the prompts with `data.input_key` (={data.input_key})."
        )
    if renderer is not None:
        add_rows(found, f"prompts of {name_of(dataset.setting)}", report)
        _check_room(found, config, dataset, lengths)


def hidden_of_prompt(tokenizer: "PreTrainedTokenizerBase | None", prompt: Prompt) -> Iterator[str]:
    """What of a prompt the chat template does not show. Templates drop earlier reasoning: it is not counted."""
    if prompt.messages is None:
        return
    messages = for_template(tokenizer, prompt.messages, prompt.tools)
    for hidden in hidden_parts(tokenizer, messages, prompt.tools):
        if hidden.part is not Part.REASONING:
            yield str(hidden)
    text = render_text(tokenizer, messages, tools=prompt.tools)
    for key in ignored_keys(tokenizer, messages, prompt.tools, text=text):
        yield f"the key `{key}` of messages"


def _usable_length(prompt_ids: list[int], max_len: int) -> int:
    """Its tokens. Raises `UnusableRow` if they leave no room for an answer."""
    length = len(prompt_ids)
    if length >= max_len:
        raise UnusableRow(f"not shorter than `data.max_len` (={max_len}); raise it to use them")
    return length


def _check_room(found: Findings, config: RLConfig, dataset: Dataset, lengths: dict[int, int]) -> None:
    """Add a warning if an answer of the longest that is allowed would not fit. lengths: of the prompts, by row."""
    name = name_of(RL.rollout.max_new_tokens)
    longest_answer = config.rollout.max_new_tokens
    is_evaluated = name_of(dataset.setting) == name_of(RL.eval.dataset)
    if is_evaluated and config.eval.max_new_tokens is not None:
        name = name_of(RL.eval.max_new_tokens)
        longest_answer = config.eval.max_new_tokens
    if longest_answer is None or not lengths:
        return
    max_len = config.data.max_len
    tight = [row for row, length in lengths.items() if max_len - length < longest_answer]
    if not tight:
        return
    row = max(tight, key=lengths.__getitem__)
    found.add(
        "warning",
        f"prompts of {name_of(dataset.setting)}: {len(tight):,} of the first {len(lengths):,} leave less of "
        f"`data.max_len` (={max_len}) than `{name}` (={longest_answer}): row {row} has {lengths[row]:,} tokens, which "
        f"leaves {max_len - lengths[row]:,} for the whole episode, so its answers are cut. Use --data.max_len "
        f"{lengths[row] + longest_answer} or more, or a smaller --{name}.",
    )


def _first_of_each(sizes: list[int]) -> list[int]:
    """The numbers of the first rows of each dataset, `LOOK_ROWS` in all."""
    most = max(1, LOOK_ROWS // len(sizes))
    starts = accumulate([0, *sizes[:-1]])
    numbers: list[int] = []
    for start, size in zip(starts, sizes, strict=True):
        numbers.extend(range(start, start + min(size, most)))
    return numbers


def add_rows(found: Findings, what: str, report: DropReport) -> None:
    """Which of the first rows can be used, from their DropReport."""
    if report.dropped:
        found.add("warning", f"{what}: {report.message()}")
    if report.hidden_message():
        found.add("warning", f"{what}: {report.hidden_message()}")
    found.add("ok", f"{what}: {report.total - report.dropped:,} of the first {report.total:,} rows can be used")


def check_steps(found: Findings, config: RLConfig, rows: Rows) -> None:
    """Add how many training batches the prompts are. Raises DataError if they cannot be mixed."""
    order = EpochOrder(rows.sizes, seed=config.train.seed, shares=config.data.prompt_probs, flag="data.prompt_probs")
    passes = config.train.num_episodes
    batch_size = config.rollout.batch_size
    plan = StepPlan(
        rows=len(order),
        rows_are_cut=is_cut(rows, config.data.max_samples),
        passes=passes,
        batch_size=batch_size,
        steps=math.ceil(len(order) * passes / batch_size),
        max_steps=config.train.max_steps,
    )
    add_steps(found, plan, RL.rollout.batch_size)


@dataclass(frozen=True)
class StepPlan:
    """How many steps the rows of a dataset are."""

    rows: int
    rows_are_cut: bool
    """There may be more rows than were read."""
    passes: int
    batch_size: int
    steps: int
    max_steps: int | None


def is_cut(rows: Rows, max_samples: int | None) -> bool:
    """Whether there may be more rows than the first that were read."""
    return max(rows.sizes) >= MOST_ROWS and (max_samples is None or max_samples > MOST_ROWS)


def add_steps(found: Findings, plan: StepPlan, batch_setting: object) -> None:
    """Add "N rows / B = S steps", and a warning if the rows do not fill a batch."""
    rows = plural(plan.rows, "row")
    at_least = "at least " if plan.rows_are_cut else ""
    passes = f" x {plan.passes} passes" if plan.passes > 1 else ""
    text = f"steps: {at_least}{rows}{passes} / {plan.batch_size:,} = {at_least}{plural(plan.steps, 'step')}"
    if plan.max_steps is not None and (plan.rows_are_cut or plan.max_steps < plan.steps):
        text += f", ended by `train.max_steps` (={plan.max_steps})"
    found.add("ok", text)

    if plan.rows < plan.batch_size and not plan.rows_are_cut:
        name = name_of(batch_setting)
        found.add(
            "warning",
            f"`{name}` (={plan.batch_size}): the dataset has {rows}, which do not fill one batch. Use --{name} "
            f"{plan.rows} or less, or a dataset with more rows.",
        )


def show(found: Findings) -> None:
    """Print the report, one finding a line."""
    for finding in found:
        line = Text.assemble((f"{finding.level:<9}", COLOURS[finding.level]), finding.text)
        Console().print(line, soft_wrap=True)
