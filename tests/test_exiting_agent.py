"""Whole runs with graders that exit, raise what is no Exception, block, or kill their process: the others go on."""

import time
from pathlib import Path

import pytest

from tests.runs import events, metrics, run, settings, trained_groups, write_prompts

pytestmark = pytest.mark.ray
AGENT = str(Path(__file__).parent / "exiting_agent.py")
PROMPTS = 40


def test_graders_that_exit_cost_their_groups_alone(ray_session, model_dir, tmp_path):
    """A loop that ended would be silent for train.watchdog_s, and the run longer than this test may take."""
    bad = {5: "exit", 9: "time limit", 14: "exit in a task"}
    prompts = write_prompts(tmp_path / "p.jsonl", PROMPTS, bad)
    run(settings(model_dir, tmp_path / "out", prompts, "--train.agent_path", AGENT, "--train.watchdog_s", "120"))
    lost = {event["group"]: event for event in events(tmp_path / "out", "group_discarded")}
    reasons = sorted(event["reason"] for event in lost.values())
    assert reasons == ["GraderTimedOut", "SystemExit", "SystemExit"]
    assert all("exiting_agent.py:" in event["detail"] for event in lost.values())
    assert sorted([*trained_groups(tmp_path / "out"), *lost]) == sorted(f"0:{i}" for i in range(PROMPTS))
    assert not events(tmp_path / "out", "runner_lost")


def test_a_block_is_named_within_5_s_and_in_the_metrics_of_its_step(ray_session, model_dir, tmp_path, monkeypatch):
    """Asked for at the end of the step: the look at the rollouts, every 10 s, comes after it."""
    monkeypatch.setattr("molt.rollout.watchdog.LOOK_S", 3600.0)
    prompts = write_prompts(tmp_path / "p.jsonl", 4, {1: f"block:{tmp_path / 'flag'}"})
    run(settings(model_dir, tmp_path / "out", prompts, "--train.agent_path", AGENT))
    (blocked,) = events(tmp_path / "out", "runner_blocked")
    assert "exiting_agent.py:35" in blocked["at"] and blocked["seconds"] < 5.0
    (worst,) = metrics(tmp_path / "out", "perf/runner_lag_max")
    (blocked_s,) = metrics(tmp_path / "out", "perf/runner_blocked_max")
    assert 6.0 < blocked_s <= worst < 60.0


def test_a_grader_that_ends_its_process_every_time_costs_its_group_alone(ray_session, model_dir, tmp_path):
    """As one whose memory grows until the runner is killed."""
    prompts = write_prompts(tmp_path / "p.jsonl", PROMPTS, {9: "end the process"})
    more = ("--train.agent_path", AGENT)
    run(settings(model_dir, tmp_path / "out", prompts, *more))
    (lost,) = events(tmp_path / "out", "group_discarded")
    assert lost["reason"] == "runner"
    assert len(events(tmp_path / "out", "runner_lost")) == 3
    assert sorted([*trained_groups(tmp_path / "out"), lost["group"]]) == sorted(f"0:{i}" for i in range(PROMPTS))


def test_a_runner_whose_loop_a_callback_ended_is_replaced_at_once(ray_session, model_dir, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", PROMPTS, {9: f"exit in a callback:{tmp_path / 'flag'}"})
    began = time.monotonic()
    run(settings(model_dir, tmp_path / "out", prompts, "--train.agent_path", AGENT, "--train.watchdog_s", "300"))
    assert time.monotonic() - began < 200
    assert len(events(tmp_path / "out", "runner_lost")) == 1
    assert sorted(trained_groups(tmp_path / "out")) == sorted(f"0:{i}" for i in range(PROMPTS))
