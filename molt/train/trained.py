"""A model that learns, on one rank: its optimizer, its schedule and its part of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from molt.config import OptimizerConfig
from molt.parallel.mesh import saving_group
from molt.train.checkpoint import load_checkpoint, write_part, written
from molt.train.optimizer import build_optimizer, build_scheduler
from molt.train.step import LossFn, MicroBatch, optimizer_step
from molt.types import Metric


class Trained:
    """Owns model, optimizer and schedule. Every method but `written` is collective: all ranks call it."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int, device: torch.device, part: str):
        """total_steps: optimizer steps of the whole run. part: the folder of this model in a checkpoint."""
        self.model, self.config, self.device, self.part = model, config, device, part
        self.optimizer = build_optimizer(model, config)
        self.scheduler = build_scheduler(self.optimizer, config, total_steps)
        self.group = saving_group()

    def step(self, micro_batches: Sequence[MicroBatch | None], loss_fn: LossFn) -> dict[str, Metric]:
        state = (self.model, self.optimizer, self.scheduler)
        return optimizer_step(*state, micro_batches, loss_fn, max_norm=self.config.max_norm)

    def save(self, tmp: Path, background: bool) -> None:
        """This rank's part of a checkpoint, as it is now; whoever owns the checkpoint commits it."""
        state = (self.model, self.optimizer, self.scheduler)
        self.writing = write_part(tmp / self.part, *state, group=self.group, background=background)

    def written(self, tmp: Path) -> None:
        """Wait until what `save` left to the background is on disk. The one method that is called from elsewhere."""
        written(tmp, self.writing)

    def load(self, path: Path) -> None:
        load_checkpoint(path, self.model, self.optimizer, self.scheduler, part=self.part)
