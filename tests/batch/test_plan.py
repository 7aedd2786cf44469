"""Who trains what, in which step: every trained sample once, equal numbers of micro-batches, weights that sum to 1."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.algo.advantage import ADVANTAGES
from molt.algo.shaping import Shaping
from molt.batch.plan import SampleTask, advantages, plan_batch, shaped_rewards
from molt.types import PolicyFailure, RolloutInfo, SampleInfo, Scored

MAX_LEN = 64


def rollout(reward=0.0, *samples, outcome=None, cut=None):
    """`samples`: (tokens, trained tokens) of each segment."""
    infos = tuple(SampleInfo(tokens, trained, 0) for tokens, trained in samples)
    return RolloutInfo("0:0", 0, outcome or Scored(reward, reward), cut, 1, infos)


def shaped(groups, clip_range=(-10.0, 10.0), **penalties):
    return shaped_rewards(groups, Shaping(MAX_LEN, clip_range, **penalties))


def group_advantages_of(groups, estimator):
    return advantages(groups, shaped(groups), ADVANTAGES[estimator])


def plan(groups, *, groups_per_step=None, micro_batch_size=1, ranks=1, estimator="grpo", **filling):
    return plan_batch(
        groups,
        rewards=shaped(groups),
        group_advantages=group_advantages_of(groups, estimator),
        groups_per_step=groups_per_step or len(groups),
        micro_batch_size=micro_batch_size,
        ranks=ranks,
        max_len=MAX_LEN,
        **filling,
    )


def tasks_of(rank_plan):
    return [task for step in rank_plan for micro_batch in step for task in micro_batch]


def test_one_rank_by_hand():
    groups = [
        [rollout(1.0, (10, 4)), rollout(0.0, (8, 2), (20, 6))],  # the second rollout has two segments
        [rollout(2.0, (5, 3)), rollout(2.0, (6, 0))],  # nothing of the last rollout is trained
    ]
    ((first, second),) = plan(groups, groups_per_step=1, micro_batch_size=2, estimator="dr_grpo")
    # Step 1: 4 + 2 + 6 = 12 trained tokens; advantages 1 - 1/2 and 0 - 1/2; longest first.
    assert first == [
        [
            SampleTask((0, 1, 1), reward=0.0, advantage=-0.5, weight=1 / 12, share=1 / 3),
            SampleTask((0, 0, 0), reward=1.0, advantage=0.5, weight=1 / 12, share=1 / 3),
        ],
        [SampleTask((0, 1, 0), reward=0.0, advantage=-0.5, weight=1 / 12, share=1 / 3)],
    ]
    # Step 2: 3 trained tokens; equal rewards have no advantage, and are trained all the same.
    assert second == [[SampleTask((1, 0, 0), reward=2.0, advantage=0.0, weight=1 / 3, share=1)]]


def test_the_last_step_takes_the_remainder():
    groups = [[rollout(1.0, (4, 2))] for _ in range(5)]
    (steps,) = plan(groups, groups_per_step=2)
    assert [sorted(task.at[0] for batch in step for task in batch) for step in steps] == [[0, 1], [2, 3], [4]]


def test_a_rank_without_work_gets_empty_micro_batches():
    first, second, third = plan([[rollout(1.0, (9, 1)), rollout(0.0, (5, 1))]], ranks=3)
    assert [len(tasks_of(p)) for p in (first, second, third)] == [1, 1, 0]
    assert third == [[[]]]


@pytest.mark.parametrize(("packed", "samples"), [(True, [[9], [5, 3, 1]]), (False, [[9], [5], [3, 1]])])
def test_micro_batches_are_filled_up_to_a_number_of_tokens(packed, samples):
    groups = [[rollout(1.0, (9, 1)), rollout(0.0, (5, 1), (3, 1)), rollout(0.0, (1, 1))]]
    ((step,),) = plan(groups, max_tokens=10, packed=packed)
    assert [[groups[0][t.at[1]].samples[t.at[2]].tokens for t in batch] for batch in step] == samples
    assert {task.weight for task in tasks_of([step])} == {1 / 4}


def test_a_step_of_which_nothing_is_trained_is_left_out():
    assert plan([[rollout(1.0, (4, 0))], [rollout(0.0)]], ranks=2) == [[], []]
    (steps,) = plan([[rollout(1.0, (4, 0))], [rollout(0.0, (3, 1))]], groups_per_step=1)
    assert [[task.at[0] for task in batch] for step in steps for batch in step] == [[1]]


def test_rewards_are_clipped_before_the_baseline_and_group_advantages_spread_over_segments():
    groups = [[rollout(30.0, (4, 1), (4, 1)), rollout(0.0, (4, 1))]]
    rewards = shaped(groups, (-1.0, 10.0))
    assert rewards == [[10.0, 0.0]] and advantages(groups, rewards, ADVANTAGES["dr_grpo"]) == [[5.0, -5.0]]  # mean 5
    (steps,) = plan(groups, estimator="rloo")  # 10 - 0 and 0 - 10
    assert sorted((*t.at[1:], t.advantage) for t in tasks_of(steps)) == [(0, 0, 10.0), (0, 1, 10.0), (1, 0, -10.0)]


def test_baselines_are_of_the_group_and_groups_may_differ_in_size():
    groups = [[rollout(1.0), rollout(0.0), rollout(0.0), rollout(1.0)], [rollout(5.0), rollout(3.0)], [rollout(7.0)]]
    assert group_advantages_of(groups, "reinforce_baseline") == [[0.5, -0.5, -0.5, 0.5], [1.0, -1.0], [0.0]]


def test_a_policy_failure_counts_with_its_reward():
    groups = [[rollout(outcome=PolicyFailure(-1.0)), rollout(1.0)]]
    assert shaped(groups) == [[-1.0, 1.0]] == group_advantages_of(groups, "dr_grpo")


def test_a_token_estimator_gets_the_shaped_reward_and_no_group_advantage():
    groups = [[rollout(20.0, (4, 2)), rollout(0.0, (4, 2))]]
    assert shaped(groups) == [[10.0, 0.0]] and group_advantages_of(groups, "reinforce") == [[None, None]]
    (steps,) = plan(groups, estimator="reinforce")
    assert {(t.reward, t.advantage) for t in tasks_of(steps)} == {(10.0, None), (0.0, None)}


def test_the_longest_segment_of_a_rollout_is_what_the_overlong_penalty_is_about():
    # 64 - 16 = 48 tokens are free; 52 are 4 of 16 into the buffer: 0.5 * 4 / 16 = 0.125. Together they have 92.
    groups = [[rollout(1.0, (40, 9), (52, 9)), rollout(1.0, (48, 9), (44, 9)), rollout(1.0)]]
    assert shaped(groups, overlong_buffer_len=16, overlong_penalty_factor=0.5) == [[0.875, 1.0, 1.0]]


def test_a_prompt_counts_once_whatever_its_segments_and_a_sample_has_its_share():
    groups = [[rollout(1.0, (10, 4)), rollout(0.0, (8, 2), (20, 6))], [rollout(2.0, (5, 3)), rollout(2.0, (6, 0))]]
    (steps,) = plan(groups, micro_batch_size=4, aggregation="prompt-mean-token-mean")
    # Two prompts of 4 + 2 + 6 = 12 and 3 trained tokens; four samples.
    weights = {task.at: task.weight for task in tasks_of(steps)}
    assert weights == {(0, 0, 0): 1 / 24, (0, 1, 0): 1 / 24, (0, 1, 1): 1 / 24, (1, 0, 0): 1 / 6}
    assert {task.share for task in tasks_of(steps)} == {1 / 4}


SAMPLE = st.integers(1, 50).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens)))
ROLLOUT = st.builds(lambda r, s: rollout(r, *s), st.sampled_from([0.0, 0.5, 1.0]), st.lists(SAMPLE, max_size=3))
GROUPS = st.lists(st.lists(ROLLOUT, min_size=1, max_size=4), min_size=1, max_size=6)


@settings(deadline=None)
@given(GROUPS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_every_trained_sample_is_planned_once(groups, groups_per_step, micro_batch_size, ranks):
    plans = plan(groups, groups_per_step=groups_per_step, micro_batch_size=micro_batch_size, ranks=ranks)
    trained = {
        (g, r, s): info.trained_tokens
        for g, rollouts in enumerate(groups)
        for r, one in enumerate(rollouts)
        for s, info in enumerate(one.samples)
        if info.trained_tokens
    }
    assert Counter((t.at) for p in plans for t in tasks_of(p)) == Counter(trained.keys())
    assert len(plans) == ranks and len({len(p) for p in plans}) == 1
    for step in zip(*plans, strict=True):
        assert len({len(batches) for batches in step}) == 1  # collectives need equal counts
        assert all(len(batch) <= micro_batch_size for batches in step for batch in batches)
        tasks = [task for batches in step for batch in batches for task in batch]
        assert len({task.at[0] // groups_per_step for task in tasks}) == 1  # split by groups
        total = sum(task.weight * trained[task.at] for task in tasks)
        assert total == pytest.approx(1.0)
