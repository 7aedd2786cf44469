"""The buffer in a checkpoint: finished groups that are not trained yet, arrays and light records.

`buffer.json` holds the records, `buffer.npz` all per-token arrays end to end (no pickle in either).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from molt.types import Group, PolicyFailure, Prompt, RolloutInfo, Sample, SampleInfo, Scored

ARRAYS = ("token_ids", "versions", "logprobs")


def save_buffer(directory: Path, groups: Sequence[Group], samples: Sequence[list[list[Sample]]]) -> None:
    """Write the finished `groups` and their samples, `[group][rollout][segment]`."""
    flat = [sample for rollouts in samples for segments in rollouts for sample in segments]
    arrays = {name: np.concatenate([getattr(s, name) for s in flat]) if flat else np.zeros(0) for name in ARRAYS}
    np.savez(directory / "buffer.npz", **arrays)
    records = [
        {
            "epoch": group.prompt.epoch,
            "position": group.prompt.position,
            "start_step": group.start_step,
            "rollouts": [_record(rollout) for rollout in group.rollouts],
        }
        for group in groups
    ]
    (directory / "buffer.json").write_text(json.dumps(records))


def load_buffer(
    directory: Path, prompt_at: Callable[[int, int], Prompt]
) -> tuple[list[Group], list[list[list[Sample]]]]:
    """Inverse of `save_buffer`; `prompt_at(epoch, position)` gives the prompts back."""
    with np.load(directory / "buffer.npz", allow_pickle=False) as file:
        arrays = [file[name] for name in ARRAYS]
    groups, samples, at = [], [], 0
    for order, record in enumerate(json.loads((directory / "buffer.json").read_text())):
        prompt = prompt_at(record["epoch"], record["position"])
        rollouts = [_rollout(fields) for fields in record["rollouts"]]
        groups.append(Group(prompt, order, record["start_step"], rollouts))
        samples.append([])
        for rollout in rollouts:
            samples[-1].append([])
            for info in rollout.samples:
                samples[-1][-1].append(Sample(*(array[at : at + info.tokens] for array in arrays)))
                at += info.tokens
    return groups, samples


def _record(rollout: RolloutInfo) -> dict:
    """A rollout as JSON. Attempts that failed before are counted already and not kept."""
    outcome = rollout.outcome
    kept = {"reward": outcome.reward, "score": outcome.score}
    if isinstance(outcome, PolicyFailure):
        kept = {"reward": outcome.reward, "reason": outcome.reason}
    fields = {k: v for k, v in vars(rollout).items() if k not in ("outcome", "samples", "failures")}
    return fields | {"outcome": kept, "samples": [asdict(sample) for sample in rollout.samples]}


def _rollout(record: dict) -> RolloutInfo:
    outcome = (PolicyFailure if "reason" in record["outcome"] else Scored)(**record["outcome"])
    samples = tuple(SampleInfo(**sample) for sample in record["samples"])
    return RolloutInfo(**record | {"outcome": outcome, "samples": samples})
