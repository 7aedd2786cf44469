"""The circuit breaker: its limit by hand, and what a policy and a critic do with a step that is not fit to be taken."""

import json
from dataclasses import replace
from math import inf, isfinite, nan

import pytest
import torch
import torch.distributed as dist

from molt.report import metrics as report
from molt.train.breaker import FEWEST, WINDOW, Breaker, merge_evidence
from molt.train.checkpoint import begin, commit
from molt.train.critic import Critic
from molt.train.optimizer import lr_factor
from molt.train.policy import Policy
from tests.train import test_critic as of_critic
from tests.train import test_policy as of_policy
from tests.train.ranks import alone, run_ranks, whole

RATE = 1e-4


def breaker(norms, factor=3.0):
    made = Breaker(factor)
    for norm in norms:
        made.take(norm, has_signal=True)
    return made


def test_the_limit_by_hand():
    assert breaker([1.0] * 7).limit == inf  # one too few
    # sorted: 1 1 2 2 4 4 9 9: the median is (2 + 4) / 2
    assert breaker([9.0, 1.0, 2.0, 4.0, 4.0, 2.0, 1.0, 9.0]).limit == 3 * 3.0
    # Steps without any gradient tell nothing: seven norms are left, then eight.
    assert breaker([0.0] * 20 + [1.0] * 7).limit == inf
    assert breaker([0.0] * 20 + [1.0] * 8).limit == 3.0
    assert breaker([1.0] * 9, factor=inf).limit == inf


def test_the_limit_forgets():
    made = breaker([100.0] * WINDOW + [1.0] * (WINDOW // 2))
    assert made.limit == 3 * 50.5  # half old, half new: (1 + 100) / 2
    made.take(1.0, has_signal=True)
    assert made.limit == 3.0


def test_steps_of_regularisers_alone_do_not_lower_the_limit():
    made = breaker([])
    for _ in range(10):
        made.take(0.01, has_signal=False)
    for _ in range(7):
        made.take(1.0, has_signal=True)
    assert made.limit == inf  # seven norms
    made.take(1.0, has_signal=True)
    assert made.limit == 3.0
    made.take(0.01, has_signal=False)
    assert list(made.norms) == [1.0] * 8


def skip(made, *norms):
    for norm in norms:
        made.skip(norm)


def test_two_spikes_of_one_size_change_the_limit_and_the_third_starts_it_again():
    made = breaker([1.0] * 20)
    skip(made, 35.0)
    assert made.limit == 3.0
    skip(made, 30.0)
    assert made.limit == 4 * 30.0
    made.take(32.0, has_signal=True)
    assert made.limit == 3 * 32.0  # the median of 35, 30, 32
    made.take(300.0, has_signal=False)
    skip(made, 300.0)
    assert made.limit == 3 * 32.0  # it counts anew


@pytest.mark.parametrize(
    "norms",
    [
        [30.0, 121.0],  # above 4 times 30
        [30.0, nan, 31.0],
        [30.0, inf, 31.0],
        [30.0, 300.0, 3000.0, 30_000.0],
        [300.0, 31.0, 300.0],
    ],
)
def test_spikes_that_differ_or_are_not_finite_change_nothing(norms):
    made = breaker([1.0] * 20)
    skip(made, *norms)
    assert made.limit == 3.0


def test_only_a_step_with_a_signal_ends_a_row_of_spikes():
    made = breaker([1.0] * 20)
    skip(made, 30.0)
    made.take(1.0, has_signal=True)
    skip(made, 30.0)
    assert made.limit == 3.0
    made.take(0.01, has_signal=False)
    skip(made, 30.0)
    assert made.limit == 4 * 30.0
    made.take(1.0, has_signal=True)  # the change did not last
    assert made.limit == 3.0 and list(made.norms) == [1.0] * 22


def test_evidence_of_ranks_is_merged_by_step():
    first = [{"loss": 1.0, "tensors": ["b"], "groups": [0, 2]}, {"loss": None, "tensors": [], "groups": []}]
    second = [{"loss": 1.0, "tensors": ["a", "b"], "groups": [1, 2]}, {"loss": None, "tensors": ["c"], "groups": [5]}]
    assert merge_evidence([first, second]) == [
        {"loss": 1.0, "tensors": ["a", "b"], "groups": [0, 1, 2]},
        {"loss": None, "tensors": ["c"], "groups": [5]},
    ]
    assert merge_evidence([[], []]) == []


def make_policy(path, mesh):
    return Policy(of_policy.settings(path, lr=RATE, lr_scheduler="cosine"), mesh)


@pytest.fixture
def policy(tiny):
    yield make_policy(tiny, alone())
    dist.destroy_process_group()


@pytest.fixture
def critic(tiny):
    yield Critic(of_critic.settings(tiny, lr=RATE), alone())
    dist.destroy_process_group()


def scaled(step, factor):
    """A step whose loss, and so whose gradient, is so many times as large."""
    return [[replace(task, weight=task.weight * factor) for task in tasks] for tasks in step]


def state_of(trained):
    """Weights and optimizer state of all ranks, by name."""
    state = {}
    for name, p in trained.model.named_parameters():
        state[name] = whole(p)
        state |= {f"{name}/{key}": whole(value) for key, value in trained.optimizer.state[p].items()}
    return state


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rates(trained):
    return [group["lr"] for group in trained.optimizer.param_groups]


def test_a_step_with_a_loss_that_is_not_finite_is_skipped(policy):
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1), (2, 3)),))
    of_policy.train(policy, [good], samples)
    before = state_of(policy)
    metrics = of_policy.train(policy, [scaled(good, nan)], samples)
    assert same(state_of(policy), before)
    assert all(p.grad is None for p in policy.model.parameters())
    assert metrics["train/skipped_count"].total == metrics["train/skipped_nonfinite_count"].total == 1
    assert "train/skipped_spike_count" not in metrics
    assert "train/loss" not in metrics and "train/grad_norm" not in metrics
    assert metrics["train/entropy"].count == 28  # what is finite of the step is still told
    (evidence,) = policy.evidence()
    json.dumps(evidence, allow_nan=False)
    tensors = evidence.pop("tensors")
    assert len(tensors) == 3 and set(tensors) <= {name for name, _ in policy.model.named_parameters()}
    assert evidence == {
        "optimizer_step": 1, "reason": "nonfinite", "loss": None, "norm": None, "limit": None, "groups": [0, 1],
    }  # fmt: skip
    assert policy.evidence() == []  # it is told once
    # The schedule counts the skipped step, and training goes on.
    config = policy.settings.actor
    assert rates(policy) == [RATE * lr_factor(2, config, total_steps=10)] * 2
    assert not set(of_policy.train(policy, [good], samples)) & {"train/skipped_count", "train/skipped_nonfinite_count"}
    assert not same(state_of(policy), before)


