"""The page: prompt → rollout → trajectory → reward → advantage → batch → loss → step → publish.

| task      | consumes           | produces             | waits for                    | released by                 |
|-----------|--------------------|----------------------|------------------------------|-----------------------------|
| producer  | prompts            | groups in the buffer | a free admission slot        | learner finishing a version |
| learner   | a batch of groups  | metrics, version + 1 | enough groups in the buffer  | producer                    |
| evaluator | evaluation prompts | eval metrics, best   | a weight sync                | learner                     |
| watchdog  | progress events    | a table, a restart   | a silence longer than bound  | any progress                |

They run in one asyncio loop of one driver. Rollouts (prompt → reward) happen in the runners, which the
producer feeds; everything else is a line of `learn`. A weight sync (molt's flags say publish) follows every training
batch: the number of batches trained (`step`) is the policy version, unless a roll-back abandoned some
(`types.Lineage`).
"""

import asyncio
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any, TypeVar

from molt.algo.kl import adapt
from molt.batch.masking import Participation, participation
from molt.batch.plan import advantages, plan_batch, shaped_rewards
from molt.config import RLConfig
from molt.errors import BreakerError, LostError, MoltError, PublicationError, RankLostError, TrainingError
from molt.records.steps import rollout_metrics
from molt.report.clock import Clock
from molt.report.metrics import merge, values
from molt.rollout.handles import HEARTBEAT_S
from molt.run import Run
from molt.types import Group, Metric

T = TypeVar("T")

TRIP_BATCHES = 100
"""`train.max_trips` of the breaker within so many batches stop the run."""


async def train_to_the_end(run: Run) -> None:
    """The life of a run whose processes are up: first weight sync, learn, evaluate, save, export.

    What stops a run between two steps is raised after it was saved. Raises `RankLostError` as it comes.
    """
    is_new = run.checkpoints.saved is None
    proof = await publish(run)
    if is_new and proof:
        run.log.step(0, values(proof))
    if run.evaluator.due(run.step):
        await begin_evaluation(run)

    await produce_and_learn(run)
    explain_early_end(run)

    with between_steps(run):
        await finish_evaluation(run)
        await begin_evaluation(run)
        await finish_evaluation(run)

    ends_early = run.shutdown.requested or run.shutdown.failed
    wants_result = not run.config.ckpt.disable_final_save
    if ends_early or wants_result:
        await save(run)
    await run.checkpoints.settle()
    if run.shutdown.requested:
        print(f"saved step {run.step} in {run.checkpoints.folder}; the same command with --ckpt.load_enable goes on")
    if run.shutdown.failed and run.shutdown.error is not None:
        raise run.shutdown.error
    if wants_result and not run.shutdown.requested:
        await run.export(run.config.ckpt.output_dir.resolve())


async def produce_and_learn(run: Run) -> None:
    """Train until the prompts, `train.max_steps` or a reason to stop end it, while the producer generates."""
    lost = None
    async with asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(run.producer.run())
        try:
            await learn(run)
        except RankLostError as error:  # as itself, not in a group
            lost = error
        finally:
            producing.cancel()
    if lost is not None:
        raise lost


async def learn(run: Run) -> None:
    """The learner."""
    config = run.config
    cluster = run.cluster
    while run.step < run.total_batches:
        clock = Clock()

        # prompt → rollout → trajectory → reward: in the runners, meanwhile
        groups = await next_batch(run)
        if not groups:
            break
        clock.lap("wait_s")

        # reward → advantage → batch
        rollouts = [group.rollouts for group in groups]
        rewards = shaped_rewards(rollouts, run.spec.shaping)
        taking_part = participation(rollouts, config.reward)
        group_advantages = advantages(rollouts, rewards, run.spec.algorithm.estimator, taking_part)

        split = partial(
            plan_batch, rollouts, rewards=rewards, group_advantages=group_advantages, taking_part=taking_part
        )
        plans = cluster.plans(partial(split, **batch_layout(config)), aggregation=config.actor.loss_agg_mode)
        lost = await cluster.fetch(plans, [group.samples for group in groups])
        if lost:  # with the node that they were on: the batch is taken anew
            run.producer.begin_again([groups[index] for index in lost])
            continue

        # values and reference log-probs, where the advantages need them
        inferred = await cluster.infer(plans)
        prepared, returns = await cluster.prepare(plans, inferred, run.step, run.kl_coef, run.lineage)

        # batch → loss → step
        freeze_policy = run.step < config.actor.freezing_steps
        trained = await cluster.train(returns, freeze_policy=freeze_policy)
        clock.lap("train_s")

        # step → publish, once the version before is evaluated
        with between_steps(run):
            await finish_evaluation_before_publishing(run)
        clock.lap("evaluate_s")
        trained_version = run.version
        run.step += 1
        proof: dict[str, Metric] = {}
        with between_steps(run):
            proof = await publish(run)
        run.producer.close(groups, run.step)
        clock.lap("publish_s")

        measured = merge([prepared, trained, shaped_reward_metric(rewards, taking_part), proof])
        measured |= adapt_kl(run, measured)
        numbers = await step_numbers(run, groups, measured, clock)
        await run.records.write(run.step, trained_version, groups, group_advantages, numbers)
        cluster.keepers.release(group.prompt.group_id for group in groups)
        await stop_if_all_is_filtered(run, numbers)
        await run.checkpoints.settle_if_written()
        if trained.get("train/skipped_count", Metric(0)).total:
            await trip(run, groups)

        await evaluate_and_save_if_due(run)


