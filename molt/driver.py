"""The driver of an RL run: wires processes, data and records to the loop, and unwires them."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from molt import cluster
from molt.chat.render import Renderer, load_renderer
from molt.config import RLConfig
from molt.config_file import dump
from molt.data.mixture import EpochOrder
from molt.data.prompts import PromptDataset, PromptStream
from molt.data.rows import DropReport, load_rows
from molt.errors import ConfigError, MoltError, UnusableRow
from molt.loop import Run, begin_evaluation, between_steps, enduring, evaluation_due, finish_evaluation, publish, train
from molt.publish.publication import Publisher
from molt.records import Records, identity, refuse_other_run
from molt.report.header import header
from molt.report.metrics import values
from molt.report.sinks import RunLog
from molt.rollout.engine_worker import RolloutEngineWorker, Sampling
from molt.rollout.evaluate import EPOCH as EVALUATION
from molt.rollout.evaluate import Answers, answer
from molt.rollout.producer import Producer
from molt.rollout.replay import Replay, Unpublished, begin_dump, dumped
from molt.rollout.watchdog import Watchdog
from molt.train.checkpoint import checkpoint_step, latest_checkpoint, repair
from molt.types import Prompt

PROBE_SEQUENCES, PROBE_TOKENS = 8, 32


def run_rl(config: RLConfig, engine_worker: Any = RolloutEngineWorker) -> None:
    """One whole run. Raises a `MoltError` when it cannot go on; what was trained is saved by then, if ranks are left.

    engine_worker: the Ray actor class of an `Engine`; the tests have one without vLLM.
    """
    _in_ray(config, drive, engine_worker)
    # The page is made outside the RL path; failing to draw it does not fail the run.
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-m", "molt", "report", str(config.ckpt.output_dir)], check=False, timeout=300)


def run_evaluation(config: RLConfig, engine_worker: Any = RolloutEngineWorker) -> tuple[Answers, float]:
    """`eval.eval_only`: what the model answers to `eval.dataset`, and the seconds it took. No trainer is built."""
    return _in_ray(config, answers, engine_worker)


def _in_ray(config: RLConfig, main: Callable[..., Any], engine_worker: Any) -> Any:
    """The value of the coroutine function `main` in a Ray session; of what it raises, the `MoltError` inside."""
    cluster.start_ray(config)
    try:
        return asyncio.run(main(config, engine_worker))
    except Exception as error:  # no fault boundary: everything is raised again
        cause = _first(error)
        if isinstance(cause, MoltError):
            raise cause from None
        raise
    finally:
        ray.shutdown()


async def answers(config: RLConfig, engine_worker: Any = RolloutEngineWorker) -> tuple[Answers, float]:
    """The driver of `run_evaluation`, inside a Ray session."""
    prompts = _evaluation_prompts(config)
    async with cluster.started(config, 0, engine_worker) as processes, asyncio.TaskGroup() as tasks:
        started = time.perf_counter()
        engines, watchdog = processes.engines, _watchdog(config, processes, lambda kind, **fields: None)
        mending = [tasks.create_task(task) for task in (engines.watch(), engines.serve(), watchdog.run())]
        found = await answer(prompts, processes.runners, config.rollout, config.eval)
        for task in mending:
            task.cancel()
        return found, time.perf_counter() - started


async def drive(config: RLConfig, engine_worker: Any = RolloutEngineWorker) -> None:
    """The driver of one run, inside a Ray session."""
    stream = _prompt_stream(config)
    replayed = config.train.rollout_replay_dir
    batches = (
        dumped(replayed, identity(config, stream)) if replayed else math.ceil(len(stream) / config.rollout.batch_size)
    )
    total_steps = min(config.train.max_steps or sys.maxsize, batches)
    if 0 < total_steps <= config.actor.freezing_steps:
        raise ConfigError(
            f"`actor.freezing_steps` (={config.actor.freezing_steps}) with {total_steps} steps in all: the policy "
            f"would never be trained. Use a value below {total_steps}, or more prompts or steps."
        )
    renderer = load_renderer(
        config.actor.model_name_or_path, config.data.chat_template, apply_chat_template=config.data.apply_chat_template
    )
    if config.ckpt.load_enable:
        repair(config.ckpt.checkpoints)
    checkpoint = latest_checkpoint(config.ckpt.checkpoints) if config.ckpt.load_enable else None
    if checkpoint:
        refuse_other_run(checkpoint, config, stream)
    # Without a checkpoint, whatever an earlier attempt logged is not of this run's lineage either.
    resume_step = checkpoint_step(checkpoint) if checkpoint else -1 if config.ckpt.load_enable else None
    if dump_dir := config.train.rollout_dump_dir:
        begin_dump(dump_dir, identity(config, stream), resume_step, owner=config.ckpt.output_dir)
    said = header(config, total_steps)
    with RunLog(config.ckpt.run_dir, config.logger, said, total_steps, resume_step) as log:
        (config.ckpt.run_dir / "header.txt").write_text(said)
        (config.ckpt.run_dir / "config.toml").write_text(dump(config))
        async with cluster.started(config, total_steps, engine_worker, log.event) as processes:
            producer = Replay(replayed, stream) if replayed else _producer(config, processes, stream, log.event)
            run = Run(
                config,
                processes,
                producer,
                Unpublished() if replayed else await _publisher(config, processes, stream, renderer, log.event),
                Records(config, log, renderer),
                _watchdog(config, processes, log.event),
                _evaluation_prompts(config),
                total_steps,
                published=log.published,
                kl_coef=config.algo.kl_coef,
            )
            if checkpoint:
                await run.records.restore(run, checkpoint)
                print(f"resumed from {checkpoint}: {len(producer.finished_groups())} finished groups are in the buffer")
            elif config.ckpt.load_enable:
                run.lineage = run.lineage.rolled_back(0, run.published)
                await run.records.follow(run, None)
                print(f"no checkpoint in {config.ckpt.checkpoints}: starting from the beginning")
            _stop_on_signals(producer)
            try:
                async with asyncio.TaskGroup() as tasks:
                    both = (processes.engines.watch(), run.watchdog.run())
                    watching = [tasks.create_task(_told(producer, task)) for task in both]
                    await enduring(run, _whole)
                    for task in watching:
                        task.cancel()
            except BaseException:  # whatever stopped the run, the last checkpoint is completed
                try:
                    await run.records.settle()
                except MoltError as error:
                    print(f"error: {error}", file=sys.stderr)
                raise


def _watchdog(config: RLConfig, processes: cluster.Cluster, on_event: Callable[..., None]) -> Watchdog:
    mending = lambda: processes.engines.repairing  # noqa: E731
    return Watchdog(processes.runners, config.train.watchdog_s, on_event, mending, config.rollout.timeout_s)


async def _told(producer: Producer | Replay, watching: Awaitable[None]) -> None:
    """What `watching` gives up with is for the learner, which stops between two steps and saves."""
    try:
        await watching
    except* MoltError as errors:
        producer.fail(_first(errors))


async def _whole(run: Run) -> None:
    """First publication, training, and what a run leaves behind."""
    config, fresh = run.config, run.records.saved is None
    proof = await publish(run)
    if fresh and proof:
        run.records.log.step(0, values(proof))
    if evaluation_due(run):
        await begin_evaluation(run)
    if not run.restarts and (run.step >= run.total_steps or run.producer.done):
        print(f"step {run.step}: nothing is left to train. Raise --train.num_episodes or --train.max_steps to go on.")
    await train(run)
    producer = run.producer
    if producer.filtered and not producer.stopping and run.step < run.total_steps:
        print(
            f"step {run.step} of {run.total_steps}: {producer.filtered} of {producer.judged} groups were filtered, and "
            "no prompt is left. Widen --algo.dynamic_filtering_range, or raise --train.num_episodes to go on.",
            file=sys.stderr,
        )
    with between_steps(run):
        await finish_evaluation(run, ahead=False)
        await begin_evaluation(run)
        await finish_evaluation(run, ahead=False)
    failed = producer.failed.is_set()
    if producer.stopping or failed or not config.ckpt.disable_final_save:
        await run.records.save(run)
    await run.records.settle()
    if failed and producer.error:
        raise producer.error
    if not producer.stopping and not config.ckpt.disable_final_save:
        await run.records.export(run, config.ckpt.output_dir.resolve())


def _prompt_stream(config: RLConfig) -> PromptStream:
    data, flag = config.data, "data.prompt_dataset"
    mixed = data.prompt_probs is not None
    rows = load_rows(data.prompt_dataset, flag=flag, split=data.prompt_split, max_samples=data.max_samples, each=mixed)
    order = EpochOrder(rows.sizes, seed=config.train.seed, shares=data.prompt_probs, flag="data.prompt_probs")
    return PromptStream(PromptDataset(rows, data), order, num_episodes=config.train.num_episodes)


def _evaluation_prompts(config: RLConfig) -> list[Prompt]:
    if config.eval.dataset is None:
        return []
    rows = load_rows(config.eval.dataset, flag="eval.dataset", split=config.eval.split)
    dataset, report, prompts = PromptDataset(rows, config.data), DropReport(len(rows)), []
    for row in range(len(dataset)):
        try:
            prompts.append(replace(dataset.prompt(row), epoch=EVALUATION))
        except UnusableRow as error:
            report.add(row, error)
    if report.dropped:
        print(f"eval.dataset: {report.message()}", file=sys.stderr)
    return prompts


def _producer(
    config: RLConfig, processes: cluster.Cluster, stream: PromptStream, on_event: Callable[..., None]
) -> Producer:
    return Producer(
        stream,
        processes.runners,
        config.rollout,
        queue=config.train.async_queue_size,
        max_staleness=config.train.staleness_bound,
        keep=config.algo.dynamic_filtering_range if config.algo.dynamic_filtering_enable else None,
        on_event=on_event,
    )


async def _publisher(
    config: RLConfig,
    processes: cluster.Cluster,
    stream: PromptStream,
    renderer: Renderer,
    on_event: Callable[..., None],
) -> Publisher:
    """The probe is sampled once, from the initial weights: prompts of the run and what the model answers."""
    prompts = _probe_prompts(config, stream, renderer)
    sampling = Sampling(
        1.0, 1.0, -1, min(PROBE_TOKENS, config.data.max_len // 2), config.train.seed, tuple(renderer.eos_ids)
    )
    turns = await processes.engines.sample(prompts, sampling)
    dtype = cluster.engine_settings(config).dtype
    default_bound = 1e-3 if dtype == "float32" else 0.05
    return Publisher(
        processes.policy,
        processes.engines,
        [[*turn.prompt_ids.tolist(), *turn.token_ids.tolist()] for turn in turns],
        bound=default_bound if config.train.parity_bound is None else config.train.parity_bound,
        use_max=dtype == "float32",
        workers_per_engine=config.vllm.tensor_parallel_size,
        on_event=on_event,
    )


def _probe_prompts(config: RLConfig, stream: PromptStream, renderer: Renderer) -> list[list[int]]:
    prompts: list[list[int]] = []
    for index in range(len(stream)):
        if len(prompts) == PROBE_SEQUENCES:
            break
        try:
            # Only the end of a long prompt, so that the answer and vLLM's one extra token fit.
            prompts.append(renderer.prompt_ids(stream[index])[-max(1, config.data.max_len // 2 - 1) :])
        except UnusableRow:
            continue
    return prompts


def _stop_on_signals(producer: Producer | Replay) -> None:
    """SIGTERM, and the first Ctrl-C: finish the step, save, exit 0. A second Ctrl-C ends at once."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if producer.stopping:
            os._exit(130)
        producer.stop()

    loop.add_signal_handler(signal.SIGTERM, producer.stop)
    loop.add_signal_handler(signal.SIGINT, interrupt)


def _first(error: BaseException) -> BaseException:
    """The error itself, out of task groups and out of the process that raised it."""
    while isinstance(error, BaseExceptionGroup | RayTaskError):
        error = error.cause if isinstance(error, RayTaskError) else error.exceptions[0]
    return error
