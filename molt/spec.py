"""What a run is, resolved from its settings before any process starts.

`resolve` reads datasets and looks at what earlier runs left on disk; it writes nothing, starts nothing and loads no
model. `molt check` calls it too, so what it refuses is known in seconds.
"""

import math
from dataclasses import dataclass, replace

import torch

from molt.algo.shaping import Shaping
from molt.algorithm import Algorithm, load_algorithm, reward_shaping
from molt.config import RLConfig
from molt.data.fingerprint import fingerprint
from molt.data.mixture import EpochOrder
from molt.data.prompts import PromptDataset, PromptStream
from molt.data.rows import DropReport, load_rows
from molt.errors import ConfigError, UnusableRow
from molt.parallel.mesh import resolve_device
from molt.records.state import refuse_other_run
from molt.roles import Role, roles
from molt.rollout.dump import PROMPTS, check_dump, dumped_batches
from molt.train.checkpoint import latest_checkpoint
from molt.types import EVALUATION_EPOCH, Json, Prompt


@dataclass(frozen=True)
class ProcessSpec:
    """The processes of a run besides its driver."""

    config: RLConfig
    device: torch.device
    num_engines: int
    """0 where the rollouts are replayed."""
    weight_transfer: str
    """`nccl`, `ipc` or `shm`."""
    roles: list[Role]
    """The models that ranks hold; none for an evaluation."""
    total_batches: int
    """Training batches of the whole run."""


@dataclass(frozen=True)
class HeldOut:
    """The prompts of evaluations."""

    prompts: list[Prompt]
    dropped: str = ""
    """Which rows cannot be used; "" if all can."""


@dataclass(frozen=True)
class RunSpec:
    """One run of asynchronous RL."""

    config: RLConfig
    algorithm: Algorithm
    processes: ProcessSpec
    stream: PromptStream
    held_out: HeldOut
    identity: Json
    """The settings that must be equal for a place in the prompt stream to mean the same prompt and group."""
    rows: Json
    """Fingerprints of the rows behind the places: `prompts`, `labels`, `evaluation rows`."""

    @property
    def total_batches(self) -> int:
        return self.processes.total_batches

    @property
    def dataset(self) -> str:
        """The setting of the training data and its value, for messages."""
        return f"`data.prompt_dataset` (={self.config.data.prompt_dataset})"

    @property
    def shaping(self) -> Shaping:
        return reward_shaping(self.config.reward, self.config.data.max_len)

    @property
    def checkpoint_identity(self) -> Json:
        """What must be equal to resume a checkpoint: a replay has no ledger, and other runs have no stored batches."""
        return self.identity | {"replay": self.config.train.rollout_replay_dir is not None}

    @property
    def dump_identity(self) -> Json:
        """What must be equal to replay stored batches."""
        return dump_identity(self.config, self.identity, self.rows)


@dataclass(frozen=True)
class EvaluationSpec:
    """One evaluation of a model that is on disk: `molt eval`."""

    config: RLConfig
    processes: ProcessSpec
    held_out: HeldOut


def resolve(config: RLConfig) -> RunSpec:
    """Raises a `MoltError` for what could not run: datasets, counts of steps, directories of another run."""
    algorithm = load_algorithm(config.algo, config.actor)
    stream = prompt_stream(config)
    identity = run_identity(config, stream)
    held_out = held_out_prompts(config)
    rows = row_fingerprints(config, stream, held_out)
    total_batches = _total_batches(config, stream, dump_identity(config, identity, rows))
    spec = RunSpec(
        config=config,
        algorithm=algorithm,
        processes=process_spec(config, roles(config, algorithm), total_batches),
        stream=stream,
        held_out=held_out,
        identity=identity,
        rows=rows,
    )
    _refuse_other_runs(spec)
    return spec


def resolve_evaluation(config: RLConfig) -> EvaluationSpec:
    """Raises a `MoltError` for what could not be evaluated."""
    return EvaluationSpec(config, process_spec(config, [], total_batches=0), held_out_prompts(config))


def prompt_stream(config: RLConfig) -> PromptStream:
    """The training prompts in the order of the run."""
    data = config.data
    rows = load_rows(
        data.prompt_dataset,
        flag="data.prompt_dataset",
        split=data.prompt_split,
        max_samples=data.max_samples,
        each=data.prompt_probs is not None,
    )
    order = EpochOrder(rows.sizes, seed=config.train.seed, shares=data.prompt_probs, flag="data.prompt_probs")
    return PromptStream(PromptDataset(rows, data), order, num_episodes=config.train.num_episodes)


