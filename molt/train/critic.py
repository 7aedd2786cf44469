"""The critic on one rank: the value of the state before every token, learned from the returns. No Ray."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from molt.algo.value import explained_variance, value_loss, variance_sums
from molt.batch.collate import Batch, scatter
from molt.batch.plan import RankPlan, SampleTask
from molt.config import CriticConfig, FsdpConfig, TrainConfig
from molt.models.build import build_critic
from molt.models.forward import ValueModel
from molt.parallel.mesh import Mesh, seed
from molt.parallel.shape import DATA_AXES
from molt.report.metrics import merge
from molt.train.inference import Samples, TokenArrays, infer, lay_out, sample_of, tasks_of, values_forward
from molt.train.trained import Trained
from molt.types import Metric

ROUNDING = 1e-12
"""Up to this share of the mean square the variance of equal rewards may be above 0."""
METRIC_NAMES = {
    "train/loss": "train/value_loss",
    "train/grad_norm": "train/value_grad_norm",
    "train/lr": "train/value_lr",
}
"""Metrics of an optimizer step, renamed to tell them from the policy's."""


@dataclass(frozen=True)
class CriticSettings:
    """What a critic rank needs to know; derived from the run's config by `cluster`."""

    critic: CriticConfig
    fsdp: FsdpConfig
    train: TrainConfig
    max_len: int
    total_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""


@dataclass
class CriticMicroBatch:
    """What the value loss of one forward/backward reads; per-token tensors are `[B, T]`."""

    batch: Batch
    mask: Tensor
    """bool, the trained tokens."""
    old_values: Tensor
    """float32, at the weights that the training batch started with."""
    returns: Tensor
    """float32, `A + V`."""
    weights: Tensor
    """float32, 0 where the mask is off."""


class Critic(Trained[ValueModel]):
    """Value model, optimizer and schedule of one rank. Every method but `written` is collective: all ranks call it."""

    def __init__(self, settings: CriticSettings, mesh: Mesh):
        seed(settings.train.seed, deterministic=settings.train.full_determinism_enable)
        super().__init__(
            build_critic(settings.critic, settings.fsdp, mesh, mesh.device, settings.max_len),
            settings.critic,
            settings.total_steps,
            mesh,
            part="critic",
            spike_factor=settings.train.grad_spike_factor,
        )
        self.settings = settings
        self._forget_batch()

    def infer(self, plan: RankPlan, samples: Samples) -> TokenArrays:
        """Values of a training batch at the weights it starts with; they are kept for `train`."""
        self.plan = plan
        self.samples = samples
        forward = values_forward(self.model)
        self.old_values = infer(forward, plan, samples, packed=self.settings.fsdp.packing_samples)
        return self.old_values

    def train(self, returns: TokenArrays) -> dict[str, Metric]:
        """All optimizer steps of the batch that `infer` had last. Returns this rank's metrics."""
        of_steps = []
        signals = _steps_with_signal(self.plan, self.mesh)
        for _ in range(self.settings.critic.max_epochs):
            for planned, has_signal in zip(self.plan, signals, strict=True):
                micro_batches = self._micro_batches(planned, returns)
                of_steps.append(self.step(micro_batches, self._loss, planned, has_signal=has_signal))
        metrics = {METRIC_NAMES.get(name, name): metric for name, metric in merge(of_steps).items()}

        metrics["train/explained_variance"] = Metric(self._explained_variance(returns))
        self._forget_batch()
        return metrics

    def _forget_batch(self) -> None:
        """Free the arrays of a batch when it is trained, not when the next one is there."""
        self.plan: RankPlan = []
        self.samples: Samples = {}
        self.old_values: TokenArrays = {}

    def _explained_variance(self, returns: TokenArrays) -> float:
        """How much of the returns of all ranks the values before the steps explain."""
        sums = torch.zeros(5, dtype=torch.float64)
        for task in tasks_of(self.plan):
            sums += variance_sums(
                torch.tensor(returns[task.at]),
                torch.tensor(self.old_values[task.at]),
                torch.tensor(sample_of(self.samples, task).mask),
            )
        # Collective over the data-parallel axes: every rank, once per training batch.
        sums_of_batch = self.mesh.sum(sums.to(self.device), *DATA_AXES)
        return explained_variance(sums_of_batch)

    def _micro_batches(
        self, planned: Sequence[list[SampleTask]], returns: TokenArrays
    ) -> Iterator[CriticMicroBatch | None]:
        """The micro-batches of a step, each laid out when its turn comes; None for one that only other ranks have."""
        for tasks in planned:
            yield self._micro_batch(tasks, returns) if tasks else None

    def _micro_batch(self, tasks: list[SampleTask], returns: TokenArrays) -> CriticMicroBatch:
        """Samples of the batch, laid out on the device."""
        batch, mask = lay_out(tasks, self.samples, packed=self.settings.fsdp.packing_samples)
        old_values = scatter(batch, [self.old_values[task.at] for task in tasks])
        laid_out_returns = scatter(batch, [returns[task.at] for task in tasks])

        weights = []
        for length, task in zip(batch.lengths, tasks, strict=True):
            weights.append(torch.full((length,), task.weight))
        return CriticMicroBatch(
            batch=batch,
            mask=mask.to(self.device),
            old_values=old_values.to(self.device),
            returns=laid_out_returns.to(self.device),
            weights=(scatter(batch, weights) * mask).to(self.device),
        )

    def _loss(self, model: nn.Module, micro_batch: CriticMicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """`sum(weight * value loss)` of a micro-batch."""
        mask = micro_batch.mask
        values = model(micro_batch.batch, needed=mask)
        if values.isnan().any():  # the breaker skips the step, on every rank
            return values.sum(), {}

        loss, clipped = value_loss(
            values,
            micro_batch.old_values,
            micro_batch.returns,
            clip=self.settings.critic.value_clip,
        )
        clipped_tokens = (clipped & mask).sum()
        clip_fraction = Metric(float(clipped_tokens), float(mask.sum()))
        return (micro_batch.weights * loss).sum(), {"train/value_clip_fraction": clip_fraction}


def _steps_with_signal(plan: RankPlan, mesh: Mesh) -> list[bool]:
    """Of each step of the batch, whether the rewards of its trained samples, of all ranks, differ.

    Once a critic knows the one reward of batches that all fail, or all succeed, their gradient is next to nothing.
    Every rank calls it, with as many steps; the answer is the same.
    """
    sums = torch.zeros(len(plan), 3, dtype=torch.float64)
    for step, planned in enumerate(plan):
        for tasks in planned:
            for task in tasks:
                if task.weight:
                    sums[step] += torch.tensor([1.0, task.reward, task.reward**2], dtype=torch.float64)
    # Collective over the data-parallel axes: every rank, once per training batch.
    count, total, squares = mesh.sum(sums.to(mesh.device), *DATA_AXES).cpu().unbind(1)
    variance = squares / count - (total / count) ** 2
    return (variance > ROUNDING * squares / count).tolist()
