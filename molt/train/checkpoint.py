"""Atomic checkpoints, and the Hugging Face export.

    checkpoints/step_000020/        renamed from step_000020.tmp when everything is on disk
        model/                      sharded parameters and optimizer state (torch.distributed.checkpoint)
        trainer.json                optimizer steps, skipped ones included
        breaker.json                RL: gradient norms of the last steps taken
        rng_00000.pt                random state, one per rank
        extra.json, ...             whatever the owner of the checkpoint adds (position in the data, buffer)
        manifest.json               written last: every file with its size

Two phases, because in RL the driver, another process, adds files: every rank calls `write_part` and waits for
what it returns (`written`) while training goes on, then one process, the owner, calls `commit`. A directory without
a complete manifest is not a checkpoint.
Everything is JSON or tensors; the pickles that torch.distributed.checkpoint writes for itself are read
only from a directory whose manifest is complete.
"""

import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from molt.errors import CheckpointError
from molt.publish.gather import named_full_tensors
from molt.train.optimizer import place

MANIFEST = "manifest.json"
SHARD_BYTES = 5 * 2**30


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
    tmp: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, group: ProcessGroup, background: bool
) -> Future:
    """Write what the training ranks hold. Every rank calls it, with the same directory on a shared disk.

    group: used for nothing but saves, one at a time. background: return as soon as the state is copied to host
    memory; pass the future to `written` to know that rank's part is on disk. Rank 0's is the last one.
    Raises `CheckpointError` when the disk does not take it.
    """
    tensors = _tensors(model, optimizer)
    with failing(tmp, needed=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())):
        tmp.mkdir(exist_ok=True)
        # The host's generator alone: dropout is off, so nothing draws on a device.
        generator = io.BytesIO()  # torch itself reports a full disk as any other error
        torch.save(torch.get_rng_state(), generator)
        (tmp / f"rng_{dist.get_rank():05d}.pt").write_bytes(generator.getvalue())
        if dist.get_rank() == 0:
            (tmp / "trainer.json").write_text(json.dumps({"optimizer_steps": scheduler.last_epoch}))
        # Collectives on `group`: every rank. They also remove duplicates of replicated tensors.
        where = {"checkpoint_id": tmp / "model", "process_group": group}
        if background:
            return dcp.async_save(tensors, **where)
        done = Future()
        done.set_result(dcp.save(tensors, **where))
        return done


def written(tmp: Path, part: Future) -> None:
    """Wait until a rank's part is on disk. Raises `CheckpointError`."""
    with failing(tmp):
        part.result()


@contextmanager
def failing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what a full or unwritable disk raises into a `CheckpointError`. needed: bytes that all ranks write."""
    try:
        yield
    except (OSError, SafetensorError, dcp.CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        there = next(parent for parent in path.parents if parent.is_dir())
        space = f"{shutil.disk_usage(there).free / 2**30:.2f} GiB are free"
        space += f", {needed / 2**30:.2f} GiB are needed" if needed else ""
        raise CheckpointError(
            f"{path} could not be written ({cause}; {space}): the run stops, and the last complete checkpoint stays. "
            "Make room or mend the directory, then resume with --ckpt.load_enable."
        ) from error


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
    files = sorted(path for path in tmp.rglob("*") if path.is_file() and path.name != MANIFEST)
    manifest = {"files": {path.relative_to(tmp).as_posix(): path.stat().st_size for path in files}}
    for path in [*files, *(path for path in tmp.rglob("*") if path.is_dir())]:
        _fsync(path)
    (tmp / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _fsync(tmp / MANIFEST)
    _fsync(tmp)
    final = tmp.with_suffix("")
    old = tmp.with_suffix(".old.tmp")
    if final.exists():
        final.rename(old)
    tmp.rename(final)
    _fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
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
    return int(path.name.removeprefix("step_"))


def checkpoint_path(directory: Path, step: int) -> Path:
    return temporary(directory, step).with_suffix("")


def _defect(path: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"{MANIFEST} is missing or unreadable"
    for name, size in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or has not the {size} bytes of the manifest"
    return None


def complete(path: Path) -> bool:
    """Whether it is a checkpoint that can be loaded."""
    return _defect(path) is None


def _candidates(directory: Path) -> list[Path]:
    """Finished directories, newest first; `.tmp` ones are not among them."""
    found = [path for path in directory.glob("step_*") if path.suffix == "" and path.is_dir()]
    return sorted(found, key=checkpoint_step, reverse=True)


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None. A torn one is skipped with a warning that names it."""
    for path in _candidates(directory):
        defect = _defect(path)
        if defect is None:
            return path
        warnings.warn(f"checkpoint {path} is torn and was skipped: {defect}", stacklevel=2)
    return None


def repair(directory: Path) -> None:
    """Finish what was killed between its manifest and its name. Who owns the directory calls it, before a resume."""
    for tmp in directory.glob("step_*[0-9].tmp"):
        if complete(tmp) and not tmp.with_suffix("").exists():
            tmp.rename(tmp.with_suffix(""))


