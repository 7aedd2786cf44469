"""The line of a step: what it measured and nothing else; a score with its interval, which is no column of its own."""

import os
import subprocess
import sys

import pytest

from molt.report.console import run_console, step_line


def test_an_evaluation_shows_its_interval():
    metrics = {"eval/m/pass1": 0.5, "eval/m/pass1_low": 0.4, "eval/m/pass1_high": 0.6125, "eval/m/pass8": 0.75}
    assert step_line(3, 12, metrics).plain == "step  3/12  eval/m/pass1 0.500 [0.400, 0.613]  eval/m/pass8 0.750"


def test_counts_are_whole_numbers():
    metrics = {"eval/m/failures": 1045.0, "eval/m/pass1": 1.0, "faults/timeout": 1_000_000.0, "faults/KeyError": 2.0}
    # 1,000,000 + 2 faults
    assert step_line(3, 12, metrics).plain == (
        "step  3/12  eval/m/failures 1,045  eval/m/pass1 1.000  faults 1,000,002"
    )


def test_an_evaluation_without_an_interval():
    assert step_line(3, None, {"eval/low/pass1": 7.5, "eval/loss": 2.0}).plain == (
        "step 3  eval/loss 2.000  eval/low/pass1 7.500"
    )


def test_a_step_shows_what_was_filtered_and_what_the_critic_explains():
    metrics = {"rollout/reward": 0.5, "train/kl": 0.0125, "train/explained_variance": 0.876, "rollout/filtered": 0.25}
    assert step_line(3, 12, metrics).plain == ("step  3/12  reward 0.500  kl 1.25e-02  explained 0.88  filtered 25.0%")


def test_a_step_of_rl_shows_mixed_groups_and_three_numbers_of_the_agent():
    """Sorted, without what molt counts for a ChatAgent; a long name is cut at 16 characters, and lr gives way."""
    metrics = {
        "rollout/reward": 0.5,
        "rollout/mixed_groups": 0.25,
        "train/lr": 1e-3,
        "rollout/info/steps": 4.0,
        "rollout/info/chat_requests": 2.0,
        "rollout/info/format": 0.12345,
        "rollout/info/answers_that_are_numbers": 1234.0,
        "rollout/info/zeal": 1.0,
    }
    assert step_line(3, 12, metrics).plain == (
        "step  3/12  reward 0.500  mixed 25%  answers_that_are 1.23e+03  format 0.123  steps 4"
    )
    assert "lr 1.0e-03" in step_line(3, 12, {"train/loss": 1.0, "train/lr": 1e-3}).plain, "SFT shows it"


PIPED = """
import sys
from pathlib import Path
from molt.config import LoggerConfig
from molt.report.sinks import RunLog
with RunLog(Path(sys.argv[1]), LoggerConfig(logging_steps=1), "molt rl  MODEL", 2) as log:
    log.step(1, {"rollout/reward": 0.5, "faults/timeout": 1.0})
    log.step(2, {"eval/m/pass1": 0.5})
"""


@pytest.mark.parametrize("force_color", ["", "1"])
def test_piped_output_is_plain_text(tmp_path, force_color):
    environment = {**os.environ, "FORCE_COLOR": force_color, "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-c", PIPED, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "molt rl  MODEL",
        "step 1/2  reward 0.500  faults 1",
        "step 2/2  eval/m/pass1 0.500",
    ]
    assert "\x1b" not in done.stderr


def test_a_terminal_has_colours_and_a_progress_bar(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_console().is_terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert not run_console().is_terminal
