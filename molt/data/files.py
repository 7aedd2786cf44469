"""One data file, or one Arrow table, as a `Part`: rows that stay raw until they are asked for.

json and jsonl rows come back exactly as written. Arrow (parquet, arrow, what `datasets` saves) unifies the
fields of nested structs and fills the missing ones with null; those fields are removed again, so a chat
message or a tool schema is what it was. Values of csv are strings, and an empty field is ''.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from molt.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The rows of one file or table: `decode(raw[i])`."""

    name: str
    raw: Sequence[Any]
    columns: list[str]
    decode: Callable[[Any], Row]


def _read_json(path: Path, limit: int | None) -> Part:
    """An array of objects, or (as is common) one object per line."""
    data = path.read_bytes()
    if not data.lstrip().startswith(b"["):
        return _read_jsonl(path, limit)
    rows = _parse(path, data)[:limit]
    return Part(str(path), rows, _columns(path, "element", enumerate(rows)), lambda row: row)


def _read_jsonl(path: Path, limit: int | None) -> Part:
    with path.open("rb") as file:
        numbered = list(islice(((n, line) for n, line in enumerate(file, 1) if line.strip()), limit))
    columns = _columns(path, "line", ((n, _parse(path, line, n)) for n, line in numbered))
    return Part(str(path), [line for _, line in numbered], columns, json.loads)


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


def _read_csv(path: Path, limit: int | None) -> Part:
    """The first line names the columns."""
    csv.field_size_limit(sys.maxsize)  # by default a field above 128 KiB, a long prompt, is an error
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = next(reader, [])
            rows = []
            for row in islice((row for row in reader if row), limit):
                if len(row) != len(columns):
                    raise csv.Error(f"it has {len(row)} fields and the header has {len(columns)}")
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {reader.line_num}: not a row of csv ({error}), so it cannot be read. Write UTF-8, and "
                'put fields that hold commas, quotes or line breaks into "".'
            ) from None
    if len({*columns}) < len(columns):
        raise DataError(f"{path}: two columns have one name ({', '.join(columns)}), so one would be lost. Rename it.")
    return Part(str(path), rows, columns, lambda row: dict(zip(columns, row, strict=True)))


def _read_parquet(path: Path, limit: int | None) -> Part:
    import pyarrow.parquet as pq

    return _read_table(path, limit, lambda: pq.ParquetFile(path, memory_map=True).read())


def _read_arrow(path: Path, limit: int | None) -> Part:
    """Both kinds of Arrow IPC: the file, and the stream that `datasets` writes."""
    import pyarrow as pa

    def read() -> pa.Table:
        source = pa.memory_map(str(path))
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()

    return _read_table(path, limit, read)


def _read_table(path: Path, limit: int | None, read: Callable[[], Any]) -> Part:
    import pyarrow as pa

    try:
        table = read()
    except (pa.ArrowException, OSError) as error:
        kind, detail = path.suffix.removeprefix("."), str(error).splitlines()[0]
        raise DataError(f"{path}: not {kind} ({detail}), so no row can be read. Write it again.") from None
    return table_part(str(path), table, limit)


def table_part(name: str, table: Any, limit: int | None) -> Part:
    """Rows of an Arrow table, or of a `datasets.Dataset` in the format "arrow"."""

    def decode(i: int) -> Row:
        one = table[i : i + 1]
        row = one.to_pylist()[0]
        return {field.name: _plain(row[field.name], field.type) for field in one.schema}

    return Part(name, range(len(table))[:limit], list(table.column_names), decode)


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


READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
