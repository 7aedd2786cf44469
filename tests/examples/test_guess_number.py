"""The guessing game: what the model is told, what it earns, and how a game ends."""

import json
import subprocess
import sys

import pytest

from molt.types import PolicyFailure, Scored
from tests.examples.scripted import AGENTS, play


def test_hints_lead_to_the_number_and_every_turn_costs():
    episode, script = play("guess_number.py", "Guess.", 37, "50", "Is it 25?", "37")
    assert episode.outcome == Scored(pytest.approx(0.8), 1.0)  # 1 - 0.1 * 2
    assert not episode.truncated and episode.info == {"guesses": 3.0}
    assert script.prompts[1].endswith("user\nlower<|im_end|>\n<|im_start|>assistant\n")
    assert script.prompts[2].endswith("user\nhigher<|im_end|>\n<|im_start|>assistant\n")


def test_the_first_guess_earns_everything():
    assert play("guess_number.py", "Guess.", "37", "37")[0].outcome == Scored(1.0, 1.0)


def test_eight_wrong_guesses_lose_the_game():
    episode, script = play("guess_number.py", "Guess.", 37, *["1"] * 8)
    assert episode.outcome == Scored(0.0, 0.0) and len(script.prompts) == 8
    assert not episode.truncated


def test_a_limit_outside_the_game_truncates_it():
    episode, _ = play("guess_number.py", "Guess.", 37, "1", "2", max_turns=2)
    assert episode.outcome == Scored(0.0, 0.0) and episode.truncated


@pytest.mark.parametrize("answer", ["I will not guess", "", "9" * 5000])
def test_an_answer_without_a_guess_is_the_models_own_doing(answer):
    episode, _ = play("guess_number.py", "Guess.", 37, "50", answer, max_new_tokens=2000)
    assert isinstance(episode.outcome, PolicyFailure) and episode.outcome.reason == "no guess"
    assert episode.outcome.reward == 0.0 and len(episode.turns) == 2


def test_the_file_writes_its_dataset():
    done = subprocess.run(
        [sys.executable, AGENTS / "guess_number.py", "5"], capture_output=True, text=True, check=True, timeout=120
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5 and all(1 <= row["label"] <= 100 and row["input"] for row in rows)
