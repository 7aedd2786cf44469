"""What is said once a run."""

from molt.records.notices import Notices


def test_a_blocked_runner_is_named_once(capsys):
    notices = Notices()
    notices.look(1, {"perf/runner_lag_max": 0.9, "perf/runner_blocked_max": 0.9})
    assert capsys.readouterr().err == ""
    notices.look(2, {"perf/runner_lag_max": 2.5, "perf/runner_blocked_max": 2.34})
    line = capsys.readouterr().err
    assert line.startswith("step 2: the agent's code blocked a runner for 2.3 s (`perf/runner_blocked_max`)")
    assert "docs/agents.md" in line and "busy" not in line
    notices.look(3, {"perf/runner_lag_max": 5.0, "perf/runner_blocked_max": 5.0})
    assert capsys.readouterr().err == ""


def test_a_busy_machine_is_not_the_agents_fault(capsys):
    notices = Notices()
    notices.look(86, {"perf/runner_lag_max": 1.8, "perf/runner_blocked_max": 0.1})
    line = capsys.readouterr().err
    assert line.startswith("step 86: a runner's event loop was 1.8 s late (`perf/runner_lag_max`)")
    assert "the machine was busy" in line and "did not block" in line


def test_each_setting_of_a_client_that_is_ignored_is_named_once(capsys):
    notices = Notices()
    notices.look(1, {"rollout/info/chat_ignored_temperature": 0.5, "rollout/info/chat_ignored_top_p": 0.0})
    line = capsys.readouterr().err
    assert line.startswith("step 1: the agent's client asks for temperature of its own")
    notices.look(2, {"rollout/info/chat_ignored_temperature": 0.5, "rollout/info/chat_ignored_top_p": 1.0})
    assert "asks for top_p of its own" in capsys.readouterr().err


def test_what_is_ignored_is_named_in_its_own_words_and_totals_are_not(capsys):
    names = ("constraint", "tool_choice", "tools", "tool_web_search", "reasoning_effort")
    Notices().look(1, {f"rollout/info/chat_ignored_{name}": 1.0 for name in names})
    lines = capsys.readouterr().err.splitlines()
    words = ["asks for a tool_choice", "offers the tool web_search", "sends the option reasoning_effort"]
    assert len(lines) == 3 and [word in line for word, line in zip(words, lines, strict=True)] == [True] * 3


def test_rollouts_without_a_model_call_are_named_once(capsys):
    notices = Notices()
    notices.look(1, {"rollout/no_model_call": 0.0})
    assert capsys.readouterr().err == ""
    notices.look(2, {"rollout/no_model_call": 0.25})
    line = capsys.readouterr().err
    assert line.startswith("step 2: 25% of the rollouts ended without a model call") and "ctx.openai_url" in line
    notices.look(3, {"rollout/no_model_call": 1.0})
    assert capsys.readouterr().err == ""
