"""Where a run writes: whether it can, and whether it would write over what it reads.

The final model replaces the one that is in `ckpt.output_dir`; `best` and old checkpoints are deleted.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from molt.cli.findings import Findings
from molt.config import CkptConfig, RLConfig, comma_list
from molt.errors import ConfigError
from molt.setting import name_of, names

RL = names(RLConfig)
REPLACED = ("best", "candidate", "checkpoints", "run")
"""Folders of an output directory whose contents a run replaces and deletes."""


@dataclass(frozen=True)
class Place:
    """A setting and the path that it names."""

    setting: object
    path: Path

    @property
    def label(self) -> str:
        return f"`{name_of(self.setting)}` (={self.path})"

    @property
    def real(self) -> Path:
        """Without symbolic links."""
        return self.path.resolve()


def check_rl_places(found: Findings, config: RLConfig) -> None:
    """Add what is wrong with the directories that an RL run writes."""
    optional = [
        (RL.train.rollout_dump_dir, config.train.rollout_dump_dir),
        (RL.reward.cache_dir, config.reward.cache_dir),
        (RL.logger.tensorboard_dir, config.logger.tensorboard_dir),
    ]
    written = [Place(RL.ckpt.output_dir, config.ckpt.output_dir), Place(RL.ckpt.path, config.ckpt.checkpoints)]
    written += [Place(setting, path) for setting, path in optional if path is not None]
    models = [
        (RL.actor.model_name_or_path, config.actor.model_name_or_path),
        (RL.ref.model_name_or_path, config.ref.model_name_or_path),
        (RL.critic.model_name_or_path, config.critic.model_name_or_path),
    ]
    datasets = [
        (RL.data.prompt_dataset, config.data.prompt_dataset),
        (RL.eval.dataset, config.eval.dataset),
    ]
    read = [*models_here(models), *datasets_here(datasets)]
    if config.train.rollout_replay_dir is not None:
        read.append(Place(RL.train.rollout_replay_dir, config.train.rollout_replay_dir))
    check_places(found, config.ckpt, written, read)


def models_here(settings: Sequence[tuple[object, str]]) -> Iterator[Place]:
    """The models that are directories here; the hub's are not."""
    for setting, path in settings:
        if path and os.path.isdir(path):
            yield Place(setting, Path(path))


def datasets_here(settings: Sequence[tuple[object, str | None]]) -> Iterator[Place]:
    """The files and directories of comma lists of datasets."""
    for setting, paths in settings:
        for name in comma_list(paths or ""):
            base, at, folder = name.rpartition("@")
            if os.path.exists(name):
                yield Place(setting, Path(name))
            elif at and os.path.exists(os.path.join(base, folder)):
                yield Place(setting, Path(base, folder))


def check_places(found: Findings, ckpt: CkptConfig, written: Sequence[Place], read: Sequence[Place]) -> None:
    """Add what is wrong with the directories that a run writes, given what it reads."""
    for place in written:
        if not place.path.is_relative_to(ckpt.output_dir):  # which is checked with what it holds
            found.attempt(check_writable, place)
    for source in read:
        overwritten = _overwriting(ckpt, written, source)
        if overwritten is not None:
            found.add("error", overwritten)
            return  # an output that is wrong is so for each of its inputs
    _warn_of_model(found, ckpt)
    for source in read:
        _warn_of_outputs_in_dataset(found, written, source)


def check_writable(place: Place) -> None:
    """Raise if nothing could be written there."""
    folder = nearest_existing(place.path)
    problem = ""
    if not folder.is_dir():
        problem = "a file"
    elif not is_writable(folder):
        problem = "not writable"
    if problem:
        raise ConfigError(
            f"{place.label}: {folder} is {problem}, so nothing of the run could be saved. Use a directory that you may "
            "write to."
        )


def is_writable(folder: Path) -> bool:
    """Whether it takes a file with a few bytes. Permission bits are not enough: root passes them on a file system that
    takes no files, and a full one takes an empty file."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            return True
    except OSError:
        return False


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _overwriting(ckpt: CkptConfig, written: Sequence[Place], source: Place) -> str | None:
    """What the run would do to what it reads, or None."""
    fix = "Use another directory for what it writes"
    for place in written:
        if place.real == source.real:
            return (
                f"{place.label} is {source.label}: the run would write over what it reads, and the original would be "
                f"lost. {fix}."
            )
    replaced = [ckpt.output_dir / name for name in REPLACED] + [ckpt.checkpoints]
    for folder in replaced:
        if source.real.is_relative_to(folder.resolve()):
            return (
                f"{source.label} is in {folder}, whose files the run replaces and deletes, so it would lose what it "
                f"reads. {fix}: --ckpt.output_dir."
            )
    return None


def _warn_of_model(found: Findings, ckpt: CkptConfig) -> None:
    """A model of somebody else in the output directory; a run that is resumed replaces its own."""
    model = ckpt.output_dir / "config.json"
    is_of_a_run = ckpt.run_dir.exists()
    if model.is_file() and not is_of_a_run:
        found.add(
            "warning",
            f"`ckpt.output_dir` (={ckpt.output_dir}) holds a model, which the final one replaces. Use another "
            "--ckpt.output_dir to keep it.",
        )


def _warn_of_outputs_in_dataset(found: Findings, written: Sequence[Place], source: Place) -> None:
    """A directory of data files is searched to any depth; one that `datasets` saved has a list of its files."""
    is_dataset = name_of(source.setting).endswith("dataset")
    is_saved = any((source.path / name).exists() for name in ("state.json", "dataset_dict.json"))
    if not is_dataset or not source.path.is_dir() or is_saved:
        return
    for place in written:
        if place.real.is_relative_to(source.real):
            found.add(
                "warning",
                f"{place.label} is inside {source.label}: what the run writes may be read as data when it is resumed. "
                "Use a directory elsewhere.",
            )
            return
