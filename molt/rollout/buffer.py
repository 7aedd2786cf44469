"""The buffer in a checkpoint: finished groups that are not trained yet, arrays and light records.

    buffer.json    the records: groups, their rollouts, and how many tokens each sample has
    buffer.npz     the per-token arrays of all samples, one after another in the order of the records

There is no pickle in either. A rollout dump has the same two files for every batch (`replay.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from molt.checkpoint_files import FORMAT, NUMBER, read_json, require_known_format, with_defaults, write_json
from molt.errors import CheckpointError
from molt.rollout.samples import describe
from molt.types import (
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
Arrays = dict[str, np.ndarray]
"""The columns of all samples, by name; see `COLUMNS`."""

RECORDS = "buffer.json"
ARRAYS = "buffer.npz"
COLUMNS = ("token_ids", "versions", "logprobs")


def save_buffer(directory: Path, groups: Sequence[Group], samples: Sequence[RolloutSamples]) -> None:
    """Write finished `groups`, or unscored ones, and their samples, `[group][rollout][segment]`."""
    _write_arrays(directory / ARRAYS, samples)
    records = [_group_record(group) for group in groups]
    write_json(directory / RECORDS, {"groups": records})


def load_buffer(directory: Path, prompt_at: Callable[[int, int], Prompt]) -> tuple[list[Group], list[RolloutSamples]]:
    """Inverse of `save_buffer`; `prompt_at(epoch, position)` gives the prompts back.

    Raises `CheckpointError` for files of a newer format, or without what a group needs to be trained.
    """
    path = directory / RECORDS
    reader = _SampleReader(_read_arrays(directory / ARRAYS))
    groups: list[Group] = []
    samples: list[RolloutSamples] = []

    for order, saved in enumerate(read_json(path)["groups"]):
        record = with_defaults(saved, "buffer.json group", path)
        prompt = prompt_at(record["epoch"], record["position"])
        rollouts: list[RolloutInfo] = []
        of_group: RolloutSamples = []
        for index, saved_rollout in enumerate(record["rollouts"]):
            rollout, segments = _load_rollout(path, saved_rollout, prompt.group_id, index, reader)
            rollouts.append(rollout)
            of_group.append(segments)

        start_step = record["start_step"]
        if start_step is None:
            start_step = _oldest_version(rollouts)
        groups.append(Group(prompt=prompt, order=order, start_step=start_step, rollouts=rollouts))
        samples.append(of_group)
    return groups, samples


def _write_arrays(path: Path, samples: Sequence[RolloutSamples]) -> None:
    flat = list(_flatten(samples))
    np.savez(
        path,
        format=np.array(FORMAT),
        token_ids=_end_to_end([sample.token_ids for sample in flat]),
        versions=_end_to_end([sample.versions for sample in flat]),
        logprobs=_end_to_end([sample.logprobs for sample in flat]),
    )


def _end_to_end(columns: list[np.ndarray]) -> np.ndarray:
    if not columns:
        return np.zeros(0)
    return np.concatenate(columns)


def _flatten(samples: Sequence[RolloutSamples]) -> Iterable[Sample]:
    for rollouts in samples:
        for segments in rollouts:
            yield from segments


def _read_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        if NUMBER in file:
            require_known_format(path, int(file[NUMBER]))
        missing = [name for name in COLUMNS if name not in file]
        if missing:
            raise CheckpointError(
                f"{path} has no {missing[0]}: its groups cannot be trained. Remove this checkpoint or dump to resume "
                "from the one before, or use another --ckpt.output_dir."
            )
        return {name: file[name] for name in COLUMNS}


class _SampleReader:
    """Takes one sample after another from the arrays of all."""

    def __init__(self, arrays: Arrays):
        self.arrays = arrays
        self.position = 0

    def next(self, tokens: int) -> Sample:
        """The next sample, of `tokens` tokens."""
        end = self.position + tokens
        part = slice(self.position, end)
        self.position = end
        return Sample(
            token_ids=self.arrays["token_ids"][part],
            versions=self.arrays["versions"][part],
            logprobs=self.arrays["logprobs"][part],
        )


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


def _load_rollout(
    path: Path, saved: Json, group_id: str, index: int, reader: _SampleReader
) -> tuple[RolloutInfo, list[Sample]]:
    record = with_defaults(saved, "buffer.json rollout", path)
    segments: list[Sample] = []
    infos: list[SampleInfo] = []
    for saved_sample in record["samples"]:
        sample_record = with_defaults(saved_sample, "buffer.json sample", path)
        sample = reader.next(sample_record["tokens"])
        info = describe(sample)
        segments.append(sample)
        infos.append(
            SampleInfo(
                tokens=info.tokens,
                trained_tokens=info.trained_tokens,
                oldest_version=info.oldest_version,
                media=sample_record["media"],
            )
        )

    rollout = RolloutInfo(
        group_id=group_id,
        index=index,
        outcome=_load_outcome(path, record["outcome"]),
        truncated=record["truncated"],
        turns=record["turns"],
        samples=tuple(infos),
        duration_s=record["duration_s"],
        metrics=record["metrics"],
    )
    return rollout, segments


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


def _oldest_version(rollouts: Sequence[RolloutInfo]) -> int:
    """The oldest version among the generated tokens of a group, 0 where there is none."""
    versions = [sample.oldest_version for rollout in rollouts for sample in rollout.samples if sample.trained_tokens]
    return min(versions, default=0)
