"""A run that would write over what it reads, or that cannot write, is refused before it starts."""

import os
import shutil
from pathlib import Path

import pytest

from molt.cli import check, places
from molt.cli.args import parse
from molt.cli.check import Findings
from molt.cli.train_sft import static_checks
from molt.config import CkptConfig, RLConfig
from molt.config_sft import SftConfig
from tests.cli.conftest import write_rows
from tests.cli.test_check import RL, SFT


def _rl(*flags: str) -> Findings:
    found = Findings()
    places.check_rl_places(found, parse(RLConfig, [*RL.split(), *flags], prog="molt rl"))
    return found


def _levels(found: Findings) -> list[str]:
    return [finding.level for finding in found]


@pytest.mark.parametrize(
    "flags",
    [
        ["--ckpt.output_dir=model"],
        ["--ckpt.output_dir=./elsewhere/../model/"],
        ["--ckpt.output_dir=elsewhere/link"],
        ["--ckpt.path=model"],
        ["--train.rollout_dump_dir=model"],
        ["--reward.cache_dir=data", "--data.prompt_dataset=data"],
        ["--ckpt.output_dir=data", "--eval.dataset=data"],
        ["--ckpt.output_dir=teacher", "--ref.model_name_or_path=teacher"],
        ["--ckpt.output_dir=data/part", "--data.prompt_dataset=prompts.jsonl,data@part"],
        ["--train.rollout_dump_dir=data", "--train.rollout_replay_dir=data"],
    ],
)
def test_an_output_that_is_an_input(flags, run):
    (run / "elsewhere").mkdir()
    (run / "elsewhere" / "link").symlink_to(run / "model")
    (run / "data" / "part").mkdir(parents=True)
    (run / "teacher").mkdir()
    (error,) = _rl(*flags).errors
    assert "would write over what it reads" in error and "Use another directory" in error
    assert "output_dir" in error or "path" in error or "_dir" in error


@pytest.mark.parametrize("folder", ["best", "checkpoints/step_000020/hf", "candidate"])
def test_an_input_that_the_run_deletes(folder, run):
    """The best model of an earlier run in the same directory, which the next best one replaces."""
    source = run / "out" / folder
    source.mkdir(parents=True)
    (error,) = _rl("--ckpt.output_dir=out", f"--actor.model_name_or_path=out/{folder}").errors
    assert str(source) in error and "replaces and deletes" in error


def test_sft_is_checked_too(run):
    found = static_checks(parse(SftConfig, [*SFT.split(), "--ckpt.output_dir=model"], prog="molt sft"))
    assert sum("would write over what it reads" in error for error in found.errors) == 1
    kept = sorted(path.name for path in (run / "model").iterdir())
    assert "config.json" in kept, "the check touched the model"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--ckpt.output_dir=."],  # the folder of a dataset's file, the agent and the model's directory
        ["--ckpt.output_dir=model-rl"],
        ["--ckpt.output_dir=out", "--actor.model_name_or_path=out/models/base"],
        ["--ckpt.output_dir=model/rl"],
        ["--logger.tensorboard_dir=out", "--ckpt.output_dir=out"],
        ["--ckpt.output_dir=out", "--actor.model_name_or_path=org/out"],
        ["--eval.dataset=prompts.jsonl"],
    ],
)
def test_what_is_fine(flags, run):
    (run / "out" / "models" / "base").mkdir(parents=True)
    assert _levels(_rl(*flags)) == []


def test_a_model_in_the_output_directory_is_named(run):
    """A model that is no input, and of no run: it would be replaced at the end."""
    (run / "out").mkdir()
    shutil.copy(run / "model" / "config.json", run / "out")
    (warning,) = _rl("--ckpt.output_dir=out")
    assert warning.level == "warning" and "holds a model, which the final one replaces" in warning.text
    (run / "out" / "run").mkdir()  # a run's own: it is resumed, or refused elsewhere
    assert _levels(_rl("--ckpt.output_dir=out")) == []


def test_outputs_inside_a_directory_of_data_files(run):
    (run / "data").mkdir()
    write_rows(run / "data" / "a.jsonl", range(3))
    (warning,) = _rl("--data.prompt_dataset=data", "--ckpt.output_dir=data/out")
    assert warning.level == "warning" and "read as data" in warning.text
    (run / "data" / "state.json").write_text("{}")  # saved by `datasets`: its files are listed
    assert _levels(_rl("--data.prompt_dataset=data", "--ckpt.output_dir=data/out")) == []


@pytest.mark.parametrize("flag", ["ckpt.path", "train.rollout_dump_dir", "reward.cache_dir", "logger.tensorboard_dir"])
def test_every_output_must_be_writable(flag, run):
    (error,) = _rl(f"--{flag}=/proc/out").errors
    assert f"`{flag}` (=/proc/out): /proc is not writable" in error
    (error,) = _rl(f"--{flag}=agent.py/out").errors
    assert f"`{flag}`" in error and "agent.py is a file" in error


def test_a_full_disk_is_not_writable(tmp_path, monkeypatch):
    """/dev/full takes no byte, as a full file system does; an empty file would still be made."""
    assert places.is_writable(tmp_path)

    def full(dir: Path):
        return open("/dev/full", "wb")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert not places.is_writable(tmp_path)


def test_a_resumed_run_is_not_warned(run):
    ckpt = CkptConfig(output_dir=run / "out", load_enable=True)
    os.makedirs(ckpt.run_dir)
    check.check_output_dir(ckpt)
    assert _levels(_rl("--ckpt.output_dir=out", "--ckpt.load_enable")) == []