# What the learner waits for.


async def next_batch(run: Run) -> list[Group]:
    """The groups of the next batch, or [] after the last one. An error that stops the run here is saved first."""
    batch = run.producer.batch(run.config.rollout.batch_size, stalled_after_s=run.producer.patience_s)
    try:
        return await serving(run, batch)
    except RankLostError:
        raise
    except MoltError:
        await save(run)
        raise


async def serving(run: Run, waited_for: Awaitable[T]) -> T:
    """Wait for rollouts. An engine that was restarted meanwhile gets the published weights at once."""
    waiting = asyncio.ensure_future(waited_for)
    try:
        while not waiting.done():
            restarted = asyncio.ensure_future(run.cluster.engines.restarted.wait())
            await asyncio.wait((waiting, restarted), return_when=asyncio.FIRST_COMPLETED)
            restarted.cancel()
            if not waiting.done():
                await run.publisher.publish(run.version)
                run.log.event("rejoined", version=run.version)
    finally:
        waiting.cancel()
    return waiting.result()


@contextmanager
def between_steps(run: Run) -> Iterator[None]:
    """An error of this block that no retry can help stops the run after the step, when it can be saved."""
    try:
        yield
    except RankLostError:
        raise
    except (LostError, PublicationError) as error:
        run.shutdown.fail(error)


# Weight sync and evaluation.


async def publish(run: Run) -> dict[str, Metric]:
    """Publish the trainer's weights as `run.version`, with proof; a run that is to stop waits for no engine."""
    run.published = max(run.published, run.version)  # used up, even if only one engine ever has it
    publishing = asyncio.ensure_future(run.publisher.publish(run.version))
    try:
        while not publishing.done():
            await asyncio.wait((publishing,), timeout=HEARTBEAT_S)
            no_engine = not publishing.done() and not run.cluster.engines.present
            if no_engine and run.shutdown.requested:  # a resume publishes
                return {}
    finally:
        publishing.cancel()
    proof = publishing.result()
    if proof:  # a replay has no engines
        run.log.event("publication", version=run.version, mismatch=proof["mismatch/abs_max"].total)
    return proof


async def begin_evaluation(run: Run) -> None:
    """Start to measure the published version, once. Nothing else is published before it ends."""
    if run.shutdown.immediate.is_set() or not run.evaluator.wants(run.step):
        return
    if run.evaluator.best_model.is_kept:
        await save(run)
    await run.evaluator.begin(run.step, run.version)


async def finish_evaluation(run: Run) -> None:
    """Wait for the evaluation of the published weights, if one runs; a run that is to stop drops it."""
    if run.evaluator.task is None:
        return
    await serving(run, first_of(run.evaluator.task, run.shutdown.immediate))
    await run.evaluator.conclude(no_engine_has_it=False)


async def finish_evaluation_before_publishing(run: Run) -> None:
    """As `finish_evaluation`, while the trainer's weights are one batch ahead of the published ones.

    No restarted engine can be given the weights that are measured, so when no engine has them any more the evaluation
    is dropped.
    """
    if run.evaluator.task is None:
        return
    unserved = run.cluster.engines.unserved
    await first_of(run.evaluator.task, run.shutdown.immediate, unserved)
    await run.evaluator.conclude(no_engine_has_it=unserved.is_set())


