"""One run as an object: its collaborators, and how far it is. `started` opens everything that the loop needs."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from molt import cluster
from molt.chat.render import Renderer, load_renderer
from molt.cluster import ActorClass, Cluster
from molt.config import RLConfig
from molt.config_file import dump
from molt.errors import MoltError, UnusableRow, first_error
from molt.publish.publication import Publisher
from molt.records.best import BestModel
from molt.records.checkpoints import Checkpoints
from molt.records.evaluator import Evaluator
from molt.records.leftovers import remove_untrained
from molt.records.state import RunState, refuse_other_run
from molt.records.steps import StepRecords
from molt.report.header import header
from molt.report.sinks import RunLog
from molt.rollout.dump import begin_dump
from molt.rollout.engine_worker import RolloutEngineWorker, Sampling
from molt.rollout.producer import GroupFilter, Producer
from molt.rollout.replay import Replay, Unpublished
from molt.rollout.reward import scoring_s
from molt.rollout.shutdown import Shutdown
from molt.rollout.watchdog import Watchdog
from molt.spec import HeldOut, RunSpec
from molt.train.checkpoint import checkpoint_step, failing, latest_checkpoint, repair
from molt.types import NO_ROLLBACK, Lineage, OnEvent
from molt.worker_settings import engine_settings, reward_settings

PROBE_SEQUENCES = 8
PROBE_TOKENS = 32
"""The log-prob probe: so many prompts of the run, and as many tokens of an answer to each."""
FP32_PARITY = 1e-3
"""Default `train.parity_bound` where engines hold float32: the largest difference of two log-probs, in nats."""
LOW_PRECISION_PARITY = 0.05
"""Default `train.parity_bound` otherwise: the mean difference, in nats."""


class Policy(Protocol):
    """The policy ranks as an export sees them."""

    async def export(self, model: str, chat_template: str | None, path: Path) -> None: ...


@dataclass
class Run:
    """The collaborators of one run, and how far it is. The loop alone writes the fields below the collaborators."""

    spec: RunSpec
    cluster: Cluster
    producer: Producer | Replay
    publisher: Publisher | Unpublished
    checkpoints: Checkpoints
    evaluator: Evaluator
    records: StepRecords
    watchdog: Watchdog
    shutdown: Shutdown
    log: RunLog

    step: int = 0
    """Training batches trained."""
    lineage: Lineage = NO_ROLLBACK
    published: int = -1
    """The highest policy version that was ever published."""
    kl_coef: float = 0.0
    """The coefficient of the KL; `algo.kl.target` adapts it."""
    trips: deque[int] = field(default_factory=deque)
    """Steps at which the breaker tripped."""

    @property
    def config(self) -> RLConfig:
        return self.spec.config

    @property
    def total_batches(self) -> int:
        return self.spec.total_batches

    @property
    def version(self) -> int:
        """The policy version of the weights after `step` batches."""
        return self.lineage.version(self.step)

    def state(self) -> RunState:
        """How far the run is now, as a checkpoint stores it."""
        return RunState(
            step=self.step,
            total_batches=self.total_batches,
            lineage=self.lineage,
            best=self.evaluator.best_model.best,
            kl_coef=self.kl_coef,
            trips=tuple(self.trips),
            ledger=self.producer.ledger(),
            identity=self.spec.checkpoint_identity,
            rows=self.spec.rows,
            finished=tuple(self.producer.finished_groups()),
            unscored=tuple(self.producer.unscored_groups()),
        )

    async def export(self, path: Path) -> None:
        """The policy as a Hugging Face model directory. Raises `CheckpointError` when the disk does not take it."""
        await export_policy(self.cluster.policy, self.config, path)


async def export_policy(policy: Policy, config: RLConfig, path: Path) -> None:
    """Write the policy to `path`. Raises `CheckpointError` when the disk does not take it."""
    with failing(path):
        await policy.export(config.actor.model_name_or_path, config.data.chat_template, path)


@asynccontextmanager
async def started(spec: RunSpec, engine_worker: ActorClass = RolloutEngineWorker) -> AsyncIterator[Run]:
    """A run whose directory is open and whose processes are up and watched; everything ends with the block.

    Whatever stops the run, the checkpoint that is being written is completed. engine_worker: as in `cluster.started`.
    """
    config = spec.config
    renderer = load_renderer(
        config.actor.model_name_or_path,
        config.data.chat_template,
        apply_chat_template=config.data.apply_chat_template,
    )
    resume_step = _resume_step(spec)
    if config.train.rollout_dump_dir is not None:
        after_step = -1 if resume_step is None else resume_step
        begin_dump(
            config.train.rollout_dump_dir, spec.dump_identity, after_step=after_step, output_dir=config.ckpt.output_dir
        )
    print_dropped(spec.held_out)
    shutdown = Shutdown()
    head = header(config, spec.total_batches)
    with RunLog(config.ckpt.run_dir, config.logger, head, spec.total_batches, resume_step) as log:
        (config.ckpt.run_dir / "header.txt").write_text(head)
        (config.ckpt.run_dir / "config.toml").write_text(dump(config))
        async with cluster.started(spec.processes, log.event, engine_worker) as processes:
            run = await _wire(spec, processes, shutdown, log, renderer)
            _stop_on_signals(shutdown)
            try:
                async with _watched(run):
                    yield run
            except BaseException:
                await _complete_checkpoint(run.checkpoints)
                raise


def print_dropped(held_out: HeldOut) -> None:
    """Which rows of the evaluation dataset cannot be used."""
    if held_out.dropped:
        print(held_out.dropped, file=sys.stderr)


def _resume_step(spec: RunSpec) -> int | None:
    """The step of the checkpoint to resume from; -1 for a resume without one; None for a run that is new.

    For a new run it removes what one that failed before its first training batch left.
    Raises `CheckpointError` if the checkpoint belongs to another run.
    """
    ckpt = spec.config.ckpt
    if not ckpt.load_enable:
        remove_untrained(ckpt)
        return None
    repair(ckpt.checkpoints)
    checkpoint = latest_checkpoint(ckpt.checkpoints)
    if checkpoint is None:
        return -1  # whatever an earlier attempt logged is not of this run's lineage either
    refuse_other_run(checkpoint, spec.checkpoint_identity, spec.rows, spec.dataset)
    return checkpoint_step(checkpoint)


async def _wire(spec: RunSpec, processes: Cluster, shutdown: Shutdown, log: RunLog, renderer: Renderer) -> Run:
    """Connect the collaborators of a run."""
    config = spec.config

    async def export(path: Path) -> None:
        await export_policy(processes.policy, config, path)

    checkpoints = Checkpoints(config.ckpt, processes, processes.keepers, export, log.event)
    max_failure_rate = config.rollout.max_failure_rate
    best = BestModel(config.ckpt, checkpoints, log.run_dir, max_failure_rate=max_failure_rate)
    replay_dir = config.train.rollout_replay_dir
    if replay_dir is None:
        producer = _producer(spec, processes, shutdown, log.event)
        publisher = await _publisher(spec, processes, renderer, log.event)
    else:
        producer = Replay(replay_dir, spec.stream, shutdown, processes.keepers)
        publisher = Unpublished()
    return Run(
        spec=spec,
        cluster=processes,
        producer=producer,
        publisher=publisher,
        checkpoints=checkpoints,
        evaluator=Evaluator(spec.held_out.prompts, processes.runners, config.eval, config.rollout, best, log),
        records=StepRecords(config, log, processes.keepers),
        watchdog=watchdog(config, processes, log.event),
        shutdown=shutdown,
        log=log,
        published=log.published,
        kl_coef=spec.algorithm.kl_coef,
    )


def watchdog(config: RLConfig, processes: Cluster, on_event: OnEvent) -> Watchdog:
    """The watchdog of a run or an evaluation. An engine that is being restarted explains a silence."""

    def repairing() -> bool:
        return processes.engines.repairing

    return Watchdog(
        processes.runners,
        config.train.watchdog_s,
        on_event,
        repairing,
        patience_s=max(config.rollout.timeout_s, scoring_s(config.rollout, reward_settings(config))),
    )


def _producer(spec: RunSpec, processes: Cluster, shutdown: Shutdown, on_event: OnEvent) -> Producer:
    config = spec.config
    group_filter = None
    if config.algo.dynamic_filtering_enable:
        low, high = config.algo.dynamic_filtering_range
        group_filter = GroupFilter(low, high)
    return Producer(
        spec.stream,
        processes.runners,
        config.rollout,
        shutdown,
        queue=config.train.async_queue_size,
        max_staleness=config.train.staleness_bound,
        group_filter=group_filter,
        copies=processes.keepers,
        reward=config.reward,
        on_event=on_event,
    )


async def _publisher(spec: RunSpec, processes: Cluster, renderer: Renderer, on_event: OnEvent) -> Publisher:
    """The probe is sampled once, from the initial weights: prompts of the run and the model's answers."""
    config = spec.config
    sampling = Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=min(PROBE_TOKENS, config.data.max_len // 2),
        seed=config.train.seed,
        stop_token_ids=tuple(renderer.eos_ids),
    )
    probe = await processes.engines.complete(_probe_prompts(spec, renderer), sampling)
    in_float32 = engine_settings(spec.processes).dtype == "float32"
    bound = config.train.parity_bound
    if bound is None:
        bound = FP32_PARITY if in_float32 else LOW_PRECISION_PARITY
    return Publisher(
        processes.policy,
        processes.engines,
        probe,
        bound=bound,
        use_max=in_float32,
        workers_per_engine=config.vllm.tensor_parallel_size,
        on_event=on_event,
    )


