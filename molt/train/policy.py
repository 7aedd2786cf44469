"""The policy on one rank: batch → loss → step. No Ray: a worker process calls this class.

The loss of a token is `-min(r A, clip(r) A) * c`, with `c` the importance coefficient of trainer
against engine. It is blind to the estimator: an advantage arrives as one number per rollout or is
spread over a segment by a token estimator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from molt.algo.advantage import ADVANTAGES, whiten, whitening_sums
from molt.algo.importance import correction
from molt.algo.loss import ppo
from molt.algo.ratio import log_ratio
from molt.batch.collate import Batch, collate, gather, scatter
from molt.batch.plan import RankPlan, SampleTask
from molt.config import ActorConfig, AdvantageConfig, FsdpConfig, TrainConfig
from molt.models.build import build_policy
from molt.parallel.mesh import all_reduce_sums, init_distributed, resolve_device, saving_group
from molt.publish.gather import named_full_tensors
from molt.report.metrics import merge
from molt.train.checkpoint import export_hf, load_checkpoint, write_part, written
from molt.train.optimizer import build_optimizer, build_scheduler
from molt.train.step import dummy_batch, optimizer_step
from molt.types import Metric, Sample


@dataclass(frozen=True)
class PolicySettings:
    """What a policy rank needs to know; derived from the run's config by `cluster`."""

    actor: ActorConfig
    fsdp: FsdpConfig
    advantage: AdvantageConfig
    train: TrainConfig
    temperature: float
    max_len: int
    total_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    engine_dtype: torch.dtype
    """Weights are published in this dtype."""


@dataclass
class MicroBatch:
    """Everything the loss of one forward/backward reads; per-token tensors are `[B, T]`."""

    batch: Batch
    mask: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    weights: Tensor
    old_logprobs: Tensor | None = None
    """None: this is the first optimizer step of the training batch, so old = current, detached."""