def test_the_very_first_step_may_be_skipped(policy):
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1, 2, 3),),))
    before = state_of(policy)
    of_policy.train(policy, [scaled(good, nan)], samples)
    assert same(state_of(policy), before) and policy.scheduler.last_epoch == 1
    of_policy.train(policy, [good], samples)
    assert policy.scheduler.last_epoch == 2 and not same(state_of(policy), before)


def test_the_other_steps_of_a_batch_are_taken(policy):
    samples = of_policy.make_samples()
    first, second = of_policy.make_plan(samples, (((0, 1),), ((2,), (3,))))
    before = state_of(policy)
    metrics = of_policy.train(policy, [first, scaled(second, nan)], samples)
    assert not same(state_of(policy), before)
    assert metrics["train/loss"].count == metrics["train/grad_norm"].count == 1
    assert metrics["train/lr"].count == 2
    assert all(isfinite(value) for value in report.values(metrics).values())
    assert [evidence["groups"] for evidence in policy.evidence()] == [[1]]


def normal_steps(policy, plan, samples, number):
    return [of_policy.train(policy, plan, samples)["train/grad_norm"].total for _ in range(number)]


def test_a_gradient_100_times_the_usual_one_is_skipped_and_twice_the_usual_one_is_not(policy):
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1, 2, 3),),))
    norms = normal_steps(policy, [good], samples, FEWEST - 1)
    assert list(policy.breaker.norms) == norms
    norms += normal_steps(policy, [scaled(good, 2.0)], samples, 1)
    before = state_of(policy)
    metrics = of_policy.train(policy, [scaled(good, 100.0)], samples)
    assert same(state_of(policy), before)
    assert metrics["train/skipped_count"].total == metrics["train/skipped_spike_count"].total == 1
    assert list(policy.breaker.norms) == norms  # a spike does not raise the limit for the next
    (evidence,) = policy.evidence()
    middle = sorted(norms)
    assert evidence["reason"] == "spike" and evidence["tensors"] == []
    assert evidence["limit"] == pytest.approx(20 * (middle[3] + middle[4]) / 2)
    assert evidence["norm"] == pytest.approx(100 * norms[-1] / 2, rel=0.2)  # the weights have moved a little since
    assert evidence["loss"] == metrics["train/loss"].total and evidence["norm"] == metrics["train/grad_norm"].total
    normal_steps(policy, [good], samples, 1)
    assert policy.evidence() == [] and not same(state_of(policy), before)


