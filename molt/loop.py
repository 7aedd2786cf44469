"""The page: prompt → rollout → trajectory → reward → advantage → batch → loss → step → publish.

| task     | consumes           | produces             | waits for                    | released by                 |
|----------|--------------------|----------------------|------------------------------|-----------------------------|
| producer | prompts            | groups in the buffer | a free admission slot        | learner finishing a version |
| learner  | a batch of groups  | metrics, version + 1 | enough groups in the buffer  | producer                    |

Both run in one asyncio loop of one driver. Rollouts (prompt → reward) happen in the runners, which the
producer feeds; everything else is a line of `learn`. A version is published after every training
batch, so the version being trained is the number of batches trained.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from molt.algo.kl import adapt
from molt.algo.plugin import load_estimator
from molt.batch.plan import advantages, plan_batch, shaped_rewards
from molt.cluster import Cluster
from molt.config import RLConfig
from molt.errors import FailureRateError, StalledError
from molt.publish.publication import Publisher
from molt.records import Records
from molt.report.metrics import merge
from molt.rollout.evaluate import evaluate
from molt.rollout.producer import Producer
from molt.types import Metric, Prompt


@dataclass
class Run:
    """The collaborators of one run, and how far it is."""

    config: RLConfig
    cluster: Cluster
    producer: Producer
    publisher: Publisher
    records: Records
    eval_prompts: list[Prompt]
    total_steps: int
    step: int = 0
    """Training batches trained = the version that is published."""
    evaluated: int | None = None
    """The version that was evaluated last."""
    kl_coef: float = 0.0
    """The coefficient of the KL; `algo.kl.target` adapts it."""


async def train(run: Run) -> None:
    """Train to the end of the prompts, `train.max_steps`, or `producer.stop()`.

    Whatever stops the run between two steps (too many failures, a stall) is saved first.
    """
    async with asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(run.producer.run())
        try:
            await learn(run)
        except (FailureRateError, StalledError):
            await run.records.save(run)
            raise
        finally:
            producing.cancel()


async def learn(run: Run) -> None:
    """The learner."""
    config, cluster = run.config, run.cluster
    estimator = load_estimator(config.algo.advantage.estimator)
    while run.step < run.total_steps:
        clock = Clock()

        # prompt → rollout → trajectory → reward: by the runners, meanwhile
        groups = await run.producer.batch(config.rollout.batch_size, stalled_after_s=run.producer.runners.patience_s)
        if not groups:
            break
        clock.lap("wait_s")

        # reward → advantage
        rollouts, samples = [group.rollouts for group in groups], [group.samples for group in groups]
        rewards = shaped_rewards(rollouts, config.reward, config.data.max_len)
        group_advantages = advantages(rollouts, rewards, estimator)

        # advantage → batch: values and reference log-probs only if the advantages need them
        plans = partial(plan_batch, rollouts, rewards=rewards, group_advantages=group_advantages, **_layout(config))
        scores = await cluster.score(plans, samples)
        plan = plans(ranks=len(cluster.policy.workers), aggregation=config.actor.loss_agg_mode)
        prepared, returns = await cluster.policy.prepare(plan, samples, scores, run.step, run.kl_coef)

        # batch → loss → step
        trained = await cluster.train(returns, freeze_policy=run.step < config.actor.freezing_steps)
        clock.lap("train_s")

        # step → publish
        run.step += 1
        proof = await publish(run)
        run.producer.close(groups, run.step)
        clock.lap("publish_s")

        learned = [prepared, trained, _shaped(rewards)]
        learned.append(_adapt_kl(run, merge(learned)))
        await run.records.step(run, groups, group_advantages, [*learned, proof, clock.metrics()])
        if run.step == run.total_steps or (config.eval.steps > 0 and run.step % config.eval.steps == 0):
            await evaluate_now(run)
        if config.ckpt.save_steps > 0 and run.step % config.ckpt.save_steps == 0:
            await run.records.save(run)


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
    """Publish the trainer's weights as version `run.step`, with proof."""
    proof = await run.publisher.publish(run.step)
    run.records.event("publication", version=run.step, mismatch=proof["mismatch/abs_max"].total)
    return proof


async def evaluate_now(run: Run) -> None:
    """Evaluate the published version, once; the learner waits, so it is the only one that is measured."""
    if run.evaluated == run.step or not run.eval_prompts:
        return
    run.evaluated = run.step
    metrics = await evaluate(run.eval_prompts, run.cluster.runners, run.config.rollout, run.config.eval)
    await run.records.evaluation(run, metrics)


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
