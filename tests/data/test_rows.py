"""Rows come back as written, whatever the file; every bad file names its value, consequence and fix."""

import json
import pickle

import pytest

from molt.data.rows import DropReport, UnusableRow, load_rows, require_column
from molt.errors import DataError

FLAG = "data.prompt_dataset"

# Rows as unlike each other as real ones: text and parts, tool calls, two tool schemas with a null inside.
MIXED = [
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "parameters": {"a": {"type": "int"}}}]},
    {
        "messages": [
            {"role": "user", "content": "y", "name": "bob"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"b": 1}}}]},
        ],
        "tools": [{"name": "g", "parameters": {"b": {"type": "int", "enum": ["1", "2"]}}}],
    },
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, **kwargs):
    return load_rows(str(path), flag=FLAG, **kwargs)


def test_jsonl_rows_are_what_was_written(tmp_path):
    rows = load(jsonl(tmp_path / "a.jsonl", [*MIXED, {"messages": [{"role": "user", "content": None}]}]))
    assert list(rows) == [*MIXED, {"messages": [{"role": "user", "content": None}]}]
    assert rows.columns == ["messages", "tools"]


def test_json_is_an_array_or_lines(tmp_path):
    (tmp_path / "array.json").write_text(json.dumps(MIXED, indent=2))
    jsonl(tmp_path / "lines.json", MIXED)
    assert list(load(tmp_path / "array.json")) == list(load(tmp_path / "lines.json")) == MIXED


def test_parquet_structs_lose_the_fields_that_arrow_filled_in(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(MIXED)
    assert table.to_pylist() != MIXED  # Arrow gave every message a `name` and a `tool_calls`
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(load(tmp_path / "a.parquet")) == MIXED


def test_parquet_json_columns_are_decoded_and_keep_their_nulls(tmp_path):
    """`datasets` stores messages that Arrow cannot unify (text here, parts there) as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = [[{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}], "name": None}]]
    storage = pa.array([[json.dumps(message) for message in cell] for cell in cells])
    table = pa.table({"messages": storage.cast(pa.list_(pa.json_()))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [row["messages"] for row in load(tmp_path / "a.parquet")] == cells


def test_a_top_level_null_stays(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input": ["x", None], "label": [None, 3]}), tmp_path / "a.parquet")
    assert list(load(tmp_path / "a.parquet")) == [{"input": "x", "label": None}, {"input": None, "label": 3}]


def test_files_are_concatenated_and_know_their_source(tmp_path):
    jsonl(tmp_path / "math.jsonl", [{"i": 0}, {"i": 1}])
    jsonl(tmp_path / "code.jsonl", [{"i": 2, "extra": 1}])
    rows = load_rows(f"{tmp_path}/math.jsonl, {tmp_path}/code.jsonl", flag=FLAG)
    assert [row["i"] for row in rows] == [0, 1, 2]
    assert [rows.source(i) for i in range(3)] == ["math", "math", "code"]
    assert rows.columns == ["i", "extra"]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            rows[outside]


@pytest.mark.parametrize("n, expected", [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2]), (None, [0, 1, 2])])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_max_samples_counts_over_all_files(tmp_path, n, expected, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, cells in (("a", [0, 1]), ("b", [2])):
        if suffix == "parquet":
            pq.write_table(pa.table({"i": cells}), tmp_path / f"{name}.parquet")
        else:
            jsonl(tmp_path / f"{name}.{suffix}", [{"i": i} for i in cells])
    rows = load_rows(f"{tmp_path}/a.{suffix},{tmp_path}/b.{suffix}", flag=FLAG, max_samples=n)
    assert [row["i"] for row in rows] == expected


def says(error, *parts):
    for part in parts:
        assert part in str(error.value), f"{part!r} is missing in: {error.value}"


def test_missing_file(tmp_path):
    jsonl(tmp_path / "train.jsonl", MIXED)
    with pytest.raises(DataError) as error:
        load(tmp_path / "trian.jsonl")
    says(
        error, f"`{FLAG}` (={tmp_path}/trian.jsonl)", "nothing to load", "Did you mean 'train.jsonl'?", "Give the path"
    )


def test_unknown_suffix_and_directory(tmp_path):
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.xlsx")
    says(error, "a.xlsx", "unknown kind '.xlsx'", "cannot be read", ".json, .jsonl, .parquet")
    with pytest.raises(DataError) as error:
        load(tmp_path)
    says(error, str(tmp_path), "a directory", "cannot be read", "Give the path")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_rows(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.jsonl")
    says(error, f"`{FLAG}` (={tmp_path}/a.jsonl)", "there are no rows", "Name files")
    with pytest.raises(DataError, match="there are no rows"):
        load_rows("", flag=FLAG)


@pytest.mark.parametrize("bad", [b'{"input": "x"', b"[1, 2]", b'{"input": "\xff"}', b"input: x"])
def test_malformed_line_is_named(tmp_path, bad):
    (tmp_path / "a.jsonl").write_bytes(b'{"input": "x"}\n\n' + bad + b"\n")
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.jsonl")
    says(error, "a.jsonl, line 3", "cannot be read", "Write one object per line")


def test_malformed_array_and_parquet(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1},\n {"a": }]')
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.json")
    says(error, "a.json, line 2", "cannot be read", "one array of objects")
    (tmp_path / "b.json").write_text('[{"a": 1}, 3]')
    with pytest.raises(DataError) as error:
        load(tmp_path / "b.json")
    says(error, "b.json, element 1", "it is a int", "cannot be read", "one array of objects")
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(DataError) as error:
        load(tmp_path / "c.parquet")
    says(error, "c.parquet", "not a parquet file", "no row can be read", "Write it again")


def test_missing_column_names_the_nearest(tmp_path):
    rows = load(jsonl(tmp_path / "a.jsonl", [{"input": 1, "label": 2}]))
    require_column(rows, "input", "data.input_key")
    with pytest.raises(DataError) as error:
        require_column(rows, "inputs", "data.input_key")
    says(error, "`data.input_key` (=inputs)", "no row could be used", "Did you mean 'input'?", "input, label")


def test_drop_report_counts_rows_once_and_names_the_first():
    report = DropReport(1000)
    assert report.message() == "" and report.dropped == 0
    for row in (5, 17, 5):  # row 5 comes back in the next epoch
        report.add(row, UnusableRow("longer than `data.max_len` (=2048)"))
    report.add(8, UnusableRow("without `input`"))
    assert report.dropped == 3
    assert report.message() == (
        "dropped 3 of 1,000 rows: 2 longer than `data.max_len` (=2048) (rows 5, 17), 1 without `input` (row 8). "
        "Correct these rows or remove them."
    )
    for row in range(20, 27):
        report.add(row, UnusableRow("empty"))
    assert "7 empty (rows 20, 21, 22, 23, 24, ...)" in report.message()


def test_unusable_row_survives_pickling():
    assert str(pickle.loads(pickle.dumps(UnusableRow("empty")))) == "empty"
