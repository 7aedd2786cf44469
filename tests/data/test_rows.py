"""Rows come back as written, whatever the file; every bad file names its value, consequence and fix."""

import json
import pickle
import subprocess
import sys
import time

import pytest

from molt.data.rows import DropReport, load_rows, require_column, short_names
from molt.errors import DataError, UnusableRow

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


def write_arrow(path, table, stream=True):
    import pyarrow as pa

    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


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


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_and_streams(tmp_path, stream):
    import pyarrow as pa

    write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist(MIXED), stream)
    assert list(load(tmp_path / "a.arrow")) == MIXED


def test_a_cut_arrow_file(tmp_path):
    import pyarrow as pa

    write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist(MIXED))
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.arrow")
    says(error, "a.arrow: not arrow (", "no row can be read", "Write it again")


def test_csv_values_are_strings_and_empty_is_the_empty_string(tmp_path):
    long = "x" * 200_000
    text = f'\ufeffinput,label\n"a, ""b""\nc",007\n\n,\n{long},é\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    rows = load(tmp_path / "a.csv")
    assert rows.columns == ["input", "label"]
    assert list(rows) == [
        {"input": 'a, "b"\nc', "label": "007"},
        {"input": "", "label": ""},
        {"input": long, "label": "é"},
    ]


@pytest.mark.parametrize(
    ("content", "line", "detail"),
    [
        (b"a,b\n1,2\n1,2,3\n", 3, "it has 3 fields and the header has 2"),
        (b"a,b\n\n1\n", 3, "it has 1 fields and the header has 2"),
        (b'a,b\n1,"2\n', 2, "unexpected end of data"),
        (b"a,b\n1,\xff\n", 0, "utf-8"),
    ],
)
def test_ragged_or_broken_csv(tmp_path, content, line, detail):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.csv")
    says(error, f"a.csv, line {line}: not a row of csv ({detail[:5]}" if line else "a.csv, line", detail, "Write UTF-8")


