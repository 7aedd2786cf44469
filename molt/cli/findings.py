"""The report of a check: findings as they are made."""

from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec, TypeVar

from molt.errors import MoltError

Level = Literal["error", "warning", "ok"]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    text: str


class Findings(list[Finding]):
    """The report as it grows."""

    def add(self, level: Level, *texts: str) -> None:
        for text in texts:
            self.append(Finding(level, text))

    def attempt(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """The result of the function, or None and an error in the report if it raises a MoltError."""
        try:
            return function(*args, **kwargs)
        except MoltError as error:
            self.add("error", str(error))
            return None

    @property
    def errors(self) -> list[str]:
        return [finding.text for finding in self if finding.level == "error"]
