"""One data file, or one Arrow table, as a `Part`: rows that stay raw until they are read.

json and jsonl rows come back exactly as written. Arrow (parquet, arrow, a directory that `datasets` saved) unifies the
fields of nested structs and fills the missing ones with null; those fields are removed again, so a chat
message or a tool schema is what it was. Values of csv are strings, and an empty field is ''.
"""

import csv
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from molt.errors import DataError
from molt.types import Json

Row = Json


@dataclass(frozen=True)
class Part:
    """The rows of one file or table: `decode(raw[i])`."""

    name: str
    raw: Sequence[Any]
    columns: list[str]
    decode: Callable[[Any], Row]

    def __len__(self) -> int:
        return len(self.raw)


def _read_json(path: Path, limit: int | None) -> Part:
    """An array of objects, or (as is common) one object per line."""
    data = path.read_bytes().removeprefix(BOM_UTF8)
    is_array = data.lstrip().startswith(b"[")
    if not is_array:
        return _read_jsonl(path, limit)

    rows = _parse(path, data, line=None)[:limit]
    columns = _Columns(path, unit="element")
    for number, row in enumerate(rows):
        columns.add(number, row)
    return Part(str(path), rows, columns.names, _as_it_is)


def _as_it_is(row: Row) -> Row:
    return row


def _read_jsonl(path: Path, limit: int | None) -> Part:
    lines = []
    columns = _Columns(path, unit="line")
    with path.open("rb") as file:
        for number, line in islice(_numbered(file), limit):
            columns.add(number, _parse(path, line, number))
            lines.append(line)
    return Part(str(path), lines, columns.names, json.loads)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if line.strip():
            yield number, line


def _parse(path: Path, data: bytes, line: int | None) -> Any:
    """The JSON value of `data`, line number `line` of the file; None: all of it."""
    try:
        return json.loads(data)
    except RecursionError:
        raise _malformed(path, f"line {line or 1}", "it is nested too deeply") from None
    except ValueError as error:
        where = line or getattr(error, "lineno", 1)
        raise _malformed(path, f"line {where}", str(error)) from None


class _Columns:
    """The names of columns, in the order in which rows of a file bring them."""

    def __init__(self, path: Path, unit: str):
        """unit: the word for a row in messages, before its number."""
        self._path = path
        self._unit = unit
        self._names: dict[str, None] = {}

    def add(self, number: int, row: Any) -> None:
        """Raises DataError if the row is not an object."""
        if not isinstance(row, dict):
            raise _malformed(self._path, f"{self._unit} {number}", f"it is a {type(row).__name__}")
        self._names.update(dict.fromkeys(row))

    @property
    def names(self) -> list[str]:
        return list(self._names)


def _malformed(path: Path, where: str, detail: str) -> DataError:
    return DataError(
        f"{path}, {where}: not a JSON object ({detail}), so the row cannot be read. "
        "Write one object per line (.jsonl), or one array of objects (.json)."
    )


def _read_csv(path: Path, limit: int | None) -> Part:
    """The first line names the columns."""
    csv.field_size_limit(sys.maxsize)  # by default a field above 128 KiB, a long prompt, is an error
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = next(reader, [])
            rows = list(islice(_csv_rows(reader, len(columns)), limit))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {reader.line_num}: not a row of csv ({error}), so it cannot be read. Write UTF-8, and "
                'put fields that hold commas, quotes or line breaks into "".'
            ) from None

    if len(set(columns)) < len(columns):
        raise DataError(f"{path}: two columns have one name ({', '.join(columns)}), so one would be lost. Rename it.")

    def decode(fields: list[str]) -> Row:
        return dict(zip(columns, fields, strict=True))

    return Part(str(path), rows, columns, decode)


def _csv_rows(rows: Iterable[list[str]], width: int) -> Iterator[list[str]]:
    """The rows that are not blank. Raises `csv.Error` for one of another width than the header."""
    for row in rows:
        if not row:
            continue
        if len(row) != width:
            raise csv.Error(f"it has {len(row)} fields and the header has {width}")
        yield row


def _read_parquet(path: Path, limit: int | None) -> Part:
    import pyarrow.parquet as pq

    with _arrow_errors(path):
        table = pq.ParquetFile(path, memory_map=True).read()
    return table_part(str(path), table, limit)


def _read_arrow(path: Path, limit: int | None) -> Part:
    """Both kinds of Arrow IPC: the file, and the stream that `datasets` writes."""
    import pyarrow as pa

    with _arrow_errors(path):
        source = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
    return table_part(str(path), table, limit)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """What Arrow raises while it reads the file becomes a DataError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        kind = path.suffix.removeprefix(".")
        detail = str(error).splitlines()[0]
        raise DataError(f"{path}: not {kind} ({detail}), so no row can be read. Write it again.") from None


def table_part(name: str, table: Any, limit: int | None) -> Part:
    """Rows of an Arrow table, or of a `datasets.Dataset` in the format "arrow"."""

    def decode(i: int) -> Row:
        one_row = table[i : i + 1]
        values = one_row.to_pylist()[0]
        return {field.name: _plain(values[field.name], field.type) for field in one_row.schema}

    indices = range(len(table))[:limit]
    return Part(name, indices, list(table.column_names), decode)


def _plain(value: Any, arrow_type: Any) -> Any:
    """An Arrow value as it was before Arrow: struct fields filled with null removed, JSON text parsed."""
    import pyarrow.types as kinds

    if value is None:
        return None
    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return json.loads(value)  # how `datasets` stores messages that have no common type
    if isinstance(value, list) and not kinds.is_map(arrow_type):
        return [_plain(item, arrow_type.value_type) for item in value]
    if isinstance(value, dict):
        return _plain_struct(value, arrow_type)
    return value


def _plain_struct(value: Json, struct: Any) -> Json:
    fields = {}
    for field in struct:
        item = value[field.name]
        if item is not None:
            fields[field.name] = _plain(item, field.type)
    return fields


READERS: dict[str, Callable[[Path, int | None], Part]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""By the suffix of a file: `(path, limit)` to its rows, at most `limit` of them."""
