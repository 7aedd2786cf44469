"""The rollout store: the tokens of every trained sample, one parquet file per step.

One row per sample (a segment of a rollout). Token ids are the record; `text` and `runs` are views.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from molt.columns import ALWAYS, Column, TokenColumns
from molt.types import Json, PolicyFailure, RolloutInfo, Sample

RECORD_SCHEMA = pa.schema(
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
    ]
)
"""What a row says of its sample."""

TEXT_SCHEMA = pa.schema(
    [
        ("text", pa.string()),  # everything decoded
        ("runs", pa.list_(pa.string())),  # decoded piece by piece: one string per run of equal `versions`
    ]
)
"""Views of the tokens."""


def schema(further: Sequence[Column] = ()) -> pa.Schema:
    """The columns of a stored file: the record, the token columns (those of every stream, then `further`), the text."""
    tokens = [(column.name, _list_type(column)) for column in (*ALWAYS, *further)]
    return pa.schema([*RECORD_SCHEMA, *pa.schema(tokens), *TEXT_SCHEMA])


def _list_type(column: Column) -> pa.DataType:
    """A list with an entry per token."""
    entry = pa.from_numpy_dtype(np.dtype(column.dtype))
    for _ in column.shape:
        entry = pa.list_(entry)
    return pa.list_(entry)


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


@dataclass(frozen=True)
class StoredGroup:
    """What is stored of a trained group besides its arrays."""

    rollouts: Sequence[RolloutInfo]
    advantages: Sequence[float | None]
    """Of each rollout; None where a token estimator computes them on the ranks."""
    version_trained: int
    """Of the weights that the group was trained on."""


def rollout_rows(group: StoredGroup, samples: Sequence[Sequence[Sample]]) -> list[Json]:
    """The rows of one group for `write_rollouts`: one per segment. samples: `[rollout][segment]`."""
    rows = []
    for rollout, advantage, segments in zip(group.rollouts, group.advantages, samples, strict=True):
        for index, sample in enumerate(segments):
            rows.append(
                {
                    "group_id": rollout.group_id,
                    "rollout": rollout.index,
                    "segment": index,
                    "reward": rollout.reward,
                    "score": rollout.score,
                    "advantage": advantage,
                    "outcome": _outcome_name(rollout),
                    "truncated": rollout.truncated,
                    "cut": rollout.cut,
                    "version_trained": group.version_trained,
                    "prompt_tokens": _prompt_tokens(sample),
                    "columns": sample.columns,
                }
            )
    return rows


def _outcome_name(rollout: RolloutInfo) -> str:
    if isinstance(rollout.outcome, PolicyFailure):
        return "policy_failure"
    return "scored"


def _prompt_tokens(sample: Sample) -> int:
    """Tokens before the first one that the policy generated."""
    generated = np.flatnonzero(sample.mask)
    if len(generated) == 0:
        return len(sample.token_ids)
    return int(generated[0])


def write_rollouts(run_dir: Path, step: int, rows: list[Json], decode: Callable[[list[int]], str]) -> Path:
    """Store `rows` atomically; `text` and `runs` are filled in.

    A row has the keys of `RECORD_SCHEMA`, and `columns`, its `TokenColumns`. Raises `KeyError` for a key that does not
    exist, so that a misspelt one is not lost in silence.
    """
    further: dict[Column, None] = {}
    for row in rows:
        further.update(dict.fromkeys(row["columns"].further))
    complete = [_complete(row, list(further), decode) for row in rows]
    table = pa.Table.from_pylist(complete, schema=schema(list(further)))

    path = rollouts_path(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".parquet.new")
    pq.write_table(table, aside, compression="zstd")
    os.replace(aside, path)
    return path


def _complete(row: Json, further: Sequence[Column], decode: Callable[[list[int]], str]) -> Json:
    """The row as it is stored."""
    record = dict(row)
    columns: TokenColumns = record.pop("columns")
    unknown = record.keys() - set(RECORD_SCHEMA.names)
    if unknown:
        raise KeyError(
            f"rollout columns {sorted(unknown)} do not exist: they would be lost. See rollouts.RECORD_SCHEMA."
        )

    for column in (*ALWAYS, *further):
        record[column.name] = columns.values(column).tolist()
    record["text"] = decode(record["token_ids"])
    record["runs"] = text_runs(record["token_ids"], record["versions"], decode)
    return record
