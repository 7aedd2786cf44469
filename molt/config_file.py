"""Settings as a `config.toml`, and back: what a run writes, `--config` reads."""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from molt.config import refuse_known
from molt.errors import ConfigError, did_you_mean

Config = TypeVar("Config")

TOML_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path in quotes"}
TOML_TYPES: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,), Path: (str,)}
"""The types of TOML values that a setting of a type takes. Compared by identity, for a bool is an int."""


def load(config_class: type[Config], path: Path) -> Config:
    """The settings in a `config.toml`; what it leaves out has its default. Raises `ConfigError`."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"`--config` (={path}) cannot be read: {error.strerror}. Name a config.toml.") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"`--config` (={path}) is not TOML: {error}. Fix that line.") from error
    return _from_table(config_class(), table, "", path)


def _from_table(default: Any, table: Any, prefix: str, path: Path) -> Any:
    """`default` with the values of `table`, which sits under the key `prefix`."""
    if not isinstance(table, dict):
        name = prefix.removesuffix(".")
        raise ConfigError(f"{path}: `{name}` (={table!r}) must be a table: write [{name}].")
    hints = typing.get_type_hints(type(default))
    changes = {}
    for key, value in table.items():
        name = prefix + key
        if key not in hints:
            near = did_you_mean(name, [prefix + known for known in hints])
            raise ConfigError(f"{path}: unknown setting `{name}`.{near} Remove or rename it.")
        if dataclasses.is_dataclass(hints[key]):
            changes[key] = _from_table(getattr(default, key), value, f"{name}.", path)
        else:
            changes[key] = _typed(value, hints[key], name, path)
    return dataclasses.replace(default, **changes)


def _typed(value: Any, hint: Any, name: str, path: Path) -> Any:
    """A TOML value as the type of its field; TOML has no null, so None never occurs."""
    arguments = typing.get_args(hint)
    if types.NoneType in arguments:
        return _typed(value, arguments[0], name, path)
    if typing.get_origin(hint) is Literal:
        return _choice(value, arguments, name, path)
    if typing.get_origin(hint) is tuple:
        return _tuple(value, arguments, name, path)
    if type(value) not in TOML_TYPES[hint]:
        raise _mistyped(value, TOML_WORDS[hint], name, path)
    return hint(value)


def _choice(value: Any, choices: tuple[Any, ...], name: str, path: Path) -> Any:
    refuse_known(name, value)
    if value not in choices:
        raise _mistyped(value, "one of " + ", ".join(repr(choice) for choice in choices), name, path)
    return value


def _tuple(value: Any, hints: tuple[Any, ...], name: str, path: Path) -> tuple[Any, ...]:
    if Ellipsis in hints and isinstance(value, list):  # of any length; the range of the setting limits it
        hints = hints[:1] * len(value)
    if not isinstance(value, list) or len(value) != len(hints):
        raise _mistyped(value, f"a list of {len(hints)} values", name, path)
    return tuple(_typed(item, hint, name, path) for item, hint in zip(value, hints, strict=True))


def _mistyped(value: Any, wanted: str, name: str, path: Path) -> ConfigError:
    return ConfigError(f"{path}: `{name}` (={value!r}) must be {wanted}.")


def dump(config: Any) -> str:
    """The text of a `config.toml` that `--config` reads back as the same settings."""
    lines = "\n".join(_lines(dataclasses.asdict(config), ""))
    return lines.lstrip("\n") + "\n"


def _lines(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """The values of a table, then the tables in it."""
    for name, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{name} = {_toml(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{name}]"
            yield from _lines(value, f"{prefix}{name}.")


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        items = ", ".join(_toml(item) for item in value)
        return f"[{items}]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML too
    # JSON is TOML, except that TOML wants DEL escaped.
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.replace("\x7f", "\\u007f")
