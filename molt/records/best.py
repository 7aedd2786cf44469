"""The best model of a run: `OUTPUT_DIR/best`, and `checkpoints/best.json` which says that it is complete.

The weights are exported before they are evaluated: by the time the score is known they have changed. That export is the
candidate; it becomes the best, or is removed.
"""

import shutil
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from molt.checkpoint_files import to_json
from molt.config import RLCkptConfig
from molt.errors import ConfigError
from molt.records.checkpoints import Checkpoints
from molt.records.state import Best, read_best
from molt.report.metrics import values
from molt.train.checkpoint import checkpoint_path, complete, failing, write_file
from molt.types import Metric

Metrics = Mapping[str, Metric]


class BestModel:
    """Owns the candidate, the best model and `best.json`."""

    def __init__(self, config: RLCkptConfig, checkpoints: Checkpoints, run_dir: Path, *, max_failure_rate: float):
        output_dir = config.output_dir.resolve()
        self.metric = config.best_metric_key
        """`ckpt.best_metric_key`: "" for the first `pass1`, none for no best model."""
        self.checkpoints = checkpoints
        self.run_dir = run_dir
        self.max_failure_rate = max_failure_rate
        self.best: Best | None = None
        self.file = checkpoints.folder / "best.json"
        self.model = output_dir / "best"
        self.candidate = output_dir / "candidate"

    @property
    def is_kept(self) -> bool:
        """Whether the run keeps a best model at all."""
        return self.metric != "none"

    async def export_candidate(self) -> None:
        """Export the weights that an evaluation is about to measure."""
        self.checkpoints.hold_pruning()
        await self.checkpoints.export(self.candidate)

    async def judge(self, step: int, metrics: Metrics) -> Best | None:
        """If the candidate, of `step`, is better than every version before, make it the best model; else remove it.

        metrics: of its evaluation. Returns the new best, or None. Raises `ConfigError` when the evaluation has no
        `ckpt.best_metric_key`.
        """
        metric = self._metric_in(metrics)
        value = self._comparable_value(step, metric, metrics)
        new_best: Best | None = None
        if value is not None and self._exceeds_best(metric, value):
            new_best = {"step": step, "metric": metric, "value": value}
        await self.checkpoints.settle()  # best.json never names a checkpoint that is not there
        if new_best is not None:
            self.best = new_best
            self.promote()
        self.drop_candidate()
        return new_best

    def drop_candidate(self) -> None:
        """The candidate will not become the best model."""
        self.checkpoints.protect(self._best_step)
        shutil.rmtree(self.candidate, ignore_errors=True)

    def promote(self) -> None:
        """The candidate becomes `OUTPUT_DIR/best`; then `best.json`, which says that it is complete."""
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.model, ignore_errors=True)
        with failing(self.file):
            self.candidate.rename(self.model)
            write_file(self.file, to_json(self.best or {}))

    async def follow(self, step: int, saved: Best | None) -> None:
        """Make the best model that of the lineage which continues from `step`.

        saved: the best by the checkpoint of that step. An evaluation that ended later, of a step in the lineage, stays
        the best. Otherwise the model is exported again from its checkpoint, if that is still there. It changes the
        weights of the ranks; the caller loads them.
        """
        shutil.rmtree(self.candidate, ignore_errors=True)
        noted = read_best(self.file)
        if noted is not None and noted["step"] <= step:
            self.best = noted
        elif saved is not None and complete(self._checkpoint_of(saved)):
            self.best = saved
            await self.checkpoints.ranks.load(self._checkpoint_of(saved))
            await self.checkpoints.export(self.candidate)
            self.promote()
        else:
            self.best = None
            self._abandon()
        self.checkpoints.protect(self._best_step)

    @property
    def _best_step(self) -> int | None:
        if self.best is None:
            return None
        return self.best["step"]

    def _checkpoint_of(self, best: Best) -> Path:
        return checkpoint_path(self.checkpoints.folder, best["step"])

    def _abandon(self) -> None:
        """Move a best model of steps that are no longer in the lineage aside."""
        if self.model.exists():
            aside = self.run_dir / "abandoned" / f"best_{datetime.now():%Y%m%d-%H%M%S.%f}"
            aside.parent.mkdir(exist_ok=True)
            shutil.move(self.model, aside)
            print(f"the best model is of steps that this resume abandons: it is now {aside}", file=sys.stderr)
        self.file.unlink(missing_ok=True)

    def _metric_in(self, metrics: Metrics) -> str:
        """The name of the metric by which versions are compared."""
        if self.metric:
            return self.metric
        if self.best is not None:
            return self.best["metric"]
        return next(name for name in metrics if name.endswith("/pass1"))

    def _comparable_value(self, step: int, metric: str, metrics: Metrics) -> float | None:
        """The value of `metric`, or None if too many rollouts of the evaluation failed."""
        failed = 0.0
        answered = 0.0
        for name, found in metrics.items():
            if name.endswith("/failures"):
                failed += found.total
            if name.endswith("/response_length"):
                answered += found.count
        rollouts = failed + answered
        if failed > self.max_failure_rate * rollouts:
            print(
                f"step {step}: {failed:.0f} of {rollouts:.0f} evaluation rollouts have no result, above "
                f"rollout.max_failure_rate (={self.max_failure_rate:g}): this version is not compared with the best "
                "one.",
                file=sys.stderr,
            )
            return None
        if metric not in metrics and not failed:
            raise ConfigError(
                f"`ckpt.best_metric_key` (={metric}) is not what the evaluation measures: no version can be the best. "
                f"Use one of {', '.join(sorted(metrics))}, or none; then resume with --ckpt.load_enable."
            )
        return values(metrics).get(metric)

    def _exceeds_best(self, metric: str, value: float) -> bool:
        if self.best is None or self.best["metric"] != metric:
            return True
        return value > self.best["value"]
