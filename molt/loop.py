"""The page: prompt → rollout → trajectory → reward → advantage → batch → loss → step → publish.

| task      | consumes           | produces             | waits for                    | released by                 |
|-----------|--------------------|----------------------|------------------------------|-----------------------------|
| producer  | prompts            | groups in the buffer | a free admission slot        | learner finishing a version |
| learner   | a batch of groups  | metrics, version + 1 | enough groups in the buffer  | producer                    |
| evaluator | evaluation prompts | eval metrics, best   | a publication                | learner                     |
| watchdog  | progress events    | a table, a new start | a silence longer than bound  | any progress                |

They run in one asyncio loop of one driver. Rollouts (prompt → reward) happen in the runners, which the
producer feeds; everything else is a line of `learn`. A version is published after every training
batch: the batches trained (`step`) say which, unless a roll-back abandoned some (`types.Lineage`).
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from molt.algo.kl import adapt
from molt.algo.plugin import load_estimator
from molt.batch.plan import advantages, plan_batch, shaped_rewards
from molt.cluster import Cluster
from molt.config import RLConfig
from molt.errors import BreakerError, LostError, MoltError, PublicationError, RankLostError
from molt.publish.publication import Publisher
from molt.records import Records
from molt.report.metrics import merge
from molt.rollout.evaluate import evaluate
from molt.rollout.pool import HEARTBEAT_S
from molt.rollout.producer import Producer
from molt.rollout.replay import Replay, Unpublished
from molt.rollout.watchdog import Watchdog
from molt.types import NO_ROLLBACK, Group, Lineage, Metric, Prompt

T = TypeVar("T")

TRIP_BATCHES = 100
"""`train.max_trips` of the breaker within so many batches stop the run."""


@dataclass
class Run:
    """The collaborators of one run, and how far it is."""

    config: RLConfig
    cluster: Cluster
    producer: Producer | Replay
    publisher: Publisher | Unpublished
    records: Records
    watchdog: Watchdog
    eval_prompts: list[Prompt]
    total_steps: int
    step: int = 0
    """Training batches trained."""
    lineage: Lineage = NO_ROLLBACK
    published: int = -1
    """The highest version there ever was."""
    evaluated: int | None = None
    """The step that was evaluated last."""
    evaluation: tuple[int, asyncio.Task] | None = None
    """The one that runs, and the step whose weights it measures."""
    kl_coef: float = 0.0
    """The coefficient of the KL; `algo.kl.target` adapts it."""
    trips: deque[int] = field(default_factory=deque)
    """Steps at which the breaker tripped."""
    restarts: int = 0
    """Of the ranks, since the last checkpoint."""

    @property
    def version(self) -> int:
        """Of the weights after `step` batches."""
        return self.lineage.version(self.step)


async def enduring(run: Run, whole: Callable[[Run], Awaitable[None]]) -> None:
    """`whole(run)`, from the last checkpoint on again whenever a rank is lost, also while the ranks are replaced.

    Raises `RankLostError` after `train.max_restarts` without a new checkpoint in between.
    """
    while True:
        try:
            if run.restarts:
                await recover(run)
            return await whole(run)
        except RankLostError as lost:
            run.restarts += 1
            run.records.event("rank_lost", step=run.step, restart=run.restarts, reason=str(lost))
            if run.restarts > run.config.train.max_restarts:
                raise
            if run.producer.error and run.producer.failed.is_set():  # whoever found that watches no more
                raise run.producer.error from lost
            print(f"step {run.step}: {lost} All ranks start again from the last checkpoint.", file=sys.stderr)


async def train(run: Run) -> None:
    """Train to the end of the prompts, `train.max_steps`, or `producer.stop()`.

    What stops the run between two steps (too many failures, a stall, the breaker, engines or runners that are lost for
    good) is saved first. Raises `RankLostError`.
    """
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
    config, cluster = run.config, run.cluster
    estimator = load_estimator(config.algo.advantage.estimator)
    while run.step < run.total_steps:
        clock = Clock()

        # prompt → rollout → trajectory → reward: by the runners, meanwhile
        groups = await next_batch(run)
        if not groups:
            break
        clock.lap("wait_s")

        # reward → advantage
        rollouts, samples = [group.rollouts for group in groups], [group.samples for group in groups]
        rewards = shaped_rewards(rollouts, config.reward, config.data.max_len)
        group_advantages = advantages(rollouts, rewards, estimator)

        # advantage → batch: values and reference log-probs only if the advantages need them
        plans = partial(plan_batch, rollouts, rewards=rewards, group_advantages=group_advantages, **_layout(config))
        inferred = await cluster.infer(plans, samples)
        plan = plans(ranks=len(cluster.policy.workers), aggregation=config.actor.loss_agg_mode)
        prepared, returns = await cluster.policy.prepare(plan, samples, inferred, run.step, run.kl_coef, run.lineage)

        # batch → loss → step
        trained = await cluster.train(returns, freeze_policy=run.step < config.actor.freezing_steps)
        clock.lap("train_s")

        # step → publish, once the version before is evaluated
        with between_steps(run):
            await finish_evaluation(run, ahead=True)
        clock.lap("evaluate_s")
        run.step += 1
        proof: dict[str, Metric] = {}
        with between_steps(run):
            proof = await publish(run)
        run.producer.close(groups, run.step)
        clock.lap("publish_s")

        learned = [prepared, trained, _shaped(rewards)]
        learned.append(_adapt_kl(run, merge(learned)))
        await run.records.step(run, groups, group_advantages, [*learned, proof, clock.metrics()])
        if trained.get("train/skipped_count", Metric(0)).total:
            await trip(run, groups)
        if run.step == run.total_steps or evaluation_due(run):
            await begin_evaluation(run)
        if config.ckpt.save_steps > 0 and run.step % config.ckpt.save_steps == 0:
            await run.records.save(run)


@contextmanager
def between_steps(run: Run) -> Iterator[None]:
    """What is lost for good in this block stops the run after the step, when that is recorded and can be saved."""
    try:
        yield
    except RankLostError:
        raise
    except (LostError, PublicationError) as error:
        run.producer.fail(error)


async def next_batch(run: Run) -> list[Group]:
    """The groups of the next batch, or [] after the last one. What else stops the run here is saved first."""
    size, patience_s = run.config.rollout.batch_size, run.producer.patience_s
    try:
        return await serving(run, run.producer.batch(size, stalled_after_s=patience_s))
    except RankLostError:
        raise
    except MoltError:
        await run.records.save(run)
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
                run.records.event("rejoined", version=run.version)
    finally:
        waiting.cancel()
    return waiting.result()


def _layout(config: RLConfig) -> dict[str, Any]:
    """How a training batch is split into steps and micro-batches, for every model alike."""
    return {
        "groups_per_step": config.rollouts_per_step // config.rollout.n_samples_per_prompt,
        "micro_batch_size": config.train.micro_batch_size,
        "max_tokens": config.train.max_tokens_per_gpu if config.train.dynamic_batch_enable else None,
        "packed": config.fsdp.packing_samples,
        "max_len": config.data.max_len,
    }


def _shaped(rewards: list[list[float]]) -> dict[str, Metric]:
    return {"rollout/shaped_reward": Metric(sum(map(sum, rewards)), sum(map(len, rewards)))}


def _adapt_kl(run: Run, measured: dict[str, Metric]) -> dict[str, Metric]:
    """The coefficient of this batch; that of the next one is nearer to what `algo.kl.target` wants."""
    kl, used, found = run.config.algo.kl, run.kl_coef, measured.get("train/kl")
    moved = run.step > run.config.actor.freezing_steps  # a policy that waits for its critic keeps its KL
    if used and kl.target and moved and found and found.count:
        rollouts = int(measured["rollout/shaped_reward"].count)
        run.kl_coef = adapt(used, found.total / found.count, target=kl.target, horizon=kl.horizon, rollouts=rollouts)
    return {"train/kl_coef": Metric(used)} if used else {}


async def publish(run: Run) -> dict[str, Metric]:
    """Publish the trainer's weights as `run.version`, with proof; a run that is to stop waits for no engine."""
    run.published = max(run.published, run.version)  # used, even if only one engine ever has it
    publishing = asyncio.ensure_future(run.publisher.publish(run.version))
    try:
        while not publishing.done():
            await asyncio.wait((publishing,), timeout=HEARTBEAT_S)
            waits = not publishing.done() and not run.cluster.engines.present
            if waits and run.producer.stopping:  # a resume publishes
                return {}
    finally:
        publishing.cancel()
    if proof := publishing.result():  # a replay has no engines
        run.records.event("publication", version=run.version, mismatch=proof["mismatch/abs_max"].total)
    return proof


