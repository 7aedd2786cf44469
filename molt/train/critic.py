"""The critic on one rank: the value of the state before every token, learned from the returns. No Ray."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from molt.algo.value import explained_variance, value_loss, variance_sums
from molt.batch.collate import Batch, scatter
from molt.batch.plan import RankPlan, SampleTask, Scores
from molt.config import CriticConfig, FsdpConfig, TrainConfig
from molt.models.build import build_critic
from molt.parallel.mesh import all_reduce_sums, init_distributed, resolve_device, seed
from molt.report.metrics import merge
from molt.train.score import Samples, lay_out, sample_of, score, tasks_of
from molt.train.trained import Trained
from molt.types import Metric

NAMES = {"train/loss": "train/value_loss", "train/grad_norm": "train/value_grad_norm", "train/lr": "train/value_lr"}
"""Of an optimizer step, to tell them from the policy's."""


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
class MicroBatch:
    """What the value loss of one forward/backward reads; per-token tensors are `[B, T]`."""

    batch: Batch
    mask: Tensor
    old_values: Tensor
    returns: Tensor
    weights: Tensor


class Critic(Trained):
    """Value model, optimizer and schedule of one rank. Every method but `written` is collective: all ranks call it."""

    def __init__(self, settings: CriticSettings, rank: int, world_size: int, address: str, port: int, local_rank: int):
        seed(settings.train.seed, deterministic=settings.train.full_determinism_enable)
        self.settings = settings
        device = resolve_device(settings.fsdp.device, local_rank)
        mesh = init_distributed(rank, world_size, address, port, device)
        model = build_critic(settings.critic, settings.fsdp, mesh, device, settings.max_len)
        factor = settings.train.grad_spike_factor
        super().__init__(model, settings.critic, settings.total_steps, device, part="critic", spike_factor=factor)

    def score(self, plan: RankPlan, samples: Samples) -> Scores:
        """Values of a training batch at the weights it starts with; they are kept for `train`."""
        self.plan, self.samples = plan, samples
        packed = self.settings.fsdp.packing_samples
        self.values = score(lambda batch, mask: self.model(batch, needed=mask), plan, samples, packed=packed)
        return self.values

    def train(self, returns: Scores) -> dict[str, Metric]:
        """All optimizer steps of the batch that was scored last. Returns this rank's metrics."""
        steps = [[self._micro_batch(b, returns) if b else None for b in batches] for batches in self.plan]
        epochs = self.settings.critic.max_epochs
        planned = list(zip(steps, self.plan, strict=True))
        trained = merge([self.step(step, self._loss, tasks) for _ in range(epochs) for step, tasks in planned])
        sums = torch.zeros(5, dtype=torch.float64)
        for task in tasks_of(self.plan):
            pair = (torch.tensor(found[task.at]) for found in (returns, self.values))
            sums += variance_sums(*pair, torch.tensor(sample_of(self.samples, task).mask))
        # Collective on the default group: every rank, once per training batch.
        explained = explained_variance(all_reduce_sums(sums.to(self.device)))
        self.plan, self.samples, self.values = [], {}, {}  # not kept until the next batch is there
        named = {NAMES.get(name, name): metric for name, metric in trained.items()}
        return named | {"train/explained_variance": Metric(explained)}

    def _micro_batch(self, tasks: list[SampleTask], returns: Scores) -> MicroBatch:
        batch, mask = lay_out(tasks, self.samples, packed=self.settings.fsdp.packing_samples)
        old, target = (scatter(batch, [found[task.at] for task in tasks]) for found in (self.values, returns))
        weights = scatter(batch, [torch.full((n,), t.weight) for n, t in zip(batch.lengths, tasks, strict=True)]) * mask
        return MicroBatch(batch, *(tensor.to(self.device) for tensor in (mask, old, target, weights)))

    def _loss(self, model: nn.Module, m: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """`sum(weight * value loss)` of a micro-batch."""
        values = model(m.batch, needed=m.mask)
        if values.isnan().any():  # the breaker skips the step, on every rank
            return values.sum(), {}
        loss, clipped = value_loss(values, m.old_values, m.returns, clip=self.settings.critic.value_clip)
        clip_fraction = Metric(float((clipped & m.mask).sum()), float(m.mask.sum()))
        return (m.weights * loss).sum(), {"train/value_clip_fraction": clip_fraction}
