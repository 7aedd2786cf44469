"""Rollouts that a length limit cut: the gradient is, bit by bit, that of the batch without them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from molt.algo.advantage import ADVANTAGES
from molt.algo.plugin import load_estimator
from molt.algo.reduce import AGGREGATIONS
from molt.batch.masking import participation
from molt.batch.plan import advantages, plan_batch
from molt.config import AdvantageConfig, KlConfig, RewardConfig
from molt.rollout.samples import describe
from molt.train.policy import Policy
from molt.types import RolloutInfo, Scored
from tests.train.ranks import alone, whole
from tests.train.test_objective import inferred_of
from tests.train.test_policy import make_samples, settings

MASKED = {(0, 1), (0, 3), (1, 0)}
"""Group and rollout."""


def batch():
    """Two groups of four rollouts, three of them cut by their length; one of those has two segments."""
    flat = [segments[0] for rollouts in make_samples((9, 14, 6, 11)) for segments in rollouts]
    flat += [segments[0] for rollouts in make_samples((17, 5, 8, 12), seed=3) for segments in rollouts]
    samples = {0: [[flat[0]], [flat[1], flat[4]], [flat[2]], [flat[3]]], 1: [[each] for each in flat[4:]]}
    rewards = [[1.0, 0.0, 0.5, 2.0], [2.0, -1.0, 0.0, 1.0]]
    groups = []
    for g, rollouts in samples.items():
        infos = []
        for r, segments in enumerate(rollouts):
            cut = "length" if (g, r) in MASKED else None
            outcome = Scored(rewards[g][r], rewards[g][r])
            infos.append(RolloutInfo(str(g), r, outcome, cut, 1, tuple(map(describe, segments))))
        groups.append(infos)
    return samples, groups


def without_masked(samples, groups, inferred):
    """The same without the cut rollouts, numbered anew."""
    kept = {g: [r for r in range(4) if (g, r) not in MASKED] for g in samples}
    fewer = {g: [samples[g][r] for r in rollouts] for g, rollouts in kept.items()}
    infos = [[replace(groups[g][r], index=i) for i, r in enumerate(rollouts)] for g, rollouts in kept.items()]
    moved = {}
    for name, arrays in inferred.items():
        moved[name] = {(g, kept[g].index(r), s): a for (g, r, s), a in arrays.items() if r in kept[g]}
    return fewer, infos, moved


def gradient(policy, samples, groups, inferred, aggregation, reward):
    rewards = [[rollout.reward for rollout in rollouts] for rollouts in groups]
    taking_part = participation(groups, reward)
    estimator = policy.settings.algo.advantage.estimator
    (plan,) = plan_batch(
        groups,
        rewards=rewards,
        group_advantages=advantages(groups, rewards, load_estimator(estimator), taking_part),
        taking_part=taking_part,
        groups_per_step=2,
        micro_batch_size=2,
        max_len=64,
        ranks=1,
        aggregation=aggregation,
    )
    found = {}

    def keep_gradients(*_):
        found.update({name: whole(p.grad).clone() for name, p in policy.model.named_parameters()})

    handle = policy.optimizer.register_step_pre_hook(keep_gradients)
    policy.prepare(plan, samples, inferred, 6, policy.algorithm.kl_coef)
    policy.train()
    handle.remove()
    return found


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_the_gradient_is_that_of_the_batch_without_masked_rollouts(tiny, estimator):
    """For every aggregation; at a learning rate of 0 one model serves all."""
    kl = KlConfig(init_coef=0.3) if ADVANTAGES[estimator].level == "token" else KlConfig()
    policy = Policy(settings(tiny, advantage=AdvantageConfig(estimator), kl=kl, lr=0.0), alone())
    samples, groups = batch()
    inferred = inferred_of(samples, ("ref_logprobs", "values"))
    fewer, infos, moved = without_masked(samples, groups, inferred)
    for aggregation in AGGREGATIONS:
        masked = gradient(policy, samples, groups, inferred, aggregation, RewardConfig(mask_truncated=True))
        expected = gradient(policy, fewer, infos, moved, aggregation, RewardConfig())
        unmasked = gradient(policy, samples, groups, inferred, aggregation, RewardConfig())
        assert masked.keys() == expected.keys() and any(g.any() for g in expected.values())
        for name in expected:
            assert torch.equal(masked[name], expected[name]), (aggregation, name)
        assert not all(torch.equal(unmasked[name], expected[name]) for name in expected)
    dist.destroy_process_group()
