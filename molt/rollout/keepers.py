"""The keepers as the driver sees them: where the arrays of finished groups are held, filed and loaded."""

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import ObjectLostError

from molt.errors import LostError
from molt.report.rollouts import StoredGroup
from molt.rollout.buffer import count_groups, read_groups
from molt.rollout.handles import DEAD, KeeperHandle, SamplesRef, ignore_event, last_line
from molt.types import Group, Prompt

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class KeeperNode:
    """A node with a keeper. Nodes are named by Ray's id."""

    node: str
    handle: KeeperHandle


class Keepers:
    """One keeper a node. That of the driver's node does the files; the others hold second copies.

    `spawn(node)` starts a keeper there. A keeper that dies is started again and its call repeated, up to
    `train.max_restarts` times in a row; the copies that it held are gone, the arrays themselves are not.
    """

    def __init__(
        self,
        spawn: Callable[[str], KeeperHandle],
        nodes: Sequence[str],
        *,
        replicate: bool,
        max_restarts: int = 3,
        on_event: Callable[..., None] = ignore_event,
    ):
        """nodes: by Ray's id, the driver's first. replicate: whether groups get a copy on another node."""
        self.spawn = spawn
        self.nodes = [KeeperNode(node, spawn(node)) for node in nodes]
        self.replicate = replicate
        self.max_restarts = max_restarts
        self.on_event = on_event
        self._copies: dict[str, KeeperHandle] = {}
        """By group, the keeper that holds a second copy."""

    @property
    def handles(self) -> list[KeeperHandle]:
        return [place.handle for place in self.nodes]

    async def load_tokenizer(self) -> None:
        """As `Keeper.load_tokenizer`, where there is a keeper."""
        for place in self.nodes[:1]:
            await place.handle.load_tokenizer.remote()

    async def copy(self, group_id: str, samples: SamplesRef, node: str) -> None:
        """Hold a second copy of a finished group's arrays, which are on `node`, on the next node.

        Arrays on the driver's node need none: without that node there is no run. A copy that cannot be made is
        reported; the group is as good as without `rollout.replicate`.
        """
        names = [place.node for place in self.nodes]
        if not self.replicate or node not in names or node == names[0]:
            return
        keeper = self.nodes[(names.index(node) + 1) % len(names)]
        try:
            await keeper.handle.hold.remote(group_id, samples)
        except (*DEAD, ObjectLostError) as error:
            self.on_event("copy_failed", group=group_id, node=keeper.node, reason=last_line(error))
            return
        self._copies[group_id] = keeper.handle

    def release(self, group_ids: Iterable[str]) -> None:
        """These groups are trained and written down: nobody needs a copy."""
        for group_id in group_ids:
            keeper = self._copies.pop(group_id, None)
            if keeper is not None:
                keeper.release.remote([group_id])

    def release_all(self) -> None:
        """The run continues from a checkpoint, without the groups that it had."""
        self.release(list(self._copies))

    async def write_arrays(self, directory: Path, samples: Sequence[SamplesRef]) -> list[int]:
        """As `Keeper.write_arrays`."""

        def call(keeper: KeeperHandle) -> Awaitable[list[int]]:
            return keeper.write_arrays.remote(directory, list(samples))

        return await self._on_this_node(call)

    async def write_rollouts(
        self, run_dir: Path, step: int, groups: Sequence[StoredGroup], samples: Sequence[SamplesRef], limit: int
    ) -> list[int]:
        """As `Keeper.write_rollouts`."""

        def call(keeper: KeeperHandle) -> Awaitable[list[int]]:
            return keeper.write_rollouts.remote(run_dir, step, list(groups), list(samples), limit)

        return await self._on_this_node(call)

    async def load(self, directory: Path, prompt_at: Callable[[int, int], Prompt]) -> list[Group]:
        """The groups of a buffer, with references to their arrays that the driver owns. prompt_at: of `read_groups`.

        Raises `CheckpointError` as `buffer.read_arrays` and `read_groups` do.
        """
        count = count_groups(directory)
        if count == 0:
            return []

        async def call(keeper: KeeperHandle) -> list[Group]:
            infos_ref, *samples = keeper.read_arrays.options(num_returns=1 + count).remote(directory)
            groups = read_groups(directory, prompt_at, await infos_ref)
            for group, reference in zip(groups, samples, strict=True):
                group.samples = reference
            return groups

        return await self._on_this_node(call)

    async def _on_this_node(self, call: Callable[[KeeperHandle], Awaitable[Answer]]) -> Answer:
        """The answer of the driver's own keeper. Raises `LostError` when it dies again and again."""
        for _ in range(self.max_restarts + 1):
            keeper = self.nodes[0].handle
            try:
                return await call(keeper)
            except DEAD as error:
                self._replace(keeper, last_line(error))
        raise LostError(
            f"the keeper, which writes checkpoints and stored rollouts, died {self.max_restarts + 1} times in a row "
            "(train.max_restarts): the run stops. Fix what its output says (a lack of memory?), then resume with "
            "--ckpt.load_enable."
        )

    def _replace(self, lost: KeeperHandle, reason: str) -> None:
        """Start another keeper on this node; the first of several calls that it failed does it."""
        here = self.nodes[0]
        if here.handle is not lost:
            return
        print(f"the keeper is replaced: {reason}", file=sys.stderr)
        self.on_event("keeper_lost", reason=reason)
        ray.kill(lost)  # pyright: ignore[reportArgumentType]  # an `ActorHandle` at run time
        self.nodes[0] = KeeperNode(here.node, self.spawn(here.node))
