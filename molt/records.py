"""What the driver of an RL run writes down: metrics, rollouts, events, checkpoints, the final model."""

import asyncio
import json
import shutil
import sys
from collections import deque
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt.chat.render import Renderer
from molt.checkpoint_files import read_json, to_json, with_defaults, write_json
from molt.config import RLConfig
from molt.data.prompts import PromptStream
from molt.errors import ConfigError, MoltError, TrainingError
from molt.report.metrics import merge, values
from molt.report.rollouts import write_rollouts
from molt.report.sinks import RunLog
from molt.rollout.buffer import load_buffer, save_buffer
from molt.rollout.replay import abandon_dump, dump_batch
from molt.rollout.runner_pool import own
from molt.train.checkpoint import (
    begin,
    checkpoint_path,
    checkpoint_step,
    commit,
    complete,
    failing,
    latest_checkpoint,
    prune,
    removing,
    require_same_run,
    write_file,
)
from molt.types import NO_ROLLBACK, Group, Lineage, Metric, PolicyFailure, Sample

if TYPE_CHECKING:
    from molt.loop import Run


Metrics = dict[str, Metric]
NEARLY_ALL, FILTERED_STEPS = 0.99, 3
"""A step of which this fraction of the trained tokens is filtered warns; so many in a row stop the run."""


