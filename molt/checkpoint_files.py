"""The format number of a checkpoint's files, what each file holds, and how an older or newer one is read.

    write_json(path, fields)     `fields` with the format number
    read_json(path)              the fields again; missing ones get the defaults of `KEYS`

Rollout dumps and `best.json` are written and read the same way. `rollout/` and `train/` both use this file, so it is
below them.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.errors import CheckpointError
from molt.types import Json

FORMAT = 2
"""In every file that molt writes. Files of format 1 have no number, and some of them are bare lists (`LISTS`)."""

NUMBER = "format"
"""The name of the format number, in JSON objects and among arrays."""


@dataclass(frozen=True)
class Key:
    """What a reader uses where a file lacks a key."""

    default: Any = None
    warning: str = ""
    """What the run loses by it. Empty: it loses nothing."""
    required: bool = False
    """Nothing can stand in for it: a file without it is refused."""


REQUIRED = Key(required=True)
NO_BEST = "this best evaluation is forgotten"

KEYS: dict[str, dict[str, Key]] = {
    "manifest.json": {"files": REQUIRED},
    # RL: the driver's state. `step` is the number in the directory's name.
    "loop.json": {
        "total_steps": Key(),
        "rollbacks": Key([]),
        "best": Key(),
        "kl_coef": Key(0.0, "with algo.kl.target the coefficient starts again from algo.kl.init_coef"),
        "trips": Key([], "the breaker counts its trips from 0"),
        "ledger": Key({}, "the resume may repeat or skip prompts"),
        "data": Key({}),  # `require_same_run` warns
        "rows": Key({}),  # `require_same_rows` compares what is there
    },
    "loop.json ledger": {
        "position": Key(None, "the resume counts the prompts of its batches instead and may repeat or skip some"),
        "in_flight": Key([], "the prompts in flight at the save are skipped"),
        "filter": Key([0, 0], "the filtered groups are counted from 0"),
    },
    # The best evaluation, here and in `loop.json`.
    "best.json": {"step": Key(None, NO_BEST), "metric": Key(None, NO_BEST), "value": Key(None, NO_BEST)},
    # SFT. The step is the number in the directory's name.
    "extra.json": {"data": Key({}), "rows": Key({})},  # `require_same_run` warns
    # A model: one rank writes these for all.
    "trainer.json": {"optimizer_steps": Key(None, "the schedule continues from the optimizer's count of steps")},
    "breaker.json": {
        "norms": Key([], "the breaker has no limit until it has seen enough steps"),
        "spikes": Key([]),  # newer than the norms; without it one more spike may be skipped
    },
    # The finished groups, here and in a rollout dump.
    "buffer.json": {"groups": REQUIRED},
    "buffer.json group": {
        "epoch": REQUIRED,
        "position": REQUIRED,
        "start_step": Key(None, "the group counts as old as its oldest token"),
        "rollouts": REQUIRED,
    },
    "buffer.json rollout": {
        "outcome": REQUIRED,
        "samples": REQUIRED,
        "truncated": Key(False, "the rollout counts as complete"),
        "cut": Key(),  # a rollout that was truncated counts as cut by its length
        "turns": Key(1, "the rollout counts as one turn"),
        "duration_s": Key(0.0),
        "metrics": Key({}),
    },
    "buffer.json outcome": {"reward": REQUIRED, "score": Key(), "reason": Key()},
    "buffer.json sample": {"tokens": REQUIRED, "media": Key(0)},
    "dump.json": {},
}
"""By file, and by part of a file, the keys and their defaults."""

LISTS = {"buffer.json": "groups", "breaker.json": "norms"}
"""Files that were a bare list in format 1, and the key that holds this list since."""


def write_json(path: Path, fields: Mapping[str, object]) -> None:
    """Write `fields` with the format number."""
    path.write_text(to_json(fields))


def to_json(fields: Mapping[str, object]) -> str:
    return json.dumps({NUMBER: FORMAT, **fields})


def read_json(path: Path) -> Json:
    """The fields of a file, without the format number and complete by `KEYS`.

    Raises `CheckpointError` for a file of a newer format, or without a key that it must have.
    """
    content: Any = json.loads(path.read_text())
    if isinstance(content, list):
        content = {LISTS[path.name]: content}
    require_known_format(path, content.pop(NUMBER, 1))
    return with_defaults(content, path.name, path)


def require_known_format(path: Path, number: int) -> None:
    """Raise `CheckpointError` for a file of a newer format than this molt writes."""
    if number > FORMAT:
        raise CheckpointError(
            f"{path} has format {number}, this molt reads formats up to {FORMAT}: it would misread what the newer "
            "format added. Resume with the molt that wrote it or a newer one, or use another --ckpt.output_dir."
        )


def with_defaults(fields: Mapping[str, object], part: str, path: Path) -> Json:
    """`fields` and what `KEYS[part]` has for the missing ones, with a warning where that costs something.

    Raises `CheckpointError` where a required key is missing. path: the file, for messages.
    """
    complete = dict(fields)
    for name, key in KEYS[part].items():
        if name in complete:
            continue
        if key.required:
            raise CheckpointError(
                f"{path} has no `{name}` ({part}): molt cannot tell what was saved. Remove this checkpoint or dump to "
                "resume from the one before, or use another --ckpt.output_dir."
            )
        if key.warning:
            warnings.warn(f"{path} has no `{name}`: {key.warning}", stacklevel=2)
        complete[name] = key.default
    return complete
