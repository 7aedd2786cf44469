"""What a run says of itself: hand-written headers, and that only what is in force is in them."""

from dataclasses import replace
from pathlib import Path

import pytest

from molt.config import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CkptConfig,
    CriticConfig,
    KlConfig,
    PromptDataConfig,
    RefConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    TrainConfig,
)
from molt.errors import ConfigError
from molt.report.header import header

PLAIN = RLConfig(
    actor=ActorConfig(model_name_or_path="MODEL"),
    data=PromptDataConfig(max_len=1024),
    rollout=RolloutConfig(batch_size=32, n_samples_per_prompt=8),
    train=TrainConfig(agent_path="agent.py"),
    ckpt=CkptConfig(output_dir=Path("out")),
)

GRPO = (
    replace(PLAIN, algo=AlgoConfig(AdvantageConfig(estimator="grpo"))),
    """\
molt rl  MODEL  agent agent.py
  300 steps of 32 x 8 rollouts, at most 1 batch off-policy
  R    = clip(reward, -10, 10)
  A    = (R - mean(group)) / (std(group) + 1e-6)    [grpo]
  loss = sum_t 1/N * -min(r A, clip(r, 1 - 0.2, 1 + 0.2) A) * c    [ppo]
  r    = exp(logprob - old)
  c    = mask(w, 0.5, 5)
  w    = exp(old - rollout)
  one optimizer step per batch: r = 1, so the clip has no effect; c is the trust region
  output out""",
)

# 256 rollouts in steps of 64 are 4 steps, twice.
GAE = (
    replace(
        PLAIN,
        actor=ActorConfig(model_name_or_path="MODEL", freezing_steps=10, eps_clip_low_high=(0.2, 0.28), dual_clip=3.0),
        critic=CriticConfig(model_name_or_path="VALUE"),
        algo=AlgoConfig(AdvantageConfig(estimator="gae", lam=0.95), KlConfig(init_coef=0.01, target=0.05)),
        reward=RewardConfig(stop_properly_penalty_coef=0.5, clip_range=(-1.0, 1.0)),
        train=TrainConfig(agent_path="agent.py", batch_size=64, max_epochs=2),
    ),
    """\
molt rl  MODEL  agent agent.py
  300 steps of 32 x 8 rollouts, at most 1 batch off-policy
  R      = clip(0.5 reward if truncated else reward, -1, 1)
  r_u    = -beta KL_u, plus R at the last generated token of a segment
  A      = sum_u>=t (gamma lam)^(u-t) (r_u + gamma V_next - V_u), whitened over the batch\
    [gae, gamma = 1, lam = 0.95]
  loss   = sum_t 1/N * -min(r A, clip(r, 1 - 0.2, 1 + 0.28) A) * c    [ppo, at most 3 |A| where A < 0]
  r      = exp(logprob - old)
  c      = mask(w, 0.5, 5)
  w      = exp(old - rollout)
  KL     = d    [k1, beta = 0.01 at first, adapted towards KL = 0.05]
  d      = old - ref
  ref    = MODEL, frozen
  critic = VALUE, V clipped to V_old +- 0.2, trained alone for the first 10 batches
  8 optimizer steps per batch; old is computed before the first
  output out""",
)

DISTILL = (
    replace(
        PLAIN,
        ref=RefConfig(model_name_or_path="TEACHER"),
        algo=AlgoConfig(AdvantageConfig(estimator="on_policy_distill", is_correction_level="off")),
        train=TrainConfig(agent_path="agent.py", async_queue_size=0),
    ),
    """\
molt rl  MODEL  agent agent.py
  300 steps of 32 x 8 rollouts, on-policy
  A       = -beta (old - teacher)    [on_policy_distill]
  loss    = sum_t 1/N * -min(r A, clip(r, 1 - 0.2, 1 + 0.2) A)    [ppo]
  r       = exp(logprob - old)
  KL      = d    [k1, beta = 1]
  d       = old - teacher
  teacher = TEACHER, frozen
  one optimizer step per batch: r = 1, so the clip has no effect
  output out""",
)

# 1024 - 256 = 768
EVERYTHING = (
    replace(
        PLAIN,
        actor=ActorConfig(
            model_name_or_path="MODEL",
            loss_mode="gspo",
            loss_agg_mode="seq-mean-token-mean",
            eps_clip_low_high=(3e-4, 4e-4),
            entropy_coef=0.001,
            aux_loss_coef=0.01,
        ),
        algo=AlgoConfig(
            AdvantageConfig(
                estimator="rloo", is_correction_level="seq", is_correction_gating="tv", is_correction_threshold=(0.1,)
            ),
            KlConfig(init_coef=0.02, estimator="k3", use_loss=True, ref="rollout"),
            dynamic_filtering_enable=True,
        ),
        reward=RewardConfig(overlong_buffer_len=256, overlong_penalty_factor=0.5),
        train=TrainConfig(agent_path="agent.py", batch_size=128),
    ),
    """\
molt rl  MODEL  agent agent.py
  300 steps of 32 x 8 rollouts, at most 1 batch off-policy
  batch = groups with 0 < mean(score) < 1; the others are replaced
  R     = clip(reward - 0.5 clip(longest segment - 768, 0, 256) / 256, -10, 10)
  A     = R - mean(others in group)    [rloo]
  loss  = sum_t 1/(S len_s) * (-min(s A, clip(s, 1 - 0.0003, 1 + 0.0004) A) * c + beta KL - 0.001 H) \
+ 0.01 mean(balance)    [gspo]
  r     = exp(logprob - old)
  s     = exp(mean of log r over the sample)
  c     = w if 0 <= mean of tv(exp(rollout), exp(old)) over the sample <= 0.1 else 0
  w     = exp(old - rollout)
  KL    = exp(d) - 1 - d    [k3, beta = 0.02]
  d     = logprob - ref
  ref   = the policy that sampled the token
  2 optimizer steps per batch; old is computed before the first
  output out""",
)


