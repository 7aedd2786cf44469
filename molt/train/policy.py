"""The policy on one rank: batch → loss → step. No Ray: a worker process calls this class.

The loss of a token is the policy loss times `c`, the importance coefficient of trainer against engine; KL, entropy and
load balance are added to it. It is blind to the estimator: an advantage arrives as one number per rollout or is
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

from molt.algo.advantage import whiten, whitening_sums
from molt.algo.importance import correction
from molt.algo.kl import kl_per_token
from molt.algo.plugin import load_estimator, load_loss
from molt.algo.ratio import log_ratio
from molt.batch.collate import Batch, collate, gather, scatter
from molt.batch.plan import Place, RankPlan, SampleTask, Scores
from molt.config import ActorConfig, AlgoConfig, FsdpConfig, TrainConfig
from molt.models.build import build_policy
from molt.parallel.mesh import all_reduce_sums, init_distributed, resolve_device, seed
from molt.publish.gather import named_full_tensors
from molt.report.metrics import merge
from molt.train.checkpoint import export_hf
from molt.train.score import Samples, lay_out, logprobs_of, sample_of, score, tasks_of
from molt.train.trained import Trained
from molt.types import NO_ROLLBACK, Lineage, Metric


@dataclass(frozen=True)
class PolicySettings:
    """What a policy rank needs to know; derived from the run's config by `cluster`."""

    actor: ActorConfig
    fsdp: FsdpConfig
    algo: AlgoConfig
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
    segments: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    weights: Tensor
    shares: Tensor
    """`[S]`, the weight of each sample as a whole."""
    old_logprobs: Tensor | None
    """None: this is the first optimizer step of the training batch, so old = current, detached."""
    ref_logprobs: Tensor | None
    """None: there is no KL in the loss."""


