"""Settings that name a row of a table in `algo/`: a wrong name is refused, and `--help` lists the rows.

The tables need torch, so they are imported where a help is shown or a name is not the default.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from molt.config import RLConfig
from molt.setting import name_of, names, value_of

if TYPE_CHECKING:  # imported with tyro, once the flags are known to be right
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

RL = names(RLConfig)
OWN = "FILE.py:function"
"""How a user names what he wrote."""


class RowName(NamedTuple):
    """A setting that is the name of a row."""

    setting: object
    rows: Callable[[], Mapping[str, object]]
    """Imports the table."""
    own: str = ""
    """What a user may write in place of a name; "": nothing."""

    def help(self) -> str:
        """The rows there are."""
        choices = [*self.rows(), self.own] if self.own else [*self.rows()]
        return f"One of: {', '.join(choices)}."


def estimators() -> Mapping[str, object]:
    from molt.algo.advantage import ADVANTAGES

    return ADVANTAGES


def losses() -> Mapping[str, object]:
    from molt.algo.loss import LOSSES

    return LOSSES


def aggregations() -> Mapping[str, object]:
    from molt.algo.reduce import AGGREGATIONS

    return AGGREGATIONS


ROW_NAMES = [
    RowName(RL.algo.advantage.estimator, estimators, OWN),
    RowName(RL.actor.loss_mode, losses),
    RowName(RL.actor.loss_agg_mode, aggregations),
]


def refuse_unknown_rows(config: object) -> None:
    """Raise `ConfigError` for a name that no row has. A user's own file is looked at later."""
    if not isinstance(config, RLConfig):  # SFT names no row
        return
    default = RLConfig()
    for row_name in ROW_NAMES:
        name = value_of(row_name.setting, config)
        is_own = row_name.own and ":" in name
        if is_own or name == value_of(row_name.setting, default):
            continue
        rows = row_name.rows()
        if name not in rows:
            from molt.algo.plugin import unknown_row

            raise unknown_row(name_of(row_name.setting), name, rows, row_name.own)


# What the help says of a row's own defaults.


def bounds_of_losses() -> str:
    from molt.algo.loss import LOSSES

    texts = []
    for name, loss in LOSSES.items():
        low, high = loss.low_high
        texts.append(f"{name} {low:g} {high:g}")
    return f"The losses' own: {', '.join(texts)}."


def kl_of_estimators() -> str:
    from molt.algo.advantage import ADVANTAGES

    texts = [f"{name} {row.kl_coef:g}" for name, row in ADVANTAGES.items() if row.kl_coef]
    return f"The estimators' own: {', '.join(texts)}, all others 0."


HELP: dict[str, Callable[[], str]] = {
    **{name_of(row_name.setting): row_name.help for row_name in ROW_NAMES},
    name_of(RL.actor.eps_clip_low_high): bounds_of_losses,
    name_of(RL.algo.kl.init_coef): kl_of_estimators,
}
"""By setting, what follows the string under its field."""


def help_from_tables() -> "ConstructorRegistry":
    """For `tyro.cli`: the fields as tyro finds them, with what the tables say of them in their help."""
    from tyro.constructors import ConstructorRegistry

    registry = ConstructorRegistry()
    registry.struct_rule(SectionWithRows())
    return registry


class SectionWithRows:
    """A rule of tyro for a section of settings."""

    def __init__(self):
        self._asks_tyro = False

    def __call__(self, section: "StructTypeInfo") -> "StructConstructorSpec | None":
        if self._asks_tyro:  # tyro's own rules answer
            return None
        from tyro.constructors import ConstructorRegistry, StructConstructorSpec

        self._asks_tyro = True
        try:
            found = ConstructorRegistry.get_struct_spec(section)
        finally:
            self._asks_tyro = False
        if not isinstance(found, StructConstructorSpec):
            return None
        prefix = getattr(section.type, "prefix", "")
        return replace(found, fields=tuple(_with_rows(field, prefix + field.name) for field in found.fields))


def _with_rows(field: "StructFieldSpec", setting: str) -> "StructFieldSpec":
    """The field with a longer help, if the tables say something of this setting."""
    if setting not in HELP:
        return field
    under_field = field.helptext
    from_tables = HELP[setting]

    def text() -> str:
        shown = under_field() if callable(under_field) else under_field
        return f"{shown} {from_tables()}"

    return replace(field, helptext=text)
