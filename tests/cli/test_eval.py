"""`molt eval`: what it asks for, what it prints, and when it refuses to print a score."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from molt.cli.args import parse
from molt.cli.eval import present
from molt.cli.main import main
from molt.config import RLConfig
from molt.errors import FailureRateError
from molt.types import InfraFailure, RolloutInfo, SampleInfo, Scored
from tests.runs import flags, write_prompts

ROOT = Path(__file__).resolve().parents[2]
LOST = InfraFailure("timeout", "no end within rollout.timeout_s (=10)")


def rollouts(*scores) -> list[RolloutInfo]:
    """Of one prompt; None is a failure."""
    outcomes = [LOST if score is None else Scored(score, score) for score in scores]
    return [RolloutInfo("g", i, o, None, 1, (SampleInfo(9, 4, 0),)) for i, o in enumerate(outcomes)]


def config(*more: str) -> RLConfig:
    return parse(RLConfig, ["--actor.model_name_or_path", "M", "--eval.dataset", "e.jsonl", *more], prog="test")


def test_table_and_json_have_the_same_numbers(capsys):
    present(config(), {"math": [rollouts(1, 0), rollouts(0, None)], "code": [rollouts(1, 1)]}, 2.5)
    *table, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert (summary["model"], summary["dataset"], summary["seconds"]) == ("M", "e.jsonl", 2.5)
    math, code = summary["sources"]["math"], summary["sources"]["code"]
    # (1/2 + 0) / 2; the second prompt has one result left, so no best of 2
    assert (math["pass1"], math["pass2"], math["prompts"], math["samples"], math["failures"]) == (0.25, 1.0, 2, 4, 1)
    assert (code["pass1"], code["pass1_high"]) == (1.0, 1.0)
    assert '"failures": 1,' in last and '"failures": 0,' in last, "counts are whole numbers"
    assert code["pass1_low"] == pytest.approx(0.2065, abs=1e-4)  # Wilson's of one prompt: 1 / (1 + 1.96²)
    (row,) = [line for line in table if " math " in line]
    assert re.sub(r"[│┃|\s]+", " ", row).strip() == "math 2 4 0.2500 0.0000 0.5000 1.0000 4.0 0.0% 1"
    assert "1  timeout: no end within rollout.timeout_s (=10)" in "\n".join(table)


@pytest.mark.parametrize(("answers", "count"), [
    ([rollouts(1, None), rollouts(1, 1)], "1 of 4"),  # 25 % > 20 %
    ([rollouts(None, None)], "2 of 2"),
])  # fmt: skip
def test_too_many_failures_are_an_error_with_the_reasons_and_no_score(answers, count, capsys):
    with pytest.raises(FailureRateError, match=rf"{count} .*max_failure_rate \(=0.2\)(.|\n)*timeout: no end within"):
        present(config(), {"math": answers}, 1.0)
    assert capsys.readouterr().out == ""


def test_the_name_of_an_error_is_not_doubled(capsys):
    failure = InfraFailure("KeyError", "'grader' at agent.py:8")
    answers = [rollouts(1, 1, 1), [dataclasses.replace(rollouts(None)[0], outcome=failure)]]
    present(config("--rollout.max_failure_rate", "0.5"), {"math": answers}, 1.0)
    assert "    1  KeyError: 'grader' at agent.py:8\n" in capsys.readouterr().out


def test_where_nothing_has_a_result_no_rate_allows_a_score():
    with pytest.raises(FailureRateError):
        present(config("--rollout.max_failure_rate", "1"), {"math": [rollouts(None)]}, 1.0)


ASKS = ["--actor.model_name_or_path", "model", "--train.agent_path", "agent.py", "--fsdp.device", "cpu"]


@pytest.mark.parametrize("entry", [["eval"], ["rl", "--eval.eval_only"], ["check", "eval"],
                                   ["check", "--eval.eval_only"]], ids=" ".join)  # fmt: skip
def test_every_entry_asks_for_the_evaluation_set_and_not_for_prompts(entry, run, capsys):
    assert main([*entry, *ASKS]) == 1
    shown = "".join(capsys.readouterr())
    assert "`eval.dataset` is not set" in shown and "data.prompt_dataset" not in shown


@pytest.mark.processes
def test_the_module_that_trains_becomes_the_evaluation(run):
    command = [sys.executable, "-m", "molt.cli.train_rl_ray", "--eval.eval_only", *ASKS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: `eval.dataset` is not set")


def test_what_only_training_needs_is_not_asked(run, capsys):
    """A group of one with grpo, a directory that holds a run, no prompts."""
    (run / "ckpt" / "run").mkdir(parents=True)
    (run / "ckpt" / "run" / "metrics.jsonl").write_text("{}\n")
    wanted = [*ASKS, "--eval.dataset", "prompts.jsonl", "--data.max_len", "64", "--algo.advantage.estimator", "grpo"]
    assert main(["check", "eval", *wanted]) == 0
    assert "prompts of eval.dataset: 20 of the first 20" in capsys.readouterr().out
    assert main(["check", "rl", *wanted]) == 1


@pytest.mark.parametrize(("models", "fix"), [
    (["ckpt/checkpoints/step_000020/hf", "ckpt/best", "ckpt"], "ckpt/checkpoints/step_000020/hf"),
    (["ckpt/best", "ckpt"], "ckpt/best"),
    (["ckpt"], "ckpt"),
    ([], None),
])  # fmt: skip
def test_a_training_checkpoint_is_named_and_so_is_the_model_beside_it(models, fix, run, capsys):
    checkpoint = run / "ckpt" / "checkpoints" / "step_000020"
    checkpoint.mkdir(parents=True)
    for model in models:
        (run / model).mkdir(exist_ok=True)
        (run / model / "config.json").write_text("{}")
    given = ["--actor.model_name_or_path", str(checkpoint), "--eval.dataset", "prompts.jsonl"]
    assert main(["check", "eval", *ASKS, *given]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert f"(={checkpoint}) is a training checkpoint" in line
    assert line.endswith(f"Use --actor.model_name_or_path {run / fix}." if fix else "--ckpt.save_hf to it.")


@pytest.mark.ray
def test_the_whole_program_greedy(model_dir, tmp_path):
    """In a process of its own, over the fake engine: greedy samples of a prompt are all the same. The first prompts
    block their runner, which is noticed long before their deadline."""
    dataset = write_prompts(tmp_path / "held_out.jsonl", 5, {0: f"block:{tmp_path / 'flag'}", 3: "raise"})
    arguments = flags(model_dir, tmp_path / "out", "", "--eval.dataset", dataset, "--eval.eval_only",
                      "--eval.temperature", "0", "--eval.n_samples_per_prompt", "3", "--eval.batch_size", "2",
                      "--rollout.max_failure_rate", "0.5", "--rollout.max_retries", "1",
                      "--train.watchdog_s", "4")  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "tests.runs", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["sources"]["held_out"]
    assert (found["prompts"], found["samples"], found["failures"]) == (5, 15, 3)
    assert found["pass1"] == found["pass3"]
    assert "runner 0 is replaced: no answer within train.watchdog_s (=4)" in done.stderr
    assert "3  RuntimeError: the sandbox is gone at " in done.stdout
    assert not (tmp_path / "out").exists()
