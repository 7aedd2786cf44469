"""The whole objective of a step: policy loss, KL, entropy, aggregation; the same for any layout and number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from molt.algo.advantage import ADVANTAGES
from molt.algo.loss import LOSSES
from molt.batch.plan import advantages, plan_batch
from molt.config import AdvantageConfig, KlConfig
from molt.rollout.samples import describe
from molt.train.policy import Policy
from molt.train.reference import Reference, ReferenceSettings
from molt.types import RolloutInfo, Scored
from tests.streams import sample_from
from tests.train.ranks import alone, run_ranks, whole
from tests.train.test_policy import TEMPERATURE, logprobs_of, make_samples, reference_model, settings

MAX_LEN = 64


def ragged():
    """Two prompts; the first rollout has two segments. Arrays by place, and the light records."""
    a, b, c, d = (segments[0] for rollouts in make_samples((9, 14, 6, 11)) for segments in rollouts)
    e = make_samples((17, 5, 5, 5), seed=3)[0][0][0]
    samples = {0: [[a, e], [b]], 1: [[c], [d]]}
    rewards = [[1.0, 0.0], [2.0, -1.0]]
    groups = [
        [
            RolloutInfo(str(g), r, Scored(rewards[g][r], rewards[g][r]), None, 1, tuple(map(describe, segments)))
            for r, segments in enumerate(rollouts)
        ]
        for g, rollouts in samples.items()
    ]
    return samples, groups, rewards


def plans(groups, rewards, estimator, *, aggregation, size, packed, ranks):
    return plan_batch(
        groups,
        rewards=rewards,
        group_advantages=advantages(groups, rewards, ADVANTAGES[estimator]),
        groups_per_step=2,
        micro_batch_size=size,
        max_len=MAX_LEN,
        ranks=ranks,
        aggregation=aggregation,
        packed=packed,
    )


def inferred_of(samples, names):
    """Stand-ins for what other models say: near the engine's log-probs, and small values."""
    rng = np.random.default_rng(7)
    found = {name: {} for name in names}
    for g, rollouts in samples.items():
        for r, segments in enumerate(rollouts):
            for s, sample in enumerate(segments):
                noise = rng.normal(size=(2, len(sample.token_ids))).astype(np.float32)
                made = {"ref_logprobs": sample.logprobs + 0.3 * noise[0] * sample.mask, "values": 0.1 * noise[1]}
                for name in names:
                    found[name][g, r, s] = made[name].astype(np.float32)
    return found


def gradients(policy, plan, samples, inferred, kl_coef):
    """The gradient of all ranks at the first step."""
    found = {}
    policy.optimizer.register_step_pre_hook(
        lambda *_: found.update({name: whole(p.grad) for name, p in policy.model.named_parameters()})
    )
    policy.prepare(plan, samples, inferred, 6, kl_coef)
    policy.train()
    return found


