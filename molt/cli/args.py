"""argv -> settings.

The flags are generated from the dataclasses in `molt.config` (tyro), in dotted form with underscores.
`--config FILE.toml` loads the settings of an earlier run as defaults; flags override it. Every mistake
is one message on stderr and exit code 2, before anything heavy is imported.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import re
import select
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from molt.cli.row_names import help_from_tables, refuse_unknown_rows
from molt.config import refuse_known
from molt.config_file import TOML_WORDS, load
from molt.errors import ConfigError, LostError, MoltError, did_you_mean
from molt.paths import expanded, with_absolute_paths
from molt.process import loopback_without_proxy
from molt.rare_gc import collect_rarely

Config = TypeVar("Config")

LOST = 3
"""Exit code of a driver that lost processes for good: a new one may find others."""

COLOUR = r"\x1b\[[\d;]*m"
DOUBLE_NO = re.compile(rf",({COLOUR}| )*--[\w.]*\bno_no_\w+")
COLOUR_OR_CHARACTER = re.compile(rf"({COLOUR})|.")
ESSENTIALS = {
    "RLConfig": """Most runs set few of the flags below:
  agent and model   --train.agent_path --actor.model_name_or_path
  data              --data.prompt_dataset --data.label_key --data.apply_chat_template --data.max_len
  batch             --rollout.batch_size --rollout.n_samples_per_prompt --rollout.max_new_tokens
  training          --algo.advantage.estimator --actor.adam.lr --train.max_steps
  evaluation        --eval.dataset --eval.steps --eval.eval_at_start
  output            --ckpt.output_dir --ckpt.load_enable --logger.logging_steps""",
    "SftConfig": """Most runs set few of the flags below:
  model and data    --model.model_name_or_path --data.dataset --data.output_key --data.max_len
  training          --train.batch_size --train.micro_batch_size --train.max_epochs --adam.lr --lr_scheduler
  evaluation        --eval.dataset --eval.steps
  output            --ckpt.output_dir --ckpt.load_enable --logger.logging_steps""",
}
"""On top of the help, by the class of the settings; RL does not import that of SFT."""
CONFIG_HELP = (
    "--config FILE.toml loads the settings of an earlier run (RUN/run/config.toml) as defaults; flags override it. "
    "`{None}` stands for unset."
)


def parse(config_class: type[Config], argv: list[str], *, prog: str, about: str | None = None) -> Config:
    """The settings in `argv`, every path in them absolute. about: the first line of the help; None: that of
    `config_class`.

    Raises `ConfigError`; what tyro refuses it prints, and exits with 2.
    """
    config_file, flags_given = _take_config_file(argv, prog)
    if config_file is None:
        default = config_class()
    else:
        default = load(config_class, config_file)
    _check_flags(config_class, flags_given)

    import tyro  # here, for a flag that is wrong is refused without it

    stdout = io.StringIO()
    stderr = io.StringIO()
    stdout.isatty = sys.stdout.isatty  # the help keeps its colours
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            config = tyro.cli(
                config_class,
                prog=prog,
                description=_description(config_class, about),
                args=flags_given,
                default=default,
                use_underscores=True,
                registry=help_from_tables(),
            )
    except SystemExit as stop:
        # tyro boxes and wraps what a dataclass refuses; show our own message as it was written.
        refused = _cause(stop)
        if refused is not None:
            raise refused from None
        print(_without_double_no(stdout.getvalue()), end="", flush=True)
        sys.stderr.write(stderr.getvalue())
        raise
    config = with_absolute_paths(config)
    refuse_unknown_rows(config)
    return config


def _description(config_class: type, about: str | None) -> str:
    """The text on top of the help."""
    parts = [about or config_class.__doc__ or ""]
    if config_class.__name__ in ESSENTIALS:
        parts.append(ESSENTIALS[config_class.__name__])
    parts.append(CONFIG_HELP)
    return "\n\n".join(parts)


def _take_config_file(argv: list[str], prog: str) -> tuple[Path | None, list[str]]:
    """The value of `--config`, which tyro does not have, and the other arguments."""
    # Abbreviations would shadow `--ckpt.*` and friends.
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, usage=f"{prog} [OPTIONS]")
    parser.add_argument("--config")
    known, others = parser.parse_known_args(argv)
    if known.config is None:
        return None, others
    return expanded(known.config), others


def _without_double_no(text: str) -> str:
    """The help without the inverses `no_no_...` that tyro gives to switches named `no_...`."""
    return DOUBLE_NO.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    """Spaces for the characters, so that the box keeps its width; colours stay."""
    return COLOUR_OR_CHARACTER.sub(_colour_or_space, match[0])


def _colour_or_space(match: re.Match[str]) -> str:
    return match[1] or " "


def _cause(error: BaseException | None) -> ConfigError | None:
    """The `ConfigError` that led to the error, if one did."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def flags(config_class: type) -> dict[str, Any]:
    """Every flag without its dashes, dotted, and the type of its value."""
    return dict(_flags(config_class, ""))