def without_advantages(step):
    return [[replace(task, advantage=0.0) for task in batch] for batch in step]


def test_batches_that_teach_nothing_make_no_spike_of_those_that_do(tiny):
    """An entropy bonus gives them a gradient all the same."""
    policy = Policy(of_policy.settings(tiny, lr=RATE, entropy_coef=1e-4), alone())
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1, 2, 3),),))
    small = normal_steps(policy, [without_advantages(good)], samples, 10)
    real = normal_steps(policy, [good], samples, 6)
    dist.destroy_process_group()
    assert policy.evidence() == [] and list(policy.breaker.norms) == real
    assert min(small) > 0 and min(real) > 20 * max(small)  # each would have been a spike


def test_a_step_learns_if_any_of_its_samples_does(policy):
    samples = of_policy.make_samples()
    first, second = of_policy.make_plan(samples, (((0, 1),), ((2,), (3,))))
    (alone_there, rest) = second
    half = [without_advantages([alone_there])[0], rest]
    policy.prepare([without_advantages(first), half], samples, {}, 6, 0.0)
    assert policy.prepared.has_signal == [False, True]
    rounding = [[replace(task, advantage=1e-17) for task in batch] for batch in first]
    masked = [[replace(task, weight=0.0) for task in batch] for batch in second]
    policy.prepare([rounding, masked], samples, {}, 6, 0.0)
    assert policy.prepared.has_signal == [False, False]


def test_a_critic_learns_something_where_rewards_differ(critic):
    samples = of_critic.make_samples()
    (good,), returns = of_critic.make_plan(samples, of_critic.WHOLE), of_critic.make_returns(samples)

    def with_rewards(*rewards):
        given = iter(rewards)
        return [[replace(task, reward=next(given)) for task in batch] for batch in good]

    for rewards in ([0.0] * 4, [1.0] * 4, [0.1] * 4, [-1e5] * 4):
        critic_step(critic, [with_rewards(*rewards)], samples, returns)
        assert list(critic.breaker.norms) == []
    critic_step(critic, [with_rewards(0.0, 0.0, 0.0, 1e-3)], samples, returns)
    assert len(critic.breaker.norms) == 1
    critic_step(critic, [with_rewards(1000.0, 1000.01, 1000.0, 1000.0)], samples, returns)
    assert len(critic.breaker.norms) == 2


def test_gradients_that_stay_large_are_trained_again(policy):
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1, 2, 3),),))
    normal_steps(policy, [good], samples, FEWEST)
    large = scaled(good, 100.0)
    for _ in range(2):
        before = state_of(policy)
        of_policy.train(policy, [large], samples)
        assert same(state_of(policy), before)
    assert "train/skipped_count" not in of_policy.train(policy, [large], samples)
    assert not same(state_of(policy), before)
    assert [found["reason"] for found in policy.evidence()] == ["spike", "spike"]
    of_policy.train(policy, [scaled(good, 1e5)], samples)  # 1,000 times the new size
    assert [found["reason"] for found in policy.evidence()] == ["spike"]


def test_the_limit_needs_some_norms(policy):
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1, 2, 3),),))
    normal_steps(policy, [good], samples, FEWEST - 1)
    of_policy.train(policy, [scaled(good, 100.0)], samples)
    assert policy.evidence() == []


def saved(trained, directory):
    aside = begin(directory, 1)
    trained.save(aside, background=False)
    return commit(aside)


def test_a_resumed_run_decides_the_same(policy, tiny, tmp_path):
    samples = of_policy.make_samples()
    (good,) = of_policy.make_plan(samples, (((0, 1, 2, 3),),))
    normal_steps(policy, [good], samples, FEWEST)
    of_policy.train(policy, [scaled(good, 100.0)], samples)
    norms, spikes, path = list(policy.breaker.norms), list(policy.breaker.spikes), saved(policy, tmp_path)
    resumed = make_policy(tiny, alone())
    resumed.breaker.take(7.0, has_signal=True)  # what it knew is not of this lineage
    resumed.breaker.skip(8.0)
    resumed.load(path)
    assert list(resumed.breaker.norms) == norms and list(resumed.breaker.spikes) == spikes and len(spikes) == 1
    resumed_metrics = of_policy.train(resumed, [scaled(good, 100.0)], samples)
    assert resumed_metrics["train/skipped_spike_count"].total == 1


