"""A model that learns, on one rank: its optimizer, its schedule and its part of a checkpoint."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from molt.batch.plan import SampleTask
from molt.checkpoint_files import read_json, write_json
from molt.config import OptimizerConfig
from molt.parallel.mesh import saving_group
from molt.train.breaker import Breaker, Evidence
from molt.train.checkpoint import failing, load_checkpoint, write_part, written
from molt.train.optimizer import build_optimizer, build_scheduler, place
from molt.train.step import LossFn, MicroBatch, StepRefusedError, optimizer_step
from molt.types import Metric


class Trained:
    """Owns model, optimizer, schedule and breaker. Every method but `written` is collective: all ranks call it."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        device: torch.device,
        *,
        part: str,
        spike_factor: float,
    ):
        """total_steps: optimizer steps of the whole run. part: the folder of this model in a checkpoint.

        spike_factor: a step whose gradient norm is above so many times the usual one is skipped.
        """
        self.model, self.config, self.device, self.part = model, config, device, part
        self.optimizer = build_optimizer(model, config)
        self.scheduler = build_scheduler(self.optimizer, config, total_steps)
        self.group = saving_group()
        self.breaker = Breaker(spike_factor)
        self.skipped: list[Evidence] = []
        """Since they were read."""

    def step(
        self, micro_batches: Sequence[MicroBatch | None], loss_fn: LossFn, planned: Sequence[Sequence[SampleTask]]
    ) -> dict[str, Metric]:
        """An optimizer step, or none where loss or gradient are not fit for one: every rank skips it alike.

        planned: this rank's samples of the step, for the evidence. Returns this rank's metrics; those of a skipped
        step are without what is not finite, and with `train/skipped_count`.
        """
        state, limit = (self.model, self.optimizer, self.scheduler), self.breaker.limit
        try:
            metrics = optimizer_step(*state, micro_batches, loss_fn, max_norm=self.config.max_norm, spike=limit)
        except StepRefusedError as refused:
            return self._skip(refused, limit, planned)
        self.breaker.add(metrics["train/grad_norm"].total)
        return metrics

    def _skip(
        self, refused: StepRefusedError, limit: float, planned: Sequence[Sequence[SampleTask]]
    ) -> dict[str, Metric]:
        metrics = {name: metric for name, metric in refused.metrics.items() if isfinite(metric.total)}
        loss, norm = (refused.metrics[name].total for name in ("train/loss", "train/grad_norm"))
        reason = "spike" if isfinite(loss + norm) else "nonfinite"
        evidence = {"optimizer_step": self.scheduler.last_epoch, "reason": reason}
        numbers = {"loss": loss, "norm": norm, "limit": limit}
        evidence |= {name: number if isfinite(number) else None for name, number in numbers.items()}
        groups = sorted({task.at[0] for tasks in planned for task in tasks})
        self.skipped.append(evidence | {"tensors": refused.tensors[:3], "groups": groups})
        # The schedule was counted in batches: a fault may not shift the rates of those that follow, nor its end.
        # `scheduler.step` would warn that no optimizer step came before.
        place(self.scheduler, self.scheduler.last_epoch + 1)
        if dist.get_rank() == 0:  # what is counted is added up over ranks, and they all skipped the same step
            metrics |= {"train/skipped_count": Metric(1.0), f"train/skipped_{reason}_count": Metric(1.0)}
        return metrics

    def evidence(self) -> list[Evidence]:
        """What tripped the breaker since this was called last, one entry per skipped step."""
        skipped, self.skipped = self.skipped, []
        return skipped

    def save(self, tmp: Path, background: bool) -> None:
        """This rank's part of a checkpoint, as it is now; whoever owns the checkpoint commits it."""
        state = (self.model, self.optimizer, self.scheduler)
        self.writing = write_part(tmp / self.part, *state, group=self.group, background=background)
        if dist.get_rank() == 0:
            with failing(tmp):
                write_json(tmp / self.part / "breaker.json", {"norms": list(self.breaker.norms)})

    def written(self, tmp: Path) -> None:
        """Wait until what `save` left to the background is on disk. The one method that is called from elsewhere."""
        written(tmp, self.writing)

    def load(self, path: Path) -> None:
        load_checkpoint(path, self.model, self.optimizer, self.scheduler, part=self.part)
        self.breaker.norms.clear()
        self.breaker.norms.extend(read_json(path / self.part / "breaker.json")["norms"])
