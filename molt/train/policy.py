"""The policy on one rank: batch → loss → step. No Ray: a worker process calls this class.

The loss of a token is the policy loss times `c`, the importance coefficient of trainer against engine; KL, entropy and
load balance are added to it. It does not know the estimator: an advantage arrives as one number per rollout or is
spread over a segment by a token estimator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from molt.algo.advantage import SMALLEST_ADVANTAGE
from molt.algo.centering import centered_loss, weighting
from molt.algo.importance import correction
from molt.algo.kl import kl_per_token
from molt.algo.ratio import log_ratio
from molt.algorithm import load_algorithm
from molt.batch.collate import Batch, collate, gather, scatter
from molt.batch.plan import Place, RankPlan, SampleTask
from molt.chat.render import stop_ids
from molt.columns import CandidateColumns, candidate_columns
from molt.config import ActorConfig, AlgoConfig, FsdpConfig, TrainConfig
from molt.errors import TrainingError
from molt.models.build import build_policy
from molt.models.forward import PolicyModel, PolicyOutput
from molt.parallel.mesh import Mesh, seed
from molt.parallel.shape import DATA_AXES
from molt.publish.gather import named_full_tensors
from molt.report.metrics import merge
from molt.train.checkpoint import export_hf
from molt.train.inference import (
    Samples,
    TokenArrays,
    infer,
    lay_out,
    lay_out_columns,
    logprobs_forward,
    sample_of,
    tasks_of,
)
from molt.train.token_advantages import AdvantageInputs, TokenAdvantages, token_advantages
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
    apply_chat_template: bool = False
    """An answer ends with the token that closes a turn of the chat template."""


@dataclass
class PolicyMicroBatch:
    """Everything the loss of one forward/backward reads; per-token tensors are `[B, T]`."""

    batch: Batch
    mask: Tensor
    """bool, the trained tokens."""
    segments: Tensor
    """int64, which of the S samples a token belongs to."""
    advantages: Tensor
    rollout_logprobs: Tensor
    weights: Tensor
    """float32, 0 where the mask is off."""
    shares: Tensor
    """float32 `[S]`, the weight of each sample."""
    old_logprobs: Tensor | None
    """None: this is the first optimizer step of the training batch, so old = current, detached."""
    ref_logprobs: Tensor | None
    """None: there is no KL in the loss."""
    columns: dict[str, Tensor]
    """The further token columns of the samples, by name: `[B, T, *shape]`."""


@dataclass(frozen=True)
class PreparedBatch:
    """What the micro-batches of a training batch are laid out from, each when its turn comes."""

    plan: RankPlan
    samples: Samples
    inferred: dict[str, TokenArrays]
    old_logprobs: TokenArrays
    advantages: dict[Place, Tensor]
    has_signal: list[bool]
    """Of each step, whether an advantage of any rank is not 0."""


EMPTY_BATCH = PreparedBatch(plan=[], samples={}, inferred={}, old_logprobs={}, advantages={}, has_signal=[])


class Policy(Trained[PolicyModel]):
    """Model, optimizer and schedule of one rank. Every method but `written` is collective: all ranks call it."""

    def __init__(self, settings: PolicySettings, mesh: Mesh):
        seed(settings.train.seed, deterministic=settings.train.full_determinism_enable)
        super().__init__(
            build_policy(settings.actor, settings.fsdp, mesh, mesh.device, settings.max_len),
            settings.actor,
            settings.total_steps,
            mesh,
            part=".",
            spike_factor=settings.train.grad_spike_factor,
        )
        self.settings = settings
        self.algorithm = load_algorithm(settings.algo, settings.actor)
        self.kl_coef = 0.0
        self.candidates: CandidateColumns | None = None
        """What the engine recorded for score centering; None without it."""
        if settings.algo.advantage.score_centering_top_k:
            self.candidates = candidate_columns(settings.algo.advantage.score_centering_top_k)
        self.prepared = EMPTY_BATCH

    def prepare(
        self,
        plan: RankPlan,
        samples: Samples,
        inferred: dict[str, TokenArrays],
        batches_trained: int,
        kl_coef: float,
        lineage: Lineage = NO_ROLLBACK,
    ) -> tuple[dict[str, Metric], TokenArrays]:
        """Everything that a training batch needs before its first step; `train` takes the steps.

        inferred: `ref_logprobs` and `values` of this rank's samples, where they are needed. Returns this rank's
        metrics (`staleness/*`, `train/kl` if it is in the reward), and the returns `A + V` that a critic learns.
        """
        self._require_candidates(plan, samples)
        self.prepared = EMPTY_BATCH  # frees one that was prepared and not trained
        self.kl_coef = kl_coef
        if self.settings.algo.kl.ref == "rollout":
            inferred = inferred | {"ref_logprobs": _rollout_logprobs(plan, samples)}

        old = self._old_logprobs(plan, samples)
        advantages = self._advantages(plan, samples, inferred, old)
        self.prepared = PreparedBatch(
            plan=plan,
            samples=samples,
            inferred=inferred,
            old_logprobs=old,
            advantages=advantages.advantages,
            has_signal=_steps_with_signal(plan, advantages.advantages, self.mesh),
        )
        metrics = merge([advantages.metrics, _staleness(plan, samples, batches_trained, lineage)])
        return metrics, advantages.returns

    def train(self) -> dict[str, Metric]:
        """All optimizer steps of the prepared batch. Returns this rank's metrics: `train/*`, `ratio/*`."""
        metrics = []
        for _ in range(self.settings.train.max_epochs):
            for planned, has_signal in zip(self.prepared.plan, self.prepared.has_signal, strict=True):
                of_step = self.step(self.micro_batches(planned), self._loss, planned, has_signal=has_signal)
                metrics.append(of_step)
        self.prepared = EMPTY_BATCH  # freed now, not when the next one is there
        return merge(metrics)

    def micro_batches(self, planned: Sequence[list[SampleTask]]) -> Iterator[PolicyMicroBatch | None]:
        """The micro-batches of a step of the prepared batch, one after another: the device holds one at a time.

        None for one that only other ranks have.
        """
        for tasks in planned:
            yield self._micro_batch(tasks) if tasks else None

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs float32 `[T]` of given tokens at temperature 1 (entry 0 is 0): the probe's trainer side."""
        token_ids = [np.asarray(ids) for ids in sequences]
        batch = collate(token_ids, packed=self.settings.fsdp.packing_samples)
        with torch.no_grad():
            logprobs = self.model(batch, temperature=1.0).logprobs
        return [of_sequence.float().cpu().numpy() for of_sequence in gather(batch, logprobs)]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under their Hugging Face names, in the engine's dtype."""
        return named_full_tensors(self.model, self.settings.engine_dtype)

    def export(self, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
        """Write the model as `from_pretrained` loads it."""
        ends = stop_ids(tokenizer, (), apply_chat_template=self.settings.apply_chat_template)
        export_hf(self.model, tokenizer, path, self.mesh, end_ids=ends)

    def _require_candidates(self, plan: RankPlan, samples: Samples) -> None:
        """Raise `TrainingError` for a sample that was made without what score centering reads."""
        if self.candidates is None:
            return
        for task in tasks_of(plan):
            columns = sample_of(samples, task).columns.arrays
            if self.candidates.ids not in columns or self.candidates.logprobs not in columns:
                k = self.settings.algo.advantage.score_centering_top_k
                group, _, _ = task.at
                raise TrainingError(
                    f"`algo.advantage.score_centering_top_k` (={k}), but the samples of group {group} of this "
                    "batch were made without the candidates of that many: their center is unknown. Groups in a "
                    "checkpoint or dump keep what they were made with; use the value of that run."
                )

    def _old_logprobs(self, plan: RankPlan, samples: Samples) -> TokenArrays:
        """Log-probs at the weights that the batch starts with, for the steps that run at other weights."""
        # The very first step runs at the weights of `old`; a second epoch, or a KL in the reward, needs it for all.
        if self.settings.train.max_epochs > 1 or self.algorithm.kl_in_reward:
            steps = plan
        elif self.candidates is not None:  # score centering has no ratio to older weights
            steps = []
        else:
            steps = plan[1:]
        forward = logprobs_forward(self.model, self.settings.temperature)
        return infer(forward, steps, samples, packed=self.settings.fsdp.packing_samples)

    def _advantages(
        self, plan: RankPlan, samples: Samples, inferred: dict[str, TokenArrays], old: TokenArrays
    ) -> TokenAdvantages:
        inputs = AdvantageInputs(
            tasks=list(tasks_of(plan)),
            samples=samples,
            old_logprobs=old,
            ref_logprobs=inferred.get("ref_logprobs", {}),
            values=inferred.get("values", {}),
        )
        return token_advantages(self.algorithm, inputs, kl_coef=self.kl_coef, mesh=self.mesh)

    def _micro_batch(self, tasks: list[SampleTask]) -> PolicyMicroBatch:
        """Samples of the prepared batch, laid out on the device."""
        samples = self.prepared.samples
        old = self.prepared.old_logprobs
        advantages = self.prepared.advantages
        batch, mask = lay_out(tasks, samples, packed=self.settings.fsdp.packing_samples)

        def on_device(arrays: Sequence[np.ndarray | Tensor]) -> Tensor:
            """One `[T]` for each task, as `[B, T]`."""
            return scatter(batch, arrays).to(self.device)

        rollout_logprobs = []
        weights = []
        for task in tasks:
            sample = sample_of(samples, task)
            rollout_logprobs.append(sample.logprobs)
            weights.append(np.float32(task.weight) * sample.mask)

        old_logprobs = None
        if tasks[0].at in old:
            old_logprobs = on_device([old[task.at] for task in tasks])
        ref_logprobs = None
        if self.settings.algo.kl.use_loss and self.kl_coef:
            reference = self.prepared.inferred["ref_logprobs"]
            ref_logprobs = on_device([reference[task.at] for task in tasks])

        columns = lay_out_columns(batch, tasks, samples)
        return PolicyMicroBatch(
            batch=batch,
            mask=mask.to(self.device),
            segments=batch.segments.to(self.device),
            advantages=on_device([advantages[task.at] for task in tasks]),
            rollout_logprobs=on_device(rollout_logprobs),
            weights=on_device(weights),
            shares=torch.tensor([task.share for task in tasks], device=self.device),
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            columns={name: values.to(self.device) for name, values in columns.items()},
        )

    def _loss(self, model: nn.Module, micro_batch: PolicyMicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """`sum(weight * (policy * c + beta KL - entropy_coef H))`, and the load balance, of a micro-batch."""
        actor = self.settings.actor
        mask = micro_batch.mask
        output: PolicyOutput = model(
            micro_batch.batch,
            temperature=self.settings.temperature,
            needed=mask,
            candidates=self._candidates(micro_batch),
            balance=actor.aux_loss_coef != 0,
        )
        logprobs = output.logprobs
        if logprobs.isnan().any():  # no ratio can be formed: the breaker skips the step, on every rank
            return logprobs.sum(), {}

        if output.candidate_logprobs is None:
            loss, metrics = self._policy_loss(logprobs, micro_batch)
        else:
            loss, metrics = self._centered_loss(logprobs, output.candidate_logprobs, micro_batch)
        if micro_batch.ref_logprobs is not None:
            kl = self._kl_to(micro_batch.ref_logprobs, logprobs)
            loss = loss + self.kl_coef * kl
            metrics["train/kl"] = _over_tokens(kl.detach(), mask)
        if actor.entropy_coef:
            loss = loss - actor.entropy_coef * output.entropy
        metrics["train/entropy"] = _over_tokens(output.entropy.detach(), mask)

        total = (micro_batch.weights * loss).sum()
        if output.balance is not None:
            total = total + actor.aux_loss_coef * (micro_batch.shares * output.balance).sum()
            metrics["train/balance_loss"] = Metric(float(output.balance.detach().sum()), len(micro_batch.shares))
        return total, metrics

    def _policy_loss(self, logprobs: Tensor, micro_batch: PolicyMicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The policy loss of each token times its importance coefficient, `[B, T]`."""
        old = micro_batch.old_logprobs
        if old is None:
            old = logprobs.detach()
        low, high = self.algorithm.low_high
        loss, clipped = self.algorithm.loss.fn(
            logprobs,
            old,
            micro_batch.advantages,
            micro_batch.mask,
            micro_batch.segments,
            low=low,
            high=high,
            dual_clip=self.settings.actor.dual_clip,
        )
        metrics = _ratio_metrics(old, micro_batch)
        metrics["train/clip_fraction"] = _over_tokens(clipped, micro_batch.mask)

        if self.settings.algo.advantage.is_correction_level != "off":
            coefficient, inside = self._importance(old, micro_batch)
            loss = loss * coefficient
            metrics["ratio/filtered_fraction"] = _over_tokens(~inside, micro_batch.mask)
        return loss, metrics

    def _candidates(self, micro_batch: PolicyMicroBatch) -> Tensor | None:
        """The tokens whose log-probs score centering needs, int64 `[B, T, K]`; None without it."""
        if self.candidates is None:
            return None
        return micro_batch.columns[self.candidates.ids.name].long()

    def _centered_loss(
        self, logprobs: Tensor, candidate_logprobs: Tensor, micro_batch: PolicyMicroBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The loss of score centering, `[B, T]`, in the place of policy loss and importance correction."""
        assert self.candidates is not None
        config = self.settings.algo.advantage
        loss = centered_loss(
            logprobs,
            candidate_logprobs,
            micro_batch.advantages,
            micro_batch.rollout_logprobs,
            micro_batch.columns[self.candidates.logprobs.name],
            micro_batch.mask,
            weight=weighting(config.is_correction_level, config.is_correction_mode, *config.band),
        )
        return loss, _ratio_metrics(logprobs.detach(), micro_batch)

    def _importance(self, old: Tensor, micro_batch: PolicyMicroBatch) -> tuple[Tensor, Tensor]:
        """`algo.importance.correction` of trainer against engine: the coefficient, and where it changed nothing."""
        config = self.settings.algo.advantage
        low, high = config.band
        return correction(
            old,
            micro_batch.rollout_logprobs,
            micro_batch.mask,
            micro_batch.segments,
            level=config.is_correction_level,
            mode=config.is_correction_mode,
            gating=config.is_correction_gating,
            low=low,
            high=high,
        )

    def _kl_to(self, ref_logprobs: Tensor, logprobs: Tensor) -> Tensor:
        """The KL of each token to the reference, `[B, T]`."""
        setting = self.settings.algo.kl
        return kl_per_token(logprobs, ref_logprobs, setting.estimator, from_reference=setting.ref == "rollout")


def _steps_with_signal(plan: RankPlan, advantages: dict[Place, Tensor], mesh: Mesh) -> list[bool]:
    """Of each step of the batch, whether a trained token of any rank has an advantage that is not 0 up to rounding.

    advantages: 0 for tokens that are not trained. Every rank calls it, with as many steps; the answer is the same.
    """
    counts = torch.zeros(len(plan), device=mesh.device)
    for step, planned in enumerate(plan):
        for tasks in planned:
            for task in tasks:
                is_learned = advantages[task.at].abs() >= SMALLEST_ADVANTAGE
                if task.weight:
                    counts[step] += is_learned.sum()
    # Collective over the data-parallel axes: every rank, once per training batch.
    totals = mesh.sum(counts, *DATA_AXES)
    return [total > 0 for total in totals.tolist()]


def _over_tokens(values: Tensor, mask: Tensor) -> Metric:
    """Sum of `[B, T]` over the trained tokens, and how many there are."""
    return Metric(float((values * mask).sum()), float(mask.sum()))


def _ratio_metrics(old: Tensor, micro_batch: PolicyMicroBatch) -> dict[str, Metric]:
    """`ratio/*`: importance sampling ratios of trainer against engine, over the trained tokens."""
    mask = micro_batch.mask
    log_ratios = log_ratio(old_logprobs=old, rollout_logprobs=micro_batch.rollout_logprobs)
    log_ratios = (log_ratios * mask).double()
    return {
        "ratio/mean": _over_tokens(log_ratios.exp(), mask),
        "ratio/log_abs_mean": _over_tokens(log_ratios.abs(), mask),
        "ratio/log_abs_max": Metric(float(log_ratios.abs().max())),
    }


def _rollout_logprobs(plan: RankPlan, samples: Samples) -> TokenArrays:
    """The engine's log-probs of every planned sample."""
    return {task.at: sample_of(samples, task).logprobs for task in tasks_of(plan)}


def _staleness(plan: RankPlan, samples: Samples, batches_trained: int, lineage: Lineage) -> dict[str, Metric]:
    """Per trained token, in batches: how many were trained before this batch, minus those before its weights."""
    total = 0
    count = 0
    oldest = 0
    for task in tasks_of(plan):
        sample = sample_of(samples, task)
        ages = batches_trained - lineage.steps(sample.versions[sample.mask])
        total += int(ages.sum())
        count += len(ages)
        oldest = max(oldest, int(ages.max()))
    return {"staleness/mean": Metric(total, count), "staleness/max": Metric(oldest)}
