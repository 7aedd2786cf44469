"""Other rows have another fingerprint; the same rows have the same one in every format."""

import json

import pytest

from molt.data.fingerprint import MOST_ROWS, _spaced, fingerprint
from molt.data.rows import load_rows

ROWS = [
    {"q": [{"role": "user", "content": "1 + 1?"}], "a": "2"},
    {"q": [{"role": "user", "content": "2 + 2?", "name": "bob"}], "a": "4"},
    {"q": [{"role": "user", "content": "¿cuánto es 3 + 3?"}], "a": "6"},
]


def changed(number, **fields):
    rows = list(ROWS)
    rows[number] = rows[number] | fields
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        changed(2, q="other"),
        changed(0, q=[{"role": "system", "content": "1 + 1?"}]),
        list(reversed(ROWS)),
        ROWS[:2],
        [{"a": "2"}, *ROWS[1:]],
    ],
)
def test_other_prompts_differ(rows):
    assert fingerprint(rows, ["q"]) != fingerprint(ROWS, ["q"])


def test_only_the_named_columns_count():
    rows = changed(1, a="5", note="new")
    assert fingerprint(rows, ["q"]) == fingerprint(ROWS, ["q"])
    assert fingerprint(rows, ["a", None]) != fingerprint(ROWS, ["a", None])
    assert fingerprint(rows, [None, None]) == ""


def test_values_do_not_run_into_each_other():
    assert fingerprint([{"q": "ab"}, {"q": "c"}], ["q"]) != fingerprint([{"q": "a"}, {"q": "bc"}], ["q"])
    assert fingerprint([{"q": "1"}], ["q"]) != fingerprint([{"q": 1}], ["q"])


def test_the_format_and_the_name_of_the_file_do_not_count(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1, ensure_ascii=False))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "c.parquet")  # gives every message a `name`
    found = set()
    for name in ("a.jsonl", "b.json", "c.parquet"):
        rows = load_rows(str(tmp_path / name), flag="data.prompt_dataset")
        found.add(fingerprint(rows, ["q", "a"]))
    assert found == {fingerprint(ROWS, ["q", "a"])}


def test_a_large_dataset_is_read_here_and_there():
    assert list(_spaced(3)) == [0, 1, 2]
    places = _spaced(10 * MOST_ROWS)
    assert len(set(places)) == MOST_ROWS and places[0] == 0 and places[-1] == 10 * MOST_ROWS - 1
    assert len(set(_spaced(MOST_ROWS + 1))) == MOST_ROWS

    class Large:
        read = 0

        def __len__(self):
            return 10**7

        def __getitem__(self, i):
            self.read += 1
            return {"q": str(i)}

    rows = Large()
    fingerprint(rows, ["q"])
    assert rows.read == MOST_ROWS