def evaluation_due(run: Run) -> bool:
    """By the settings, at this step."""
    config = run.config.eval
    return run.step % config.steps == 0 if run.step and config.steps > 0 else config.eval_at_start and not run.step


async def begin_evaluation(run: Run) -> None:
    """Start to measure the published version, once. Nothing else is published before it ends."""
    ending = run.producer.stopping or run.producer.failed.is_set()
    if run.evaluated == run.step or not run.eval_prompts or run.evaluation or ending:
        return
    await run.records.candidate(run)
    config = run.config
    measured = evaluate(run.eval_prompts, run.cluster.runners, config.rollout, config.eval)
    run.evaluation = run.step, asyncio.create_task(measured)


async def finish_evaluation(run: Run, *, ahead: bool) -> None:
    """Wait for the evaluation that runs, if one does, and record it; a run that is to stop drops it.

    ahead: the trainer's weights are a batch further. Then no engine can be given those that are measured, and when none
    has them any more the evaluation is dropped.
    """
    if run.evaluation is None:
        return
    step, evaluation = run.evaluation
    ends = [run.producer.stopped, run.producer.failed, *([run.cluster.engines.unserved] if ahead else [])]
    ended = [asyncio.ensure_future(event.wait()) for event in ends]
    waiting = asyncio.wait((evaluation, *ended), return_when=asyncio.FIRST_COMPLETED)
    await (waiting if ahead else serving(run, waiting))
    for end in ended:
        end.cancel()
    if not evaluation.done():
        if run.cluster.engines.unserved.is_set():
            print(f"step {step}: its evaluation is dropped, since no engine has its weights any more", file=sys.stderr)
            run.records.event("evaluation_dropped", step=step)
        return drop_evaluation(run)
    if error := evaluation.exception():
        drop_evaluation(run)
        raise error
    run.evaluation, run.evaluated = None, step
    await run.records.evaluation(run, evaluation.result())


