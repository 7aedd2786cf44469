"""A batch with masked rollouts is planned as the batch that never had them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.algo.advantage import ADVANTAGES
from molt.algo.reduce import AGGREGATIONS
from molt.algorithm import reward_shaping
from molt.batch.masking import fewest_left, participation, takes_part
from molt.batch.plan import Place, advantages, plan_batch, shaped_rewards
from molt.config import RewardConfig
from molt.types import CUT_REASONS, RolloutInfo, SampleInfo, Scored

MAX_LEN = 64
MASK = RewardConfig(mask_truncated=True)


def rollout(reward, cut, samples):
    infos = tuple(SampleInfo(tokens, trained, 0) for tokens, trained in samples)
    return RolloutInfo("0:0", 0, Scored(reward, reward), cut, 1, infos)


@pytest.mark.parametrize("cut", [None, *CUT_REASONS])
def test_only_what_a_length_limit_cut_is_masked_and_only_on_request(cut):
    info = rollout(1.0, cut, [])
    assert takes_part(info, RewardConfig())
    assert takes_part(info, MASK) is (cut != "length")


@pytest.mark.parametrize(("n", "fewest"), [(1, 1), (2, 2), (8, 2)])
def test_how_many_must_be_left(n, fewest):
    assert fewest_left(n) == fewest


def plan(groups, reward, estimator, aggregation, groups_per_step):
    rewards = shaped_rewards(groups, reward_shaping(reward, MAX_LEN))
    taking_part = participation(groups, reward)
    return plan_batch(
        groups,
        rewards=rewards,
        group_advantages=advantages(groups, rewards, ADVANTAGES[estimator], taking_part),
        taking_part=taking_part,
        groups_per_step=groups_per_step,
        micro_batch_size=2,
        max_len=MAX_LEN,
        ranks=2,
        aggregation=aggregation,
    )


def numbered_as_before(plans, groups):
    """The plan of the groups without masked rollouts, with the numbers that its rollouts have among all."""
    kept = [[index for index, each in enumerate(rollouts) if takes_part(each, MASK)] for rollouts in groups]

    def renamed(task):
        place = Place(task.at.group, kept[task.at.group][task.at.rollout], task.at.segment)
        return replace(task, at=place)

    return [[[[renamed(task) for task in batch] for batch in step] for step in steps] for steps in plans]


SAMPLE = st.integers(1, 50).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens)))
ROLLOUT = st.builds(
    rollout,
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([None, "turns", "length"]),
    st.lists(SAMPLE, max_size=3),
)
GROUPS = st.lists(st.lists(ROLLOUT, min_size=1, max_size=5), min_size=1, max_size=5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ADVANTAGES)
@settings(max_examples=25)
@given(groups=GROUPS, groups_per_step=st.integers(1, 3))
def test_everything_that_decides_the_gradient_is_that_of_the_batch_without_them(
    estimator, aggregation, groups, groups_per_step
):
    """Advantages, weights, shares, micro-batches and steps; a group of which none is left stays in its step."""
    without = [[each for each in rollouts if takes_part(each, MASK)] for rollouts in groups]
    expected = plan(without, RewardConfig(), estimator, aggregation, groups_per_step)
    assert plan(groups, MASK, estimator, aggregation, groups_per_step) == numbered_as_before(expected, groups)


def test_by_hand():
    groups = [
        [rollout(1.0, None, [(10, 4)]), rollout(0.0, "turns", [(8, 2)]), rollout(9.0, "length", [(60, 50)])],
        [rollout(1.0, "length", [(60, 50)])],
    ]
    (first, _) = plan(groups, MASK, "rloo", "prompt-mean-token-mean", 1)
    # Of the first group 1 and 0 are left: 1 - 0 and 0 - 1. One prompt of 4 + 2 tokens; the second step trains nothing.
    tasks = {task.at: task for step in first for batch in step for task in batch}
    rest = plan(groups, MASK, "rloo", "prompt-mean-token-mean", 1)[1]
    tasks |= {task.at: task for step in rest for batch in step for task in batch}
    assert {at: (task.advantage, task.weight, task.share) for at, task in tasks.items()} == {
        (0, 0, 0): (1.0, 1 / 6, 1 / 2),
        (0, 1, 0): (-1.0, 1 / 6, 1 / 2),
    }
    rewards = shaped_rewards(groups, reward_shaping(MASK, MAX_LEN))
    found = advantages(groups, rewards, ADVANTAGES["rloo"], participation(groups, MASK))
    assert found == [[1.0, -1.0, None], [None]]
    all_masked = [[rollout(1.0, "length", [(4, 2)])]]
    assert advantages(all_masked, [[1.0]], ADVANTAGES["grpo"], participation(all_masked, MASK)) == [[None]]
