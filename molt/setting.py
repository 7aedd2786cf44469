"""Settings named by reference, so that a type checker sees every name that a rule or a message uses.

RL = names(RLConfig)
RL.algo.kl.target                      # for a type checker the value, a `float | None`
name_of(RL.algo.kl.target)             # "algo.kl.target"
value_of(RL.algo.kl.target, config)    # config.algo.kl.target
"""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, TypeVar, cast

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Reference:
    """One setting, or a section of settings. An attribute of a section is the reference to what it holds."""

    _name: str
    _type: Any
    """The annotation of the setting, or the class of the section."""

    def __getattr__(self, field: str) -> "Reference":
        hints = _settings_of(self._type)
        if field not in hints:
            raise AttributeError(f"no setting `{field}` in {self._name or self._type}")
        name = f"{self._name}.{field}" if self._name else field
        return Reference(name, hints[field])


def names(config_class: type[Config]) -> Config:
    """A stand-in for an instance of `config_class` whose attributes are references to its settings."""
    # To a type checker it is the instance, so that a wrong name is a type error.
    return cast(Config, Reference("", config_class))


def name_of(setting: object) -> str:
    """The dotted name of a setting, as in messages and flags."""
    return _reference(setting)._name


def value_of(setting: object, config: object) -> Any:
    """The value that the setting has in `config`."""
    value = config
    for field in name_of(setting).split("."):
        value = getattr(value, field)
    return value


def single_settings(setting: object) -> Iterator[Reference]:
    """The setting itself, or all settings of a section, in order."""
    reference = _reference(setting)
    fields = _settings_of(reference._type)
    if not fields:
        yield reference
    for field in fields:
        yield from single_settings(getattr(reference, field))


def _reference(setting: object) -> Reference:
    if not isinstance(setting, Reference):
        raise TypeError(f"{setting!r} is a value, not a reference to a setting: take it from `names(...)`")
    return setting


def _settings_of(section: Any) -> dict[str, Any]:
    """Name and annotation of each field of a section; of anything else none."""
    if not dataclasses.is_dataclass(section):
        return {}
    return typing.get_type_hints(section)
