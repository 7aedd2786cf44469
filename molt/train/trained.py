"""A model that learns, on one rank: its optimizer, its schedule and its part of a checkpoint."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from math import isfinite, nan
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from molt.batch.plan import SampleTask
from molt.checkpoint_files import read_json, write_json
from molt.config import OptimizerConfig
from molt.parallel.mesh import Mesh
from molt.train.breaker import Breaker, Evidence
from molt.train.checkpoint import failing, load_checkpoint, write_part, written
from molt.train.optimizer import build_optimizer, build_scheduler, place
from molt.train.step import LossFn, MicroBatchT, StepRefusedError, optimizer_step
from molt.types import Metric

ModelT = TypeVar("ModelT", bound=nn.Module)
BREAKER_FILE = "breaker.json"
SHOWN_TENSORS = 3
"""Tensors that the evidence of a skipped step names."""


class Trained(Generic[ModelT]):
    """Owns model, optimizer, schedule and breaker. Every method but `written` is collective: all ranks call it."""

    def __init__(
        self,
        model: ModelT,
        config: OptimizerConfig,
        total_steps: int,
        mesh: Mesh,
        *,
        part: str,
        spike_factor: float,
    ):
        """total_steps: optimizer steps of the whole run. part: the folder of this model in a checkpoint.

        spike_factor: a step whose gradient norm is above so many times the usual one is skipped.
        """
        self.model = model
        self.config = config
        self.mesh = mesh
        self.device = mesh.device
        self.part = part
        self.optimizer = build_optimizer(model, config)
        self.scheduler = build_scheduler(self.optimizer, config, total_steps)
        self.group = mesh.saving_group()
        self.breaker = Breaker(spike_factor)
        self.skipped: list[Evidence] = []
        """Of the steps that were skipped since `evidence` was called."""
        self.writing: Future | None = None
        """This rank's part of the checkpoint that was saved last."""

    def step(
        self,
        micro_batches: Iterable[MicroBatchT | None],
        loss_fn: LossFn[MicroBatchT],
        planned: Sequence[Sequence[SampleTask]],
        *,
        has_signal: bool,
    ) -> dict[str, Metric]:
        """An optimizer step, or none where loss or gradient are not fit for one: every rank skips it alike.

        planned: this rank's samples of the step, for the evidence. has_signal: whether any rank's samples of the step
        have something to learn from beside regularisers; the same on every rank. Returns this rank's metrics; those of
        a skipped step are without what is not finite, and with `train/skipped_count`.
        """
        limit = self.breaker.limit
        try:
            metrics = optimizer_step(
                self.model,
                self.optimizer,
                self.scheduler,
                micro_batches,
                loss_fn,
                mesh=self.mesh,
                max_norm=self.config.max_norm,
                spike=limit,
            )
        except StepRefusedError as refused:
            return self._skip(refused, limit, planned)
        self.breaker.take(metrics["train/grad_norm"].total, has_signal=has_signal)
        return metrics

    def _skip(
        self, refused: StepRefusedError, limit: float, planned: Sequence[Sequence[SampleTask]]
    ) -> dict[str, Metric]:
        """Keep the evidence and count the step in the schedule; returns the metrics of a skipped step."""
        evidence = _evidence_of(refused, limit, planned, optimizer_step=self.scheduler.last_epoch)
        self.skipped.append(evidence)
        self.breaker.skip(_norm_of_spike(refused))

        # The schedule counts all planned steps: a fault may not shift the rates of those that follow, nor its end.
        # `scheduler.step` would warn that no optimizer step came before.
        place(self.scheduler, self.scheduler.last_epoch + 1)

        metrics = {name: metric for name, metric in refused.metrics.items() if isfinite(metric.total)}
        if self.mesh.is_writer:  # counts are added up over ranks, and all ranks skipped the same step
            metrics["train/skipped_count"] = Metric(1.0)
            metrics[f"train/skipped_{evidence['reason']}_count"] = Metric(1.0)
        return metrics

    def evidence(self) -> list[Evidence]:
        """What tripped the breaker since this was called last, one entry per skipped step."""
        skipped = self.skipped
        self.skipped = []
        return skipped

    def save(self, tmp: Path, background: bool) -> None:
        """This rank's part of a checkpoint, as it is now; whoever owns the checkpoint commits it."""
        self.writing = write_part(
            tmp / self.part,
            self.model,
            self.optimizer,
            self.scheduler,
            mesh=self.mesh,
            group=self.group,
            background=background,
        )
        if self.mesh.is_writer:
            with failing(tmp):
                fields = {"norms": list(self.breaker.norms), "spikes": list(self.breaker.spikes)}
                write_json(tmp / self.part / BREAKER_FILE, fields)

    def written(self, tmp: Path) -> None:
        """Wait until the background save is on disk. The one method that another thread calls."""
        assert self.writing is not None, "`save` comes first"
        written(tmp, self.writing)

    def load(self, path: Path) -> None:
        """Restore everything from a checkpoint."""
        load_checkpoint(path, self.model, self.optimizer, self.scheduler, mesh=self.mesh, part=self.part)
        saved = read_json(path / self.part / BREAKER_FILE)
        self.breaker.norms.clear()
        self.breaker.norms.extend(saved["norms"])
        self.breaker.spikes.clear()
        self.breaker.spikes.extend(saved["spikes"])


def _evidence_of(
    refused: StepRefusedError, limit: float, planned: Sequence[Sequence[SampleTask]], *, optimizer_step: int
) -> Evidence:
    """Why a step was skipped. optimizer_step: its number, from 0."""
    loss = refused.metrics["train/loss"].total
    norm = refused.metrics["train/grad_norm"].total
    groups = set()
    for tasks in planned:
        for task in tasks:
            group, _, _ = task.at
            groups.add(group)
    return {
        "optimizer_step": optimizer_step,
        "reason": "spike" if isfinite(loss + norm) else "nonfinite",
        "loss": _if_finite(loss),
        "norm": _if_finite(norm),
        "limit": _if_finite(limit),
        "tensors": refused.tensors[:SHOWN_TENSORS],
        "groups": sorted(groups),
    }


def _norm_of_spike(refused: StepRefusedError) -> float:
    """The gradient norm of a step that was not taken, NaN where the loss was not finite."""
    loss = refused.metrics["train/loss"].total
    norm = refused.metrics["train/grad_norm"].total
    return norm if isfinite(loss) else nan


def _if_finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    if isfinite(number):
        return number
    return None
