"""Runs whose rollouts teach nothing say so once; runs that learn, and solved tasks, are not accused."""

from molt.records.no_signal import NoSignal
from molt.types import Group, PolicyFailure, Prompt, RolloutInfo, Scored

PROMPT = Prompt(epoch=0, position=0, row=0, messages=None, text="say")


def batch(*groups):
    """Groups of outcomes, and the advantages reward - mean of the group."""
    made = []
    advantages = []
    for outcomes in groups:
        rollouts = []
        for index, outcome in enumerate(outcomes):
            rollouts.append(RolloutInfo("0:0", index, outcome, cut=None, turns=1, samples=()))
        made.append(Group(PROMPT, order=0, start_step=0, rollouts=rollouts))
        mean = sum(outcome.reward for outcome in outcomes) / len(outcomes)
        advantages.append([outcome.reward - mean for outcome in outcomes])
    return made, advantages


def scored(*rewards, score=None):
    return [Scored(reward, reward if score is None else score) for reward in rewards]


def notices(steps):
    """(number of the step, text) of every notice."""
    signal = NoSignal()
    found = []
    for number, (groups, advantages) in enumerate(steps, 1):
        found += [(number, text) for text in signal.look(groups, advantages)]
    return found


def test_five_steps_of_reward_0_are_named_once():
    ((step, text),) = notices([batch(scored(0, 0), scored(0, 0))] * 20)
    assert step == 5
    assert "every rollout had the same reward (0) in 5 steps in a row" in text
    assert "nothing was learned" in text and "SFT" in text and "nothing is left" not in text


def test_a_solved_task_has_nothing_left_to_learn():
    ((step, text),) = notices([batch(scored(1, 0))] + [batch(scored(1, 1), scored(1, 1))] * 20)
    assert step == 6
    assert "every rollout has the same reward (1)" in text and "nothing is left to learn" in text
    assert "too hard" not in text


def test_the_same_failure_everywhere_is_not_a_solved_task():
    failed = [PolicyFailure(-0.1, "no number")] * 2
    ((step, text),) = notices([batch(failed)] * 20)
    assert step == 5 and "the same reward (-0.1)" in text and "too hard" in text


def test_prompts_that_are_each_always_solved_or_never():
    ((step, text),) = notices([batch(scored(1, 1), scored(0, 0))] * 20)
    assert step == 5 and "the rollouts of each prompt had the same reward" in text


def test_one_mixed_group_in_five_steps_is_enough():
    nothing = batch(scored(0, 0))
    mixed = batch(scored(0, 1))
    assert notices(([nothing] * 4 + [mixed]) * 5) == []


def test_rounding_is_no_advantage():
    """The mean of ten times 0.1 is 0.09999999999999999 in floating point."""
    step = batch(scored(*[0.1] * 10))
    assert any(advantage for advantage in step[1][0])
    assert len(notices([step] * 5)) == 1


def by_ranks(groups):
    """The advantages of a token estimator, which the driver does not know."""
    return [[None] * len(group.rollouts) for group in groups]


def test_equal_rewards_are_named_where_the_ranks_compute_the_advantages():
    groups, _ = batch(scored(0, 0), scored(0, 0))
    ((step, text),) = notices([(groups, by_ranks(groups))] * 20)
    assert step == 5 and "every rollout had the same reward (0)" in text and "nothing was learned" in text


def test_rewards_that_differ_are_left_to_the_ranks():
    """In a batch, or from batch to batch: a critic compares across batches."""
    groups, _ = batch(scored(0, 1))
    assert notices([(groups, by_ranks(groups))] * 20) == []
    steps = []
    for reward in (0, 1) * 10:
        groups, _ = batch(scored(reward, reward))
        steps.append((groups, by_ranks(groups)))
    assert notices(steps) == []


def test_one_reward_for_all_teaches_nothing_without_a_baseline():
    """`reinforce` without whitening: every advantage is the reward, 0.5."""
    groups, _ = batch(scored(0.5, 0.5), scored(0.5, 0.5))
    ((step, text),) = notices([(groups, [[0.5, 0.5], [0.5, 0.5]])] * 20)
    assert step == 5 and "the same reward (0.5)" in text
    assert notices([(groups, [[0.5, 0.2], [0.5, 0.2]])] * 20) == [], "an estimator that reads the lengths"


def test_a_distillation_reads_no_rewards():
    groups, _ = batch(scored(0, 0))
    signal = NoSignal(reads_rewards=False)
    assert [signal.look(groups, by_ranks(groups)) for _ in range(20)] == [[]] * 20


def test_a_reward_that_rises_without_a_score_above_0():
    rising = batch(scored(0.1, 0.2, score=0.0), [*scored(0.3, score=0.0), PolicyFailure(-0.1, "no number")])
    ((step, text),) = notices([rising] * 30)
    assert step == 10 and "no rollout has a score above 0 so far" in text and "best 0 in 10 steps" in text


def test_a_score_above_0_or_scores_that_differ_are_left_alone():
    one_success = [batch(scored(0.1, 0.2, score=1.0))]
    assert notices(one_success + [batch(scored(0.1, 0.2, score=0.0))] * 30) == []
    assert notices([batch(scored(-3.0, -1.5))] * 30) == [], "a negative distance is a score"


def test_after_a_roll_back_steps_are_counted_anew():
    signal = NoSignal()
    step = batch(scored(0, 0))
    for _ in range(4):
        assert signal.look(*step) == []
    signal.forget()
    for _ in range(4):
        assert signal.look(*step) == []
    assert len(signal.look(*step)) == 1