def prune(directory: Path, max_num: int, max_bytes: float = inf, best: int | None = None) -> None:
    """Remove the oldest checkpoints until at most `max_num` (>= 1) of at most `max_bytes` in all are left.

    The newest and that of step `best` count but stay; older torn ones and what killed saves left go. One process
    calls it, while nothing is being written.
    """
    found = _candidates(directory)
    kept = {path: _size(path) for path in found if _defect(path) is None}
    newest = next(iter(kept), None)
    for path in reversed(list(kept)):
        within = len(kept) <= max_num and sum(kept.values()) <= max_bytes
        if not within and path != newest and checkpoint_step(path) != best:
            del kept[path]
    for path in found:
        if newest and path not in kept and checkpoint_step(path) < checkpoint_step(newest):
            (path / MANIFEST).unlink(missing_ok=True)  # torn from here on, should we die while removing
            shutil.rmtree(path)
    for path in directory.glob("step_*.tmp"):
        shutil.rmtree(path)


def _size(path: Path) -> int:
    """Bytes of a complete checkpoint."""
    return sum(json.loads((path / MANIFEST).read_text())["files"].values())


def require_same_run(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` when a position in the data, saved under other settings, would mean other rows."""
    if saved != now:
        raise CheckpointError(
            f"checkpoint {path} was made with {saved}, this run has {now}: it would repeat or skip rows. Resume with "
            "the settings of that run, or use another --ckpt.output_dir."
        )


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, part: str = "."
) -> None:
    """Restore everything in place. Every rank calls it.

    part: the folder that holds this model. The number of ranks may differ from the one that saved. Raises
    `CheckpointError` when the checkpoint is torn, has no such part, or belongs to another model.
    """
    if defect := _defect(path):
        raise CheckpointError(f"checkpoint {path} is torn: {defect}. Remove it to resume from the one before.")
    path = path / part
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path.parent} has no {part}: it was saved without one, and a fresh one would not fit to the "
            "trained policy. Resume with the settings it was saved with, or start in another --ckpt.output_dir."
        )
    try:
        # Collective on the default group: every rank. Tensors are filled in place.
        dcp.load(_tensors(model, optimizer), checkpoint_id=path / "model")
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this model and optimizer ({str(error).strip().splitlines()[-1]}). "
            "Resume with the model it was saved from, or start in another --ckpt.output_dir."
        ) from error
    # The position alone: rates are those of the present settings, so that a lowered one takes effect.
    place(scheduler, json.loads((path / "trainer.json").read_text())["optimizer_steps"])
    random_state = path / f"rng_{dist.get_rank():05d}.pt"
    if random_state.exists():  # a rank that did not exist then keeps its fresh one
        torch.set_rng_state(torch.load(random_state, weights_only=True))


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that is sharded, by name; shares memory with model and optimizer."""
    persistent = model.state_dict().keys()  # first: it also returns every FSDP module to its sharded state
    params = dict(model.named_parameters())
    tensors = {f"model/{name}": p.detach() for name, p in params.items()}
    tensors |= {f"model/{name}": b for name, b in model.named_buffers() if name in persistent}
    for name, p in params.items():
        tensors |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state.get(p, {}).items()}
    return tensors


def export_hf(model: nn.Module, tokenizer, path: Path) -> None:
    """Write the model as `from_pretrained` loads it: safetensors in the compute dtype, configuration, tokenizer.

    Every rank calls it; rank 0 writes. Files are written aside and moved in; `config.json` leaves first and comes
    last, so a directory that loads is whole.
    """
    tmp, writer = path / ".export.tmp", dist.get_rank() == 0
    if writer:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    _write_weights(model, tmp, writer)
    if writer:
        causal_lm = model.causal_lm
        config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
        config.dtype, config.use_cache = model.compute_dtype, True
        config.save_pretrained(tmp)
        causal_lm.generation_config.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        _move_in(tmp, path)
    dist.barrier()  # default group, every rank: the export exists when anyone returns


def _write_weights(model: nn.Module, tmp: Path, writer: bool) -> None:
    """Files of at most `SHARD_BYTES`, with transformers' index if there are several."""
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}

    def flush():
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(pending, tmp / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(pending, file))
        pending.clear()

    size = 0
    for name, tensor in named_full_tensors(model, model.compute_dtype):  # collectives: every rank iterates to the end
        if writer:
            if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > SHARD_BYTES:
                flush()
            pending[name] = tensor.cpu().contiguous()
            size += tensor.nbytes
    if writer:
        flush()
        if len(set(weight_map.values())) == 1:
            (tmp / "model-00001.safetensors").rename(tmp / "model.safetensors")
        else:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (tmp / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _move_in(tmp: Path, path: Path) -> None:
    (path / "config.json").unlink(missing_ok=True)
    for stale in path.glob("model*.safetensors*"):
        stale.unlink()
    for file in sorted(tmp.iterdir(), key=lambda file: file.name == "config.json"):
        _fsync(file)
        os.replace(file, path / file.name)
    tmp.rmdir()
    _fsync(path)