def held_out_prompts(config: RLConfig) -> HeldOut:
    """The usable rows of `eval.dataset`, if there is one."""
    if config.eval.dataset is None:
        return HeldOut([])
    rows = load_rows(config.eval.dataset, flag="eval.dataset", split=config.eval.split)
    dataset = PromptDataset(rows, config.data)
    report = DropReport(len(rows))
    prompts = []
    for row in range(len(dataset)):
        try:
            prompts.append(replace(dataset.prompt(row), epoch=EVALUATION_EPOCH))
        except UnusableRow as error:
            report.add(row, error)
    if report.dropped:
        return HeldOut(prompts, f"eval.dataset: {report.message()}")
    return HeldOut(prompts)


def run_identity(config: RLConfig, stream: PromptStream) -> Json:
    """JSON-able; see `RunSpec.identity`."""
    return {
        **stream.order.identity,
        "seed": config.train.seed,
        "batch": config.rollout.batch_size,
        "group": config.rollout.n_samples_per_prompt,
    }


def row_fingerprints(config: RLConfig, stream: PromptStream, held_out: HeldOut) -> Json:
    """See `RunSpec.rows`; the evaluation has none without rows."""
    data = config.data
    rows = stream.dataset.rows
    fingerprints = {
        "prompts": fingerprint(rows, [data.input_key]),
        "labels": fingerprint(rows, [data.label_key, data.tools_key]),
    }
    if held_out.prompts:
        evaluated = [vars(prompt) for prompt in held_out.prompts]
        fingerprints["evaluation rows"] = fingerprint(evaluated, ["messages", "text", "label"])
    return fingerprints


def dump_identity(config: RLConfig, identity: Json, rows: Json) -> Json:
    """See `RunSpec.dump_identity`. `reward.mask_truncated` decides which groups a run replaces, so batches made without
    it are others; a dump of an older molt has no such key."""
    of_dump = identity | {PROMPTS: rows["prompts"]}
    if config.reward.mask_truncated:
        of_dump["mask_truncated"] = True
    return of_dump


def _total_batches(config: RLConfig, stream: PromptStream, of_dump: Json) -> int:
    """Training batches of the whole run. of_dump: what a dump that it replays must have been made with."""
    if config.train.rollout_replay_dir is not None:
        available = dumped_batches(config.train.rollout_replay_dir, of_dump)
    else:
        available = math.ceil(len(stream) / config.rollout.batch_size)
    total = available
    if config.train.max_steps is not None:
        total = min(config.train.max_steps, available)
    if 0 < total <= config.actor.freezing_steps:
        raise ConfigError(
            f"`actor.freezing_steps` (={config.actor.freezing_steps}) with {total} steps in all: the policy would "
            f"never be trained. Use a value below {total}, or more prompts or steps."
        )
    return total


def process_spec(config: RLConfig, models: list[Role], total_batches: int) -> ProcessSpec:
    """The processes for these models; `[]` for an evaluation."""
    device = resolve_device(config.fsdp.device)
    replays = config.train.rollout_replay_dir is not None
    return ProcessSpec(
        config=config,
        device=device,
        num_engines=0 if replays else config.vllm.num_engines,
        weight_transfer=_weight_transfer(config.vllm.weight_transfer, device),
        roles=models,
        total_batches=total_batches,
    )


def _weight_transfer(setting: str, device: torch.device) -> str:
    on_cpu = device.type == "cpu"
    if setting == "auto":
        return "shm" if on_cpu else "nccl"
    if on_cpu and setting in ("nccl", "ipc"):
        raise ConfigError(
            f"`vllm.weight_transfer` (={setting}) copies between GPUs, and there is none: no weights would arrive. "
            "Use auto."
        )
    return setting


def _refuse_other_runs(spec: RunSpec) -> None:
    """Raise if what this run would continue, or write into, belongs to another run."""
    config = spec.config
    if config.ckpt.load_enable:
        checkpoint = latest_checkpoint(config.ckpt.checkpoints)
        if checkpoint is not None:
            refuse_other_run(checkpoint, spec.checkpoint_identity, spec.rows, spec.dataset)
    if config.train.rollout_dump_dir is not None:
        check_dump(
            config.train.rollout_dump_dir,
            spec.dump_identity,
            resumes=config.ckpt.load_enable,
            output_dir=config.ckpt.output_dir,
        )