def critic_step(critic, plan, samples, returns):
    critic.infer(plan, samples)
    return critic.train(returns)


def test_a_critic_skips_too_and_remembers_its_own_norms(critic, tiny, tmp_path):
    samples = of_critic.make_samples()
    (good,), returns = of_critic.make_plan(samples, of_critic.WHOLE), of_critic.make_returns(samples)
    for _ in range(FEWEST):
        critic_step(critic, [good], samples, returns)
    before, norms = state_of(critic), list(critic.breaker.norms)
    for factor, reason in ((nan, "nonfinite"), (100.0, "spike")):
        metrics = critic_step(critic, [scaled(good, factor)], samples, returns)
        assert same(state_of(critic), before)
        assert metrics["train/skipped_count"].total == metrics[f"train/skipped_{reason}_count"].total == 1
        assert isfinite(metrics["train/explained_variance"].total)
        (evidence,) = critic.evidence()
        assert evidence["reason"] == reason and evidence["groups"] == [0, 1, 2, 3]
    path = saved(critic, tmp_path)
    dist.destroy_process_group()
    resumed = Critic(of_critic.settings(tiny, lr=RATE), alone())
    resumed.load(path)
    assert list(resumed.breaker.norms) == norms and len(norms) == FEWEST
    critic_step(resumed, [good], samples, returns)
    assert not same(state_of(resumed), before)


def test_values_that_are_nan_are_a_loss_that_is_not_finite(critic):
    samples = of_critic.make_samples()
    plan, returns = of_critic.make_plan(samples, of_critic.WHOLE), of_critic.make_returns(samples)
    critic.infer(plan, samples)
    before = state_of(critic)
    critic.model.register_forward_hook(lambda model, inputs, values: values * nan)
    assert critic.train(returns)["train/skipped_nonfinite_count"].total == 1
    assert same(state_of(critic), before)


FAULTS = {
    # Log-probs of which no ratio can be formed; or a finite loss whose gradient is infinite.
    "nan": lambda model, inputs, found: found._replace(logprobs=found.logprobs * nan),
    "inf": lambda model, inputs, found: found.logprobs.register_hook(lambda gradient: gradient * inf) and None,
}


def on_a_rank(mesh, path, plans, samples):
    """For each fault, of rank 1 alone: metrics, evidence, whether nothing changed; then whether a step moves it."""
    rank, results = mesh.rank, []
    policy = make_policy(path, mesh)
    for fault in FAULTS.values():
        before = state_of(policy)
        hook = policy.model.register_forward_hook(fault) if rank == 1 else None
        metrics = of_policy.train(policy, plans[rank], samples)
        if hook:
            hook.remove()
        results.append((metrics, policy.evidence(), same(state_of(policy), before)))
    # Rank 0 has no advantage in this step, and no rank has one in the next: only the first counts, on both ranks.
    mine = plans[rank] if rank == 1 else [without_advantages(step) for step in plans[rank]]
    of_policy.train(policy, mine, samples)
    of_policy.train(policy, [without_advantages(step) for step in plans[rank]], samples)
    norms = list(policy.breaker.norms)
    return results, not same(state_of(policy), before) and not policy.evidence(), norms


@pytest.mark.processes
def test_every_rank_skips_when_one_has_the_fault(tiny, tmp_path):
    samples = of_policy.make_samples()
    (step,) = of_policy.make_plan(samples, (((0, 1), (2, 3)),))
    plans = [[[step[0], []]], [[step[1], []]]]
    ranks = run_ranks(on_a_rank, 2, tmp_path, tiny, plans, samples)
    assert all(moved for _, moved, _ in ranks)
    (first, second) = (norms for _, _, norms in ranks)
    assert first == second and len(first) == 1
    for number, fault in enumerate(FAULTS):
        metrics, evidence, unchanged = zip(*(results[number] for results, *_ in ranks), strict=True)
        assert all(unchanged), fault
        merged = report.merge(metrics)
        # One skipped step, however many ranks skipped it.
        assert merged["train/skipped_count"].total == merged["train/skipped_nonfinite_count"].total == 1
        assert all(isfinite(value) for value in report.values(merged).values())
        (told,) = merge_evidence(evidence)
        assert told["groups"] == [0, 1] and told["optimizer_step"] == number and told["tensors"]
        assert (told["loss"] is None) == (fault == "nan") and told["norm"] is None
