"""argv -> settings.

The flags are generated from the dataclasses in `molt.config` (tyro), in dotted form with underscores.
`--config FILE.toml` loads the settings of an earlier run as defaults; flags override it. Every mistake
is one message on stderr and exit code 2, before anything heavy is imported.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import os
import re
import select
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from molt.config_file import TOML_WORDS, load
from molt.errors import ConfigError, LostError, MoltError, did_you_mean
from molt.rare_gc import collect_rarely

Config = TypeVar("Config")

LOST = 3
"""Exit code of a driver that lost processes for good: a new one may find others."""

COLOUR = r"\x1b\[[\d;]*m"
DOUBLE_NO = re.compile(rf",({COLOUR}| )*--[\w.]*\bno_no_\w+")


def parse(config_class: type[Config], argv: list[str], *, prog: str) -> Config:
    """The settings that `argv` asks for. Raises `ConfigError`; what tyro refuses it prints, and exits with 2."""
    # tyro has no `--config`, so it is taken out first; abbreviations would shadow `--ckpt.*` and friends.
    outer = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, usage=f"{prog} [OPTIONS]")
    outer.add_argument("--config", type=Path)
    known, argv = outer.parse_known_args(argv)
    default = load(config_class, known.config) if known.config else config_class()
    _check_flags(config_class, argv)
    description = (
        f"{config_class.__doc__}\n\n--config FILE.toml loads the settings of an earlier run "
        "(RUN/run/config.toml) as defaults; flags override it. `{None}` stands for unset."
    )
    shown, console = io.StringIO(), io.StringIO()
    shown.isatty = sys.stdout.isatty  # the help keeps its colours
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(console):
            return tyro.cli(
                config_class, prog=prog, description=description, args=argv, default=default, use_underscores=True
            )
    except SystemExit as stop:
        # tyro boxes and wraps what a dataclass refuses; show our own message as it was written.
        if refused := _cause(stop):
            raise refused from None
        print(_without_double_no(shown.getvalue()), end="", flush=True)
        sys.stderr.write(console.getvalue())
        raise


def _without_double_no(text: str) -> str:
    """tyro gives every switch an inverse; that of one named no_... is nothing to offer. The box keeps its width."""
    return DOUBLE_NO.sub(lambda off: re.sub(rf"({COLOUR})|.", lambda part: part[1] or " ", off[0]), text)


def _cause(error: BaseException | None) -> ConfigError | None:
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def flags(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Every flag without its dashes, dotted, and the type of its value."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(config_class).items():
        found |= flags(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {prefix + name: hint}
    return found


def _check_flags(config_class: type, argv: list[str]) -> None:
    known = flags(config_class)
    switches = {name for name, hint in known.items() if hint is bool}
    off = {f"{head}{dot}no_{tail}" for head, dot, tail in (name.rpartition(".") for name in switches)}
    everything = {"help", "config", *known, *off}
    for token, following in itertools.pairwise([*argv, "--"]):
        if not token.startswith("--"):
            continue
        name = token[2:].partition("=")[0].replace("-", "_")
        if name not in everything and not name.startswith("tyro_"):
            raise ConfigError(f"unknown flag `--{name}`.{_nearest(name, everything)} `--help` lists all flags.")
        if name in switches | off and ("=" in token or not following.startswith("-")):
            value = token.partition("=")[2] or following
            raise ConfigError(
                f"`--{name}` is a switch and takes no value, but is followed by {value!r}. "
                "Write the flag alone to turn it on, and with `no_` before its last word to turn it off."
            )
        value = token.partition("=")[2] if "=" in token else following
        if name in known and name not in switches and not value.startswith("--"):  # a missing one tyro names
            _check_value(name, known[name], value)


def _check_value(name: str, hint: Any, value: str) -> None:
    """Refuse what is no choice or no number, with the nearest choice; the rest is tyro's."""
    kinds = typing.get_args(hint)
    if types.NoneType in kinds:
        hint = kinds[0]
        if value == "None":
            return
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal and value not in choices:
        raise ConfigError(
            f"`{name}` (={value}) is no choice of it, so nothing was started.{did_you_mean(value, choices)} "
            f"Use one of: {', '.join(choices)}."
        )
    if hint in (int, float):
        try:
            hint(value)
        except ValueError:
            raise ConfigError(
                f"`{name}` (={value}) must be {TOML_WORDS[hint]}, so nothing was started. Write one after the flag."
            ) from None


def _nearest(name: str, everything: set[str]) -> str:
    # `--lr` is far from `--actor.adam.lr` by letters, yet it is what was meant.
    same_word = sorted(f"--{flag}" for flag in everything if flag.rpartition(".")[2] == name.rpartition(".")[2])
    if same_word:
        return did_you_mean(f"--{name}", same_word) or f" Did you mean {same_word[0]!r}?"
    return did_you_mean(f"--{name}", [f"--{flag}" for flag in sorted(everything)])


def run_command(command: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Run a command and return its exit code. A MoltError is printed without traceback: 2 for a ConfigError, `LOST` for
    processes that are gone for good, else 1.

    Exits silently when the reader of stdout is gone (`molt rl --help | head`).
    """
    collect_rarely()
    try:
        code = command(argv) or 0
        sys.stdout.flush()
        return code
    except MoltError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else LOST if isinstance(error, LostError) else 1
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 1


def _reader_has_left() -> bool:
    """Whether it is stdout that is broken, and not some other pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported unasked
    return bool(poll.poll(0))
