"""The checkpoints of one RL run: saving between two steps, finding the newest, loading it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from molt.config import RLCkptConfig
from molt.data.prompts import PromptStream
from molt.records.state import FILE, RunState, read_state
from molt.rollout.buffer import write_records
from molt.rollout.keepers import Keepers
from molt.train.checkpoint import begin, commit, failing, latest_checkpoint, prune, removing
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

    def __init__(self, config: RLCkptConfig, ranks: TrainedRanks, keepers: Keepers, export: Export, on_event: OnEvent):
        self.config = config
        self.ranks = ranks
        self.keepers = keepers
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

        def prompt_at(epoch: int, position: int) -> Prompt:
            return stream[stream.index(epoch, position)]

        groups = await self.keepers.load(path, prompt_at)
        unscored: list[Group] = []
        if (path / UNSCORED).is_dir():
            unscored = [_as_unscored(group) for group in await self.keepers.load(path / UNSCORED, prompt_at)]
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
            state = await self._write_arrays(aside, state)
            path = await asyncio.to_thread(_commit, aside, state)
            await asyncio.to_thread(self._prune)
        self.completed += 1
        self.on_event("checkpoint", step=state.step, path=str(path), buffered=len(state.finished))

    async def _write_arrays(self, aside: Path, state: RunState) -> RunState:
        """Write the arrays of all groups; the state, in which groups whose arrays are lost start again."""
        with failing(aside):
            lost = await self.keepers.write_arrays(aside, [group.samples for group in state.finished])
            if lost:
                state = state.without(lost)
                await self.keepers.write_arrays(aside, [group.samples for group in state.finished])
            if state.unscored:
                state = await self._write_unscored(aside / UNSCORED, state)
        return state

    async def _write_unscored(self, folder: Path, state: RunState) -> RunState:
        """As `_write_arrays`, of the groups that wait for scores."""
        folder.mkdir()
        lost = await self.keepers.write_arrays(folder, [group.samples for group in state.unscored])
        if lost:
            state = state.without_unscored(lost)
            await self.keepers.write_arrays(folder, [group.samples for group in state.unscored])
        return state

    def _prune(self) -> None:
        if self._may_prune:
            prune(self.folder, self.config.max_num, self.config.max_mem * 2**30, self._protected)


def _commit(aside: Path, state: RunState) -> Path:
    """Write the driver's files and complete the checkpoint. It flushes every file, so it runs in a thread."""
    write_records(aside, state.finished)
    if (aside / UNSCORED).is_dir():
        write_records(aside / UNSCORED, state.unscored)
    (aside / FILE).write_text(state.to_json())
    return commit(aside)


def _as_unscored(group: Group) -> Group:
    """The group before its scores are there."""
    return replace(group, rollouts=[], unscored=group.rollouts)