class Policy(Trained):
    """Model, optimizer and schedule of one rank. Every method but `written` is collective: all ranks call it."""

    def __init__(self, settings: PolicySettings, rank: int, world_size: int, address: str, port: int, local_rank: int):
        seed(settings.train.seed, deterministic=settings.train.full_determinism_enable)
        self.settings = settings
        device = resolve_device(settings.fsdp.device, local_rank)
        mesh = init_distributed(rank, world_size, address, port, device)
        model = build_policy(settings.actor, settings.fsdp, mesh, device, settings.max_len)
        factor = settings.train.grad_spike_factor
        super().__init__(model, settings.actor, settings.total_steps, device, part=".", spike_factor=factor)
        self.estimator = load_estimator(settings.algo.advantage.estimator)
        self.loss = load_loss(settings.algo.loss or settings.actor.loss_mode)

    def prepare(
        self,
        plan: RankPlan,
        samples: Samples,
        scores: dict[str, Scores],
        step: int,
        kl_coef: float,
        lineage: Lineage = NO_ROLLBACK,
    ) -> tuple[dict[str, Metric], Scores]:
        """Everything that a training batch needs before its first step; `train` takes the steps.

        scores: `ref_logprobs` and `values` of this rank's samples, where somebody needs them. Returns this rank's
        metrics (`staleness/*`, `train/kl` if it is in the reward), and the returns `A + V` that a critic learns.
        """
        algo, self.kl_coef, self.plan, self.steps = self.settings.algo, kl_coef, plan, []
        if algo.kl.ref == "rollout":
            scores = scores | {"ref_logprobs": {t.at: sample_of(samples, t).logprobs for t in tasks_of(plan)}}
        # The very first step runs at the weights of `old`; a second epoch, or a KL in the reward, needs it for all.
        all_steps = self.settings.train.max_epochs > 1 or algo.kl_in_reward
        forward = logprobs_of(self.model, self.settings.temperature)
        old = score(forward, plan if all_steps else plan[1:], samples, packed=self.settings.fsdp.packing_samples)
        metrics, advantages, returns = self._advantages(plan, samples, scores, old)
        make = partial(self._micro_batch, samples=samples, advantages=advantages, old=old, scores=scores)
        self.steps = [[make(tasks) if tasks else None for tasks in batches] for batches in plan]
        return merge([metrics, _staleness(plan, samples, step, lineage)]), returns

    def train(self) -> dict[str, Metric]:
        """All optimizer steps of the prepared batch. Returns this rank's metrics: `train/*`, `ratio/*`."""
        steps, self.steps = list(zip(self.steps, self.plan, strict=True)), []  # not kept until the next batch is there
        epochs = self.settings.train.max_epochs
        return merge([self.step(step, self._loss, planned) for _ in range(epochs) for step, planned in steps])

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs float32 `[T]` of given tokens at temperature 1 (entry 0 is 0): the probe's trainer side."""
        batch = collate([np.asarray(ids) for ids in sequences], packed=self.settings.fsdp.packing_samples)
        with torch.no_grad():
            logprobs, _ = self.model(batch, temperature=1.0)
        return [values.float().cpu().numpy() for values in gather(batch, logprobs)]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, in the engine's dtype."""
        return named_full_tensors(self.model, self.settings.engine_dtype)

    def export(self, tokenizer: Any, path: Path) -> None:
        export_hf(self.model, tokenizer, path)

    def _advantages(
        self, plan: RankPlan, samples: Samples, scores: dict[str, Scores], old: Scores
    ) -> tuple[dict[str, Metric], dict[Place, Tensor], Scores]:
        """Metrics, per-token advantages (whitened over the whole training batch if asked), and returns."""
        config, estimator = self.settings.algo.advantage, self.estimator
        masks = {task.at: torch.tensor(sample_of(samples, task).mask) for task in tasks_of(plan)}
        spread, returns, kl, count = {}, {}, 0.0, 0
        for task in tasks_of(plan):
            at, mask = task.at, masks[task.at]
            if estimator.level == "group":
                spread[at] = torch.where(mask, task.advantage, 0.0)
                continue
            penalty = values = torch.zeros(len(mask), dtype=torch.float64)
            if self.settings.algo.kl_in_reward:
                pair = (torch.tensor(found[at], dtype=torch.float64) for found in (old, scores["ref_logprobs"]))
                setting = self.settings.algo.kl
                from_reference = setting.ref == "rollout"
                penalty = kl_per_token(*pair, setting.estimator, from_reference=from_reference) * mask
                kl, count = kl + float(penalty.sum()), count + int(mask.sum())
            if "values" in estimator.needs:
                values = torch.tensor(scores["values"][at], dtype=torch.float64)
            discounts = {"gamma": config.gamma, "lam": config.lam}
            spread[at] = estimator.fn(task.reward, mask, kl=self.kl_coef * penalty, values=values, **discounts)
            if "values" in estimator.needs:
                returns[at] = torch.where(mask, spread[at] + values, 0.0).float().numpy()
        metrics = {"train/kl": Metric(kl, count)} if self.settings.algo.kl_in_reward else {}
        if estimator.whiten and not config.no_whiten:
            sums = sum((whitening_sums(spread[at], masks[at]) for at in spread), torch.zeros(3, dtype=torch.float64))
            # Collective on the default group: every rank, once per training batch.
            sums = all_reduce_sums(sums.to(self.device)).cpu()
            spread = {at: whiten(spread[at], masks[at], sums) for at in spread}
        return metrics, spread, returns

    def _micro_batch(
        self,
        tasks: list[SampleTask],
        samples: Samples,
        advantages: dict[Place, Tensor],
        old: Scores,
        scores: dict[str, Scores],
    ) -> MicroBatch:
        batch, mask = lay_out(tasks, samples, packed=self.settings.fsdp.packing_samples)

        def lay(arrays: Any) -> Tensor:
            """By sample, or in their order, as `[B, T]` on the device."""
            ordered = [arrays[task.at] for task in tasks] if isinstance(arrays, dict) else arrays
            return scatter(batch, ordered).to(self.device)

        chosen = [sample_of(samples, task) for task in tasks]
        return MicroBatch(
            batch=batch,
            mask=mask.to(self.device),
            segments=batch.segments.to(self.device),
            advantages=lay(advantages),
            rollout_logprobs=lay([sample.logprobs for sample in chosen]),
            weights=lay([np.float32(task.weight) * s.mask for task, s in zip(tasks, chosen, strict=True)]),
            shares=torch.tensor([task.share for task in tasks], device=self.device),
            old_logprobs=lay(old) if tasks[0].at in old else None,
            ref_logprobs=lay(scores["ref_logprobs"]) if self.settings.algo.kl.use_loss and self.kl_coef else None,
        )

    def _loss(self, model: nn.Module, m: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """`sum(weight * (policy * c + beta KL - entropy_coef H))`, and the load balance, of a micro-batch."""
        actor, kl = self.settings.actor, self.settings.algo.kl
        balance = {"balance": True} if actor.aux_loss_coef else {}
        logprobs, entropy, *of_experts = model(m.batch, temperature=self.settings.temperature, needed=m.mask, **balance)
        if logprobs.isnan().any():  # no ratio can be formed: the breaker skips the step, on every rank
            return logprobs.sum(), {}
        old = logprobs.detach() if m.old_logprobs is None else m.old_logprobs
        low, high = actor.eps_clip_low_high
        loss, clipped = self.loss.fn(
            logprobs, old, m.advantages, m.mask, m.segments, low=low, high=high, dual_clip=actor.dual_clip
        )
        coefficient, metrics = self._correction(old, m)
        loss, count = loss * coefficient, float(m.mask.sum())
        if m.ref_logprobs is not None:
            per_token = kl_per_token(logprobs, m.ref_logprobs, kl.estimator, from_reference=kl.ref == "rollout")
            loss = loss + self.kl_coef * per_token
            metrics["train/kl"] = Metric(float((per_token.detach() * m.mask).sum()), count)
        if actor.entropy_coef:
            loss = loss - actor.entropy_coef * entropy
        total = (m.weights * loss).sum()
        if of_experts:
            balance = (m.shares * of_experts[0]).sum()
            total = total + actor.aux_loss_coef * balance
            metrics["train/balance_loss"] = Metric(float(of_experts[0].detach().sum()), len(m.shares))
        metrics |= {
            "train/clip_fraction": Metric(float((clipped & m.mask).sum()), count),
            "train/entropy": Metric(float((entropy.detach() * m.mask).sum()), count),
        }
        return total, metrics

    def _correction(self, old: Tensor, m: MicroBatch) -> tuple[Tensor | float, dict[str, Metric]]:
        """The importance coefficient of every token, and `ratio/*`."""
        config, count, coefficient, metrics = self.settings.algo.advantage, float(m.mask.sum()), 1.0, {}
        if config.is_correction_level != "off":
            low, high = config.band
            coefficient, inside = correction(
                old,
                m.rollout_logprobs,
                m.mask,
                m.segments,
                level=config.is_correction_level,
                mode=config.is_correction_mode,
                gating=config.is_correction_gating,
                low=low,
                high=high,
            )
            metrics["ratio/filtered_fraction"] = Metric(float((m.mask & ~inside).sum()), count)
        log_w = (log_ratio(old_logprobs=old, rollout_logprobs=m.rollout_logprobs) * m.mask).double()
        return coefficient, metrics | {
            "ratio/mean": Metric(float((log_w.exp() * m.mask).sum()), count),
            "ratio/log_abs_mean": Metric(float(log_w.abs().sum()), count),
            "ratio/log_abs_max": Metric(float(log_w.abs().max())),
        }


def _staleness(plan: RankPlan, samples: Samples, step: int, lineage: Lineage) -> dict[str, Metric]:
    """In batches, per trained token: those trained before this one minus those before the token."""
    total, count, oldest = 0, 0, 0
    for task in tasks_of(plan):
        sample = sample_of(samples, task)
        ages = step - lineage.steps(sample.versions[sample.mask])
        total, count, oldest = total + int(ages.sum()), count + len(ages), max(oldest, int(ages.max()))
    return {"staleness/mean": Metric(total, count), "staleness/max": Metric(oldest)}