CASES = {
    "ppo": {"dual_clip": 3.0},
    "gspo": {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "gmpo": {"loss_mode": "gmpo", "loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"loss_mode": "cispo", "eps_clip_low_high": (0.2, 2.0), "loss_agg_mode": "seq-mean-token-sum-norm"},
    "entropy": {"entropy_coef": 0.1, "loss_agg_mode": "prompt-mean-token-mean"},
    "kl in the loss": {"kl": KlConfig(init_coef=0.3, estimator="k3", use_loss=True)},
    "kl to the rollout": {"kl": KlConfig(init_coef=0.3, estimator="k3", use_loss=True, ref="rollout")},
    "kl in the reward": {"kl": KlConfig(init_coef=0.3), "advantage": AdvantageConfig(estimator="reinforce")},
    "gae": {"advantage": AdvantageConfig(estimator="gae", lam=0.9, gamma=0.98)},
    "sequence mask": {
        "advantage": AdvantageConfig("grpo", is_correction_level="geo", is_correction_threshold=(0.8, 1.2))
    },
}  # fmt: skip


def gradients_of(case, path, layouts, mesh):
    """One gradient for each (micro-batch size, packed)."""
    samples, groups, rewards = ragged()
    chosen = dict(CASES[case])
    estimator = chosen.get("advantage", AdvantageConfig("grpo")).estimator
    inferred, found = inferred_of(samples, ("ref_logprobs", "values")), []
    for size, packed in layouts:
        policy = Policy(settings(path, packed=packed, **chosen), mesh)
        aggregation = policy.settings.actor.loss_agg_mode
        plan = plans(
            groups, rewards, estimator, aggregation=aggregation, size=size, packed=packed, ranks=mesh.data_ranks
        )
        found.append(gradients(policy, plan[mesh.data_rank], samples, inferred, policy.algorithm.kl_coef))
    return found


def all_gradients(mesh, path):
    return {case: gradients_of(case, path, [(1, True)], mesh) for case in CASES}


@pytest.fixture(scope="module")
def on_two_ranks(tiny, tmp_path_factory):
    return run_ranks(all_gradients, 2, tmp_path_factory.mktemp("objective"), tiny)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_does_not_depend_on_layout_or_ranks(case, tiny, on_two_ranks):
    first, *others = gradients_of(case, tiny, [(8, False), (1, False), (2, True), (8, True)], alone())
    dist.destroy_process_group()
    assert sum(float(g.abs().sum()) for g in first.values()) > 0
    for other in [*others, *(found[case][0] for found in on_two_ranks)]:
        for name, expected in first.items():
            assert torch.linalg.norm(other[name] - expected) <= 1e-5 * torch.linalg.norm(expected), name


def test_the_sum_of_all_terms_against_an_independent_computation(tiny):
    """`sum_t 1/(S len_s) (-A logp-gradient * w + beta k3 - 0.1 H)` at r = 1, token by token in float64."""
    samples, groups, rewards = ragged()
    inferred = inferred_of(samples, ("ref_logprobs",))
    kl = KlConfig(init_coef=0.3, estimator="k3", use_loss=True)
    chosen = settings(tiny, kl=kl, entropy_coef=0.1, loss_agg_mode="seq-mean-token-mean")
    policy = Policy(chosen, alone())
    (plan,) = plans(groups, rewards, "grpo", aggregation="seq-mean-token-mean", size=2, packed=True, ranks=1)
    ours = gradients(policy, plan, samples, inferred, 0.3)
    dist.destroy_process_group()
    model, total = reference_model(), 0.0
    of_rollout = advantages(groups, rewards, ADVANTAGES["grpo"])
    for (g, r, s), ref in inferred["ref_logprobs"].items():
        sample = samples[g][r][s]
        ids = torch.tensor(sample.token_ids.astype(np.int64))
        now = logprobs_of(model, sample.token_ids)
        p = (model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        for t in np.flatnonzero(sample.mask):
            w = torch.exp(now[t].detach() - float(sample.logprobs[t]))
            d, entropy = now[t] - float(ref[t]), -(p[t - 1].exp() * p[t - 1]).sum()
            kept = 0.5 <= w <= 5.0
            loss = -of_rollout[g][r] * torch.exp(now[t] - now[t].detach()) * w * kept
            total = total + (loss + 0.3 * (torch.exp(-d) - 1 + d) - 0.1 * entropy) / (5 * sample.mask.sum())
    expected = torch.autograd.grad(total, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        gap = torch.linalg.norm(ours[f"causal_lm.{name}"].double() - gradient)
        assert gap <= 2e-5 * torch.linalg.norm(gradient) + 1e-10, name


def test_kl_in_the_reward_and_values_by_hand(tiny):
    """gamma 1, lam 1: A_t = R - beta * (KL of t and after) - V_t; the returns are A + V, never whitened."""
    samples, groups, rewards = ragged()
    inferred = inferred_of(samples, ("ref_logprobs", "values"))
    kl = KlConfig(init_coef=0.5)
    policy = Policy(settings(tiny, kl=kl, advantage=AdvantageConfig("gae")), alone())
    (plan,) = plans(groups, rewards, "gae", aggregation="token-mean", size=8, packed=True, ranks=1)
    metrics, returns = policy.prepare(plan, samples, inferred, 6, 0.5)
    dist.destroy_process_group()
    model, total, count = reference_model(), 0.0, 0
    for at, found in returns.items():
        sample = samples[at[0]][at[1]][at[2]]
        with torch.no_grad():
            d = logprobs_of(model, sample.token_ids).numpy() - inferred["ref_logprobs"][at]
        trained = np.flatnonzero(sample.mask)
        expected = [rewards[at[0]][at[1]] - 0.5 * d[trained[i:]].sum() for i in range(len(trained))]
        np.testing.assert_allclose(found[trained], expected, atol=1e-5)
        assert not found[~sample.mask].any()
        total, count = total + d[trained].sum(), count + len(trained)
    assert (metrics["train/kl"].total, metrics["train/kl"].count) == (pytest.approx(total, rel=1e-5), count)


def test_the_reference_says_what_the_policy_says_at_the_same_weights(tiny):
    samples, groups, rewards = ragged()
    (plan,) = plans(groups, rewards, "grpo", aggregation="token-mean", size=2, packed=False, ranks=1)
    reference = Reference(ReferenceSettings(str(tiny), settings(tiny).fsdp, TEMPERATURE, MAX_LEN), alone())
    found = reference.infer(plan, samples)
    dist.destroy_process_group()
    model = reference_model()
    for (g, r, s), values in found.items():
        sample = samples[g][r][s]
        with torch.no_grad():
            expected = logprobs_of(model, sample.token_ids).numpy()
        np.testing.assert_allclose(values[sample.mask], expected[sample.mask], atol=1e-5)
        assert not values[~sample.mask].any()
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_a_sample_that_is_filtered_keeps_its_weight_and_nothing_is_nan(tiny):
    """Everything outside the band: the loss and the gradient are 0, and defined."""
    samples, groups, rewards = ragged()
    far = {
        g: [[sample_from(s.token_ids, s.versions, s.logprobs - 5 * s.mask) for s in r] for r in rs]
        for g, rs in samples.items()
    }
    policy = Policy(settings(tiny, loss_mode="gspo"), alone())
    (plan,) = plans(groups, rewards, "grpo", aggregation="token-mean", size=2, packed=True, ranks=1)
    policy.prepare(plan, far, {}, 6, 0.0)
    metrics = policy.train()
    dist.destroy_process_group()
    assert metrics["train/loss"].total == 0 and metrics["train/grad_norm"].total == 0
    assert metrics["ratio/filtered_fraction"].total == metrics["ratio/filtered_fraction"].count > 0


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_one_token_completions_have_a_gradient(tiny, loss_mode):
    samples, groups, rewards = ragged()
    short = {}
    for g, rollouts in samples.items():
        short[g] = []
        for segments in rollouts:
            versions = np.full(4, -1, np.int32)
            versions[3] = 5
            short[g].append(
                [sample_from(segments[0].token_ids[:4], versions, np.where(versions >= 0, -4.6, 0).astype(np.float32))]
            )
    groups = [
        [replace(info, samples=tuple(map(describe, short[g][r]))) for r, info in enumerate(rollouts)]
        for g, rollouts in enumerate(groups)
    ]
    policy = Policy(settings(tiny, loss_mode=loss_mode, eps_clip_low_high=None), alone())
    (plan,) = plans(groups, rewards, "grpo", aggregation="token-mean", size=4, packed=True, ranks=1)
    policy.prepare(plan, short, {}, 6, 0.0)
    metrics = policy.train()
    dist.destroy_process_group()
    assert np.isfinite(metrics["train/loss"].total) and metrics["train/grad_norm"].total > 0
