"""Atomic checkpoints, and the Hugging Face export.

    checkpoints/step_000020/        renamed from step_000020.tmp when everything is on disk
        model/                      sharded parameters and optimizer state (torch.distributed.checkpoint)
        trainer.json                optimizer steps, skipped ones included
        breaker.json                RL: gradient norms of the last steps taken
        rng_00000.pt                random state, one per data-parallel rank
        extra.json, ...             whatever the owner of the checkpoint adds (position in the data, buffer)
        manifest.json               written last: every file with its size

Two phases, because in RL the driver, another process, adds files: every rank calls `write_part` and waits for
what it returns (`written`) while training goes on, then one process, the owner, calls `commit`. A directory without
a complete manifest is not a checkpoint.
Everything is JSON or tensors; the pickles that torch.distributed.checkpoint writes for itself are read
only from a directory whose manifest is complete. Every file has a format number (`molt/checkpoint_files.py`); that of
`model/` is in `trainer.json`.
"""

import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from molt.checkpoint_files import FORMAT, NUMBER, read_json, require_known_format, write_json
from molt.errors import CheckpointError
from molt.models.forward import PolicyModel
from molt.models.generation import exported_generation_config
from molt.parallel.mesh import Mesh, SavingGroup
from molt.parallel.shape import ALL_AXES
from molt.publish.gather import named_full_tensors
from molt.train.optimizer import place

MANIFEST = "manifest.json"
SHARD_BYTES = 5 * 2**30
GIB = 2**30
AFTER_A_CHANGE = {
    "labels": "the prompts are the same, and from now on those of the present dataset count.",
    "evaluation rows": "scores before and after this resume, and the best one, are not of the same rows.",
}
"""What a resume means with other fingerprints of the rows, by their name."""


def temporary(directory: Path, step: int) -> Path:
    """Where the parts of a checkpoint are collected until `commit`."""
    return directory / f"step_{step:06d}.tmp"


def begin(directory: Path, step: int) -> Path:
    """Make an empty temporary directory. The owner calls it before any `write_part`. Raises `CheckpointError`."""
    tmp = temporary(directory, step)
    with failing(tmp):
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    return tmp


def write_part(
    tmp: Path,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LambdaLR,
    *,
    mesh: Mesh,
    group: SavingGroup,
    background: bool,
) -> Future:
    """Write what the training ranks hold. Every rank calls it, with the same directory on a shared disk.

    group: `mesh.saving_group()`, used for nothing but saves, one at a time. background: return as soon as the state is
    copied to host memory; pass the future to `written` to know that rank's part is on disk. Rank 0's is the last one.
    Raises `CheckpointError` when the disk does not take it.
    """
    tensors = _tensors(model, optimizer)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with failing(tmp, needed=needed):
        tmp.mkdir(exist_ok=True)
        if mesh.is_first_peer:  # peers draw the same numbers
            _write_random_state(_random_state_path(tmp, mesh))
        if mesh.is_writer:
            write_json(tmp / "trainer.json", {"optimizer_steps": scheduler.last_epoch})

        # Collectives on `group`, over all axes: every rank. They also remove duplicates of replicated tensors.
        if background:
            saving = async_save(tensors, checkpoint_id=tmp / "model", process_group=group)
            assert isinstance(saving, Future)  # a pair of futures only where the caller picks a stager
            return saving
        metadata = save(tensors, checkpoint_id=tmp / "model", process_group=group)
        done: Future = Future()
        done.set_result(metadata)
        return done


def _random_state_path(folder: Path, mesh: Mesh) -> Path:
    """The file of this rank and its peers."""
    return folder / f"rng_{mesh.data_rank:05d}.pt"


def _write_random_state(path: Path) -> None:
    """The host's generator alone: dropout is off, so nothing draws on a device."""
    content = io.BytesIO()  # torch itself reports a full disk as any other error
    torch.save({NUMBER: FORMAT, "state": torch.get_rng_state()}, content)
    path.write_bytes(content.getvalue())


