"""Paths in settings: what becomes absolute, and what stays a name."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from molt.cli.args import parse
from molt.config import RLConfig
from molt.config_file import dump
from molt.config_sft import SftConfig
from molt.errors import ConfigError
from molt.paths import FUNCTION, PATH, PATHS, TEMPLATE, NamesPath, expanded


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home directory beside the current one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def _rl(*flags: str) -> RLConfig:
    return parse(RLConfig, list(flags), prog="molt rl")


def test_every_output_directory_is_expanded(home):
    config = _rl(
        "--ckpt.output_dir=~/out",
        "--ckpt.path=~/kept",
        "--train.rollout_dump_dir=~/dump",
        "--train.rollout_replay_dir=~/replay",
        "--reward.cache_dir=~/scores",
        "--logger.tensorboard_dir=~/curves",
    )
    assert config.ckpt.output_dir == home / "out"
    assert config.ckpt.run_dir == home / "out" / "run"
    assert config.ckpt.checkpoints == home / "kept"
    assert config.train.rollout_dump_dir == home / "dump"
    assert config.train.rollout_replay_dir == home / "replay"
    assert config.reward.cache_dir == home / "scores"
    assert config.logger.tensorboard_dir == home / "curves"
    sft = parse(SftConfig, ["--ckpt.output_dir=~/out", "--data.dataset=~/a.jsonl"], prog="molt sft")
    assert (sft.ckpt.output_dir, sft.data.dataset) == (home / "out", f"{home}/a.jsonl")


def test_inputs_are_expanded_and_absolute(home):
    work = home.parent / "work"
    for name in ("model", "data"):
        (work / name).mkdir()
    for name in ("agent.py", "rl.jsonl", "loss.py", "chat.jinja"):
        (work / name).touch()
    config = _rl(
        "--actor.model_name_or_path=model",
        "--ref.model_name_or_path=~/teacher",
        "--train.agent_path=agent.py",
        "--reward.scorer=./scorer.py",
        "--rollout.scheme=../scheme.py",
        "--data.prompt_dataset=rl.jsonl, ~/more.jsonl,data@train",
        "--eval.dataset=~/held_out@math",
        "--algo.loss=loss.py:mine",
        "--algo.advantage.estimator=~/mine.py:f",
        "--data.chat_template=chat.jinja",
    )
    assert config.actor.model_name_or_path == f"{work}/model"
    assert config.ref.model_name_or_path == f"{home}/teacher"
    assert config.train.agent_path == f"{work}/agent.py"
    assert config.reward.scorer == f"{work}/scorer.py"
    assert config.rollout.scheme == f"{work}/../scheme.py", "`..` stays: a symbolic link may be before it"
    assert config.data.prompt_dataset == f"{work}/rl.jsonl,{home}/more.jsonl,{work}/data@train"
    assert config.eval.dataset == f"{home}/held_out@math"
    assert config.algo.loss == f"{work}/loss.py:mine"
    assert config.algo.advantage.estimator == f"{home}/mine.py:f"
    assert config.data.chat_template == f"{work}/chat.jinja"


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        (PATH, "Qwen/Qwen3-8B"),
        (PATH, "gymnasium:CartPole-v1"),
        (PATH, "reasoning_gym:chain_sum"),
        (PATHS, "org/name"),
        (PATHS, "openai/gsm8k@main"),
        (FUNCTION, "grpo"),
        (TEMPLATE, "{{ messages[0].content }}"),
        (TEMPLATE, "~{% for m in messages %}" + "x" * 5000 + "{% endfor %}"),  # no name of a file is so long
        (PATH, "x" * 5000),
    ],
)
def test_names_and_templates_stay(mark, text, home):
    assert mark.absolute(text) == text


def test_a_path_with_a_comma_stays_one_dataset(tmp_path, monkeypatch):
    folder = tmp_path / "runs,2026"
    folder.mkdir()
    (folder / "rl.jsonl").touch()
    monkeypatch.chdir(folder)
    assert PATHS.absolute("rl.jsonl") == "rl.jsonl"


def test_a_tilde_of_nobody(home):
    with pytest.raises(ConfigError, match=r"no user 'nobody_has_this_name'.*Write the path in full"):
        _rl("--ckpt.output_dir=~nobody_has_this_name/out")
    (home.parent / "work" / "~odd").mkdir()
    assert expanded("~odd") == Path("~odd"), "it is there"


def test_an_empty_directory_is_refused(home):
    with pytest.raises(ConfigError, match=r"`ckpt.output_dir` is empty.*unset"):
        _rl("--ckpt.output_dir=")
    assert _rl("--ckpt.output_dir=.").ckpt.output_dir == home.parent / "work"


def test_config_files(home, monkeypatch):
    """What a run writes means the same files from another directory, and is read with `~` too."""
    (home.parent / "work" / "model").mkdir()
    config = _rl("--actor.model_name_or_path=model", "--ckpt.output_dir=out")
    (home / "config.toml").write_text(dump(config))
    monkeypatch.chdir("/")
    assert _rl("--config=~/config.toml") == config
    (home / "mine.toml").write_text('[ckpt]\noutput_dir = "~/out"\n')
    assert _rl("--config=~/mine.toml").ckpt.output_dir == home / "out"


def _texts(section: type, prefix: str = ""):
    """Every setting that is text: its name, the source of its help, and its annotation."""
    for name, hint in typing.get_type_hints(section, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from _texts(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


NAMES_NO_PATH = re.compile(
    r"(.*_key|.*_probs|.*split|data\.max_.*|.*\.attn_implementation|.*loss_mode|.*loss_agg_mode|ckpt\.best_metric_key)"
)


@pytest.mark.parametrize("config", [RLConfig, SftConfig])
def test_every_text_says_whether_it_names_a_path(config):
    for name, hint in _texts(config):
        marks = getattr(hint, "__metadata__", ())
        base = hint.__origin__ if marks else hint
        is_text = base is str or base == str | None
        if is_text and not NAMES_NO_PATH.fullmatch(name):
            assert any(isinstance(mark, NamesPath) for mark in marks), f"{name} may name a path"
