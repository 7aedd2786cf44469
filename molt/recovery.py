"""Continuing a run: from a checkpoint when it starts, and from the last one inside the driver when a rank is lost."""

import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from molt.errors import MoltError, RankLostError
from molt.loop import train_to_the_end
from molt.records.state import RunState, best_in_checkpoint
from molt.run import Run
from molt.train.checkpoint import checkpoint_step
from molt.types import NO_ROLLBACK
from molt.worker_settings import reward_settings


async def run_to_the_end(run: Run) -> None:
    """Resume if the settings ask for it, then train; again from the last checkpoint whenever a rank is lost.

    Raises `RankLostError` after `train.max_restarts` losses without a new checkpoint in between.
    """
    restarts = 0
    completed = run.checkpoints.completed
    while True:
        try:
            if restarts == 0:
                await resume(run)
            else:
                await recover(run)
            return await train_to_the_end(run)
        except RankLostError as lost:
            if run.checkpoints.completed > completed:
                completed = run.checkpoints.completed
                restarts = 0
            restarts += 1
            run.log.event("rank_lost", step=run.step, restart=restarts, reason=str(lost))
            if restarts > run.config.train.max_restarts:
                raise
            if run.shutdown.failed and run.shutdown.error is not None:  # the watcher that failed watches no more
                raise run.shutdown.error from lost
            print(f"step {run.step}: {lost} All ranks restart from the last checkpoint.", file=sys.stderr)


async def resume(run: Run) -> None:
    """Continue from the newest checkpoint with `--ckpt.load_enable`, else start at the first prompt."""
    if run.config.ckpt.load_enable:
        checkpoint = await load(run)
        if checkpoint is None:
            print(f"no checkpoint in {run.checkpoints.folder}: starting from the beginning")
        else:
            buffered = len(run.producer.finished_groups())
            again = _trained_again(run.log.abandoned_steps)
            print(f"resumed from {checkpoint}: {buffered} finished groups are in the buffer{again}")
    if run.step >= run.total_batches or run.producer.done:
        print(f"step {run.step}: nothing is left to train. Raise --train.num_episodes or --train.max_steps to go on.")


def _trained_again(steps: list[int]) -> str:
    """What a resume says of the steps after its checkpoint, which it abandons."""
    if not steps:
        return ""
    if len(steps) == 1:
        return f"; step {steps[0]} is trained again"
    return f"; steps {steps[0]} to {steps[-1]} are trained again"


async def recover(run: Run) -> None:
    """The same inside the running driver: all ranks are replaced, and continue from the last checkpoint.

    The next weight sync has the next unused version.
    """
    started = time.monotonic()
    run.evaluator.drop()
    await run.cluster.restart_ranks()
    run.publisher.forget()
    run.cluster.keepers.release_all()
    with suppress(MoltError):  # a checkpoint that was complete when the ranks were lost is as good as any other
        await run.checkpoints.settle()
    run.shutdown.generation_restarts()
    checkpoint = run.checkpoints.latest()
    run.records.abandon(-1 if checkpoint is None else checkpoint_step(checkpoint))
    await load(run)
    run.log.event("recovered", step=run.step, version=run.version, seconds=time.monotonic() - started)


async def load(run: Run) -> Path | None:
    """Continue from the newest checkpoint and return its path, or from the beginning where there is none."""
    checkpoint = run.checkpoints.latest()
    if checkpoint is None:
        await restart(run)
        return None
    best = best_in_checkpoint(checkpoint)
    await run.evaluator.best_model.follow(checkpoint_step(checkpoint), best)  # first, since it may load other weights
    state = await run.checkpoints.load(checkpoint, run.spec.stream, run.config.rollout.batch_size)
    assign(run, state)
    return checkpoint


def assign(run: Run, state: RunState) -> None:
    """The run is where `state` says."""
    config = run.config
    run.step = state.step
    run.lineage = state.lineage.rolled_back(state.step, run.published)
    run.trips = deque(state.trips)
    if config.algo.kl.target and state.kl_coef:  # 0: the run had no KL before
        run.kl_coef = state.kl_coef
    run.evaluator.resume(state.step)
    has_scorer = reward_settings(config).scorer is not None  # without one, groups that waited for it start again
    unscored = state.unscored if has_scorer else ()
    run.producer.restore(state.ledger, state.finished, state.step, unscored)
    if state.total_batches not in (None, run.total_batches) and config.actor.lr_scheduler != "constant":
        print(
            f"train.max_steps: the {config.actor.lr_scheduler} learning rate now ends at step {run.total_batches}, not "
            f"{state.total_batches} as before: the rate jumps here.",
            file=sys.stderr,
        )


async def restart(run: Run) -> None:
    """There is no checkpoint: the ranks have the initial weights, and the run is at its beginning."""
    run.checkpoints.forget()
    run.step = 0
    run.lineage = NO_ROLLBACK.rolled_back(0, run.published)
    run.kl_coef = run.spec.algorithm.kl_coef
    run.trips.clear()
    run.evaluator.restart()
    run.producer.restart()
    await run.evaluator.best_model.follow(0, None)
