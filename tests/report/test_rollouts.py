import pyarrow.parquet as pq
import pytest

from molt.columns import RESERVED, Column, token_columns
from molt.report.rollouts import RECORD_SCHEMA, TEXT_SCHEMA, rollouts_path, schema, step_of, text_runs, write_rollouts

TOKENS = token_columns([97, 98, 99, 100], [-1, -1, 7, 8], [0.0, 0.0, -0.5, -0.25])
LISTS = {"token_ids": [97, 98, 99, 100], "versions": [-1, -1, 7, 8], "logprobs": [0.0, 0.0, -0.5, -0.25]}


def row(**changes):
    return {
        "group_id": "0:3",
        "rollout": 1,
        "segment": 0,
        "reward": 0.5,
        "score": 1.0,
        "advantage": -0.25,
        "outcome": "scored",
        "truncated": True,
        "cut": "time",
        "version_trained": 8,
        "prompt_tokens": 2,
        "columns": TOKENS,
        **changes,
    }


def read(path):
    return pq.read_table(path).to_pylist()


def decode(ids):
    return "".join(map(chr, ids))


def test_rows_come_back_as_they_went_in(tmp_path):
    path = write_rollouts(tmp_path, 12, [row()], decode)
    assert path == rollouts_path(tmp_path, 12) and path.name == "step_000012.parquet" and step_of(path) == 12
    expected = {**row(), **LISTS, "text": "abcd", "runs": ["ab", "c", "d"]}
    del expected["columns"]
    assert read(path) == [expected]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_text_is_decoded_run_by_run(tmp_path):
    (stored,) = read(write_rollouts(tmp_path, 1, [row()], decode))
    assert stored["text"] == "abcd" and stored["runs"] == ["ab", "c", "d"]


def test_runs_never_split_characters_of_one_version():
    # é is two bytes here: decoding token by token would give two replacement characters.
    assert text_runs([97, 0xC3, 0xA9], [-1, 4, 4], lambda ids: bytes(ids).decode(errors="replace")) == ["a", "é"]


def test_a_misspelt_column_is_refused(tmp_path):
    with pytest.raises(KeyError, match="rewrad"):
        write_rollouts(tmp_path, 1, [row(rewrad=1.0)], decode)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_step_without_rollouts_is_a_file_with_the_schema(tmp_path):
    assert read(write_rollouts(tmp_path, 1, [], decode)) == []
    assert schema().field("token_ids").type.value_type == "int32"


def test_a_further_column_is_stored_and_filled_where_a_row_lacks_it(tmp_path):
    pairs = Column("pairs", "int16", fill=-1, shape=(2,))
    described = TOKENS.with_column(pairs, [[0, 0], [0, 0], [3, 4], [5, 6]])
    stored = read(write_rollouts(tmp_path, 1, [row(columns=described), row()], decode))
    assert [each["pairs"] for each in stored] == [[[0, 0], [0, 0], [3, 4], [5, 6]], [[-1, -1]] * 4]


def test_a_column_cannot_take_the_name_of_something_else_that_is_stored():
    assert {*RECORD_SCHEMA.names, *TEXT_SCHEMA.names} <= RESERVED
