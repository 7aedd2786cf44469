"""The numbers, stored rollouts and evidence of each training batch."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molt.algo.plugin import load_estimator
from molt.batch.masking import takes_part
from molt.config import RewardConfig, RLConfig
from molt.errors import LostError, TrainingError
from molt.records.no_signal import Advantages, NoSignal
from molt.records.notices import Notices
from molt.records.tool_calls import ToolCalls
from molt.report.metrics import merge
from molt.report.rollouts import StoredGroup
from molt.report.sinks import RunLog
from molt.rollout.buffer import write_records
from molt.rollout.dump import abandon_dump, begin_batch
from molt.rollout.keepers import Keepers
from molt.types import CUT_REASONS, Group, Json, Metric, PolicyFailure, RolloutInfo

NEARLY_ALL = 0.99
"""A step of which this fraction of the trained tokens is filtered warns."""
FILTERED_STEPS = 3
"""So many such steps in a row stop the run."""


class StepRecords:
    """Writes down every training batch: metrics, rollouts for the viewer, the dump for a replay."""

    def __init__(self, config: RLConfig, log: RunLog, keepers: Keepers):
        self.log = log
        self.keepers = keepers
        self.batch_size = config.rollout.batch_size
        self.rollouts_per_step = config.logger.rollouts_per_step
        self.dump_dir = config.train.rollout_dump_dir
        self.advantage = config.algo.advantage
        self.notices = Notices()
        self.no_signal = NoSignal(reads_rewards="teacher" not in load_estimator(self.advantage.estimator).needs)
        self.tool_calls = ToolCalls()
        self.filtered_steps = 0
        """Steps in a row, up to now, of which nearly everything was filtered."""

    async def write(
        self, step: int, version: int, groups: Sequence[Group], advantages: Advantages, metrics: dict[str, float]
    ) -> None:
        """version: of the weights that the batch was trained on."""
        self.log.step(step, metrics)
        self.notices.look(step, metrics)
        for notice in [*self.no_signal.look(groups, advantages), *self.tool_calls.look(metrics)]:
            print(f"step {step}: {notice}", file=sys.stderr)
        if len(groups) < self.batch_size:
            self.log.event("small_batch", step=step, groups=len(groups))
            print(f"step {step}: no prompt is left, so the batch has only {len(groups)} groups", file=sys.stderr)
        if self.dump_dir is not None:
            await self._dump(self.dump_dir, step, groups)
        await self._store(step, groups, advantages, version)

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
        self.no_signal.forget()
        self.tool_calls.forget()

    async def _dump(self, folder: Path, step: int, groups: Sequence[Group]) -> None:
        """Write the batch for a replay. Raises `LostError` when a node took arrays with it that were just trained."""
        directory = begin_batch(folder, step)
        lost = await self.keepers.write_arrays(directory, [group.samples for group in groups])
        if lost:
            raise LostError(
                f"step {step}: the arrays of {len(lost)} groups went with their node after they were trained, so the "
                "dump (train.rollout_dump_dir) would have a gap: the run stops. Resume with --ckpt.load_enable."
            )
        write_records(directory, groups)

    async def _store(self, step: int, groups: Sequence[Group], advantages: Advantages, version: int) -> None:
        """At most `logger.rollouts_per_step` rows of the viewer's table; -1: all."""
        limit = self.rollouts_per_step
        if limit == 0:
            return
        stored: list[StoredGroup] = []
        samples: list[Any] = []
        rows = 0
        for group, of_rollouts in zip(groups, advantages, strict=True):
            if 0 <= limit <= rows:
                break
            stored.append(StoredGroup(rollouts=group.rollouts, advantages=of_rollouts, version_trained=version))
            samples.append(group.samples)
            rows += sum(len(rollout.samples) for rollout in group.rollouts)
        lost = await self.keepers.write_rollouts(self.log.run_dir, step, stored, samples, limit)
        if lost:
            self.log.event("rollouts_not_stored", step=step, groups=len(lost))

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


def rollout_metrics(group: Group, reward: RewardConfig) -> dict[str, Metric]:
    """`rollout/*` of one trained group. reward: says which of its rollouts take part in training."""
    rollouts = group.rollouts
    n = len(rollouts)
    generated_tokens = sum(rollout.generated_tokens for rollout in rollouts)
    policy_failures = sum(isinstance(rollout.outcome, PolicyFailure) for rollout in rollouts)
    trained = [rollout for rollout in rollouts if takes_part(rollout, reward)]
    distinct_rewards = {rollout.reward for rollout in trained}
    metrics = {
        "rollout/reward": Metric(sum(rollout.reward for rollout in rollouts), n),
        "rollout/score": Metric(sum(rollout.score for rollout in rollouts), n),
        "rollout/response_length": Metric(generated_tokens, n),
        "rollout/generated_tokens": Metric(generated_tokens),
        "rollout/truncated": Metric(sum(rollout.truncated for rollout in rollouts), n),
        "rollout/turns": Metric(sum(rollout.turns for rollout in rollouts), n),
        "rollout/policy_failures": Metric(policy_failures, n),
        "rollout/no_model_call": Metric(sum(rollout.turns == 0 for rollout in rollouts), n),
        "rollout/mixed_groups": Metric(len(distinct_rewards) > 1),
        "timing/rollout_s": Metric(sum(rollout.duration_s for rollout in rollouts), n),
    }
    for reason in CUT_REASONS:
        metrics[f"rollout/truncated_{reason}"] = Metric(sum(rollout.cut == reason for rollout in rollouts), n)
    if reward.mask_truncated:
        metrics["rollout/masked"] = Metric(n - len(trained), n)
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


def _info_metrics(rollout: RolloutInfo) -> dict[str, Metric]:
    return {f"rollout/info/{name}": Metric(value) for name, value in rollout.metrics.items()}
