"""Training batches on disk: written by a run with `train.rollout_dump_dir`, trained again without engines.

    DIR/dump.json                                the settings that say which prompt a place in the stream is
    DIR/step_000001/buffer.json, buffer.npz      the batch that step 1 trained (`rollout/buffer.py`)

`Replay` stands where a run has its `Producer`, and `Unpublished` where it has its `Publisher`.
"""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molt.checkpoint_files import read_json, write_json
from molt.data.prompts import PromptStream
from molt.errors import DataError, MoltError
from molt.rollout.buffer import load_buffer, save_buffer
from molt.rollout.runner_pool import own
from molt.types import Group, Metric, Sample

OWNER = "output_dir"
"""In dump.json, beside the settings: the run that may go on with it."""


def batch_dir(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def begin_dump(folder: Path, identity: dict[str, Any], step: int | None, owner: Path) -> None:
    """Dump from now on what is trained after `step`; None: by a run that is no resume. owner: its output directory.

    Raises `DataError` when the directory has batches of another run, which a replay would mix up with those of this.
    """
    mine = step is not None and _read(folder).get(OWNER, str(owner.resolve())) == str(owner.resolve())
    if not mine and next(folder.glob("step_*"), None):
        raise DataError(
            f"`train.rollout_dump_dir` (={folder}) has batches of another run: a replay would train both. Use another "
            "directory, or remove them."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _require_same(folder, identity, "train.rollout_dump_dir")
    write_json(folder / "dump.json", identity | {OWNER: str(owner.resolve())})
    abandon_dump(folder, -1 if step is None else step)


def abandon_dump(folder: Path, step: int) -> None:
    """Remove what is later than `step`: the run goes on from there."""
    for path in folder.glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def _read(folder: Path) -> dict[str, Any]:
    """What its dump.json says; {} where there is none."""
    path = folder / "dump.json"
    return read_json(path) if path.exists() else {}


def _require_same(folder: Path, identity: dict[str, Any], flag: str) -> None:
    made = {key: value for key, value in _read(folder).items() if key != OWNER}
    if made and made != identity:
        raise DataError(
            f"`{flag}` (={folder}) was made with {made}, this run has {identity}: its places in the stream would be "
            "other prompts. Use the settings of that run."
        )


def dumped(folder: Path, identity: dict[str, Any]) -> int:
    """How many batches from the first one on are there without a gap. Raises `DataError` if it is none."""
    _require_same(folder, identity, "train.rollout_replay_dir")
    steps = 0
    while (batch_dir(folder, steps + 1) / "buffer.json").exists():
        steps += 1
    if not steps:
        raise DataError(
            f"`train.rollout_replay_dir` (={folder}) has no step_000001: there is nothing to replay. Name the "
            "directory that another run's --train.rollout_dump_dir wrote."
        )
    return steps


def dump_batch(folder: Path, step: int, groups: Sequence[Group], samples: Sequence[list[list[Sample]]]) -> None:
    """Write the batch that `step` trained; a resume writes the same again."""
    path = batch_dir(folder, step)
    path.mkdir(parents=True, exist_ok=True)
    save_buffer(path, groups, samples)


class Replay:
    """The batches of a dump, one after another; what a `Producer` does to get its own is done."""

    patience_s = 0.0
    done = False
    judged = filtered = 0
    NOTHING: dict[str, Any] = {}

    def __init__(self, folder: Path, stream: PromptStream):
        self.folder, self.stream = folder, stream
        self.step = 0
        self.stopped, self.failed = asyncio.Event(), asyncio.Event()
        self.error: MoltError | None = None

    async def run(self) -> None:
        """Nothing is generated."""

    async def batch(self, batch_size: int, *, stalled_after_s: float) -> list[Group]:
        """The batch that step `step + 1` trained; [] after the last one. Raises what `fail` was given."""
        if self.error is not None:
            raise self.error
        path = batch_dir(self.folder, self.step + 1)
        if self.stopping or not (path / "buffer.json").exists():
            return []
        at = lambda epoch, position: self.stream[self.stream.index(epoch, position)]  # noqa: E731
        groups, samples = await asyncio.to_thread(load_buffer, path, at)
        for group, heavy in zip(groups, samples, strict=True):
            group.samples = own(heavy)
        return groups

    def close(self, groups: Sequence[Group], step: int) -> None:
        self.step = step

    def stop(self) -> None:
        self.stopped.set()

    @property
    def stopping(self) -> bool:
        return self.stopped.is_set()

    async def drain(self) -> None:
        """Nothing is in flight."""

    def resume(self) -> None:
        """There was nothing to hold."""

    def fail(self, error: MoltError) -> None:
        self.error = self.error or error
        self.failed.set()

    def ledger(self) -> dict[str, Any]:
        return {}

    def restore(self, ledger: dict[str, Any], finished: Sequence[Group], step: int) -> None:
        self.step = step

    def finished_groups(self) -> list[Group]:
        return []

    def take_metrics(self) -> list[dict[str, Metric]]:
        return []


class Unpublished:
    """Nobody generates, so the weights go nowhere."""

    def forget(self) -> None:
        """It knows nobody."""

    async def publish(self, version: int) -> dict[str, Metric]:
        return {}