def test_csv_columns_with_one_name(tmp_path):
    (tmp_path / "a.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match=r"a.csv: two columns have one name \(a, a\), so one would be lost. Rename it."):
        load(tmp_path / "a.csv")


def test_a_saved_dataset(tmp_path):
    import datasets

    datasets.Dataset.from_list(MIXED).select([1, 0]).save_to_disk(tmp_path / "saved")
    rows = load(tmp_path / "saved")
    assert list(rows) == [MIXED[1], MIXED[0]]
    assert rows.source(0) == "saved" and rows.columns == ["messages", "tools"]
    assert list(load(tmp_path / "saved", max_samples=1)) == [MIXED[1]]
    mixed = [{"content": "x"}, {"content": [{"type": "text", "text": "y"}]}]
    datasets.Dataset.from_list(mixed, on_mixed_types="use_json").save_to_disk(tmp_path / "json")
    assert list(load(tmp_path / "json")) == mixed


def test_a_saved_dataset_dict_has_splits(tmp_path):
    import datasets

    splits = {name: datasets.Dataset.from_list([{"i": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "dict")
    assert list(load(tmp_path / "dict")) == [{"i": "train"}]
    assert list(load(tmp_path / "dict", split="test")) == [{"i": "test"}]
    with pytest.raises(DataError) as error:
        load_rows(f"{tmp_path}/dict", flag="eval.dataset", split="tset")
    says(
        error,
        f"`eval.split` (=tset): `eval.dataset` (={tmp_path}/dict) has no such split",
        "nothing to load",
        "Did you mean 'test'? Use one of: train, test",
    )
    (tmp_path / "dict" / "test" / "data-00000-of-00001.arrow").write_bytes(b"torn")
    with pytest.raises(DataError) as error:
        load(tmp_path / "dict")
    says(error, f"(={tmp_path}/dict): the saved dataset cannot be opened", "nothing to load", "`save_to_disk`")


def test_a_directory_of_files_and_its_splits(tmp_path):
    root = tmp_path / "a[1]@home"  # neither a pattern nor a data_dir
    (root / "main").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        jsonl(root / "main" / f"{name}.jsonl", [{"i": name}])
    (root / "main" / "README.md").write_text("no rows")
    rows = load(f"{root}@main")
    assert [row["i"] for row in rows] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert rows.sizes == [2] and rows.source(1) == "a[1]@home@main"
    assert len(load(f"{root}@main", max_samples=1)) == 1
    assert list(load(root / "main", split="test")) == [{"i": "test-00000-of-00001"}]
    with pytest.raises(DataError) as error:
        load(f"{root}@main", split="dev")
    says(error, "`data.prompt_split` (=dev)", f"(={root}@main) has no such split", "Use one of: train, test")
    with pytest.raises(DataError) as error:
        load(f"{root}@mian")
    says(error, f"(={root}@mian): no such file or directory", "nothing to load", "Did you mean 'main'?")


def test_a_directory_without_names_of_splits_is_train(tmp_path):
    jsonl(tmp_path / "b.jsonl", [{"i": 1}])
    (tmp_path / "a.csv").write_text("i\n0\n")
    (tmp_path / "notes.txt").write_text("no rows")
    (tmp_path / "state.jsonl.tmp").write_text("no rows")
    assert list(load(tmp_path)) == [{"i": "0"}, {"i": 1}]
    with pytest.raises(DataError, match="Use one of: train"):
        load(tmp_path, split="test")


NO_HUB = """
import sys
from molt.data.rows import load_rows
from molt.errors import DataError
try:
    print(list(load_rows(sys.argv[1], flag="data.prompt_dataset")))
except DataError as error:
    print(error)
print("datasets" in sys.modules)
"""


def in_a_process(name, cwd, **environment):
    import os

    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_HUB, name],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    text, imported = done.stdout.strip().rsplit("\n", 1)
    return text, imported == "True", time.monotonic() - began


@pytest.mark.parametrize(
    "environment",
    # Told to stay offline, or a hub that refuses the connection (port 9 discards).
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
)
def test_a_hub_name_without_a_hub_fails_in_seconds(tmp_path, environment):
    (tmp_path / "org").mkdir()
    jsonl(tmp_path / "org" / "names.jsonl", MIXED)
    text, _, seconds = in_a_process("org/name@main", tmp_path, HF_HOME=str(tmp_path / "cache"), **environment)
    parts = ["`data.prompt_dataset` (=org/name@main): there is no such path here", "of the hub it cannot be loaded ("]
    for part in [*parts, "nothing to load", "Correct the path", "HF_HUB_OFFLINE=1"]:
        assert part in text
    assert seconds < 20  # the retries of the library alone take 23 s


@pytest.mark.parametrize("name", ["data/train.jsnol.jsonl", "./org/name", "/org/name", "~/name", "a/b/c", "name"])
def test_what_cannot_be_on_the_hub_is_a_mistyped_path(tmp_path, name):
    text, imported, _ = in_a_process(name, tmp_path)
    assert f"(={name}): no such file or directory, so there is nothing to load" in text
    assert "Give the path of a file" in text and not imported


def test_jsonl_does_not_wait_for_the_library(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"i": 1}])
    assert in_a_process("a.jsonl", tmp_path)[:2] == ("[{'i': 1}]", False)


def test_a_cached_hub_dataset_is_used_offline(tmp_path):
    """What `datasets` leaves in its cache of an `org/name` with the splits train and test."""
    import datasets

    for split in ("train", "test"):
        jsonl(tmp_path / f"{split}.jsonl", [{"i": split}])
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    datasets.load_dataset("json", "default", data_files=files, cache_dir=str(tmp_path / "cache"))
    (version,) = (tmp_path / "cache" / "json").glob("*/*/*/")
    home = tmp_path / "cache" / "org___name" / "default" / "0.0.0" / version.name
    home.parent.mkdir(parents=True)
    version.rename(home)
    for file in home.glob("json-*.arrow"):
        file.rename(home / file.name.replace("json", "name"))
    info = json.loads((home / "dataset_info.json").read_text()) | {"dataset_name": "name", "config_name": "default"}
    (home / "dataset_info.json").write_text(json.dumps(info))
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    assert in_a_process("org/name", tmp_path, **cache)[0] == "[{'i': 'train'}]"


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
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv", "arrow"])
def test_max_samples_counts_over_all_files(tmp_path, n, expected, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, cells in (("a", [0, 1]), ("b", [2])):
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.table({"i": cells}), path)
        elif suffix == "arrow":
            write_arrow(path, pa.table({"i": cells}))
        elif suffix == "csv":
            path.write_text("i\n" + "".join(f"{i}\n" for i in cells))
        else:
            jsonl(path, [{"i": i} for i in cells])
    both = f"{tmp_path}/a.{suffix},{tmp_path}/b.{suffix}"
    assert [int(row["i"]) for row in load_rows(both, flag=FLAG, max_samples=n)] == expected
    each = load_rows(both, flag=FLAG, max_samples=n, each=True)
    assert ([int(row["i"]) for row in each], each.sizes) == (([0, 2], [1, 1]) if n == 1 else ([0, 1, 2], [2, 1]))


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
    says(error, "a.xlsx", "unknown kind '.xlsx'", "nothing to load", ".json, .jsonl, .csv, .parquet, .arrow")
    with pytest.raises(DataError) as error:
        load(tmp_path)
    says(
        error, f"`{FLAG}` (={tmp_path})", "the directory has no data files", "nothing to load", "Put files that end in"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the directory has no data files"):
        load(tmp_path / "empty")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_rows(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.jsonl")
    says(error, f"`{FLAG}` (={tmp_path}/a.jsonl)", "there are no rows", "Name files")
    jsonl(tmp_path / "b.jsonl", MIXED)
    with pytest.raises(DataError) as error:  # also beside one that has rows
        load_rows(f"{tmp_path}/b.jsonl,{tmp_path}/a.jsonl", flag=FLAG)
    says(error, f"`{FLAG}` (={tmp_path}/a.jsonl)", "there are no rows")
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
    for kind in ("parquet", "arrow"):
        for content in (b"no table", b""):
            (tmp_path / f"c.{kind}").write_bytes(content)
            with pytest.raises(DataError) as error:
                load(tmp_path / f"c.{kind}")
            says(error, f"c.{kind}: not {kind} (", "no row can be read", "Write it again")


def test_missing_column_names_the_nearest(tmp_path):
    rows = load(jsonl(tmp_path / "a.jsonl", [{"input": 1, "label": 2}]))
    require_column(rows, "input", "data.input_key")
    with pytest.raises(DataError) as error:
        require_column(rows, "inputs", "data.input_key")
    says(error, "`data.input_key` (=inputs)", "no row could be used", "Did you mean 'input'?", "input, label")


def test_a_column_that_only_some_files_have(tmp_path):
    for name, rows in (("a", [{"input": 1}]), ("b", [{"input": 1, "tools": []}]), ("c", [{"inputs": 1}])):
        jsonl(tmp_path / f"{name}.jsonl", rows)
    rows = load_rows(",".join(f"{tmp_path}/{name}.jsonl" for name in "abc"), flag=FLAG)
    with pytest.raises(DataError) as error:
        require_column(rows, "input", "data.input_key")
    says(error, "`data.input_key` (=input)", "c.jsonl has no such column", "none of its rows could be used")
    says(error, "Did you mean 'inputs'?", "It has inputs.", "Rename its column, or leave it out.")
    require_column(rows, "tools", "data.tools_key", everywhere=False)
    with pytest.raises(DataError, match="no row could be used"):
        require_column(rows, "tool", "data.tools_key", everywhere=False)


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
    # Dropped are 5, 8, 17 and 20 to 26: two of the first ten rows, one of the next ten, seven of the last ten.
    assert report.left([10, 10, 0, 10]) == [8, 9, 0, 3]


def test_unusable_row_survives_pickling():
    assert str(pickle.loads(pickle.dumps(UnusableRow("empty")))) == "empty"


@pytest.mark.parametrize(
    ("names", "sources"),
    [
        (["math.jsonl", "data/code.jsonl", "org/gsm8k"], ["math", "code", "gsm8k"]),
        (["math/test.jsonl", "code/test.jsonl"], ["math/test", "code/test"]),
        (["math/test.jsonl", "code/test.jsonl", "other.csv"], ["math/test", "code/test", "other"]),
        (["test.jsonl", "code/test.jsonl"], ["test", "code/test"]),
        (["/a/x/test.jsonl", "/b/x/test.jsonl"], ["a/x/test", "b/x/test"]),
        (["test.jsonl", "test.parquet"], ["test.jsonl", "test.parquet"]),
        (["a/t.jsonl", "b/t.jsonl", "b/t.csv"], ["a/t.jsonl", "b/t.jsonl", "b/t.csv"]),
        (["one/gsm8k", "two/gsm8k"], ["one/gsm8k", "two/gsm8k"]),
        (["org/set@math/test", "org/set@code/test"], ["set@math/test", "set@code/test"]),
        (["test", "data/test.jsonl"], ["test", "test.jsonl"]),
        (["d/test.jsonl", "./d/test.jsonl", "d//test.jsonl"], ["test", "test", "test"]),  # one file
        (["./d/test.jsonl", "e/test.jsonl", "d/test.jsonl"], ["d/test", "e/test", "d/test"]),
    ],
)
def test_different_datasets_are_different_sources(names, sources):
    assert short_names(names) == sources


def test_files_of_one_name_stay_apart(tmp_path):
    for folder in ("math", "code"):
        (tmp_path / folder).mkdir()
        jsonl(tmp_path / folder / "test.jsonl", [{"q": folder}])
    rows = load(f"{tmp_path}/math/test.jsonl,{tmp_path}/code/test.jsonl")
    assert [rows.source(i) for i in range(2)] == ["math/test", "code/test"]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines.jsonl", b'{"input": "a"}\n{"input": "b"}\n'),
        ("blank_first.jsonl", b'\n{"input": "a"}\n{"input": "b"}\n'),
        ("array.json", b'[\n{"input": "a"},\n{"input": "b"}\n]'),
        ("lines.json", b'{"input": "a"}\n{"input": "b"}\n'),
        ("table.csv", b"input\na\nb\n"),
    ],
)
def test_the_mark_that_some_editors_begin_a_file_with_is_no_text(name, text, tmp_path):
    (tmp_path / name).write_bytes(BOM + text)
    rows = load(tmp_path / name)
    assert list(rows) == [{"input": "a"}, {"input": "b"}] and rows.columns == ["input"]


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    depth = 100_000
    (tmp_path / "deep.jsonl").write_text('{"a": 1}\n{"a": ' + "[" * depth + "]" * depth + "}\n")
    with pytest.raises(DataError, match=r"line 2: not a JSON object \(it is nested too deeply\)"):
        load(tmp_path / "deep.jsonl")


def test_what_is_hidden_is_accounted_by_part():
    report = DropReport(9)
    assert report.hidden_message() == ""
    for row in range(7):
        report.hide(row, "the tools")
    report.hide(3, "the key `id` of messages")
    report.hide(3, "the key `id` of messages")
    assert report.hidden_message().startswith(
        "the chat template does not show the tools in 7 rows (rows 0, 1, 2, 3, 4, ...), the key `id` of messages in "
        "1 row (row 3): the model neither sees nor learns it."
    )
    assert report.dropped == 0 and report.message() == ""
