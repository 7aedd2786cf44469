"""The rollout store: the tokens of every trained sample, one parquet file per step.

One row per sample (a segment of a rollout). Token ids are the record; `text` and `runs` are views.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from molt.types import Json

SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),  # `epoch:position` of the prompt
        ("rollout", pa.int32()),  # index in the group
        ("segment", pa.int32()),  # index in the rollout; 0 unless its history was rewritten or branched
        ("reward", pa.float32()),  # as the agent returned it, before clipping and shaping
        ("score", pa.float32()),  # evaluation counts it
        ("advantage", pa.float32()),  # of the rollout, before whitening; null for a token estimator
        ("outcome", pa.string()),  # `scored` or `policy_failure`
        ("truncated", pa.bool_()),  # cut before its end
        ("cut", pa.string()),  # why: length, turns, time or agent; null if it was not
        ("version_trained", pa.int32()),  # weights that were trained on it
        ("prompt_tokens", pa.int32()),  # tokens before the first generated one
        ("token_ids", pa.list_(pa.int32())),
        ("versions", pa.list_(pa.int32())),  # weights that sampled each token, -1: not generated
        ("logprobs", pa.list_(pa.float32())),  # behaviour log-prob, 0: not generated
        ("text", pa.string()),  # everything decoded
        ("runs", pa.list_(pa.string())),  # decoded piece by piece: one string per run of equal `versions`
    ]
)


def runs_of_versions(versions: Iterable[int]) -> list[tuple[int, int]]:
    """`[-1, 7, 7]` gives `[(-1, 1), (7, 2)]`: each version with how many tokens in a row have it."""
    runs = []
    for version, tokens in groupby(versions):
        runs.append((version, len(list(tokens))))
    return runs


def text_runs(token_ids: Sequence[int], versions: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """`[1, 2, 3]` at versions `[-1, 7, 7]` gives `[decode([1]), decode([2, 3])]`."""
    ids = [int(token) for token in token_ids]
    texts = []
    start = 0
    for _, length in runs_of_versions(int(version) for version in versions):
        texts.append(decode(ids[start : start + length]))
        start += length
    if start != len(ids):
        raise ValueError(f"{len(ids)} token ids with {start} versions: not aligned")
    return texts


def rollouts_path(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step:06d}.parquet"


def step_of(path: Path) -> int:
    """The step of a stored file: 12 for `step_000012.parquet`."""
    return int(path.stem.removeprefix("step_"))


def write_rollouts(run_dir: Path, step: int, rows: list[Json], decode: Callable[[list[int]], str]) -> Path:
    """Store `rows` (keys: the columns of `SCHEMA`) atomically; `text` and `runs` are filled in.

    Raises `KeyError` for a column that does not exist, so that a misspelt one is not lost in silence.
    """
    complete = [_with_text(row, decode) for row in rows]
    table = pa.Table.from_pylist(complete, schema=SCHEMA)

    path = rollouts_path(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".parquet.new")
    pq.write_table(table, aside, compression="zstd")
    os.replace(aside, path)
    return path


def _with_text(row: Json, decode: Callable[[list[int]], str]) -> Json:
    unknown = row.keys() - set(SCHEMA.names)
    if unknown:
        raise KeyError(f"rollout columns {sorted(unknown)} do not exist: they would be lost. See rollouts.SCHEMA.")

    ids = [int(token) for token in row["token_ids"]]
    return {
        **row,
        "text": decode(ids),
        "runs": text_runs(ids, row["versions"], decode),
    }
