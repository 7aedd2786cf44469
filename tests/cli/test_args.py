"""argv and config.toml to settings, and back."""

import dataclasses
import math
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.cli.args import ESSENTIALS, flags, parse, run_command
from molt.config import CkptConfig, FsdpConfig, PromptDataConfig, RLConfig
from molt.config_file import dump, load
from molt.config_sft import SftConfig
from molt.errors import ConfigError
from molt.paths import with_absolute_paths

CONFIGS = [RLConfig, SftConfig]


def _parse(argv: str, config_class=RLConfig):
    return parse(config_class, argv.split(), prog="molt rl")


def _refused(argv: str, capsys, config_class=RLConfig) -> str:
    """The message, as one line: tyro wraps its own."""
    try:
        code = run_command(lambda flags: _parse(flags, config_class), argv)
    except SystemExit as stop:  # tyro
        code = stop.code
    assert code == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.err and output.out == ""
    return " ".join(output.err.replace("│", " ").split())


def test_no_flags_are_the_defaults():
    assert _parse("") == with_absolute_paths(RLConfig())
    assert _parse("", SftConfig) == with_absolute_paths(SftConfig())


def test_flags_are_dotted_and_typed():
    config = _parse(
        "--actor.adam.lr 3e-6 --actor.eps_clip_low_high 0.2 0.28 --data.apply_chat_template --rollout.top_k=-1 "
        "--vllm.no_enable_prefix_caching --train.max_steps 7 --ckpt.output_dir some/where --fsdp.param_dtype fp32"
    )
    assert config.actor.adam.lr == 3e-6 and config.actor.eps_clip_low_high == (0.2, 0.28)
    assert config.data.apply_chat_template and not config.vllm.enable_prefix_caching
    assert config.rollout.top_k == -1 and config.train.max_steps == 7
    assert config.ckpt.output_dir == Path.cwd() / "some/where" and config.fsdp.param_dtype == "fp32"


def test_hyphens_and_underscores_are_the_same():
    assert _parse("--rollout.top-k 5 --data.apply-chat-template") == _parse(
        "--rollout.top_k 5 --data.apply_chat_template"
    )


