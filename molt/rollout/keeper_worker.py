"""A keeper: the process of a node that holds and files the arrays of finished groups, so that the driver need not.

The driver knows groups by their light records, and their arrays by references. What has to touch the arrays is done
here: the arrays of checkpoints and dumps, the stored rollouts with their text, and second copies of what another node
holds (`rollout.replicate`). What is loaded is *returned*, so that the driver owns it: an object that a process puts
with `ray.put` dies with the process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from molt.chat.render import load_tokenizer
from molt.report.rollouts import StoredGroup, rollout_rows, write_rollouts
from molt.rollout.buffer import RolloutSamples, SampleInfos, described, read_arrays, write_arrays
from molt.rollout.handles import SamplesRef

FETCH_S = 120.0
"""For arrays to arrive from another node; then they count as lost."""
THREADS = 4
"""Calls at a time: a checkpoint that is being written must not hold up the stored rollouts of the next steps."""


@dataclass(frozen=True)
class KeeperSettings:
    """What a keeper needs to know; `cluster` derives it from the run's config."""

    model: str
    """Whose tokenizer turns stored rollouts into text."""
    chat_template: str | None


class Keeper:
    """See the module docstring. Its methods run side by side."""

    def __init__(self, settings: KeeperSettings):
        self.settings = settings
        self._held: dict[str, RolloutSamples] = {}
        """Copies of other nodes' arrays, by group: they last as long as something here refers to them."""

    def load_tokenizer(self) -> None:
        """Get ready to write stored rollouts: otherwise the first step waits for it."""
        _ = self._tokenizer

    def hold(self, group_id: str, samples: RolloutSamples) -> None:
        """Keep a copy of a group's arrays on this node; Ray brought it here with the call."""
        self._held[group_id] = samples

    def release(self, group_ids: Sequence[str]) -> None:
        """The groups are trained, or discarded."""
        for group_id in group_ids:
            self._held.pop(group_id, None)

    def write_arrays(self, directory: Path, samples: Sequence[SamplesRef]) -> list[int]:
        """The arrays of a buffer (`buffer.py`). Returns the indices of those that are lost; then nothing is written."""
        fetched, lost = fetch(samples)
        if not lost:
            write_arrays(directory, fetched)
        return lost

    def read_arrays(self, directory: Path) -> tuple[Any, ...]:
        """What the driver keeps of each group of a buffer (`list[SampleInfos]`), and then the arrays of each."""
        samples = read_arrays(directory)
        infos: list[SampleInfos] = described(samples)
        return (infos, *samples)

    def write_rollouts(
        self, run_dir: Path, step: int, groups: Sequence[StoredGroup], samples: Sequence[SamplesRef], limit: int
    ) -> list[int]:
        """The stored rollouts of a step: at most `limit` rows, all if negative. Returns the indices of lost arrays.

        A group whose arrays are lost is left out.
        """
        fetched, lost = fetch(samples)
        present = [group for index, group in enumerate(groups) if index not in lost]
        rows = []
        for group, of_group in zip(present, fetched, strict=True):
            rows += rollout_rows(group, of_group)
        if limit >= 0:
            rows = rows[:limit]
        write_rollouts(run_dir, step, rows, self._tokenizer.decode)
        return lost

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.settings.model, self.settings.chat_template)


def fetch(samples: Sequence[SamplesRef]) -> tuple[list[RolloutSamples], list[int]]:
    """The arrays that are there, in order, and the indices of those whose node is gone."""
    fetched: list[RolloutSamples] = []
    lost: list[int] = []
    for index, reference in enumerate(samples):
        try:
            fetched.append(ray.get(reference, timeout=FETCH_S))
        except (ObjectLostError, GetTimeoutError):
            lost.append(index)
    return fetched, lost


def _actor(keeper: type[Keeper]) -> Any:
    """The Ray actor class; `Any`, for Ray types neither its options nor its handles."""
    return ray.remote(max_concurrency=THREADS)(keeper)  # pyright: ignore[reportCallIssue]


@_actor
class KeeperWorker(Keeper):
    """A `Keeper` as a Ray actor."""
