"""The numbers, stored rollouts and evidence of each training batch."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from molt.chat.render import Renderer
from molt.config import RLConfig
from molt.errors import TrainingError
from molt.records.notices import Notices
from molt.report.metrics import merge
from molt.report.rollouts import write_rollouts
from molt.report.sinks import RunLog
from molt.rollout.dump import abandon_dump, dump_batch
from molt.types import Group, Json, Metric, PolicyFailure, RolloutInfo, Sample

NEARLY_ALL = 0.99
"""A step of which this fraction of the trained tokens is filtered warns."""
FILTERED_STEPS = 3
"""So many such steps in a row stop the run."""

Advantages = Sequence[Sequence[float | None]]
"""By group and rollout; None where a token estimator computes them on the ranks."""


class StepRecords:
    """Writes down every training batch: metrics, rollouts for the viewer, the dump for a replay."""

    def __init__(self, config: RLConfig, log: RunLog, renderer: Renderer):
        self.log = log
        self.renderer = renderer
        self.batch_size = config.rollout.batch_size
        self.rollouts_per_step = config.logger.rollouts_per_step
        self.dump_dir = config.train.rollout_dump_dir
        self.advantage = config.algo.advantage
        self.notices = Notices()
        self.filtered_steps = 0
        """Steps in a row, up to now, of which nearly everything was filtered."""

    async def write(
        self, step: int, version: int, groups: Sequence[Group], advantages: Advantages, metrics: dict[str, float]
    ) -> None:
        """version: of the weights that the batch was trained on."""
        self.log.step(step, metrics)
        self.notices.look(step, metrics)
        if len(groups) < self.batch_size:
            self.log.event("small_batch", step=step, groups=len(groups))
            print(f"step {step}: no prompt is left, so the batch has only {len(groups)} groups", file=sys.stderr)
        if self.dump_dir is not None:
            samples = [await group.samples for group in groups]
            await asyncio.to_thread(dump_batch, self.dump_dir, step, groups, samples)
        rows = await self._rows(groups, advantages, version)
        await asyncio.to_thread(write_rollouts, self.log.run_dir, step, rows, self.renderer.tokenizer.decode)

    def check_filtered(self, step: int, metrics: dict[str, float]) -> None:
        """Warn if the importance band left next to nothing of a step; raise `TrainingError` at the third in a row.

        clip and trunc bound the ratios and train on, so this is about mode mask alone.
        """
        fraction = metrics.get("ratio/filtered_fraction", 0.0)
        if self.advantage.is_correction_mode != "mask" or fraction < NEARLY_ALL:
            self.filtered_steps = 0
            return
        self.filtered_steps += 1
        self.log.event("filtered", step=step, fraction=fraction, in_a_row=self.filtered_steps)
        message = self._filtered_message(step, fraction, metrics)
        if self.filtered_steps == FILTERED_STEPS:
            raise TrainingError(f"{message} Then resume with --ckpt.load_enable.")
        print(message, file=sys.stderr)

    def evidence(self, step: int, groups: Sequence[Group], skipped: Json) -> Path:
        """Write why the breaker skipped steps of the batch that was just trained, and the batch, to a file.

        skipped: by model, the steps that its breaker skipped.
        """
        batch = []
        for group in groups:
            batch.append(
                {
                    "group": group.prompt.group_id,
                    "rewards": [rollout.reward for rollout in group.rollouts],
                    "trained_tokens": [rollout.generated_tokens for rollout in group.rollouts],
                }
            )
        path = self.log.run_dir / "evidence" / f"step_{step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"step": step, "skipped": skipped, "batch": batch}, indent=1))
        self.log.event("breaker_tripped", step=step, evidence=str(path), skipped=skipped)
        return path

    def abandon(self, step: int) -> None:
        """The run continues from `step`: later records move aside. -1: from the beginning."""
        self.log.abandon(step)
        if self.dump_dir is not None:
            abandon_dump(self.dump_dir, step)
        self.filtered_steps = 0

    async def _rows(self, groups: Sequence[Group], advantages: Advantages, version: int) -> list[Json]:
        """At most `logger.rollouts_per_step` rows of the viewer's table; -1: all."""
        limit = self.rollouts_per_step
        rows: list[Json] = []
        for group, of_rollouts in zip(groups, advantages, strict=True):
            if 0 <= limit <= len(rows):
                break
            rows += rollout_rows(group, of_rollouts, await group.samples, version)
        if limit < 0:
            return rows
        return rows[:limit]

    def _filtered_message(self, step: int, fraction: float, metrics: dict[str, float]) -> str:
        low, high = self.advantage.band
        names = [name for name in sorted(metrics) if name.startswith(("ratio/", "mismatch/"))]
        table = "\n".join(f"  {name} {metrics[name]:.4g}" for name in names)
        return (
            f"step {step}: `algo.advantage.is_correction_threshold` (={low:g} {high:g}) filtered {fraction:.1%} of the "
            f"trained tokens, so next to nothing was learned. That makes {self.filtered_steps} such steps in a row; at "
            f"{FILTERED_STEPS} the run stops.\n{table}\n"
            "If mismatch/* is large, trainer and engine disagree: use --fsdp.param_dtype fp32. Else the tokens are too "
            "old or the band is too narrow: lower --train.async_queue_size, or widen the band."
        )