def drop_evaluation(run: Run) -> None:
    """Nobody waits for it any more; a resume of the same step begins it again."""
    if run.evaluation is not None:
        run.evaluation[1].cancel()
        run.evaluation = None
        run.records.no_candidate()


async def trip(run: Run, groups: list[Group]) -> None:
    """The breaker skipped a step: let everything in flight end, so that what is trained next is of these weights.

    Raises `BreakerError` when it tripped `train.max_trips` times within `TRIP_BATCHES` batches.
    """
    run.trips.append(run.step)
    while run.trips[0] <= run.step - TRIP_BATCHES:
        run.trips.popleft()
    evidence = run.records.evidence(run, groups, await run.cluster.evidence())
    limit = run.config.train.max_trips
    print(
        f"step {run.step}: the breaker skipped an optimizer step ({len(run.trips)} of train.max_trips (={limit}) "
        f"within {TRIP_BATCHES} batches), which moved no weight. Evidence: {evidence}",
        file=sys.stderr,
    )
    if len(run.trips) >= limit:
        steps = ", ".join(map(str, run.trips))
        run.trips.clear()  # whoever resumes has mended it, and may count anew
        await run.records.save(run)
        raise BreakerError(
            f"the breaker tripped at steps {steps}, as often as train.max_trips (={limit}) allows: training diverges, "
            f"so the run stops after saving. What tripped it is in {evidence}; lower --actor.adam.lr or mend the "
            "reward, or raise --train.grad_spike_factor if it was a spike that is none, then resume with "
            "--ckpt.load_enable."
        )
    if run.step < run.total_steps:
        with between_steps(run):
            await serving(run, run.producer.drain())
        run.producer.resume()


async def recover(run: Run) -> None:
    """What `--ckpt.load_enable` does, inside the running driver: all ranks anew, at the last checkpoint.

    What is published next has the next unused version.
    """
    started = time.monotonic()
    drop_evaluation(run)
    await run.cluster.restart_ranks()
    run.publisher.forget()
    await run.records.go_back(run)
    run.records.event("recovered", step=run.step, version=run.version, seconds=time.monotonic() - started)


class Clock:
    """Seconds between laps, as `timing/*`."""

    def __init__(self):
        self.started = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def metrics(self) -> dict[str, Metric]:
        laps = self.laps | {"step_s": time.perf_counter() - self.started}
        return {f"timing/{name}": Metric(seconds) for name, seconds in laps.items()}
