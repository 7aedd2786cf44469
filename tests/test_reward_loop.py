"""Whole runs with a scorer, over `FakeEngine`: it is learned from, misbehaves, is cached, and survives a resume."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from molt.driver import drive_evaluation
from molt.report.metrics import values
from molt.rollout.evaluate import score
from molt.spec import resolve_evaluation
from tests.fakes import FakeEngineWorker
from tests.runs import events, metrics, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray

# The agent gives no reward; its file counts the episodes of each prompt.
AGENT = """
import os
from molt.agents import Env, Result, StepEnvRunner

class Silent(Env):
    async def step(self, state):
        with open({log!r}, "a") as file:
            file.write(state["prompt"][-1]["content"] + "\\n")
        return Result(0.0)

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Silent)
"""

# The label says what the scorer does; a path in it is waited for.
SCORER = """
import os, sys, time

kept = []

def score(trajectory):
    what = trajectory.label
    if what == "power":
        return 88**77**6
    if what == "exit":
        os._exit(1)
    if what == "raise":
        raise RuntimeError("the grader is broken")
    while what.startswith("/") and not os.path.exists(what):
        time.sleep(0.05)
    return trajectory.answer.count("7") / 4
"""


@pytest.fixture
def scored(model_dir, tmp_path):
    """`scored(name, *flags, prompts=, labels=)`: the settings of a run with the scorer; its output is `name`."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)

    def build(name, *more, count=40, labels=None):
        agent = tmp_path / "agent.py"
        agent.write_text(AGENT.format(log=str(tmp_path / f"{name}.log")))
        prompts = write_prompts(tmp_path / "prompts.jsonl", count, labels)
        return settings(
            model_dir, tmp_path / name, prompts, "--train.agent_path", str(agent), "--reward.scorer", str(scorer), *more
        )

    return build


def scorers_alive():
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "molt.agents.scorer_process" in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def test_a_run_learns_from_a_scorer_and_a_repeated_one_finds_every_score(ray_session, scored, tmp_path):
    more = (
        "--train.async_queue_size", "0", "--rollout.num_runners", "2", "--reward.num_scorers", "2",
        "--reward.cache_dir", str(tmp_path / "scores"),
    )  # fmt: skip
    run(scored("first", *more, "--train.num_episodes", "2"))
    rewards = metrics(tmp_path / "first", "rollout/reward")
    assert len(rewards) == 20 and sum(rewards[-4:]) > sum(rewards[:4]) + 0.4
    assert metrics(tmp_path / "first", "timing/score_s")[0] > 0
    config = (tmp_path / "first" / "run" / "config.toml").read_text()
    assert "scorer.py" in config and "cache_dir" in config

    run(scored("again", *more, "--train.num_episodes", "2"))
    assert metrics(tmp_path / "again", "rollout/score_cached") == [1.0] * 20
    assert metrics(tmp_path / "again", "rollout/reward") == rewards


def test_scorers_that_misbehave_cost_their_groups_alone(ray_session, scored, tmp_path):
    labels = {3: "power", 9: "exit", 14: "raise"}
    run(scored("out", "--reward.scorer_timeout_s", "1", "--rollout.max_retries", "0",
               "--rollout.max_failure_rate", "0.5", "--reward.num_scorers", "4", count=27, labels=labels))  # fmt: skip
    lost = [event["reason"] for event in events(tmp_path / "out", "group_discarded")]
    assert sorted(lost) == ["scorer_RuntimeError", "scorer_exit", "scorer_timeout"]
    assert len(set(trained_groups(tmp_path / "out"))) == 24
    # 4 rollouts, 3 scores each: the last of them is the attempt that failed.
    assert len(events(tmp_path / "out", "score_failed")) == 3 * 4 * 2
    assert sum(metrics(tmp_path / "out", "faults/scorer_exit")) == 4 * 3


def test_an_evaluation_is_scored_too(ray_session, scored, tmp_path):
    held_out = write_prompts(tmp_path / "held_out.jsonl", 6, {2: "raise"})
    more = ("--eval.eval_only", "--eval.dataset", held_out, "--reward.cache_dir", str(tmp_path / "scores"))
    config = scored("out", *more, "--rollout.max_retries", "0")
    measured = []
    for _ in range(2):
        answers, _ = asyncio.run(drive_evaluation(resolve_evaluation(config), FakeEngineWorker))
        measured.append(values(score(answers)))
    first, again = measured
    assert first["eval/held_out/failures"] == again["eval/held_out/failures"] == 4  # of the one prompt
    assert again["eval/held_out/score_cached"] == 1.0
    assert again["eval/held_out/pass1"] == first["eval/held_out/pass1"] < 1


def test_a_group_that_waits_for_its_score_survives_a_resume(ray_session, scored, tmp_path):
    """Row 5 is rolled out and waits; the run ends at step 2, and the resumed one computes its scores alone."""
    gate = tmp_path / "gate"
    more = ("--rollout.num_runners", "1", "--reward.num_scorers", "8", "--train.async_queue_size", "1")
    labels = {5: str(gate)}
    stopping = ("--train.max_steps", "2", "--train.max_staleness", "4")
    run(scored("out", *more, *stopping, count=16, labels=labels))
    saved = tmp_path / "out" / "checkpoints" / "step_000002" / "unscored" / "buffer.json"
    (group,) = json.loads(saved.read_text())["groups"]
    assert [set(rollout["outcome"]) for rollout in group["rollouts"]] == [{"trajectory"}] * 4
    rolled_out = (tmp_path / "out.log").read_text().splitlines()
    assert rolled_out.count("say 5") == 4

    gate.touch()
    run(scored("out", *more, "--train.max_staleness", "4", "--ckpt.load_enable", count=16, labels=labels))
    assert sorted(trained_groups(tmp_path / "out")) == sorted(f"0:{number}" for number in range(16))
    rolled_out = (tmp_path / "out.log").read_text().splitlines()
    assert rolled_out.count("say 5") == 4  # not one more


def test_no_scorer_outlives_its_run(ray_session, scored, tmp_path):
    before = set(scorers_alive())
    run(scored("out", "--train.max_steps", "1", "--ckpt.disable_final_save", count=8))

    async def until_gone():
        async with asyncio.timeout(10):
            while set(scorers_alive()) - before:
                await asyncio.sleep(0.1)

    asyncio.run(until_gone())
    assert Path(tmp_path / "out").exists()
