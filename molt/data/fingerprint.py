"""Which rows a dataset has, as a short text: a resume onto other rows of the same number would repeat or skip some."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

from molt.types import Json

MOST_ROWS = 2048
"""So many rows are read at most, evenly spaced, the first and the last among them."""


class RowsToRead(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Json: ...


def fingerprint(rows: RowsToRead, columns: Sequence[str | None]) -> str:
    """16 hexadecimal digits of what the rows have in these columns, in their order; "" without a column.

    The file and its format do not matter, nor do columns that are not named, and fields without a value: Arrow adds
    and removes them. None stands for a column that the settings leave out.
    """
    named = [column for column in columns if column is not None]
    if not named:
        return ""
    digest = blake2b(digest_size=8)
    for number in _spaced(len(rows)):
        row = rows[number]
        values = [_without_nulls(row.get(column)) for column in named]
        digest.update(json.dumps(values, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _spaced(count: int) -> Sequence[int]:
    """At most `MOST_ROWS` of the numbers below `count`, ascending."""
    if count <= MOST_ROWS:
        return range(count)
    last = MOST_ROWS - 1
    return [place * (count - 1) // last for place in range(MOST_ROWS)]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