class Policy:
    """Model, optimizer and schedule of one rank. Every method is collective: all ranks call it."""

    def __init__(self, settings: PolicySettings, rank: int, world_size: int, address: str, port: int, local_rank: int):
        torch.manual_seed(settings.train.seed)
        self.settings = settings
        self.device = resolve_device(settings.fsdp.device, local_rank)
        self.mesh = init_distributed(rank, world_size, address, port, self.device)
        self.saving = saving_group()
        self.model = build_policy(settings.actor, settings.fsdp, self.mesh, self.device, settings.max_len)
        self.optimizer = build_optimizer(self.model, settings.actor)
        self.scheduler = build_scheduler(self.optimizer, settings.actor, settings.total_steps)

    def train(self, plan: RankPlan, samples: Sequence[list[list[Sample]]], version: int) -> dict[str, Metric]:
        """All optimizer steps of one training batch; `samples[g][r][s]` are the arrays the plan points to.

        Returns this rank's metrics: `train/*`, `ratio/*`, `staleness/*`.
        """
        token_advantages = self._advantages(plan, samples)
        steps = [[self._micro_batch(b, samples, token_advantages) for b in batches] for batches in plan]
        metrics = [_staleness(plan, samples, version)]
        # The very first step runs at those weights anyway; a second epoch needs them for all.
        self._compute_old_logprobs(steps if self.settings.train.max_epochs > 1 else steps[1:])
        step = partial(
            optimizer_step, self.model, self.optimizer, self.scheduler, max_norm=self.settings.actor.max_norm
        )
        for _ in range(self.settings.train.max_epochs):
            metrics += [step(micro_batches, self._loss) for micro_batches in steps]
        return merge(metrics)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs float32 `[T]` of given tokens at temperature 1 (entry 0 is 0): the probe's trainer side."""
        batch = collate([np.asarray(ids) for ids in sequences], packed=self.settings.fsdp.packing_samples)
        with torch.no_grad():
            logprobs, _ = self.model(batch, temperature=1.0)
        return [values.float().cpu().numpy() for values in gather(batch, logprobs)]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, in the engine's dtype."""
        return named_full_tensors(self.model, self.settings.engine_dtype)

    def save(self, tmp: Path, background: bool) -> None:
        """This rank's part of a checkpoint, as it is now; whoever owns the checkpoint commits it."""
        state = (self.model, self.optimizer, self.scheduler)
        self.part = write_part(tmp, *state, group=self.saving, background=background)

    def written(self, tmp: Path) -> None:
        """Wait until what `save` left to the background is on disk. The one method that is called from elsewhere."""
        written(tmp, self.part)

    def load(self, path: Path) -> None:
        load_checkpoint(path, self.model, self.optimizer, self.scheduler)

    def export(self, tokenizer: Any, path: Path) -> None:
        export_hf(self.model, tokenizer, path)

    def _advantages(self, plan: RankPlan, samples) -> dict[SampleTask, Tensor]:
        """Per-token advantages of this rank's samples, whitened over the whole training batch if asked."""
        config = self.settings.advantage
        estimator = ADVANTAGES[config.estimator]
        spread = {}
        for task in _tasks(plan):
            mask = torch.tensor(_sample(samples, task).mask)
            if estimator.level == "token":
                spread[task] = estimator.fn(task.reward, mask, gamma=config.gamma)
            else:
                spread[task] = torch.where(mask, task.advantage, 0.0)
        if not estimator.whiten or config.no_whiten:
            return spread
        masks = {task: torch.tensor(_sample(samples, task).mask) for task in spread}
        sums = sum((whitening_sums(spread[t], masks[t]) for t in spread), torch.zeros(3, dtype=torch.float64))
        # Collective on the default group: every rank, once per training batch.
        sums = all_reduce_sums(sums.to(self.device)).cpu()
        return {task: whiten(spread[task], masks[task], sums) for task in spread}

    def _micro_batch(self, tasks: list[SampleTask], samples, token_advantages) -> MicroBatch | None:
        if not tasks:
            return None
        chosen = [_sample(samples, task) for task in tasks]
        batch = collate([s.token_ids for s in chosen], packed=self.settings.fsdp.packing_samples)
        lay = partial(self._lay_out, batch)
        return MicroBatch(
            batch=batch,
            mask=lay([s.mask for s in chosen]),
            advantages=lay([token_advantages[task] for task in tasks]),
            rollout_logprobs=lay([s.logprobs for s in chosen]),
            weights=lay([np.float32(t.weight) * s.mask for t, s in zip(tasks, chosen, strict=True)]),
        )

    def _lay_out(self, batch: Batch, arrays: Sequence[np.ndarray | Tensor]) -> Tensor:
        return scatter(batch, arrays).to(self.device)

    @torch.no_grad()
    def _compute_old_logprobs(self, steps: list[list[MicroBatch | None]]) -> None:
        """`old` = log-probs at the weights the training batch started with, for all its steps and epochs."""
        for micro_batch in (m for step in steps for m in step):
            # Every rank runs the same number of forwards: FSDP gathers parameters in each of them.
            batch, mask = (micro_batch.batch, micro_batch.mask) if micro_batch else (dummy_batch(), None)
            logprobs, _ = self.model(batch, temperature=self.settings.temperature, needed=mask)
            if micro_batch:
                micro_batch.old_logprobs = logprobs

    def _loss(self, model: nn.Module, m: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """`sum(weight * ppo * coefficient)` over the trained tokens of a micro-batch."""
        advantage = self.settings.advantage
        logprobs, entropy = model(m.batch, temperature=self.settings.temperature, needed=m.mask)
        old = logprobs.detach() if m.old_logprobs is None else m.old_logprobs
        low, high = self.settings.actor.eps_clip_low_high
        loss, clipped = ppo(logprobs, old, m.advantages, low=low, high=high)
        count = float(m.mask.sum())
        metrics = {}
        if advantage.is_correction_level != "off":
            low, high = advantage.is_correction_threshold
            coefficient, inside = correction(
                old,
                m.rollout_logprobs,
                m.mask,
                m.batch.segments.to(self.device),
                level=advantage.is_correction_level,
                mode=advantage.is_correction_mode,
                low=low,
                high=high,
            )
            loss = loss * coefficient
            metrics["ratio/filtered_fraction"] = Metric(float((m.mask & ~inside).sum()), count)
        log_w = (log_ratio(old_logprobs=old, rollout_logprobs=m.rollout_logprobs) * m.mask).double()
        metrics |= {
            "ratio/mean": Metric(float((log_w.exp() * m.mask).sum()), count),
            "ratio/log_abs_mean": Metric(float(log_w.abs().sum()), count),
            "ratio/log_abs_max": Metric(float(log_w.abs().max())),
            "train/clip_fraction": Metric(float((clipped & m.mask).sum()), count),
            "train/entropy": Metric(float((entropy * m.mask).sum()), count),
        }
        return (m.weights * loss).sum(), metrics


def _tasks(plan: RankPlan) -> Iterator[SampleTask]:
    return (task for step in plan for micro_batch in step for task in micro_batch)


def _sample(samples, task: SampleTask) -> Sample:
    return samples[task.group][task.rollout][task.segment]


def _staleness(plan: RankPlan, samples, version: int) -> dict[str, Metric]:
    """In batches, per trained token: the version being trained minus the token's."""
    total, count, oldest = 0, 0, 0
    for task in _tasks(plan):
        sample = _sample(samples, task)
        ages = version - sample.versions[sample.mask]
        total, count, oldest = total + int(ages.sum()), count + len(ages), max(oldest, int(ages.max()))
    return {"staleness/mean": Metric(total, count), "staleness/max": Metric(oldest)}
