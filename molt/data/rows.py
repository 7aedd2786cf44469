"""Dataset files as one sequence of plain dicts, and the account of the rows that cannot be used.

json and jsonl rows come back exactly as written. Parquet unifies the fields of nested structs and fills
the missing ones with null; those fields are removed again, so a chat message or a tool schema is what it
was. Rows stay raw (lines, Arrow) and are decoded when they are asked for.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from molt.errors import DataError, did_you_mean

Row = dict[str, Any]


class UnusableRow(DataError):
    """One row cannot be used. The argument is the reason, the same text for every row it applies to."""


class DropReport:
    """Which rows of a dataset were dropped, by reason. A row that comes back every epoch counts once."""

    def __init__(self, total: int):
        self.total = total
        self._rows: dict[str, dict[int, None]] = {}

    def add(self, row: int, error: UnusableRow) -> None:
        self._rows.setdefault(str(error), {})[row] = None

    @property
    def dropped(self) -> int:
        return sum(len(rows) for rows in self._rows.values())

    def message(self) -> str:
        """`dropped 3 of 1,000 rows: 2 longer than ... (rows 5, 17), 1 ... (row 8). <fix>`, or ''."""
        if not self._rows:
            return ""
        reasons = sorted(self._rows.items(), key=lambda item: -len(item[1]))
        parts = ", ".join(f"{len(rows):,} {reason} ({_numbers(rows)})" for reason, rows in reasons)
        return f"dropped {self.dropped:,} of {self.total:,} rows: {parts}. Correct these rows or remove them."


def _numbers(rows: dict[int, None]) -> str:
    shown = ", ".join(str(row) for row in islice(rows, 5))
    return f"row{'s' if len(rows) > 1 else ''} {shown}{', ...' if len(rows) > 5 else ''}"


@dataclass(frozen=True)
class _Part:
    """The rows of one file: `decode(raw[i])`."""

    path: Path
    raw: Sequence[Any]
    columns: list[str]
    decode: Callable[[Any], Row]


class Rows:
    """A sequence of rows: `len(rows)`, `rows[i] -> dict`, `.columns`, `.source(i)`. Row numbers start at 0."""

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self.columns = list(dict.fromkeys(column for part in parts for column in part.columns))

    def __len__(self) -> int:
        return sum(len(part.raw) for part in self._parts)

    def __getitem__(self, i: int) -> Row:
        part, offset = self._find(i)
        return part.decode(part.raw[offset])

    def source(self, i: int) -> str:
        """The stem of the file that row `i` comes from."""
        return self._find(i)[0].path.stem

    def _find(self, i: int) -> tuple[_Part, int]:
        offset = i
        for part in self._parts:
            if 0 <= offset < len(part.raw):
                return part, offset
            offset -= len(part.raw)
        raise IndexError(i)


def load_rows(paths: str, *, flag: str, max_samples: int | None = None) -> Rows:
    """Concatenate a comma list of .json, .jsonl and .parquet files; at most the first `max_samples` rows.

    `flag` is the setting that holds `paths`, for messages. Raises DataError: a file is missing, has another
    suffix, is malformed (file and line are named) or there are no rows at all.
    """
    parts: list[_Part] = []
    for path in [Path(name.strip()).expanduser() for name in paths.split(",") if name.strip()]:
        _check_path(path, flag)
        limit = None if max_samples is None else max_samples - sum(len(part.raw) for part in parts)
        parts.append(READERS[path.suffix](path, limit))
    rows = Rows(parts)
    if not len(rows):
        raise DataError(f"`{flag}` (={paths}): there are no rows to learn from. Name files that hold at least one row.")
    return rows


def require_column(rows: Rows, name: str, flag: str) -> None:
    """Raise DataError, naming the nearest column, if no row has the column `name` that `flag` asks for."""
    if name not in rows.columns:
        raise DataError(
            f"`{flag}` (={name}): the dataset has no such column, so no row could be used."
            f"{did_you_mean(name, rows.columns)} Use one of: {', '.join(rows.columns)}."
        )


def _check_path(path: Path, flag: str) -> None:
    if path.is_file() and path.suffix in READERS:
        return
    if not path.exists():
        near = [p.name for p in path.parent.glob("*")]
        why = f"no such file, so there is nothing to load.{did_you_mean(path.name, near)}"
    else:
        kind = "a directory" if path.is_dir() else f"a file of unknown kind {path.suffix!r}"
        why = f"it is {kind}, which cannot be read as rows."
    raise DataError(f"`{flag}` (={path}): {why} Give the path of a file that ends in {', '.join(READERS)}.")


def _read_json(path: Path, limit: int | None) -> _Part:
    """An array of objects, or (as is common) one object per line."""
    data = path.read_bytes()
    if not data.lstrip().startswith(b"["):
        return _read_jsonl(path, limit)
    rows = _parse(path, data)[:limit]
    return _Part(path, rows, _columns(path, "element", enumerate(rows)), lambda row: row)


def _read_jsonl(path: Path, limit: int | None) -> _Part:
    with path.open("rb") as file:
        numbered = list(islice(((n, line) for n, line in enumerate(file, 1) if line.strip()), limit))
    columns = _columns(path, "line", ((n, _parse(path, line, n)) for n, line in numbered))
    return _Part(path, [line for _, line in numbered], columns, json.loads)


def _parse(path: Path, data: bytes, line: int | None = None) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise _malformed(path, f"line {line or getattr(error, 'lineno', 1)}", str(error)) from None


def _columns(path: Path, unit: str, rows: Iterable[tuple[int, Any]]) -> list[str]:
    columns: dict[str, None] = {}
    for number, row in rows:
        if not isinstance(row, dict):
            raise _malformed(path, f"{unit} {number}", f"it is a {type(row).__name__}")
        columns.update(dict.fromkeys(row))
    return list(columns)


def _malformed(path: Path, where: str, detail: str) -> DataError:
    fix = "Write one object per line (.jsonl), or one array of objects (.json)."
    return DataError(f"{path}, {where}: not a JSON object ({detail}), so the row cannot be read. {fix}")


def _read_parquet(path: Path, limit: int | None) -> _Part:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path, memory_map=True).read()
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0]
        raise DataError(f"{path}: not a parquet file ({detail}), so no row can be read. Write it again.") from None
    table = table.slice(0, limit)

    def decode(i: int) -> Row:
        row = table.slice(i, 1).to_pylist()[0]
        return {field.name: _plain(row[field.name], field.type) for field in table.schema}

    return _Part(path, range(len(table)), table.column_names, decode)


def _plain(value: Any, type_: Any) -> Any:
    """An Arrow value as it was before Arrow: struct fields filled with null removed, JSON text parsed."""
    import pyarrow.types as kinds

    if value is not None and getattr(type_, "extension_name", "") == "arrow.json":
        return json.loads(value)  # how `datasets` stores messages that have no common type
    if isinstance(value, list) and not kinds.is_map(type_):
        return [_plain(item, type_.value_type) for item in value]
    if isinstance(value, dict):
        return {field.name: _plain(value[field.name], field.type) for field in type_ if value[field.name] is not None}
    return value


READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