def _flags(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(section).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _flags(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


class GivenFlag(NamedTuple):
    """A flag on the command line."""

    name: str
    """Dotted, without dashes."""
    value: str | None
    """After `=`, or the next argument; None: there is none, or another flag."""
    has_equals: bool


def _given_flags(argv: list[str]) -> Iterator[GivenFlag]:
    for position, argument in enumerate(argv):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        following = argv[position + 1 : position + 2]
        if equals:
            yield GivenFlag(name, value, has_equals=True)
        elif following and not following[0].startswith("--"):
            yield GivenFlag(name, following[0], has_equals=False)
        else:
            yield GivenFlag(name, None, has_equals=False)


def _inverse(switch: str) -> str:
    """The flag that turns a switch off: `data.no_apply_chat_template`."""
    section, dot, name = switch.rpartition(".")
    return f"{section}{dot}no_{name}"


def _check_flags(config_class: type, argv: list[str]) -> None:
    """Raise `ConfigError` for a flag that does not exist, and for a value that its flag cannot have."""
    settings = flags(config_class)
    switches = {name for name, hint in settings.items() if hint is bool}
    inverses = {_inverse(name) for name in switches}
    known = {"help", "config", *settings, *inverses}

    for flag in _given_flags(argv):
        if flag.name not in known and not flag.name.startswith("tyro_"):
            from molt.cli.flag_hints import flag_hint

            hint = flag_hint(flag.name, known)
            raise ConfigError(f"unknown flag `--{flag.name}`.{hint} `--help` lists all flags.")
        if flag.name in switches or flag.name in inverses:
            _check_switch(flag)
        elif flag.name in settings and flag.value is not None:  # tyro reports a missing value
            _check_value(flag.name, settings[flag.name], flag.value)


def _check_switch(flag: GivenFlag) -> None:
    if flag.value is None or (flag.value.startswith("-") and not flag.has_equals):
        return
    raise ConfigError(
        f"`--{flag.name}` is a switch and takes no value, but is followed by {flag.value!r}. "
        "Write the flag alone to turn it on, and with `no_` before its last word to turn it off."
    )


def _check_value(name: str, hint: Any, value: str) -> None:
    """Refuse a value that is no choice or no number, and name the nearest choice; tyro checks the rest."""
    alternatives = typing.get_args(hint)
    if types.NoneType in alternatives:
        if value == "None":
            return
        hint = alternatives[0]
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        refuse_known(name, value)
        if value not in choices:
            raise ConfigError(
                f"`{name}` (={value}) is no choice of it, so nothing was started.{did_you_mean(value, choices)} "
                f"Use one of: {', '.join(choices)}."
            )
    if hint is Path and not value:
        raise ConfigError(
            f"`{name}` is empty, which would be the current directory: is a variable of the shell unset? Write the "
            "directory after the flag; `.` is the current one."
        )
    if hint in (int, float):
        try:
            hint(value)
        except ValueError:
            raise ConfigError(
                f"`{name}` (={value}) must be {TOML_WORDS[hint]}, so nothing was started. Write one after the flag."
            ) from None


def run_command(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Run a command and return its exit code.

    A MoltError is printed without traceback: 2 for a ConfigError, `LOST` for processes that are gone for good, else 1.
    Exits silently when the reader of stdout is gone (`molt rl --help | head`).
    """
    collect_rarely()
    os.environ.update(loopback_without_proxy(os.environ))
    try:
        code = command(argv) or 0
        sys.stdout.flush()
        return code
    except MoltError as error:
        print(f"error: {error}", file=sys.stderr)
        return _exit_code(error)
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 1


def _exit_code(error: MoltError) -> int:
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, LostError):
        return LOST
    return 1


def _reader_has_left() -> bool:
    """Whether stdout is the broken pipe, and not another one."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # poll always reports errors
    return bool(poll.poll(0))
