"""What settings and table rows say together: defaults of the row where a setting is not set."""

import pytest

from molt.algo.advantage import ADVANTAGES
from molt.algo.loss import LOSSES
from molt.algo.shaping import Shaping
from molt.algorithm import Algorithm, load_algorithm, policy_loss, reward_shaping
from molt.config import ActorConfig, AdvantageConfig, AlgoConfig, KlConfig, RewardConfig
from molt.errors import ConfigError

PPO = ActorConfig()


def algorithm(estimator="reinforce", kl=None, actor=PPO) -> Algorithm:
    return load_algorithm(AlgoConfig(AdvantageConfig(estimator), kl or KlConfig()), actor)


def test_the_rows_that_the_settings_name():
    found = algorithm("grpo", actor=ActorConfig(loss_mode="gspo"))
    assert (found.estimator, found.loss) == (ADVANTAGES["grpo"], LOSSES["gspo"])


def test_without_a_coefficient_the_kl_has_the_estimators_own():
    none = algorithm()
    assert none.kl_coef == 0 and not none.kl_in_reward and not none.reads_reference_model
    distill = algorithm("on_policy_distill")
    assert distill.kl_coef == 1 and distill.kl_in_reward and distill.reads_reference_model


@pytest.mark.parametrize("estimator", ["reinforce", "on_policy_distill"])
def test_a_coefficient_that_is_set_holds_for_every_estimator(estimator):
    assert algorithm(estimator, KlConfig(init_coef=0.0)).kl_coef == 0
    weighed = algorithm(estimator, KlConfig(0.1, use_loss=True, ref="rollout"))
    assert weighed.kl_coef == 0.1 and not weighed.kl_in_reward and not weighed.reads_reference_model


@pytest.mark.parametrize(("estimator", "needed"), [("gae", True), ("reinforce", False), ("grpo", False)])
def test_a_critic_is_there_for_values(estimator, needed):
    assert algorithm(estimator).needs_critic == needed


@pytest.mark.parametrize("name", LOSSES)
def test_bounds_are_those_of_the_settings_or_the_losses_own(name):
    assert algorithm(actor=ActorConfig(loss_mode=name)).low_high == LOSSES[name].low_high
    chosen = ActorConfig(loss_mode=name, eps_clip_low_high=(0.1, 3.0))
    assert algorithm(actor=chosen).low_high == (0.1, 3.0)


def test_a_users_loss_has_the_bounds_of_ppo(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(logprobs, old_logprobs, advantages, mask, **_):\n    return -advantages * logprobs\n")
    algo = AlgoConfig(loss=f"{path}:f")
    assert load_algorithm(algo, PPO).low_high == (0.2, 0.2)
    assert policy_loss(algo, PPO) is not LOSSES["ppo"]


def test_a_wrong_name_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"`actor.loss_mode` \(=gmop\) .*Did you mean 'gmpo'\? Use one of: ppo, gspo"):
        algorithm(actor=ActorConfig(loss_mode="gmop"))
    with pytest.raises(ConfigError, match=r"`algo.advantage.estimator` \(=gpro\) .*Did you mean 'grpo'\?"):
        algorithm("gpro")


def test_every_setting_of_the_reward_reaches_its_shaping():
    settings = RewardConfig(
        clip_range=(-1.0, 2.0),
        overlong_buffer_len=64,
        overlong_penalty_factor=0.5,
        stop_properly_penalty_coef=0.25,
    )
    assert reward_shaping(settings, 512) == Shaping(512, (-1.0, 2.0), 64, 0.5, 0.25)