@pytest.mark.parametrize(("config", "text"), [GRPO, GAE, DISTILL, EVERYTHING], ids=["grpo", "gae", "distill", "all"])
def test_the_header_is_the_formula_in_force(config, text):
    assert header(config, 300) == text


# name, bounds of the settings, the loss of a token, its other names
LOSSES = [
    ("ppo", None, "-min(r A, clip(r, 1 - 0.2, 1 + 0.2) A)", []),
    ("gspo", None, "-min(s A, clip(s, 1 - 0.0003, 1 + 0.0004) A)", ["s    = exp(mean of log r over the sample)"]),
    ("cispo", None, "-sg(min(r, 5)) A logprob", []),
    (
        "gmpo",
        None,
        "-s A",
        ["s    = exp(mean of min(log r, 0.4) if A > 0, max(log r, -0.4) if A < 0, over the sample)"],
    ),
    (
        "gmpo",
        (0.1, 0.3),
        "-s A",
        ["s    = exp(mean of min(log r, 0.3) if A > 0, max(log r, -0.1) if A < 0, over the sample)"],
    ),
]


@pytest.mark.parametrize(("name", "bounds", "of_token", "where"), LOSSES)
def test_bounds_that_are_not_set_are_those_of_the_loss(name, bounds, of_token, where):
    actor = ActorConfig(model_name_or_path="MODEL", loss_mode=name, eps_clip_low_high=bounds)
    lines = [line.strip() for line in header(replace(PLAIN, actor=actor), 3).splitlines()]
    assert f"loss = sum_t 1/N * {of_token} * c    [{name}]" in lines
    assert [line for line in lines if line.startswith("s ")] == where


def test_a_negative_entropy_coefficient_and_whitening_turned_off():
    actor = replace(PLAIN.actor, entropy_coef=-0.01)
    text = header(replace(PLAIN, actor=actor, algo=AlgoConfig(AdvantageConfig(no_whiten=True))), 3)
    assert "* (-min(r A, clip(r, 1 - 0.2, 1 + 0.2) A) * c + 0.01 H)" in text
    assert "\n  A    = sum_u>=t gamma^(u-t) r_u    [reinforce, gamma = 1]\n" in text
    assert "\n  r_u  = R at the last generated token of a segment, else 0\n" in text


def test_a_function_of_the_user_is_shown_by_its_formula_or_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def best(rewards, groups, ctx):\n    return rewards - rewards.max()\n\n\n"
        "def flat(logprobs, old_logprobs, advantages, mask, **_):\n    return -advantages * logprobs\n\n\n"
        'flat.formula = "-A logprob + {0} [sic]"\n'
    )
    algo = AlgoConfig(AdvantageConfig(estimator=f"{file}:best"), loss=f"{file}:flat")
    lines = header(replace(PLAIN, algo=algo), 3).splitlines()
    assert lines[2:5] == [
        "  R    = clip(reward, -10, 10)",
        f"  A    = best    [{file}:best]",
        f"  loss = sum_t 1/N * (-A logprob + {{0}} [sic]) * c    [{file}:flat]",
    ]
    assert lines[-2] == "  one optimizer step per batch; c is the trust region"


@pytest.mark.parametrize(
    ("bound", "words"), [(0, "on-policy"), (1, "at most 1 batch off-policy"), (3, "at most 3 batches off-policy")]
)
def test_how_far_off_policy_a_token_may_be(bound, words):
    train = TrainConfig(agent_path="agent.py", async_queue_size=bound)
    assert header(replace(PLAIN, train=train), 3).splitlines()[1] == f"  3 steps of 32 x 8 rollouts, {words}"


def test_an_unknown_estimator_or_loss_has_no_header():
    with pytest.raises(ConfigError, match=r"algo\.advantage\.estimator"):
        header(replace(PLAIN, algo=AlgoConfig(AdvantageConfig(estimator="grop"))), 3)
    with pytest.raises(ConfigError, match=r"^`actor\.loss_mode` \(=gsop\) .* Use one of: ppo, gspo, cispo, gmpo\b"):
        header(replace(PLAIN, actor=ActorConfig(loss_mode="gsop")), 3)


def test_a_mask_and_a_scheme_are_named_where_they_are_on():
    plain = header(PLAIN, 300).splitlines()
    rollout = replace(PLAIN.rollout, scheme="revise.py")
    changed = header(replace(PLAIN, reward=RewardConfig(mask_truncated=True), rollout=rollout), 300).splitlines()
    added = [line for line in changed if "revise.py" in line or "length limit" in line]
    assert added == [
        "  rollouts of a group by revise.py",
        "  group = rollouts that no length limit cut; with too few of them it is replaced",
    ]
    assert not any("rollouts of a group" in line or "length limit" in line for line in plain)