def _read_random_state(path: Path) -> None:
    """A rank whose file does not exist, because there were fewer ranks, keeps its fresh state."""
    if not path.exists():
        return
    content: Any = torch.load(path, weights_only=True)
    if isinstance(content, Tensor):  # format 1
        content = {"state": content}
    require_known_format(path, content.get(NUMBER, 1))
    torch.set_rng_state(content["state"])


def written(tmp: Path, part: Future) -> None:
    """Wait until a rank's part is on disk. Raises `CheckpointError`."""
    with failing(tmp):
        part.result()


@contextmanager
def failing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what a full or unwritable disk raises into a `CheckpointError`. needed: bytes that all ranks write."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(
            f"{path} could not be written ({_cause(error)}; {_space(path, needed)}): the run stops, and the last "
            "complete checkpoint stays. Make room or fix the directory, then resume with --ckpt.load_enable."
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The error of the first rank that failed, where several ranks wrote together."""
    if isinstance(error, CheckpointException):
        first_failure = next(iter(error.failures.values()))
        return first_failure[0]
    return error


def _space(path: Path, needed: int | None) -> str:
    existing = next(parent for parent in path.parents if parent.is_dir())
    free = shutil.disk_usage(existing).free
    text = f"{free / GIB:.2f} GiB are free"
    if needed:
        text += f", {needed / GIB:.2f} GiB are needed"
    return text


@contextmanager
def removing(tmp: Path) -> Iterator[None]:
    """`failing` for the owner of a checkpoint, who also removes what was written of it."""
    try:
        with failing(tmp):
            yield
    except CheckpointError:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def commit(tmp: Path) -> Path:
    """Flush every file, write the manifest, rename. One process calls it after all parts are written.

    Returns the checkpoint; an older one of the same step is replaced.
    """
    files: list[Path] = []
    folders: list[Path] = []
    for path in sorted(tmp.rglob("*")):
        if path.is_dir():
            folders.append(path)
        elif path.name != MANIFEST:
            files.append(path)
    for path in [*files, *folders]:
        _fsync(path)

    sizes = {path.relative_to(tmp).as_posix(): path.stat().st_size for path in files}
    write_json(tmp / MANIFEST, {"files": sizes})
    _fsync(tmp / MANIFEST)
    _fsync(tmp)

    final = tmp.with_suffix("")
    replaced = tmp.with_suffix(".old.tmp")
    if final.exists():
        final.rename(replaced)
    tmp.rename(final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def write_file(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens."""
    aside = path.with_suffix(".new")
    aside.write_text(text)
    _fsync(aside)
    os.replace(aside, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_step(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is once it is complete."""
    return temporary(directory, step).with_suffix("")


def _file_sizes(path: Path) -> dict[str, int] | None:
    """Bytes of every file by the manifest, whatever its format; None where there is no readable manifest."""
    try:
        return json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return None


def _defect(path: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None."""
    sizes = _file_sizes(path)
    if sizes is None:
        return f"{MANIFEST} is missing or unreadable"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or has not the {size} bytes of the manifest"
    return None


def complete(path: Path) -> bool:
    """Whether it is a checkpoint that can be loaded."""
    return _defect(path) is None


def _candidates(directory: Path) -> list[Path]:
    """Finished directories, newest first; `.tmp` ones are not among them."""
    folders = [path for path in directory.glob("step_*") if path.suffix == "" and path.is_dir()]
    return sorted(folders, key=checkpoint_step, reverse=True)


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None. A torn one is skipped with a warning that names it.

    Raises `CheckpointError` when it is of a newer format.
    """
    for path in _candidates(directory):
        defect = _defect(path)
        if defect is None:
            read_json(path / MANIFEST)  # raises for a newer format
            return path
        warnings.warn(f"checkpoint {path} is torn and was skipped: {defect}", stacklevel=2)
    return None


def repair(directory: Path) -> None:
    """Finish what was killed between its manifest and its name. The directory's owner calls it, before a resume."""
    for tmp in directory.glob("step_*[0-9].tmp"):
        final = tmp.with_suffix("")
        if complete(tmp) and not final.exists():
            tmp.rename(final)


def prune(directory: Path, max_num: int, max_bytes: float = inf, best: int | None = None) -> None:
    """Remove the oldest checkpoints until at most `max_num` (>= 1) of at most `max_bytes` in all are left.

    The newest and that of step `best` count but stay; older torn ones and what killed saves left go. One process
    calls it, while nothing is being written.
    """
    candidates = _candidates(directory)
    intact = [path for path in candidates if complete(path)]
    if intact:
        newest = intact[0]
        kept = _kept(intact, max_num, max_bytes, best)
        for path in candidates:
            if path not in kept and checkpoint_step(path) < checkpoint_step(newest):
                (path / MANIFEST).unlink(missing_ok=True)  # torn from here on, should we die while removing
                shutil.rmtree(path)
    for path in directory.glob("step_*.tmp"):
        shutil.rmtree(path)


def _kept(intact: list[Path], max_num: int, max_bytes: float, best: int | None) -> set[Path]:
    """Which of the complete checkpoints, newest first, `prune` leaves."""
    newest = intact[0]
    sizes = {path: _size(path) for path in intact}
    for path in reversed(intact):
        if len(sizes) <= max_num and sum(sizes.values()) <= max_bytes:
            break
        if path != newest and checkpoint_step(path) != best:
            del sizes[path]
    return set(sizes)


def _size(path: Path) -> int:
    """Bytes of a checkpoint; 0 for one without a manifest."""
    sizes = _file_sizes(path) or {}
    return sum(sizes.values())


def require_same_run(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` when a position in the data, saved under other settings, would mean other rows.

    What an older checkpoint did not save cannot be compared: a warning says so.
    """
    missing = sorted(set(now) - set(saved))
    if missing:
        warnings.warn(
            f"checkpoint {path} does not say which {', '.join(missing)} it was made with: molt cannot check that its "
            "positions in the data mean the same rows. Resume with the settings of that run.",
            stacklevel=2,
        )
    comparable = {name: value for name, value in now.items() if name in saved}
    if saved != comparable:
        raise CheckpointError(
            f"checkpoint {path} was made with {saved}, this run has {now}: it would repeat or skip rows. Resume with "
            "the settings of that run, or use another --ckpt.output_dir."
        )


def require_same_rows(path: Path, saved: Mapping[str, str], now: Mapping[str, str], dataset: str) -> None:
    """Raise `CheckpointError` when a position in the data, saved with other rows of the same number, means other rows.

    saved, now: fingerprints by what they are of: `prompts` must be equal, where others differ a warning says so. What
    one of them lacks, as an older checkpoint does, is not compared. dataset: the setting and its value.
    """
    changed = [name for name in saved if name in now and saved[name] != now[name]]
    if "prompts" in changed:
        raise CheckpointError(
            f"checkpoint {path} was made with other rows than those of {dataset}, or in another order: it would repeat "
            "or skip rows. Resume with the rows of that run, or use another --ckpt.output_dir."
        )
    for name in changed:
        warnings.warn(f"checkpoint {path} was made with other {name}: {AFTER_A_CHANGE[name]}", stacklevel=2)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, scheduler: LambdaLR, *, mesh: Mesh, part: str = "."
) -> None:
    """Restore everything in place. Every rank calls it.

    part: the folder that holds this model. The number of ranks may differ from the one that saved. Raises
    `CheckpointError` when the checkpoint is torn or of a newer format, has no such part, or belongs to another model.
    """
    defect = _defect(path)
    if defect is not None:
        raise CheckpointError(f"checkpoint {path} is torn: {defect}. Remove it to resume from the one before.")
    folder = path / part
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {path} has no {part}: it was saved without one, and a fresh one would not fit to the "
            "trained policy. Resume with the settings it was saved with, or start in another --ckpt.output_dir."
        )
    trainer = read_json(folder / "trainer.json")
    try:
        # Collectives over all axes: every rank. Tensors are filled in place.
        load(_tensors(model, optimizer), checkpoint_id=folder / "model")
    except (CheckpointException, RuntimeError, ValueError) as error:
        last_line = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"checkpoint {folder} does not fit this model and optimizer ({last_line}). Resume with the model it was "
            "saved from, or start in another --ckpt.output_dir."
        ) from error

    # The position alone: rates are those of the present settings, so that a lowered one takes effect.
    steps = trainer["optimizer_steps"]
    if steps is None:
        steps = _steps_of_optimizer(optimizer)
    place(scheduler, steps)
    _read_random_state(_random_state_path(folder, mesh))


def _steps_of_optimizer(optimizer: Optimizer) -> int:
    """The steps that it took; the breaker may have skipped others."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that is sharded, by name; shares memory with model and optimizer."""
    persistent = model.state_dict().keys()  # first: it also returns every FSDP module to its sharded state
    params = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        tensors[f"model/{name}"] = param.detach()
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[f"model/{name}"] = buffer
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def export_hf(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, mesh: Mesh, *, end_ids: Sequence[int] = ()
) -> None:
    """Write the model as `from_pretrained` loads it: safetensors in the compute dtype, configuration, tokenizer.

    model: a `PolicyModel`. end_ids: what it was trained to end with; `generate` will stop there. Every rank calls it;
    the mesh's writer writes. Files are written aside and moved in; `config.json` leaves first and comes last, so a
    directory that loads is complete.
    """
    assert isinstance(model, PolicyModel)
    tmp = path / ".export.tmp"
    if mesh.is_writer:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        _write_weights(model, tmp)
        _write_settings(model, tokenizer, tmp, end_ids)
        _move_in(tmp, path)
    else:
        _gather_only(model)
    mesh.barrier(*ALL_AXES)  # every rank: the export exists when anyone returns


def _gather_only(model: PolicyModel) -> None:
    """What a rank that does not write does: its shards are needed."""
    for _ in named_full_tensors(model, model.compute_dtype):
        pass


def _write_weights(model: PolicyModel, folder: Path) -> None:
    """Files of at most `SHARD_BYTES`, with transformers' index if there are several."""
    writer = _ShardWriter(folder)
    for name, tensor in named_full_tensors(model, model.compute_dtype):  # collectives: every rank iterates to the end
        writer.add(name, tensor.cpu().contiguous())
    writer.finish()


class _ShardWriter:
    """Collects tensors for the next file, and remembers which file each is in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: list[str] = []
        self.file_of: dict[str, str] = {}
        self.total_bytes = 0
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.pending and self.pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._write_pending()
        self.pending[name] = tensor
        self.pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, then the index if there are several."""
        self._write_pending()
        if len(self.files) == 1:
            (self.folder / self.files[0]).rename(self.folder / "model.safetensors")
            return
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.file_of}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _write_pending(self) -> None:
        file = f"model-{len(self.files) + 1:05d}.safetensors"
        save_file(self.pending, self.folder / file, metadata={"format": "pt"})
        self.files.append(file)
        for name in self.pending:
            self.file_of[name] = file
        self.pending = {}
        self.pending_bytes = 0


def _write_settings(
    model: PolicyModel, tokenizer: PreTrainedTokenizerBase, folder: Path, end_ids: Sequence[int]
) -> None:
    """Configuration, generation settings and tokenizer."""
    causal_lm = model.causal_lm
    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.dtype = model.compute_dtype
    config.use_cache = True
    config.save_pretrained(folder)
    exported_generation_config(causal_lm.generation_config, end_ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _move_in(tmp: Path, path: Path) -> None:
    """Replace the export in `path`, and nothing else there. `config.json` leaves first and comes last."""
    (path / "config.json").unlink(missing_ok=True)
    for stale in path.glob("model*.safetensors*"):
        stale.unlink()
    others = sorted(file for file in tmp.iterdir() if file.name != "config.json")
    for file in [*others, tmp / "config.json"]:
        _fsync(file)
        os.replace(file, path / file.name)
    tmp.rmdir()
    _fsync(path)
