"""Prompts that are trained and evaluated are found in the whole dataset, however they are written."""

import json

import pytest

from molt.cli import overlap
from molt.cli.check import Findings
from molt.cli.overlap import check_overlap, comparable
from molt.data.rows import load_rows

USER = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "prompt",
    [
        "2 + 2?",
        " 2 + 2?\n",
        [USER],
        [{"content": "2 + 2?", "role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}],
        [{"role": "user", "content": "2 + 2?", "name": None}],
        [{"from": "human", "value": "2 + 2?"}],
    ],
)
def test_the_same_prompt(prompt):
    assert comparable(prompt) == comparable("2 + 2?")


@pytest.mark.parametrize(
    "prompt",
    [
        "2 + 3?",
        [SYSTEM, USER],
        [{"role": "assistant", "content": "2 + 2?"}],
        [USER, USER],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2 + 2?"}]}],
    ],
)
def test_another_prompt(prompt):
    assert comparable(prompt) != comparable("2 + 2?")


def test_a_row_without_a_prompt_is_none():
    assert comparable(None) is None


def _rows(path, prompts):
    path.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in prompts))
    return load_rows(str(path), flag="data.prompt_dataset")


def _found(tmp_path, trained, held_out) -> Findings:
    found = Findings()
    rows = [_rows(tmp_path / "a.jsonl", trained), _rows(tmp_path / "b.jsonl", held_out)]
    check_overlap(found, *rows, "`eval.dataset` (=b.jsonl)", "input")
    return found


def test_the_last_row_of_a_large_dataset_is_found(tmp_path):
    trained = [f"{i}?" for i in range(25_000)]
    (finding,) = _found(tmp_path, trained, ["new", [{"role": "user", "content": "24999?"}], "newer"])
    assert finding.level == "warning"
    assert "1 of 3 prompts are trained on too (first: row 1)" in finding.text and "looked for" not in finding.text


def test_nothing_in_common(tmp_path):
    assert _found(tmp_path, ["a", "b", None], ["c", None]) == []


def test_each_row_of_the_evaluation_counts(tmp_path):
    (finding,) = _found(tmp_path, ["a", "a"], ["b", "a", "a"])
    assert "2 of 3 prompts are trained on too (first: row 1)" in finding.text


def test_looking_ends(tmp_path, monkeypatch):
    """With no time left nothing is looked at, and the report says so."""
    monkeypatch.setattr(overlap, "LOOK_S", 0.0)
    (finding,) = _found(tmp_path, ["a", "b"], ["a"])
    assert finding.level == "ok" and "first 0 rows of 2" in finding.text