def _probe_prompts(spec: RunSpec, renderer: Renderer) -> list[list[int]]:
    """The ids of the first usable prompts. Only the end of a long one, so that the answer and one more token fit."""
    longest = max(1, spec.config.data.max_len // 2 - 1)
    prompts: list[list[int]] = []
    for index in range(len(spec.stream)):
        if len(prompts) == PROBE_SEQUENCES:
            break
        try:
            prompts.append(renderer.prompt_ids(spec.stream[index])[-longest:])
        except UnusableRow:
            continue
    return prompts


@asynccontextmanager
async def _watched(run: Run) -> AsyncIterator[None]:
    """Engines, runners and rollouts are watched while the block runs."""
    async with asyncio.TaskGroup() as tasks:
        watchers = [
            tasks.create_task(_report_to(run.shutdown, run.cluster.engines.watch())),
            tasks.create_task(_report_to(run.shutdown, run.watchdog.run())),
        ]
        yield
        for watcher in watchers:
            watcher.cancel()


async def _report_to(shutdown: Shutdown, watching: Awaitable[None]) -> None:
    """The error that a watcher ends with stops the run between two steps, where it can be saved."""
    try:
        await watching
    except* MoltError as errors:
        shutdown.fail(first_error(errors))


async def _complete_checkpoint(checkpoints: Checkpoints) -> None:
    """Wait for the checkpoint that is being written; why it failed is printed, since another error ends the run."""
    try:
        await checkpoints.settle()
    except MoltError as error:
        print(f"error: {error}", file=sys.stderr)


def _stop_on_signals(shutdown: Shutdown) -> None:
    """SIGTERM, and the first Ctrl-C: finish the step, save, exit 0. A second Ctrl-C ends at once."""
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        if not shutdown.requested:
            print("SIGTERM: the run saves and ends after this step", file=sys.stderr)
        shutdown.request()

    def interrupt() -> None:
        if shutdown.requested:
            os._exit(130)
        print("Ctrl-C: the run saves and ends after this step; another one ends it at once, unsaved", file=sys.stderr)
        shutdown.request()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupt)