async def first_of(task: asyncio.Task[Any], *events: asyncio.Event) -> None:
    """Returns when the task is done or an event is set; the task goes on."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait((task, *waits), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def evaluate_and_save_if_due(run: Run) -> None:
    """What follows a batch, by `eval.steps` and `ckpt.save_steps`; the last batch is always evaluated."""
    is_last = run.step == run.total_batches
    if is_last or run.evaluator.due(run.step):
        await begin_evaluation(run)
    save_steps = run.config.ckpt.save_steps
    if save_steps > 0 and run.step % save_steps == 0:
        await save(run)


# The numbers of a step.


def batch_layout(config: RLConfig) -> dict[str, Any]:
    """How a training batch is split into steps and micro-batches, for every model alike."""
    max_tokens = None
    if config.train.dynamic_batch_enable:
        max_tokens = config.train.max_tokens_per_gpu
    return {
        "groups_per_step": config.rollouts_per_step // config.rollout.n_samples_per_prompt,
        "micro_batch_size": config.train.micro_batch_size,
        "max_tokens": max_tokens,
        "packed": config.fsdp.packing_samples,
        "max_len": config.data.max_len,
    }


def shaped_reward_metric(rewards: list[list[float]], taking_part: Participation) -> dict[str, Metric]:
    """Over the rollouts that advantages are computed from."""
    total = 0.0
    count = 0
    for of_group, takes_part in zip(rewards, taking_part, strict=True):
        trained = list(compress(of_group, takes_part))
        total += sum(trained)
        count += len(trained)
    return {"rollout/shaped_reward": Metric(total, count)}


def adapt_kl(run: Run, measured: dict[str, Metric]) -> dict[str, Metric]:
    """The KL coefficient of this batch as a metric; the next batch's is nearer to what `algo.kl.target` wants."""
    kl = run.config.algo.kl
    used = run.kl_coef
    if not used:
        return {}
    mean_kl = measured.get("train/kl")
    policy_moved = run.step > run.config.actor.freezing_steps  # a policy that waits for its critic keeps its KL
    if kl.target and policy_moved and mean_kl is not None and mean_kl.count:
        rollouts = int(measured["rollout/shaped_reward"].count)
        mean = mean_kl.total / mean_kl.count
        run.kl_coef = adapt(used, mean, target=kl.target, horizon=kl.horizon, rollouts=rollouts)
    return {"train/kl_coef": Metric(used)}


async def step_numbers(run: Run, groups: list[Group], measured: dict[str, Metric], clock: Clock) -> dict[str, float]:
    """Every metric of the step as a number."""
    parts = [measured, clock.metrics(), await run.watchdog.take_metrics()]
    parts += [rollout_metrics(group, run.config.reward) for group in groups]
    parts += run.producer.take_metrics()
    numbers = values(merge(parts))
    tokens = numbers["rollout/generated_tokens"] * len(groups)
    numbers["perf/tokens_per_s"] = tokens / numbers["timing/step_s"]
    return numbers


# Saving, and what stops a run.


async def save(run: Run) -> None:
    """A checkpoint of this moment between two steps, unless there is one. Raises `CheckpointError`."""
    is_saved = run.checkpoints.saved == run.step
    if is_saved and run.shutdown.error is None:  # an error changes what the ledger holds
        return
    await run.checkpoints.save(run.state())


async def stop_if_all_is_filtered(run: Run, numbers: dict[str, float]) -> None:
    """Raises `TrainingError`, after saving, when the importance band filters nearly everything again and again."""
    try:
        run.records.check_filtered(run.step, numbers)
    except TrainingError:
        await save(run)
        raise


async def trip(run: Run, groups: list[Group]) -> None:
    """The breaker skipped a step: wait for everything in flight, so that the next batch is of these weights.

    Raises `BreakerError` when it tripped `train.max_trips` times within `TRIP_BATCHES` batches.
    """
    limit = run.config.train.max_trips
    run.trips.append(run.step)
    while run.trips[0] <= run.step - TRIP_BATCHES:
        run.trips.popleft()
    evidence = run.records.evidence(run.step, groups, await run.cluster.evidence())
    print(
        f"step {run.step}: the breaker skipped an optimizer step ({len(run.trips)} of train.max_trips (={limit}) "
        f"within {TRIP_BATCHES} batches), which moved no weight. Evidence: {evidence}",
        file=sys.stderr,
    )
    if len(run.trips) >= limit:
        steps = ", ".join(str(step) for step in run.trips)
        run.trips.clear()  # who resumes has fixed it, and may count anew
        await save(run)
        raise BreakerError(
            f"the breaker tripped at steps {steps}, as often as train.max_trips (={limit}) allows: training diverges, "
            f"so the run stops after saving. What tripped it is in {evidence}; lower --actor.adam.lr or fix the "
            "reward, or raise --train.grad_spike_factor if it was a false alarm, then resume with --ckpt.load_enable."
        )
    if run.step < run.total_batches:
        with between_steps(run):
            await serving(run, run.producer.drain())
        run.producer.resume()


def explain_early_end(run: Run) -> None:
    """Dynamic filtering can use up the prompts before the last step."""
    group_filter = run.producer.filter
    if group_filter is None or not group_filter.filtered:
        return
    if run.shutdown.requested or run.step >= run.total_batches:
        return
    print(
        f"step {run.step} of {run.total_batches}: {group_filter.filtered} of {group_filter.judged} groups were "
        "filtered, and no prompt is left. Widen --algo.dynamic_filtering_range, or raise --train.num_episodes to go "
        "on.",
        file=sys.stderr,
    )
