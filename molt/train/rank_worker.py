"""What the ranks of policy, critic and reference have in common: as Ray actors, and together as the driver sees them.

Heavy per-token arrays (`Scores`) go from rank to rank by reference: a method returns them as its second value.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from molt.batch.plan import RankPlan, Scores
from molt.errors import MoltError, RankLostError
from molt.report.metrics import merge
from molt.train.breaker import Evidence, merge_evidence
from molt.train.critic import Critic
from molt.train.policy import Policy
from molt.train.reference import Reference
from molt.train.score import Samples
from molt.types import Metric

ScoreRefs = dict[str, list[ray.ObjectRef]]
"""By name, one `Scores` of each rank that made them."""


DEAD = RayActorError, OutOfMemoryError
"""What a call on a rank raises that is gone; Ray kills one itself when its node runs out of memory."""
PEER_S = 5.0
"""For a death to be known after a rank failed for it."""


class RankWorker:
    """One rank. Methods run one after another, in the order the driver calls them."""

    def address(self) -> tuple[str, int]:
        """A host and free port where the ranks can meet; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(
        self, model: Callable[..., Policy | Critic | Reference], settings: Any, rank: int, world_size: int, *meet: Any
    ) -> None:
        """Build the model; returns when all ranks have. meet: address, port, local rank."""
        self.model = model(settings, rank, world_size, *meet)
        self.rank = rank

    def score(self, plan: RankPlan, groups: dict[int, ray.ObjectRef]) -> tuple[None, Scores]:
        """`groups` holds the references this rank's plan needs, by index in the batch."""
        return None, self.model.score(plan, fetch(groups))


class TrainedWorker(RankWorker):
    """One rank of a model that is trained; `written` runs beside the other methods."""

    def save(self, tmp: Path, background: bool) -> None:
        self.model.save(tmp, background)

    @ray.method(concurrency_group="saving")
    def written(self, tmp: Path) -> None:
        self.model.written(tmp)

    def load(self, path: Path) -> None:
        self.model.load(path)

    def evidence(self) -> list[Evidence]:
        return self.model.evidence()


def _waited_in_vain(error: Exception) -> bool:
    """Whether a rank's collective took longer than it may. NCCL ends the process itself then."""
    return isinstance(error, RayTaskError) and "Timed out waiting" in str(error.cause)  # gloo has no class for it


def fetch(groups: dict[int, ray.ObjectRef]) -> Samples:
    return dict(zip(groups, ray.get(list(groups.values())), strict=True))


def fetch_scores(refs: Sequence[ray.ObjectRef]) -> Scores:
    """Those of all ranks together: which rank has which sample differs between models."""
    return {at: array for scores in ray.get(list(refs)) for at, array in scores.items()}


class Ranks:
    """All ranks of one model: every call reaches each of them and waits for all, within a deadline.

    `spawn(index)` starts the process of a rank; together they are replaced when one is lost.
    """

    def __init__(self, spawn: Callable[[int], Any], count: int, *, name: str, timeout_s: float):
        self.spawn, self.name, self.timeout_s = spawn, name, timeout_s
        self.workers = [spawn(index) for index in range(count)]

    async def start(self, model: Callable[..., Any], settings: Any) -> None:
        """Every rank joins the process group at the first one's address and loads its shard."""
        self.built = model, settings
        if self.workers:
            (meet,) = await self.all([self.workers[0].address.remote()])
            # Ray shows each actor only its own GPU, so every rank is local rank 0.
            ranks = enumerate(self.workers)
            await self.all([w.start.remote(model, settings, r, len(self.workers), *meet, 0) for r, w in ranks])

    async def restart(self) -> None:
        """All ranks anew, with the weights they first had; the caller loads a checkpoint."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = [self.spawn(index) for index in range(len(self.workers))]
        await self.start(*self.built)

    async def score(self, plans: Sequence[RankPlan], groups: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
        """One `Scores` per rank, for the samples of its plan."""
        return (await self.both(lambda worker: worker.score, plans, groups))[1]

    async def train(self, *args: Any) -> dict[str, Metric]:
        """The steps of the batch that the ranks have; the merged metrics of all ranks."""
        # What a step reduced over ranks is the same on each of them; the rest is a rank's own share.
        return merge(await self.all([w.train.remote(*args) for w in self.workers]))

    async def save(self, tmp: Path, background: bool) -> None:
        """Every rank's part of a checkpoint; with `background` it is on disk when `written` returns."""
        await self.all([w.save.remote(tmp, background) for w in self.workers])

    async def written(self, tmp: Path) -> None:
        await self.all([w.written.remote(tmp) for w in self.workers])

    async def load(self, path: Path) -> None:
        await self.all([w.load.remote(path) for w in self.workers])

    async def evidence(self) -> list[Evidence]:
        """What was skipped since this was called last, of all ranks together."""
        return merge_evidence(await self.all([w.evidence.remote() for w in self.workers]))

    async def both(
        self, method: Callable[[Any], Any], plans: Sequence[RankPlan], groups: Sequence[ray.ObjectRef], *more: Any
    ) -> tuple[list[Any], list[ray.ObjectRef]]:
        """The light value and the reference to the heavy one that `method(worker)` returns for each rank's plan."""
        calls = []
        for worker, plan in zip(self.workers, plans, strict=True):
            needed = {task.at[0] for step in plan for micro_batch in step for task in micro_batch}
            of_rank = {g: groups[g] for g in sorted(needed)}
            calls.append(method(worker).options(num_returns=2).remote(plan, of_rank, *more))
        light, heavy = zip(*calls, strict=True)
        return await self.all(list(light)), list(heavy)

    async def all(self, calls: list[ray.ObjectRef]) -> list[Any]:
        """What every rank answers. Raises `RankLostError` when one is dead or silent, else what one raised."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*tasks)
        except TimeoutError:
            raise self._lost(f"did not answer within {self.timeout_s:.0f} s") from None
        except MoltError:
            raise
        except Exception as error:  # raised again; a rank whose peer died or hangs fails in a collective
            _, silent = await asyncio.wait(tasks, timeout=PEER_S)
            errors = [task.exception() for task in tasks if task.done()]
            if dead := next((error for error in errors if isinstance(error, DEAD)), None):
                raise self._lost(f"died ({dead})") from dead
            if silent and _waited_in_vain(error):
                raise self._lost(f"hangs, for which another one waited in vain ({error.cause})") from error
            raise

    def _lost(self, how: str) -> RankLostError:
        return RankLostError(
            f"a {self.name} rank {how}: its part of the weights is gone. If this stops the run, free memory if the "
            "system killed it, look for a rank that waits for another one, then resume with --ckpt.load_enable."
        )