def rollout_metrics(group: Group) -> dict[str, Metric]:
    """`rollout/*` of one trained group."""
    rollouts = group.rollouts
    n = len(rollouts)
    generated_tokens = sum(rollout.generated_tokens for rollout in rollouts)
    policy_failures = sum(isinstance(rollout.outcome, PolicyFailure) for rollout in rollouts)
    distinct_rewards = {rollout.reward for rollout in rollouts}
    metrics = {
        "rollout/reward": Metric(sum(rollout.reward for rollout in rollouts), n),
        "rollout/score": Metric(sum(rollout.score for rollout in rollouts), n),
        "rollout/response_length": Metric(generated_tokens, n),
        "rollout/generated_tokens": Metric(generated_tokens),
        "rollout/truncated": Metric(sum(rollout.truncated for rollout in rollouts), n),
        "rollout/turns": Metric(sum(rollout.turns for rollout in rollouts), n),
        "rollout/policy_failures": Metric(policy_failures, n),
        "rollout/mixed_groups": Metric(len(distinct_rewards) > 1),
        "timing/rollout_s": Metric(sum(rollout.duration_s for rollout in rollouts), n),
    }
    return merge([metrics, scoring_metrics(rollouts), *(_info_metrics(rollout) for rollout in rollouts)])


def scoring_metrics(rollouts: Sequence[RolloutInfo]) -> dict[str, Metric]:
    """What a scorer and its cache did for these rollouts; {} without one."""
    scorings = [rollout.scoring for rollout in rollouts if rollout.scoring is not None]
    if not scorings:
        return {}
    metrics = {"timing/score_s": Metric(sum(scoring.seconds for scoring in scorings), len(scorings))}
    hits = [scoring.is_cached for scoring in scorings if scoring.is_cached is not None]
    if hits:
        metrics["rollout/score_cached"] = Metric(sum(hits), len(hits))
    return metrics


def rollout_rows(
    group: Group, advantages: Sequence[float | None], samples: Sequence[Sequence[Sample]], version: int
) -> list[Json]:
    """The rows of `rollouts/step_*.parquet` for one group: one per segment."""
    rows = []
    for rollout, advantage, segments in zip(group.rollouts, advantages, samples, strict=True):
        for index, sample in enumerate(segments):
            rows.append(
                {
                    "group_id": rollout.group_id,
                    "rollout": rollout.index,
                    "segment": index,
                    "reward": rollout.reward,
                    "score": rollout.score,
                    "advantage": advantage,
                    "outcome": _outcome_name(rollout),
                    "truncated": rollout.truncated,
                    "version_trained": version,
                    "prompt_tokens": _prompt_tokens(sample),
                    "token_ids": sample.token_ids,
                    "versions": sample.versions,
                    "logprobs": sample.logprobs,
                }
            )
    return rows


def _info_metrics(rollout: RolloutInfo) -> dict[str, Metric]:
    return {f"rollout/info/{name}": Metric(value) for name, value in rollout.metrics.items()}


def _outcome_name(rollout: RolloutInfo) -> str:
    if isinstance(rollout.outcome, PolicyFailure):
        return "policy_failure"
    return "scored"


def _prompt_tokens(sample: Sample) -> int:
    """Tokens before the first one that the policy generated."""
    generated = np.flatnonzero(sample.mask)
    if len(generated) == 0:
        return len(sample.token_ids)
    return int(generated[0])
