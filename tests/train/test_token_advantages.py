"""Turn rewards: each turn is credited with what was earned from it on."""

import pytest

from molt.algorithm import load_algorithm
from molt.batch.plan import Place, SampleTask
from molt.columns import TURN_REWARD, token_columns
from molt.config import ActorConfig, AdvantageConfig, AlgoConfig
from molt.train.token_advantages import AdvantageInputs, token_advantages
from molt.types import Sample
from tests.train.ranks import alone

AT = Place(0, 0, 0)


def advantages(reward, turn_rewards, *, gamma=1.0, on=True):
    """Of two turns, tokens 1 and 2, and token 4; token 3 is an observation."""
    tokens = token_columns([5, 6, 7, 8, 9], [-1, 0, 0, -1, 0], [0, -1, -1, 0, -1])
    if turn_rewards is not None:
        tokens = tokens.with_column(TURN_REWARD, turn_rewards)
    inputs = AdvantageInputs(
        tasks=[SampleTask(AT, reward=reward, advantage=None, weight=1.0)],
        samples={0: [[Sample(tokens)]]},
        old_logprobs={},
        ref_logprobs={},
        values={},
    )
    advantage = AdvantageConfig("reinforce", no_whiten=True, gamma=gamma, turn_rewards=on)
    algorithm = load_algorithm(AlgoConfig(advantage), ActorConfig())
    return token_advantages(algorithm, inputs, kl_coef=0.0, mesh=alone()).advantages[AT].tolist()


def test_a_turn_is_credited_with_what_comes_after_it():
    # Turn 1 earned 1 and turn 2 earned 1/2; shaping added 1/2 more to the rollout, which stays at the end: r is 1 at
    # token 2 and 1 at token 4. So A is 2, 2 before the end of turn 1, and 1 after it.
    assert advantages(2.0, [0, 0, 1, 0, 0.5]) == [0, 2, 2, 0, 1]


def test_it_is_discounted_per_generated_token():
    # r is 1 at token 2 and 1/2 at token 4: A_4 = 1/2, A_2 = 1 + 1/4, A_1 = 1/2 + 1/8.
    assert advantages(1.5, [0, 0, 1, 0, 0.5], gamma=0.5) == [0, 0.625, 1.25, 0, 0.5]


@pytest.mark.parametrize(("turn_rewards", "on"), [(None, True), ([0, 0, 1, 0, 0.5], False)])
def test_without_the_column_or_the_setting_all_turns_get_the_sum(turn_rewards, on):
    assert advantages(1.5, turn_rewards, on=on) == [0, 1.5, 1.5, 0, 1.5]
