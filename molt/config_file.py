"""Settings as a `config.toml`, and back: what a run writes, `--config` reads."""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from molt.errors import ConfigError, did_you_mean

Config = TypeVar("Config")

TOML_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path in quotes"}


def load(config_class: type[Config], path: Path) -> Config:
    """The settings in a `config.toml`; what it leaves out has its default. Raises `ConfigError`."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"`--config` (={path}) cannot be read: {error.strerror}. Name a config.toml.") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"`--config` (={path}) is not TOML: {error}. Fix that line.") from error
    return _from_table(config_class(), table, "", path)


def _from_table(default: Any, table: Any, prefix: str, path: Path) -> Any:
    """`default` with the values of `table`, which sits under the key `prefix`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: `{prefix[:-1]}` (={table!r}) must be a table: write [{prefix[:-1]}].")
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
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if types.NoneType in args:
        return _typed(value, args[0], name, path)
    if Ellipsis in args and isinstance(value, list):  # as many as there are; the range says how many may be
        args = args[:1] * len(value)
    if origin is Literal:
        fits, wanted = value in args, "one of " + ", ".join(map(repr, args))
    elif origin is tuple:
        fits, wanted = isinstance(value, list) and len(value) == len(args), f"a list of {len(args)} values"
    else:
        # Not isinstance: a bool is an int.
        fits, wanted = type(value) in {float: (float, int), Path: (str,)}.get(hint, (hint,)), TOML_WORDS[hint]
    if not fits:
        raise ConfigError(f"{path}: `{name}` (={value!r}) must be {wanted}.")
    if origin is tuple:
        return tuple(_typed(item, arg, name, path) for item, arg in zip(value, args, strict=True))
    return value if origin is Literal else hint(value)


def dump(config: Any) -> str:
    """The text of a `config.toml` that `--config` reads back as the same settings."""
    return "\n".join(_lines(dataclasses.asdict(config), "")).lstrip("\n") + "\n"


def _lines(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{name} = {_toml(value)}"
    for name, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{name}]"
            yield from _lines(value, f"{prefix}{name}.")


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML too
    # JSON is TOML, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
