"""Paths in settings: expanded and absolute from the moment the command line is parsed.

A process that starts in another directory, and the `config.toml` of a run, then mean the same files. A setting of type
`Path` is a path; text that may name one says so in its annotation (`PATH`, `PATHS`, `FUNCTION`, `TEMPLATE`).
"""

import dataclasses
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from molt.errors import ConfigError

Config = TypeVar("Config")

WRITTEN_AS_PATH = ("/", "./", "../", "~")
"""How text begins that cannot be a name on the hub."""


class NamesPath(NamedTuple):
    """In the annotation of a text that may name a path."""

    absolute: Callable[[str], str]
    """The same with paths expanded and absolute; names that are no paths stay."""


def expanded(text: str) -> Path:
    """The path with `~` expanded. Raises `ConfigError` for the `~` of a user that there is not.

    A file that is really called `~...` stays.
    """
    if not text.startswith("~") or os.path.exists(text):
        return Path(text)
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = path.partition("/")[0]
        raise ConfigError(
            f"the path {text}: there is no user {user.removeprefix('~')!r}, so a directory named {user} would be made. "
            "Write the path in full."
        )
    return Path(path)


def absolute_path(text: str) -> Path:
    """The path, expanded and absolute; symbolic links stay."""
    return expanded(text).absolute()


def _path(text: str) -> str:
    """A path that exists, or is written as one, is made absolute; anything else is a name: of the hub, of a library."""
    path = expanded(text)
    if os.path.exists(path) or text.startswith(WRITTEN_AS_PATH):
        return str(path.absolute())
    return text


def _paths(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    return ",".join(_dataset(name) for name in names if name)


def _dataset(name: str) -> str:
    """`PATH`, or `PATH@DIR`. A path that would have a comma stays relative: it would be two in a comma list."""
    base, at, folder = name, "", ""
    if "@" in name and not os.path.exists(expanded(name)):
        base, at, folder = name.rpartition("@")
    path = _path(base)
    if "," in path:
        return name
    return f"{path}{at}{folder}"


def _function(text: str) -> str:
    """`FILE.py:function`, or the name of a row."""
    file, colon, function = text.rpartition(":")
    if not file:
        return text
    return f"{_path(file)}{colon}{function}"


def _template(text: str) -> str:
    """A file, or the template itself."""
    if "{{" in text or "{%" in text:
        return text
    return _path(text)


PATH = NamesPath(_path)
PATHS = NamesPath(_paths)
FUNCTION = NamesPath(_function)
TEMPLATE = NamesPath(_template)


def with_absolute_paths(config: Config) -> Config:
    """The settings with every path in them expanded and absolute. Raises `ConfigError`."""
    settings: Any = config
    hints = typing.get_type_hints(type(settings), include_extras=True)
    changes = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        changes[field.name] = _absolute(value, hints[field.name])
    return dataclasses.replace(settings, **changes)


def _absolute(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return with_absolute_paths(value)
    if isinstance(value, Path):
        return absolute_path(str(value))
    if not value:  # unset
        return value
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, NamesPath):
            return mark.absolute(value)
    return value
