"""What the driver of an RL run writes down: metrics, rollouts, events, checkpoints, the final model."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt.chat.render import Renderer
from molt.config import RLConfig
from molt.report.metrics import merge, values
from molt.report.rollouts import write_rollouts
from molt.report.sinks import RunLog
from molt.rollout.buffer import load_buffer, save_buffer
from molt.rollout.producer import own
from molt.train.checkpoint import begin, commit, prune, require_same_run
from molt.types import Group, Metric, PolicyFailure, Sample

if TYPE_CHECKING:
    from molt.loop import Run


Metrics = dict[str, Metric]


class Records:
    """Owns the run directory and the checkpoints of one RL run."""

    def __init__(self, config: RLConfig, log: RunLog, renderer: Renderer):
        self.config, self.log, self.renderer = config, log, renderer
        self.saved: int | None = None
        """The step that was saved last."""

    def event(self, kind: str, **fields: Any) -> None:
        self.log.event(kind, **fields)

    def evaluation(self, step: int, metrics: dict[str, Metric]) -> None:
        self.log.step(step, values(metrics))
        self.event("evaluation", version=step, **values(metrics))

    async def step(self, run: "Run", groups: list[Group], advantages: list[list[Any]], parts: list[Metrics]) -> None:
        """Metrics and stored rollouts of one training batch."""
        rollouts = [_rollout_metrics(group) for group in groups]
        metrics = values(merge([*parts, *rollouts, *run.producer.take_metrics()]))
        metrics["perf/tokens_per_s"] = metrics["rollout/generated_tokens"] * len(groups) / metrics["timing/step_s"]
        self.log.step(run.step, metrics)
        limit = self.config.logger.rollouts_per_step
        rows: list[dict[str, Any]] = []
        for group, of_rollouts in zip(groups, advantages, strict=True):
            if 0 <= limit <= len(rows):
                break
            rows += _rows(group, of_rollouts, await group.samples, run.step)
        kept = rows[: limit if limit >= 0 else None]
        await asyncio.to_thread(write_rollouts, self.log.run_dir, run.step, kept, self.renderer.tokenizer.decode)

    async def save(self, run: "Run") -> None:
        """A complete checkpoint of this moment between two steps, once; the newest `ckpt.max_num` are kept."""
        if self.saved == run.step and run.producer.error is None:  # an error changes what the ledger holds
            return
        ledger, finished = run.producer.ledger(), run.producer.finished_groups()
        folder = self.config.ckpt.checkpoints.resolve()
        aside = begin(folder, run.step)
        await run.cluster.policy.save(aside)
        await asyncio.to_thread(save_buffer, aside, finished, [await group.samples for group in finished])
        state = {"step": run.step, "total_steps": run.total_steps, "ledger": ledger, "data": self._identity(run)}
        (aside / "loop.json").write_text(json.dumps(state))
        path = await asyncio.to_thread(commit, aside)  # flushes every file: no work for the event loop
        prune(folder, self.config.ckpt.max_num)
        if self.config.ckpt.save_hf:
            await self.export(run, path / "hf")
        self.saved = run.step
        self.event("checkpoint", step=run.step, path=str(path), buffered=len(finished))

    async def restore(self, run: "Run", path: Path) -> None:
        """Continue where `path` was saved."""
        state = json.loads((path / "loop.json").read_text())
        require_same_run(path, state["data"], self._identity(run))
        await run.cluster.policy.load(path)
        stream = run.producer.stream
        groups, samples = load_buffer(path, lambda epoch, position: stream[stream.index(epoch, position)])
        for group, heavy in zip(groups, samples, strict=True):
            group.samples = own(heavy)
        if state["total_steps"] != run.total_steps and self.config.actor.lr_scheduler != "constant":
            print(
                f"train.max_steps: the {self.config.actor.lr_scheduler} learning rate now ends at step "
                f"{run.total_steps}, not {state['total_steps']} as before: the rate jumps here.",
                file=sys.stderr,
            )
        run.step = self.saved = state["step"]
        run.producer.restore(state["ledger"], groups, run.step)

    def _identity(self, run: "Run") -> dict[str, int]:
        """What must be the same for a position in the prompt stream to mean the same prompt and group."""
        rollout, train = self.config.rollout, self.config.train
        rows = len(run.producer.stream) // train.num_episodes
        return {"rows": rows, "seed": train.seed, "batch": rollout.batch_size, "group": rollout.n_samples_per_prompt}

    async def export(self, run: "Run", path: Path) -> None:
        """The policy as a Hugging Face model directory."""
        await run.cluster.policy.export(self.config.actor.model_name_or_path, self.config.data.chat_template, path)


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


def _rows(group: Group, advantages: list[float | None], samples: list[list[Sample]], step: int) -> list[dict[str, Any]]:
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
                    "version_trained": step - 1,
                    "prompt_tokens": int(sample.mask.argmax()) if sample.mask.any() else len(sample.token_ids),
                    "token_ids": sample.token_ids,
                    "versions": sample.versions,
                    "logprobs": sample.logprobs,
                }
            )
    return rows
