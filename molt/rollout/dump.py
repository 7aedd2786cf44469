"""Training batches on disk, as a run with `train.rollout_dump_dir` writes them.

    DIR/dump.json                                the settings that say which prompt a place in the stream is
    DIR/step_000001/buffer.json, buffer.npz      the batch that step 1 trained (`rollout/buffer.py`)

`rollout/replay.py` trains on them again, without engines.
"""

import shutil
from pathlib import Path

from molt.checkpoint_files import read_json, write_json
from molt.errors import DataError
from molt.rollout.buffer import is_buffer
from molt.types import Json

DUMP_FILE = "dump.json"
PROMPTS = "prompts"
"""In dump.json, among the settings: the fingerprint of the prompts; an older molt wrote none."""
OWNER = "output_dir"
"""In dump.json, beside the settings: the output directory of the run that may continue it."""


def batch_dir(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def check_dump(folder: Path, identity: Json, *, resumes: bool, output_dir: Path) -> None:
    """Raise `DataError` when `folder` has batches of another run, which a replay would mix with this run's.

    resumes: this run continues the one in `output_dir`, so its own batches may be there.
    """
    owner = _read(folder).get(OWNER, _owner(output_dir))
    continues_its_own = resumes and owner == _owner(output_dir)
    has_batches = next(folder.glob("step_*"), None) is not None
    if has_batches and not continues_its_own:
        raise DataError(
            f"`train.rollout_dump_dir` (={folder}) has batches of another run: a replay would train both. Use another "
            "directory, or remove them."
        )
    _require_same(folder, identity, "train.rollout_dump_dir")


def begin_dump(folder: Path, identity: Json, *, after_step: int, output_dir: Path) -> None:
    """Dump from now on the batches after `after_step`; later ones that are there are removed. -1: all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DUMP_FILE, identity | {OWNER: _owner(output_dir)})
    abandon_dump(folder, after_step)


def abandon_dump(folder: Path, step: int) -> None:
    """Remove the batches after `step`: the run continues from there."""
    for path in folder.glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def _owner(output_dir: Path) -> str:
    return str(output_dir.resolve())


def _read(folder: Path) -> Json:
    """The contents of dump.json; {} where there is none."""
    path = folder / DUMP_FILE
    if not path.exists():
        return {}
    return read_json(path)


def _require_same(folder: Path, identity: Json, flag: str) -> None:
    made_with = _read(folder)
    made_with.pop(OWNER, None)
    if PROMPTS not in made_with:
        identity = {name: value for name, value in identity.items() if name != PROMPTS}
    if made_with and made_with != identity:
        raise DataError(
            f"`{flag}` (={folder}) was made with {made_with}, this run has {identity}: its batches would hold other "
            "groups. Use the settings and the prompts of that run."
        )


def dumped_batches(folder: Path, identity: Json) -> int:
    """How many batches, counted from the first one, are there without a gap. Raises `DataError` if there is none."""
    _require_same(folder, identity, "train.rollout_replay_dir")
    steps = 0
    while is_buffer(batch_dir(folder, steps + 1)):
        steps += 1
    if steps == 0:
        raise DataError(
            f"`train.rollout_replay_dir` (={folder}) has no step_000001: there is nothing to replay. Name the "
            "directory that another run's --train.rollout_dump_dir wrote."
        )
    return steps


def begin_batch(folder: Path, step: int) -> Path:
    """The directory for the batch that `step` trained; a resumed run writes the same again.

    It counts as written when its records are there, so the arrays come first.
    """
    path = batch_dir(folder, step)
    path.mkdir(parents=True, exist_ok=True)
    return path
