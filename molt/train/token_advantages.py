"""Advantages of every token of a rank's samples, from the rewards of rollouts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from molt.algo.advantage import whiten, whitening_sums
from molt.algo.kl import kl_per_token
from molt.algorithm import Algorithm
from molt.batch.plan import Place, SampleTask
from molt.columns import TURN_REWARD
from molt.config import KlConfig
from molt.parallel.mesh import Mesh
from molt.parallel.shape import DATA_AXES
from molt.train.inference import Samples, TokenArrays, sample_of
from molt.types import Metric


@dataclass(frozen=True)
class AdvantageInputs:
    """What the advantages of a training batch may depend on, on one rank."""

    tasks: list[SampleTask]
    samples: Samples
    old_logprobs: TokenArrays
    """Of every sample if the KL is in the reward."""
    ref_logprobs: TokenArrays
    """Of every sample if the KL is in the reward."""
    values: TokenArrays
    """Of every sample if the estimator needs them."""

    def mask(self, task: SampleTask) -> Tensor:
        """bool `[T]`, the trained tokens."""
        return torch.tensor(sample_of(self.samples, task).mask)

    def turn_rewards(self, task: SampleTask) -> Tensor:
        """float64 `[T]`, what each turn earned at its last token; 0 for tokens that are not trained."""
        sample = sample_of(self.samples, task)
        earned = torch.tensor(sample.columns.values(TURN_REWARD), dtype=torch.float64)
        return earned * torch.tensor(sample.mask)


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of every token, and what comes out of computing them."""

    advantages: dict[Place, Tensor]
    """float32 `[T]`, 0 outside the mask."""
    returns: TokenArrays
    """`A + V`, before whitening: what a critic learns. Empty without values."""
    metrics: dict[str, Metric]
    """`train/kl`, if the KL is in the reward."""


def token_advantages(algorithm: Algorithm, inputs: AdvantageInputs, *, kl_coef: float, mesh: Mesh) -> TokenAdvantages:
    """Spread or estimate the advantages, whitened over the training batch of all ranks if the settings say so.

    Every rank calls it once per training batch, peers with the same samples.
    """
    if algorithm.estimator.level == "group":
        found = _spread(algorithm, inputs)
    else:
        found = _estimate(algorithm, inputs, kl_coef)

    if algorithm.estimator.whiten and not algorithm.algo.advantage.no_whiten:
        return TokenAdvantages(
            advantages=_whiten(found.advantages, inputs, mesh),
            returns=found.returns,
            metrics=found.metrics,
        )
    return found


def _kl_metrics(algorithm: Algorithm, total: float, count: int) -> dict[str, Metric]:
    if algorithm.kl_in_reward:
        return {"train/kl": Metric(total, count)}
    return {}


def _spread(algorithm: Algorithm, inputs: AdvantageInputs) -> TokenAdvantages:
    """The advantage of the rollout at each of its trained tokens."""
    advantages = {}
    for task in inputs.tasks:
        assert task.advantage is not None, "a group estimator gives one to every rollout"
        advantages[task.at] = torch.where(inputs.mask(task), task.advantage, 0.0)
    return TokenAdvantages(advantages, returns={}, metrics=_kl_metrics(algorithm, 0.0, 0))


def _estimate(algorithm: Algorithm, inputs: AdvantageInputs, kl_coef: float) -> TokenAdvantages:
    """Each segment by a token estimator."""
    settings = algorithm.algo
    advantages: dict[Place, Tensor] = {}
    returns: TokenArrays = {}
    kl_total = 0.0
    kl_count = 0
    for task in inputs.tasks:
        mask = inputs.mask(task)
        turn_rewards = torch.zeros(len(mask), dtype=torch.float64)
        if settings.advantage.turn_rewards:
            turn_rewards = inputs.turn_rewards(task)
        kl = torch.zeros(len(mask), dtype=torch.float64)
        if algorithm.kl_in_reward:
            kl = _kl(settings.kl, inputs, task) * mask
            kl_total += float(kl.sum())
            kl_count += int(mask.sum())
        values = torch.zeros(len(mask), dtype=torch.float64)
        if algorithm.needs_critic:
            values = torch.tensor(inputs.values[task.at], dtype=torch.float64)

        of_tokens = algorithm.estimator.fn(
            task.reward - float(turn_rewards.sum()),  # what shaping changed stays at the end
            mask,
            kl=kl_coef * kl - turn_rewards,
            values=values,
            gamma=settings.advantage.gamma,
            lam=settings.advantage.lam,
        )
        advantages[task.at] = of_tokens
        if algorithm.needs_critic:
            returns[task.at] = torch.where(mask, of_tokens + values, 0.0).float().numpy()
    return TokenAdvantages(advantages, returns, _kl_metrics(algorithm, kl_total, kl_count))


def _kl(settings: KlConfig, inputs: AdvantageInputs, task: SampleTask) -> Tensor:
    """float64 `[T]`, the KL to the reference at every token."""
    return kl_per_token(
        torch.tensor(inputs.old_logprobs[task.at], dtype=torch.float64),
        torch.tensor(inputs.ref_logprobs[task.at], dtype=torch.float64),
        settings.estimator,
        from_reference=settings.ref == "rollout",
    )


def _whiten(advantages: dict[Place, Tensor], inputs: AdvantageInputs, mesh: Mesh) -> dict[Place, Tensor]:
    """Whiten over the trained tokens of all ranks."""
    masks = {task.at: inputs.mask(task) for task in inputs.tasks}
    sums = torch.zeros(3, dtype=torch.float64)
    for at, of_tokens in advantages.items():
        sums = sums + whitening_sums(of_tokens, masks[at])
    # Collective over the data-parallel axes: every rank, once per training batch.
    sums = mesh.sum(sums.to(mesh.device), *DATA_AXES).cpu()
    return {at: whiten(of_tokens, masks[at], sums) for at, of_tokens in advantages.items()}