class Records:
    """Owns the run directory and the checkpoints of one RL run."""

    def __init__(self, config: RLConfig, log: RunLog, renderer: Renderer):
        self.config, self.log, self.renderer = config, log, renderer
        self.saved: int | None = None
        """The step of the newest checkpoint."""
        self.writing: asyncio.Task | None = None
        """The checkpoint that is being written; one at a time."""
        self.best: dict[str, Any] | None = None
        """Step, metric and value of the best evaluation in the lineage of the weights."""
        self.folder = config.ckpt.checkpoints.resolve()
        output = config.ckpt.output_dir.resolve()
        self.best_file, self.best_model, self.candidate_model = (
            self.folder / "best.json",
            output / "best",
            output / "candidate",
        )
        self.undecided = False
        """An evaluation runs that may make its checkpoint the best."""
        self.filtered_steps = 0
        """Steps in a row, up to now, of which nearly everything was filtered."""

    def event(self, kind: str, **fields: Any) -> None:
        self.log.event(kind, **fields)

    async def candidate(self, run: "Run") -> None:
        """Keep the weights that an evaluation is about to measure: if it makes them the best, they are trained on by
        then."""
        if self.config.ckpt.best_metric_key != "none":
            self.undecided = True
            await self.save(run)
            await self.export(run, self.candidate_model)

    async def evaluation(self, run: "Run", metrics: Metrics) -> None:
        """Log the evaluation of step `run.evaluated`, whose weights are kept if they are the best."""
        await self.keep_best(run, metrics)
        self.log.step(run.evaluated, values(metrics))
        self.event("evaluation", version=run.lineage.version(run.evaluated), **values(metrics))

    def evidence(self, run: "Run", groups: list[Group], of_models: dict[str, Any]) -> Path:
        """What made the breaker skip steps of the batch that was just trained, and the batch, as a file."""
        batch = [
            {
                "group": group.prompt.group_id,
                "rewards": [rollout.reward for rollout in group.rollouts],
                "trained_tokens": [rollout.generated_tokens for rollout in group.rollouts],
            }
            for group in groups
        ]
        path = self.log.run_dir / "evidence" / f"step_{run.step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"step": run.step, "skipped": of_models, "batch": batch}, indent=1))
        self.event("breaker_tripped", step=run.step, evidence=str(path), skipped=of_models)
        return path

    async def step(self, run: "Run", groups: list[Group], advantages: list[list[Any]], parts: list[Metrics]) -> None:
        """Metrics and stored rollouts of one training batch. Raises what writing a checkpoint raised meanwhile."""
        rollouts = [_rollout_metrics(group) for group in groups]
        lags = run.watchdog.take_metrics()
        metrics = values(merge([*parts, *rollouts, *run.producer.take_metrics(), lags]))
        metrics["perf/tokens_per_s"] = metrics["rollout/generated_tokens"] * len(groups) / metrics["timing/step_s"]
        self.log.step(run.step, metrics)
        limit = self.config.logger.rollouts_per_step
        rows: list[dict[str, Any]] = []
        before = run.lineage.version(run.step - 1)
        for group, of_rollouts in zip(groups, advantages, strict=True):
            if 0 <= limit <= len(rows):
                break
            rows += _rows(group, of_rollouts, await group.samples, before)
        kept = rows[: limit if limit >= 0 else None]
        if len(groups) < self.config.rollout.batch_size:
            self.event("small_batch", step=run.step, groups=len(groups))
            print(f"step {run.step}: no prompt is left, so the batch has only {len(groups)} groups", file=sys.stderr)
        if dump := self.config.train.rollout_dump_dir:
            samples = [await group.samples for group in groups]
            await asyncio.to_thread(dump_batch, dump, run.step, groups, samples)
        await asyncio.to_thread(write_rollouts, self.log.run_dir, run.step, kept, self.renderer.tokenizer.decode)
        try:
            self.check_filtered(run.step, metrics)
        except TrainingError:
            await self.save(run)
            raise
        if self.writing is not None and self.writing.done():
            await self.settle()

    def check_filtered(self, step: int, metrics: dict[str, float]) -> None:
        """Warn of a step of which the importance band left nearly nothing; raise `TrainingError` at the third in a row.

        clip and trunc bound the ratios and train on, so this is about mode mask alone.
        """
        advantage, fraction = self.config.algo.advantage, metrics.get("ratio/filtered_fraction", 0.0)
        if advantage.is_correction_mode != "mask" or fraction < NEARLY_ALL:
            self.filtered_steps = 0
            return
        self.filtered_steps += 1
        low, high = advantage.band
        shown = [name for name in sorted(metrics) if name.startswith(("ratio/", "mismatch/"))]
        table = "\n".join(f"  {name} {metrics[name]:.4g}" for name in shown)
        message = (
            f"step {step}: `algo.advantage.is_correction_threshold` (={low:g} {high:g}) filtered {fraction:.1%} of the "
            f"trained tokens, so next to nothing was learned. That makes {self.filtered_steps} such steps in a row; at "
            f"{FILTERED_STEPS} the run stops.\n{table}\n"
            "If mismatch/* is large, trainer and engine disagree: use --fsdp.param_dtype fp32. Else the tokens are too "
            "old or the band is too narrow: lower --train.async_queue_size, or widen the band."
        )
        self.event("filtered", step=step, fraction=fraction, in_a_row=self.filtered_steps)
        if self.filtered_steps == FILTERED_STEPS:
            raise TrainingError(f"{message} Then resume with --ckpt.load_enable.")
        print(message, file=sys.stderr)

    async def save(self, run: "Run") -> None:
        """A complete checkpoint of this moment between two steps, once.

        With `ckpt.async_save` it returns when the ranks have copied their state; `settle` waits for the rest.
        Raises `CheckpointError` when the disk does not take it, or did not take the one before.
        """
        ckpt = self.config.ckpt
        if self.saved == run.step and run.producer.error is None:  # an error changes what the ledger holds
            return
        await self.settle()
        finished = run.producer.finished_groups()
        state = {"step": run.step, "total_steps": run.total_steps, "rollbacks": run.lineage.rollbacks}
        state |= {"best": self.best, "kl_coef": run.kl_coef, "trips": list(run.trips)}
        state |= {"ledger": run.producer.ledger(), "data": _of_checkpoint(self.config, run.producer.stream)}
        aside = begin(self.folder, run.step)
        with removing(aside):
            await run.cluster.save(aside, ckpt.async_save)
            if ckpt.save_hf:
                await self.export(run, aside / "hf")
        self.saved = run.step
        self.writing = asyncio.create_task(self._write(run, aside, state, finished))
        if not ckpt.async_save:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises what went wrong with it."""
        writing, self.writing = self.writing, None
        if writing is not None:
            await writing

    async def _write(self, run: "Run", aside: Path, state: dict[str, Any], finished: list[Group]) -> None:
        """Everything of a checkpoint that can wait; `state` and `finished` are of the moment it was begun."""
        with removing(aside):
            await run.cluster.written(aside)
            samples = [await group.samples for group in finished]
            path = await asyncio.to_thread(self._commit, aside, state, finished, samples)
        run.restarts = 0
        self.event("checkpoint", step=state["step"], path=str(path), buffered=len(finished))

    def _commit(self, aside: Path, state: dict[str, Any], finished: list[Group], samples: list[Any]) -> Path:
        """Flushes every file, so it is no work for the event loop."""
        save_buffer(aside, finished, samples)
        write_json(aside / "loop.json", state)
        path = commit(aside)
        self._prune()
        return path

    def _prune(self) -> None:
        if self.undecided:  # which checkpoint is the best
            return
        ckpt = self.config.ckpt
        prune(self.folder, ckpt.max_num, ckpt.max_mem * 2**30, self.best and self.best["step"])

    async def keep_best(self, run: "Run", metrics: Metrics) -> None:
        """Make the candidate the best if it is better than every one before, else remove it.

        Raises `ConfigError` when the evaluation has no `ckpt.best_metric_key`.
        """
        key = self.config.ckpt.best_metric_key
        if key == "":
            key = self.best["metric"] if self.best else next(name for name in metrics if name.endswith("/pass1"))
        if key == "none":
            return
        better, self.undecided = self._better(run, key, metrics), False
        await self.settle()  # best.json never names a checkpoint that is not there
        if better:
            self.best = {"step": run.evaluated, "metric": key, "value": values(metrics)[key]}
            self.promote()
            self.event("best", **self.best)
        self._prune()
        self.no_candidate()

    def no_candidate(self) -> None:
        """Nothing is measured any more that may become the best."""
        self.undecided = False
        shutil.rmtree(self.candidate_model, ignore_errors=True)

    def _better(self, run: "Run", key: str, metrics: Metrics) -> bool:
        lost = sum(metric.total for name, metric in metrics.items() if name.endswith("/failures"))
        asked = lost + sum(metric.count for name, metric in metrics.items() if name.endswith("/response_length"))
        if lost > (limit := self.config.rollout.max_failure_rate) * asked:
            print(
                f"step {run.evaluated}: {lost:.0f} of {asked:.0f} evaluation rollouts have no result, above "
                f"rollout.max_failure_rate (={limit:g}): this version is not compared with the best one.",
                file=sys.stderr,
            )
            return False
        if key not in metrics and not lost:
            raise ConfigError(
                f"`ckpt.best_metric_key` (={key}) is not what the evaluation measures: no version could be the best. "
                f"Use one of {', '.join(sorted(metrics))}, or none; then resume with --ckpt.load_enable."
            )
        value = values(metrics).get(key)
        return value is not None and not (self.best and self.best["metric"] == key and value <= self.best["value"])

    def promote(self) -> None:
        """The candidate becomes OUTPUT_DIR/best; then `best.json`, which says that it is whole."""
        self.best_file.unlink(missing_ok=True)
        shutil.rmtree(self.best_model, ignore_errors=True)
        with failing(self.best_file):
            self.candidate_model.rename(self.best_model)
            write_file(self.best_file, to_json(self.best or {}))

    async def follow(self, run: "Run", best: dict[str, Any] | None) -> None:
        """Make `best.json` and OUTPUT_DIR/best those of the lineage that goes on from `run.step`.

        best: what its checkpoint says; an evaluation that ended later, of a step that is in the lineage, stays.
        """
        self.no_candidate()
        noted = read_best(self.best_file)
        if noted and noted["step"] <= run.step:
            self.best = noted
            return
        self.best = best
        if best and complete(path := checkpoint_path(self.folder, best["step"])):
            await run.cluster.policy.load(path)
            await self.export(run, self.candidate_model)
            self.promote()
            return
        self.best = None  # its checkpoint went with the lineage that was abandoned
        if self.best_model.exists():
            aside = self.log.run_dir / "abandoned" / f"best_{datetime.now():%Y%m%d-%H%M%S.%f}"
            aside.parent.mkdir(exist_ok=True)
            shutil.move(self.best_model, aside)
            print(f"the best model is of steps that this resume goes back behind: it is now {aside}", file=sys.stderr)
        self.best_file.unlink(missing_ok=True)

    async def go_back(self, run: "Run") -> None:
        """Continue from the last checkpoint, or from the beginning; what came after it is abandoned."""
        with suppress(MoltError):  # what the lost ranks had written by then is a checkpoint like any other
            await self.settle()
        checkpoint = latest_checkpoint(self.folder)
        step = checkpoint_step(checkpoint) if checkpoint else -1
        self.log.abandon(step)
        if dump := self.config.train.rollout_dump_dir:
            abandon_dump(dump, step)
        self.filtered_steps = 0
        if checkpoint:
            await self.restore(run, checkpoint)
        else:
            self.saved, run.step, run.evaluated, run.kl_coef = None, 0, None, self.config.algo.kl_coef
            run.trips.clear()
            run.producer.restore(run.producer.NOTHING, [], 0)
            await self.follow(run, None)
            run.lineage = NO_ROLLBACK.rolled_back(0, run.published)

    async def restore(self, run: "Run", path: Path) -> None:
        """Continue where `path` was saved."""
        state = read_json(path / "loop.json")
        run.step = self.saved = checkpoint_step(path)
        await self.follow(run, whole_best(state["best"], path / "loop.json"))
        await run.cluster.load(path)
        stream = run.producer.stream
        groups, samples = load_buffer(path, lambda epoch, position: stream[stream.index(epoch, position)])
        for group, heavy in zip(groups, samples, strict=True):
            group.samples = own(heavy)
        if state["total_steps"] not in (None, run.total_steps) and self.config.actor.lr_scheduler != "constant":
            print(
                f"train.max_steps: the {self.config.actor.lr_scheduler} learning rate now ends at step "
                f"{run.total_steps}, not {state['total_steps']} as before: the rate jumps here.",
                file=sys.stderr,
            )
        if self.config.algo.kl.target and state["kl_coef"]:  # 0: the run had no KL before
            run.kl_coef = state["kl_coef"]
        run.evaluated = run.step if self.log.evaluated(run.step) else None
        run.trips = deque(state["trips"])
        run.lineage = Lineage(tuple(map(tuple, state["rollbacks"]))).rolled_back(run.step, run.published)
        ledger = state["ledger"]
        if self.config.train.rollout_replay_dir is None:
            buffered = [stream.index(group.prompt.epoch, group.prompt.position) for group in groups]
            trained = run.step * self.config.rollout.batch_size
            ledger = whole_ledger(ledger, trained, buffered, path / "loop.json")
        run.producer.restore(ledger, groups, run.step)

    async def export(self, run: "Run", path: Path) -> None:
        """The policy as a Hugging Face model directory. Raises `CheckpointError` when the disk does not take it."""
        with failing(path):
            await run.cluster.policy.export(self.config.actor.model_name_or_path, self.config.data.chat_template, path)


def identity(config: RLConfig, stream: PromptStream) -> dict[str, Any]:
    """What must be the same for a position in the prompt stream to mean the same prompt and group."""
    batch, group = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    return {**stream.order.identity, "seed": config.train.seed, "batch": batch, "group": group}


def refuse_other_run(path: Path, config: RLConfig, stream: PromptStream) -> None:
    """Raise `CheckpointError` before anything is started, or written, if the checkpoint is of another run."""
    require_same_run(path, read_json(path / "loop.json")["data"], _of_checkpoint(config, stream))


def read_best(path: Path) -> dict[str, Any] | None:
    """The best evaluation that `best.json` holds; None where there is none, or the file lacks a part of it."""
    if not path.exists():
        return None
    return whole_best(read_json(path), path)


def whole_best(saved: dict[str, Any] | None, path: Path) -> dict[str, Any] | None:
    """A best evaluation as saved in `path`, or None where a part of it is missing."""
    if saved is None:
        return None
    best = with_defaults(saved, "best.json", path)
    if None in best.values():
        return None
    return best


def whole_ledger(saved: dict[str, Any], trained: int, buffered: list[int], path: Path) -> dict[str, Any]:
    """The ledger of a checkpoint. Where the next position is missing, it is counted from what the ledger should hold.

    trained: groups trained up to the checkpoint. buffered: places in the stream of the finished groups.
    """
    ledger = with_defaults(saved, "loop.json ledger", path)
    if ledger["position"] is None:
        started = [*buffered, *ledger["in_flight"]]
        ledger["position"] = max([trained + len(started), *(index + 1 for index in started)])
    return ledger


def _of_checkpoint(config: RLConfig, stream: PromptStream) -> dict[str, Any]:
    """A replay has no ledger to go on with, and a run no batches of another."""
    return identity(config, stream) | {"replay": config.train.rollout_replay_dir is not None}


def _rollout_metrics(group: Group) -> dict[str, Metric]:
    rollouts = group.rollouts
    n = len(rollouts)
    metrics = {
        "rollout/reward": Metric(sum(r.reward for r in rollouts), n),
        "rollout/score": Metric(sum(r.outcome.score for r in rollouts), n),
        "rollout/response_length": Metric(sum(r.generated_tokens for r in rollouts), n),
        "rollout/generated_tokens": Metric(sum(r.generated_tokens for r in rollouts), 1),
        "rollout/truncated": Metric(sum(r.truncated for r in rollouts), n),
        "rollout/turns": Metric(sum(r.turns for r in rollouts), n),
        "rollout/policy_failures": Metric(sum(isinstance(r.outcome, PolicyFailure) for r in rollouts), n),
        "rollout/mixed_groups": Metric(len({r.reward for r in rollouts}) > 1),
        "timing/rollout_s": Metric(sum(r.duration_s for r in rollouts), n),
    }
    info = [{f"rollout/info/{name}": Metric(value) for name, value in r.metrics.items()} for r in rollouts]
    return merge([metrics, *info])


def _rows(
    group: Group, advantages: list[float | None], samples: list[list[Sample]], version: int
) -> list[dict[str, Any]]:
    rows = []
    for rollout, advantage, segments in zip(group.rollouts, advantages, samples, strict=True):
        for index, sample in enumerate(segments):
            rows.append(
                {
                    "group_id": rollout.group_id,
                    "rollout": rollout.index,
                    "segment": index,
                    "reward": rollout.reward,
                    "score": rollout.outcome.score,
                    "advantage": advantage,
                    "outcome": "policy_failure" if isinstance(rollout.outcome, PolicyFailure) else "scored",
                    "truncated": rollout.truncated,
                    "version_trained": version,
                    "prompt_tokens": int(sample.mask.argmax()) if sample.mask.any() else len(sample.token_ids),
                    "token_ids": sample.token_ids,
                    "versions": sample.versions,
                    "logprobs": sample.logprobs,
                }
            )
    return rows
