"""The math agent: which number counts as the answer, which numbers are equal, and what it pays."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents.load import load_runner
from molt.types import Scored
from tests.examples.scripted import AGENTS, play

agent = sys.modules[load_runner(str(AGENTS / "math_problems.py")).env_class.__module__]


@pytest.mark.parametrize(
    ("answer", "reward", "score"),
    [
        ("3 + 4 = \\boxed{7}", 1.1, 1.0),
        ("The answer is 7.", 1.0, 1.0),
        ("\\boxed{8}", 0.1, 0.0),
        ("first 7, then 8", 0.0, 0.0),
        ("I do not know", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_score_is_right_or_wrong_and_the_box_is_a_bonus(answer, reward, score):
    episode, _ = play("math_problems.py", "Ann has 3 apples and buys 4 more. How many?", "7", answer)
    assert episode.outcome == Scored(pytest.approx(reward), score)
    assert episode.info["boxed"] == ("boxed" in answer)


def box_by_box(text):
    """From the last box on, until one is closed: as slow as simple."""
    for start in [match.start() for match in re.finditer(r"\\boxed{", text)][::-1]:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end]
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "7"]), max_size=12).map("".join))
def test_the_last_box_that_is_closed_is_the_answer(text):
    assert agent.last_box(text) == box_by_box(text)


def test_boxes_that_are_never_closed_take_no_time():
    assert agent.last_box("\\boxed{" * 200_000) is None  # by pairs, an hour


@pytest.mark.parametrize("chat", [True, False])
def test_the_question_is_followed_by_the_instruction(chat):
    _, script = play("math_problems.py", "How many?", 7, "7", chat=chat)
    assert "How many?" + agent.INSTRUCTION in script.prompts[0]


def test_a_number_of_a_cut_text_is_not_an_answer_but_a_box_is():
    cut, _ = play("math_problems.py", "q", "7", "so it is 7 and not", max_new_tokens=10)
    boxed, _ = play("math_problems.py", "q", "7", "\\boxed{7} because", max_new_tokens=12)
    assert cut.truncated and cut.outcome.score == 0.0
    assert boxed.truncated and boxed.outcome.score == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),  # the last one was never closed
        ("48 / 2 = 24 <<48/2=24>>\n#### 72", "72"),
        ("it costs $1,250.50 in 2 days", "2"),
        ("that makes -5.", "-5"),
        ("x=.5", ".5"),
        ("none", None),
    ],
)
def test_final_answer(text, answer):
    assert agent.final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("7", "7.0"),
        ("$1,250", "1250"),
        ("18\\text{ dollars}", "18"),
        ("x = -2", "-2"),
        ("50\\%", "50%"),
        ("\\frac{3}{4}", "0.75"),
        ("3/4", "\\dfrac{3}{4}"),
        ("0.667", "2/3"),  # 0.05 % off
        ("Blue ", "blue"),
        ("3, 4", "3,4"),  # not one number: compared as text
    ],
)
def test_equal(answer, label):
    assert agent.equal(answer, label)


@pytest.mark.parametrize(
    ("answer", "label"),
    [("100001", "100000"), ("0.66", "2/3"), ("-2", "2"), ("7", "7, 8"), ("1/0", "1"), ("9" * 5000, "1"), ("", "0")],
)
def test_not_equal(answer, label):
    assert not agent.equal(answer, label)


def test_the_way_of_gsm8k_as_a_label():
    label = "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
    assert play("math_problems.py", "q", label, "\\boxed{1072}")[0].outcome.score == 1.0