def test_the_last_of_repeated_flags_wins_and_none_unsets():
    assert _parse("--train.seed 1 --train.seed 2").train.seed == 2
    assert _parse("--train.max_steps 3 --train.max_steps None").train.max_steps is None
    assert _parse("--actor.eps_clip_low_high 0.1 0.2 --actor.eps_clip_low_high None").actor.eps_clip_low_high is None


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        ("--actor.adam.lrr 1", "--actor.adam.lr"),
        ("--rollout.n_sample_per_prompt 8", "--rollout.n_samples_per_prompt"),
        ("--data.max_length 5", "--data.max_len"),
        ("--lr 1e-6", "--actor.adam.lr"),
        ("--trian.max_epochs 8", "--train.max_epochs"),
        ("--ckpt.save_step=3", "--ckpt.save_steps"),
        ("--data.no_aply_chat_template", "--data.no_apply_chat_template"),
        ("--confg x.toml", "--config"),
    ],
)
def test_an_unknown_flag_names_the_nearest(argv, meant, capsys):
    message = _refused(argv, capsys)
    assert f"unknown flag `{argv.split()[0].partition('=')[0]}`" in message and f"Did you mean '{meant}'?" in message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--actor.adam.lr abc", ["`actor.adam.lr` (=abc)", "must be a number", "nothing was started"]),
        ("--actor.num_nodes 1.5", ["`actor.num_nodes` (=1.5)", "must be an integer", "nothing was started"]),
        ("--actor.num_nodes=1.5", ["`actor.num_nodes` (=1.5)", "must be an integer"]),
        ("--rollout.max_new_tokens many", ["`rollout.max_new_tokens` (=many)", "must be an integer"]),
        ("--rollout.max_new_tokens", ["--rollout.max_new_tokens", "Expected 1 values"]),
        ("--actor.loss_mode gpso", ["`actor.loss_mode` (=gpso)", "Did you mean 'gspo'?", "ppo, gspo, cispo"]),
        ("--fsdp.param_dtype bf61", ["`fsdp.param_dtype` (=bf61)", "Did you mean 'bf16'?", "bf16, fp32"]),
        ("--actor.adam.betas 0.9", ["--actor.adam.betas", "Expected 2 values"]),
        ("--actor.eps_clip_low_high 0.2", ["--actor.eps_clip_low_high", "expected argument count 2"]),
        ("--data.apply_chat_template True", ["--data.apply_chat_template", "takes no value", "'True'"]),
        ("--vllm.enable_prefix_caching=false", ["--vllm.enable_prefix_caching", "takes no value", "'false'", "no_"]),
        ("stray", ["stray"]),
        ("--config", ["--config", "expected one argument"]),
        ("--config nowhere.toml", ["--config", "(=nowhere.toml)", "No such file"]),
    ],
)
def test_a_wrong_value_names_flag_value_and_what_is_accepted(argv, parts, capsys):
    message = _refused(argv, capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("config_class", CONFIGS)
def test_what_a_section_refuses_is_shown_as_it_was_written(config_class, capsys):
    message = _refused("--ckpt.save_steps 0", capsys, config_class)
    assert message == (
        "error: `ckpt.save_steps` (=0): no step is a multiple of it, so nothing would ever be saved. Use a "
        "positive cadence, or -1 to save only at the end and on SIGTERM."
    )


NO_FP16 = "`fsdp.param_dtype` (=fp16): molt does not scale losses"


@pytest.mark.parametrize("config_class", CONFIGS)
def test_training_in_fp16_is_refused_with_the_reason(config_class, tmp_path, capsys):
    file = tmp_path / "config.toml"
    file.write_text("[fsdp]\nparam_dtype = 'fp16'\n")
    for argv in ("--fsdp.param_dtype fp16", "--fsdp.param_dtype=fp16", f"--config {file}"):
        message = _refused(argv, capsys, config_class)
        assert NO_FP16 in message and "Use bf16, which has the range of fp32, or fp32." in message
    for argv in ("--fp16", "--trainer.fp16 True"):
        assert "molt does not scale losses" in _refused(argv, capsys, config_class)
    with pytest.raises(ConfigError, match="molt does not scale losses"):
        FsdpConfig(param_dtype="fp16")
    with pytest.raises(SystemExit):
        _parse("--help", config_class)
    of_training = capsys.readouterr().out.partition("--fsdp.param")[2].partition("--fsdp.attn")[0]
    assert "bf16" in of_training and "fp16" not in of_training


def test_engines_may_generate_in_fp16():
    assert _parse("--vllm.dtype fp16").vllm.dtype == "fp16"


@pytest.mark.parametrize("config_class", CONFIGS)
def test_help_has_every_flag_with_its_string(config_class, capsys):
    with pytest.raises(SystemExit) as stop:
        _parse("--help", config_class)
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.replace("│", " ").split())
    for name in flags(config_class):
        assert f"--{name}" in words
    assert "--config FILE.toml" in words and "Checkpoint cadence in steps" in words
    assert not re.findall(r"--\w+-[\w-]+", words), "hyphens in the help"


@pytest.mark.parametrize("config_class", CONFIGS)
def test_the_help_begins_with_the_flags_that_most_runs_need(config_class, capsys):
    essential = re.findall(r"--([\w.]+)", ESSENTIALS[config_class.__name__])
    assert set(essential) <= flags(config_class).keys() and 10 <= len(essential) <= 20
    with pytest.raises(SystemExit):
        _parse("--help", config_class)
    top, _, _ = capsys.readouterr().out.partition(" options ")
    for name in essential:
        assert f"--{name}" in top


def test_bounds_in_an_old_file_stay_and_none_are_left_out(tmp_path):
    """Every config.toml had bounds, when 0.2 0.2 was the default of the setting."""
    path = tmp_path / "config.toml"
    path.write_text('[actor]\nloss_mode = "gspo"\neps_clip_low_high = [0.2, 0.2]\n')
    assert _parse(f"--config {path}").actor.eps_clip_low_high == (0.2, 0.2)
    assert _parse(f"--config {path} --actor.eps_clip_low_high None").actor.eps_clip_low_high is None
    assert "eps_clip_low_high" not in dump(RLConfig())


