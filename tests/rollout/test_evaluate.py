"""Evaluation over a fake runner pool: scores by source, failures left out and never a zero."""

import asyncio

import pytest

from molt.config import EvalConfig, RolloutConfig
from molt.report.metrics import values
from molt.rollout.evaluate import answer, evaluate, failures
from molt.rollout.group_task import GroupResult
from molt.types import EVALUATION_EPOCH, InfraFailure, PolicyFailure, Prompt, RolloutInfo, SampleInfo, Scored

LOST = InfraFailure("timeout")
ROLLOUT = RolloutConfig(batch_size=4, n_samples_per_prompt=2, max_new_tokens=9, temperature=0.7, top_p=0.8, top_k=3)


def right(ok):
    return Scored(float(ok) - 0.5, float(ok))  # the score counts, not the reward


def prompt(position, source="math"):
    return Prompt(EVALUATION_EPOCH, position, position, messages=None, text="x", data_source=source)


class Runners:
    """Outcomes by position of the prompt; an exception is raised, a string makes the prompt unusable."""

    patience_s = 5.0

    def __init__(self, *outcomes):
        self.outcomes, self.tasks = outcomes, []
        self.in_flight = self.most = 0

    async def run_group(self, task):
        self.tasks.append(task)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        outcomes = self.outcomes[task.prompt.position]
        if isinstance(outcomes, Exception):
            raise outcomes
        if isinstance(outcomes, str):
            return GroupResult([], unusable=outcomes), None
        rollouts = [
            RolloutInfo(
                task.prompt.group_id,
                i,
                outcome,
                "turns" if i == 0 else None,
                turns=1,
                samples=(SampleInfo(9, 4 + i, 0),),
            )
            for i, outcome in enumerate(outcomes)
        ]
        return GroupResult(rollouts), None


def scores(prompts, *outcomes, **config):
    runners = Runners(*outcomes)
    return values(asyncio.run(evaluate(prompts, runners, ROLLOUT, EvalConfig(**config)))), runners


def test_pass1_is_the_mean_and_passn_the_best_of_n():
    metrics, _ = scores([prompt(0), prompt(1)], [right(1), right(0)], [right(0), right(0)])
    assert metrics == {
        "eval/math/pass1": 0.25,  # (1/2 + 0) / 2
        "eval/math/pass1_low": 0.0,  # of two prompts, both resampled are often the second ...
        "eval/math/pass1_high": 0.5,  # ... or both the first
        "eval/math/pass2": 0.5,  # (1 + 0) / 2
        "eval/math/response_length": 4.5,  # 4 and 5 generated tokens
        "eval/math/truncated": 0.5,
        "eval/math/failures": 0.0,
    }


def test_sources_are_apart():
    prompts = [prompt(0, "math"), prompt(1, "code"), prompt(2, "math")]
    metrics, _ = scores(prompts, [right(1)] * 2, [right(0)] * 2, [right(0)] * 2)
    assert metrics["eval/math/pass1"] == 0.5 and metrics["eval/code/pass1"] == 0.0


def test_what_the_infrastructure_failed_is_left_out_and_counted():
    outcomes = [right(1), LOST], [LOST, LOST], [right(0), right(1)], LOST
    metrics, _ = scores([prompt(i) for i in range(4)], *outcomes)
    assert metrics["eval/math/pass1"] == 0.75  # (1 + 1/2) / 2: the second and the fourth prompt have no score
    assert metrics["eval/math/pass2"] == 1.0  # of the third alone: the first has one rollout left
    assert metrics["eval/math/failures"] == 5.0  # 1 + 2 + 2


@pytest.mark.parametrize("outcome", [[LOST, LOST], LOST, "prompt of 900 tokens leaves no room"])
def test_a_source_of_which_nothing_is_left_has_no_score_instead_of_zero(outcome):
    metrics, _ = scores([prompt(0)], outcome)
    assert metrics == {"eval/math/failures": 2.0}


def test_failures_by_reason():
    outcomes = [right(1), LOST], [LOST, LOST], "prompt of 900 tokens leaves no room", InfraFailure("runner", "gone")
    answers = asyncio.run(answer([prompt(i) for i in range(4)], Runners(*outcomes), ROLLOUT, EvalConfig()))
    reasons, details = failures(answers)
    assert reasons == {"timeout": 3, "unusable_prompt": 2, "runner": 2}
    assert details["runner"] == "gone" and "900 tokens" in details["unusable_prompt"]


def test_the_interval_is_over_prompts():
    """All right: Wilson's, of 4 prompts and not of 8 samples. 4 / (4 + 1.96²) = 0.5101."""
    metrics, _ = scores([prompt(i) for i in range(4)], *[[right(1)] * 2] * 4)
    assert metrics["eval/math/pass1_low"] == pytest.approx(0.5101, abs=1e-4) and metrics["eval/math/pass1_high"] == 1.0


def test_a_policy_failure_is_a_score():
    metrics, _ = scores([prompt(0)], [PolicyFailure(0.0), right(1)])
    assert metrics["eval/math/pass1"] == 0.5 and metrics["eval/math/failures"] == 0.0


def test_settings_of_its_own_else_those_of_the_rollout():
    _, runners = scores([prompt(0)], [right(1)])
    task = runners.tasks[0]
    assert (task.n, task.temperature, task.top_p, task.top_k, task.max_new_tokens) == (2, 0.7, 0.8, 3, 9)
    _, runners = scores([prompt(0)], [right(1)], n_samples_per_prompt=1, temperature=0.0, top_p=1.0, max_new_tokens=5)
    task = runners.tasks[0]
    assert (task.n, task.temperature, task.top_p, task.top_k, task.max_new_tokens) == (1, 0.0, 1.0, 3, 5)


def test_one_sample_per_prompt_has_no_pass2():
    metrics, _ = scores([prompt(0)], [right(1)], n_samples_per_prompt=1)
    assert {name for name in metrics if "pass" in name} == {f"eval/math/pass1{edge}" for edge in ("", "_low", "_high")}


@pytest.mark.parametrize(("n", "most"), [(2, 4), (4, 2), (100, 1)])
def test_no_more_rollouts_in_flight_than_in_training(n, most):
    _, runners = scores([prompt(i) for i in range(9)], *[[right(1)] * n] * 9, n_samples_per_prompt=n)
    assert runners.most == most  # 4 groups of 2 in training


def test_a_batch_size_of_its_own():
    _, runners = scores([prompt(i) for i in range(9)], *[[right(1)] * 2] * 9, batch_size=7)
    assert runners.most == 7
