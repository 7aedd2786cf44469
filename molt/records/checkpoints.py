"""The checkpoints of one RL run: saving between two steps, finding the newest, loading it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from molt.config import RLCkptConfig
from molt.data.prompts import PromptStream
from molt.records.state import FILE, RunState, read_state
from molt.rollout.buffer import load_buffer, save_buffer
from molt.rollout.runner_pool import own
from molt.train.checkpoint import begin, commit, latest_checkpoint, prune, removing
from molt.types import Group, OnEvent, Prompt

UNSCORED = "unscored"
"""A folder of a checkpoint: the groups that waited for scores, as in the buffer. A molt that does not know it starts
their prompts again, since they are in flight in the ledger."""

Export = Callable[[Path], Awaitable[None]]
"""Writes the policy as a Hugging Face model directory."""


class TrainedRanks(Protocol):
    """All models that a checkpoint holds."""

    async def save(self, tmp: Path, background: bool) -> None: ...
    async def written(self, tmp: Path) -> None: ...
    async def load(self, path: Path) -> None: ...


class Checkpoints:
    """Owns `checkpoints/`. One checkpoint is written at a time, beside the training that goes on."""

    def __init__(self, config: RLCkptConfig, ranks: TrainedRanks, export: Export, on_event: OnEvent):
        self.config = config
        self.ranks = ranks
        self.export = export
        self.on_event = on_event
        self.folder = config.checkpoints.resolve()
        self.saved: int | None = None
        """The step of the newest checkpoint in the lineage of the weights."""
        self.completed = 0
        """Checkpoints that were written to the end since the driver started."""
        self._writing: asyncio.Task[None] | None = None
        self._protected: int | None = None
        """The step of the best checkpoint, which is never pruned."""
        self._may_prune = True

    def protect(self, step: int | None) -> None:
        """The checkpoint of `step` (None: none) is the best: the oldest others are pruned, now and after each save."""
        self._protected = step
        self._may_prune = True
        is_writing = self._writing is not None and not self._writing.done()
        if not is_writing:  # pruning would take the directory that is being written for a leftover
            self._prune()

    def hold_pruning(self) -> None:
        """Remove nothing until `protect`: an evaluation may make any checkpoint the best."""
        self._may_prune = False

    async def save(self, state: RunState) -> None:
        """Write a complete checkpoint of `state`, and of the ranks as they are now.

        With `ckpt.async_save` it returns when the ranks have copied their state; `settle` waits for the rest. Raises
        `CheckpointError` when the disk does not take it, or did not take the one before.
        """
        await self.settle()
        aside = begin(self.folder, state.step)
        with removing(aside):
            await self.ranks.save(aside, self.config.async_save)
            if self.config.save_hf:
                await self.export(aside / "hf")
        self.saved = state.step
        self._writing = asyncio.create_task(self._write(aside, state))
        if not self.config.async_save:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises what went wrong with it."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            await writing

    async def settle_if_written(self) -> None:
        """Raise what went wrong with a checkpoint that has ended; one that is still being written goes on."""
        if self._writing is not None and self._writing.done():
            await self.settle()

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return latest_checkpoint(self.folder)

    async def load(self, path: Path, stream: PromptStream, batch_size: int) -> RunState:
        """Load the ranks, and return the driver's part; the arrays of its finished groups are objects of Ray's.

        batch_size: `rollout.batch_size`.
        """
        await self.ranks.load(path)
        groups = _load_groups(path, stream)
        unscored = []
        if (path / UNSCORED).is_dir():
            unscored = [_as_unscored(group) for group in _load_groups(path / UNSCORED, stream)]
        places = [stream.index(group.prompt.epoch, group.prompt.position) for group in groups]
        state = read_state(path, groups, places, batch_size, unscored)
        self.saved = state.step
        return state

    def forget(self) -> None:
        """The run starts at its beginning again: no checkpoint is of its lineage."""
        self.saved = None

    async def _write(self, aside: Path, state: RunState) -> None:
        """The part of a save that training need not wait for."""
        with removing(aside):
            await self.ranks.written(aside)
            samples = [await group.samples for group in state.finished]
            unscored = [await group.samples for group in state.unscored]
            path = await asyncio.to_thread(_commit, aside, state, samples, unscored)
            await asyncio.to_thread(self._prune)
        self.completed += 1
        self.on_event("checkpoint", step=state.step, path=str(path), buffered=len(state.finished))

    def _prune(self) -> None:
        if self._may_prune:
            prune(self.folder, self.config.max_num, self.config.max_mem * 2**30, self._protected)


def _commit(aside: Path, state: RunState, samples: Sequence[Any], unscored: Sequence[Any]) -> Path:
    """Write the driver's files and complete the checkpoint. It flushes every file, so it runs in a thread.

    samples, unscored: the samples of the finished and of the unscored groups.
    """
    save_buffer(aside, state.finished, samples)
    if state.unscored:
        (aside / UNSCORED).mkdir()
        save_buffer(aside / UNSCORED, state.unscored, unscored)
    (aside / FILE).write_text(state.to_json())
    return commit(aside)


def _as_unscored(group: Group) -> Group:
    """The group before its scores are there."""
    return replace(group, rollouts=[], unscored=group.rollouts)


def _load_groups(path: Path, stream: PromptStream) -> list[Group]:
    def prompt_at(epoch: int, position: int) -> Prompt:
        return stream[stream.index(epoch, position)]

    groups, samples = load_buffer(path, prompt_at)
    for group, arrays in zip(groups, samples, strict=True):
        group.samples = own(arrays)
    return groups