def test_a_file_gives_the_defaults_and_flags_override_it(tmp_path):
    config = _parse("--actor.adam.lr 3e-6 --train.max_steps 5 --rollout.batch_size 8")
    path = tmp_path / "config.toml"
    path.write_text(dump(config))
    for argv in (f"--config {path} --train.max_steps 9", f"--train.max_steps 9 --config={path}"):
        again = _parse(argv)
        assert again.train.max_steps == 9 and again.actor.adam.lr == 3e-6 and again.rollout.batch_size == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsead = 1", "unknown setting `train.sead`. Did you mean 'train.seed'?"),
        ("[trian]\nseed = 1", "unknown setting `trian`. Did you mean 'train'?"),
        ("[actor.adam]\nlearning = 1", "unknown setting `actor.adam.learning`."),
        ("train = 3", "`train` (=3) must be a table: write [train]."),
        ("[train]\nseed = '1'", "`train.seed` (='1') must be an integer."),
        ("[train]\nseed = true", "`train.seed` (=True) must be an integer."),
        ("[train]\nseed = 1.0", "`train.seed` (=1.0) must be an integer."),
        ("[actor.adam]\nlr = 'x'", "`actor.adam.lr` (='x') must be a number."),
        ("[actor.adam]\nbetas = [0.9]", "`actor.adam.betas` (=[0.9]) must be a list of 2 values."),
        ("[actor.adam]\nbetas = [0.9, 'x']", "`actor.adam.betas` (='x') must be a number."),
        ("[algo.advantage]\nis_correction_threshold = [0.5, 'x']", "is_correction_threshold` (='x') must be a number"),
        ("[data]\napply_chat_template = 1", "`data.apply_chat_template` (=1) must be true or false."),
        ("[data]\nlabel_key = 1", "`data.label_key` (=1) must be a string."),
        ("[ckpt]\noutput_dir = 1", "`ckpt.output_dir` (=1) must be a path in quotes."),
        ("[actor]\neps_clip_low_high = [0.2]", "`actor.eps_clip_low_high` (=[0.2]) must be a list of 2 values."),
        ("[fsdp]\nparam_dtype = 'int8'", "`fsdp.param_dtype` (='int8') must be one of 'bf16', 'fp32'."),
        ("[ckpt]\nsave_steps = 0", "`ckpt.save_steps` (=0): no step is a multiple of it"),
        ("[ckpt", "is not TOML"),
        ("a = '\udcff'", "is not TOML"),
    ],
)
def test_a_wrong_file_names_file_key_and_what_is_accepted(text, message, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    shown = _refused(f"--config {path}", capsys)
    assert message in shown and (str(path) in shown or "save_steps" in text)


def _values(hint) -> st.SearchStrategy:
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(options)
    if typing.get_origin(hint) is tuple:
        if Ellipsis in options:
            return st.lists(_values(options[0]), min_size=1, max_size=2).map(tuple)
        return st.tuples(*map(_values, options))
    if options:  # X | None
        return st.none() | _values(options[0])
    simple = {
        bool: st.booleans(),
        int: st.integers(-(10**6), 10**12),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        Path: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10).map(Path),
    }
    return simple[hint]


def _configs(config_class) -> st.SearchStrategy:
    """Valid settings: a section keeps a drawn value if its range check accepts it."""

    @st.composite
    def draw_section(draw, section, default):
        made = default
        for name, hint in typing.get_type_hints(section).items():
            sub = dataclasses.is_dataclass(hint)
            value = draw(draw_section(hint, getattr(default, name)) if sub else _values(hint))
            try:
                made = dataclasses.replace(made, **{name: value})
            except ConfigError:
                continue
        return made

    return draw_section(config_class, config_class())


@pytest.mark.parametrize("config_class", CONFIGS)
def test_dump_reads_back_as_the_same_settings(config_class, tmp_path):
    path = tmp_path / "config.toml"

    @settings(max_examples=60, deadline=None)
    @given(_configs(config_class))
    def round_trip(config):
        path.write_text(dump(config), encoding="utf-8")
        assert load(config_class, path) == config

    round_trip()


@pytest.mark.parametrize(
    "text", ['quote " and \\', "two\nlines\r\n\ttab", "ünïcode 猫 🐈", "\x00\x1f\x7f", "{% if x %}'{{ y }}'"]
)
def test_strings_survive_the_file_and_the_command_line(text, tmp_path):
    config = with_absolute_paths(RLConfig(data=PromptDataConfig(chat_template=text)))
    path = tmp_path / "config.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert _parse(f"--config {path}") == config
    assert parse(RLConfig, ["--data.chat_template", text], prog="molt rl") == config


def test_dump_is_toml_with_tables_and_without_what_is_unset():
    config = RLConfig(ckpt=CkptConfig(output_dir=Path("out")))
    table = tomllib.loads(dump(config))
    assert table["ckpt"]["output_dir"] == "out" and "path" not in table["ckpt"]
    assert table["actor"]["adam"]["betas"] == [0.9, 0.95] and "max_steps" not in table["train"]
    assert set(table) == {field.name for field in dataclasses.fields(RLConfig)}


def test_infinite_numbers_survive(tmp_path):
    path = tmp_path / "config.toml"
    config = _parse("--reward.clip_range -inf inf")
    path.write_text(dump(config))
    assert load(RLConfig, path).reward.clip_range == (-math.inf, math.inf)


def test_parsing_imports_nothing_heavy():
    """Tables that the settings name by default are not looked at."""
    code = (
        "import sys; from molt.cli.args import parse; from molt.config import RLConfig; parse(RLConfig, [], prog='x'); "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
