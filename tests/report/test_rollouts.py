import pyarrow.parquet as pq
import pytest

from molt.report.rollouts import SCHEMA, rollouts_path, step_of, text_runs, write_rollouts


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
        "token_ids": [97, 98, 99, 100],
        "versions": [-1, -1, 7, 8],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        **changes,
    }


def read(path):
    return pq.read_table(path).to_pylist()


def decode(ids):
    return "".join(map(chr, ids))


def test_rows_come_back_as_they_went_in(tmp_path):
    path = write_rollouts(tmp_path, 12, [row()], decode)
    assert path == rollouts_path(tmp_path, 12) and path.name == "step_000012.parquet" and step_of(path) == 12
    assert read(path) == [row(text="abcd", runs=["ab", "c", "d"])]
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
    assert SCHEMA.field("token_ids").type.value_type == "int32"
