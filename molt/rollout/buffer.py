"""The buffer in a checkpoint: finished groups that are not trained yet, arrays and light records.

    buffer.json    the records: groups, their rollouts, and how many tokens each sample has
    buffer.npz     the token columns of all samples, one after another in the order of the records, and `columns`: the
                   declarations, as JSON, of those that not every stream has

There is no pickle in either. The driver writes and reads the records, a keeper the arrays (`keeper_worker.py`). A
rollout dump has the same two files for every batch (`replay.py`).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from molt.checkpoint_files import FORMAT, NUMBER, read_json, require_known_format, with_defaults, write_json
from molt.columns import ALWAYS, TokenColumns, concat, declaration, declared
from molt.errors import CheckpointError
from molt.rollout.samples import describe
from molt.types import (
    CutReason,
    Group,
    Json,
    Outcome,
    PolicyFailure,
    Prompt,
    RolloutInfo,
    Sample,
    SampleInfo,
    Scored,
    Unscored,
)

RolloutSamples = list[list[Sample]]
"""The samples of one group, `[rollout][segment]`."""
SampleInfos = list[list[SampleInfo]]
"""What the driver knows of them."""

RECORDS = "buffer.json"
ARRAYS = "buffer.npz"
DECLARATIONS = "columns"
"""In buffer.npz, the declarations of the columns besides `ALWAYS`."""


def write_records(directory: Path, groups: Sequence[Group]) -> None:
    """Write the light part of finished groups, or of unscored ones."""
    records = [_group_record(group) for group in groups]
    write_json(directory / RECORDS, {"groups": records})


def write_arrays(directory: Path, samples: Sequence[RolloutSamples]) -> None:
    """Write the heavy part of these groups, `[group][rollout][segment]`, in the order of their records."""
    columns = concat([sample.columns for sample in _flatten(samples)])
    arrays = {column.name: array for column, array in columns.arrays.items()}
    declarations = [declaration(column) for column in columns.further]
    np.savez(
        directory / ARRAYS,
        allow_pickle=False,
        **{NUMBER: np.array(FORMAT), DECLARATIONS: np.array(json.dumps(declarations))},
        **arrays,
    )


def is_buffer(directory: Path) -> bool:
    """Whether there is one."""
    return (directory / RECORDS).exists()


def count_groups(directory: Path) -> int:
    """How many groups the buffer holds."""
    return len(read_json(directory / RECORDS)["groups"])


def read_arrays(directory: Path) -> list[RolloutSamples]:
    """The heavy part: the samples of each group. Raises `CheckpointError` for a newer format, or a missing column."""
    path = directory / RECORDS
    reader = _SampleReader(_read_columns(directory / ARRAYS))
    samples: list[RolloutSamples] = []
    for saved in read_json(path)["groups"]:
        group = with_defaults(saved, "buffer.json group", path)
        of_group: RolloutSamples = []
        for saved_rollout in group["rollouts"]:
            rollout = with_defaults(saved_rollout, "buffer.json rollout", path)
            of_group.append([reader.next(_sample_record(sample, path)["tokens"]) for sample in rollout["samples"]])
        samples.append(of_group)
    return samples


def described(samples: Sequence[RolloutSamples]) -> list[SampleInfos]:
    """What the driver keeps of the samples, `[group][rollout][segment]`."""
    infos: list[SampleInfos] = []
    for of_group in samples:
        infos.append([[describe(sample) for sample in segments] for segments in of_group])
    return infos


def read_groups(directory: Path, prompt_at: Callable[[int, int], Prompt], infos: Sequence[SampleInfos]) -> list[Group]:
    """The light part of a buffer. infos: `described` of its arrays; prompt_at: `(epoch, position)` to the prompt.

    Raises `CheckpointError` for files of a newer format, or without what a group needs to be trained.
    """
    path = directory / RECORDS
    groups: list[Group] = []
    for order, (saved, of_group) in enumerate(zip(read_json(path)["groups"], infos, strict=True)):
        record = with_defaults(saved, "buffer.json group", path)
        prompt = prompt_at(record["epoch"], record["position"])
        rollouts: list[RolloutInfo] = []
        for index, (saved_rollout, segments) in enumerate(zip(record["rollouts"], of_group, strict=True)):
            rollouts.append(_load_rollout(path, saved_rollout, prompt.group_id, index, segments))

        start_step = record["start_step"]
        if start_step is None:
            start_step = _oldest_version(rollouts)
        groups.append(Group(prompt=prompt, order=order, start_step=start_step, rollouts=rollouts))
    return groups


def _flatten(samples: Sequence[RolloutSamples]) -> Iterable[Sample]:
    for rollouts in samples:
        for segments in rollouts:
            yield from segments


def _read_columns(path: Path) -> TokenColumns:
    with np.load(path, allow_pickle=False) as file:
        if NUMBER in file:
            require_known_format(path, int(file[NUMBER]))
        columns = list(ALWAYS)
        if DECLARATIONS in file:
            columns += [declared(record) for record in json.loads(str(file[DECLARATIONS]))]
        missing = [column.name for column in columns if column.name not in file]
        if missing:
            raise CheckpointError(
                f"{path} has no {missing[0]}: its groups cannot be trained. Remove this checkpoint or dump to resume "
                "from the one before, or use another --ckpt.output_dir."
            )
        return TokenColumns({column: column.array(file[column.name]) for column in columns})


class _SampleReader:
    """Takes one sample after another from the columns of all."""

    def __init__(self, columns: TokenColumns):
        self.columns = columns
        self.position = 0

    def next(self, tokens: int) -> Sample:
        """The next sample, of `tokens` tokens."""
        start = self.position
        self.position += tokens
        return Sample(self.columns.slice(start, self.position))


def _group_record(group: Group) -> Json:
    rollouts = group.rollouts or group.unscored
    if not rollouts:
        raise ValueError(f"group {group.prompt.group_id} is still running: it has no records yet")
    return {
        "epoch": group.prompt.epoch,
        "position": group.prompt.position,
        "start_step": group.start_step,
        "rollouts": [_rollout_record(rollout) for rollout in rollouts],
    }


def _rollout_record(rollout: RolloutInfo) -> Json:
    """A rollout as JSON. The failures of earlier attempts are already counted and not kept."""
    return {
        "group_id": rollout.group_id,
        "index": rollout.index,
        "outcome": _outcome_record(rollout.outcome),
        "truncated": rollout.truncated,
        "cut": rollout.cut,
        "turns": rollout.turns,
        "samples": [asdict(sample) for sample in rollout.samples],
        "duration_s": rollout.duration_s,
        "metrics": rollout.metrics,
    }


def _outcome_record(outcome: Outcome) -> Json:
    if isinstance(outcome, Unscored):
        return {"trajectory": outcome.trajectory}
    if isinstance(outcome, PolicyFailure):
        return {"reward": outcome.reward, "reason": outcome.reason}
    if isinstance(outcome, Scored):
        return {"reward": outcome.reward, "score": outcome.score}
    raise ValueError(f"a rollout failed ({outcome.reason}): its group has no record")


def _sample_record(saved: Json, path: Path) -> Json:
    return with_defaults(saved, "buffer.json sample", path)


def _load_rollout(path: Path, saved: Json, group_id: str, index: int, segments: Sequence[SampleInfo]) -> RolloutInfo:
    record = with_defaults(saved, "buffer.json rollout", path)
    infos = []
    for saved_sample, info in zip(record["samples"], segments, strict=True):
        infos.append(replace(info, media=_sample_record(saved_sample, path)["media"]))
    return RolloutInfo(
        group_id=group_id,
        index=index,
        outcome=_load_outcome(path, record["outcome"]),
        cut=_load_cut(record),
        turns=record["turns"],
        samples=tuple(infos),
        duration_s=record["duration_s"],
        metrics=record["metrics"],
    )


def _load_outcome(path: Path, saved: Json) -> Scored | PolicyFailure | Unscored:
    if "trajectory" in saved:
        return Unscored(saved["trajectory"])
    record = with_defaults(saved, "buffer.json outcome", path)
    reward = record["reward"]
    if record["reason"] is not None:
        return PolicyFailure(reward, record["reason"])
    score = record["score"]
    if score is None:
        score = reward
    return Scored(reward=reward, score=score)


def _load_cut(record: Json) -> CutReason | None:
    """A file of an older molt says only whether the rollout was cut, and length is by far the most frequent reason."""
    if record["truncated"] and record["cut"] is None:
        return "length"
    return record["cut"]


def _oldest_version(rollouts: Sequence[RolloutInfo]) -> int:
    """The oldest version among the generated tokens of a group, 0 where there is none."""
    versions = [sample.oldest_version for rollout in rollouts for sample in rollout.samples if sample.trained_tokens]
    return min(versions, default=0)
