"""What the ranks of policy, critic and reference have in common: as Ray actors, and together as the driver sees them.

Heavy per-token arrays (`TokenArrays`) go from rank to rank by reference: a method returns them as its second value.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from molt.batch.plan import RankPlan
from molt.config import FsdpConfig
from molt.errors import MoltError, RankLostError
from molt.parallel.mesh import Mesh, init_distributed, resolve_device
from molt.parallel.shape import MeshShape
from molt.report.metrics import merge
from molt.train.breaker import Evidence, merge_evidence
from molt.train.exchange import Route
from molt.train.inference import Samples, TokenArrays, tasks_of
from molt.train.trained import Trained
from molt.types import Metric

ArrayRefs = dict[int, list[ray.ObjectRef]]
"""For each data-parallel rank that reads them, the `TokenArrays` that other ranks made."""
GroupRefs = dict[int, ray.ObjectRef]
"""Samples of groups, `list[list[Sample]]` by rollout and segment, by index in the batch."""
T = TypeVar("T")
ModelT = TypeVar("ModelT")
TrainedT = TypeVar("TrainedT", bound=Trained[Any])

DEAD = (RayActorError, OutOfMemoryError)
"""What a call on a rank raises that is gone; Ray kills one itself when its node runs out of memory."""
FETCH_S = 120.0
"""For arrays to arrive from another node; then they count as lost."""
PEER_S = 5.0
"""For a death to be known after a rank failed for it."""


class RankSettings(Protocol):
    """What the settings of every model say."""

    @property
    def fsdp(self) -> FsdpConfig: ...


Build = Callable[[Any, Mesh], ModelT]
"""A model of one rank, from its settings and the rank's mesh."""


class RankWorker(Generic[ModelT]):
    """One rank. Methods run one after another, in the order the driver calls them."""

    model: ModelT
    samples: Samples
    """Of the batch that `fetch` brought."""

    def address(self) -> tuple[str, int]:
        """A host and free port where the ranks can meet; the driver calls it on rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.util.get_node_ip_address(), port

    def start(
        self,
        build: Build[ModelT],
        settings: RankSettings,
        rank: int,
        shape: MeshShape,
        address: str,
        port: int,
        local_rank: int,
    ) -> None:
        """Meet the other ranks and build the model; returns when all have."""
        device = resolve_device(settings.fsdp.device, local_rank)
        mesh = init_distributed(rank, shape, address, port, device)
        self.model = build(settings, mesh)
        self.samples = {}

    def fetch(self, groups: GroupRefs) -> list[int]:
        """Bring the arrays of the groups that the rank's plan needs here; the indices of those that are lost.

        It comes before the first collective of a batch: a rank that failed later would leave the others waiting.
        """
        self.samples = {}
        lost = []
        for index, reference in groups.items():
            try:
                self.samples[index] = ray.get(reference, timeout=FETCH_S)
            except (ObjectLostError, GetTimeoutError):
                lost.append(index)
        return lost


class TrainedWorker(RankWorker[TrainedT]):
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


def fetch_arrays(refs: Sequence[ray.ObjectRef]) -> TokenArrays:
    """The arrays that other ranks made for this one."""
    merged: TokenArrays = {}
    for of_rank in ray.get(list(refs)):
        merged.update(of_rank)
    return merged


def groups_of(plan: RankPlan, groups: Sequence[ray.ObjectRef]) -> GroupRefs:
    """The groups that a rank's plan needs."""
    needed = set()
    for task in tasks_of(plan):
        group, _, _ = task.at
        needed.add(group)
    return {group: groups[group] for group in sorted(needed)}


class Ranks:
    """All ranks of one model: every call reaches each of them and waits for all, within a deadline.

    `spawn(rank)` starts the process of a rank; together they are replaced when one is lost. The ranks of one
    data-parallel rank, peers, get the same plan, and the first of them answers for all where they say the same.
    """

    def __init__(self, spawn: Callable[[int], Any], shape: MeshShape, *, name: str, timeout_s: float):
        self.spawn = spawn
        self.shape = shape
        self.name = name
        self.timeout_s = timeout_s
        self.workers = [spawn(rank) for rank in range(shape.world_size)]

    async def start(self, build: Build[Any], settings: RankSettings) -> None:
        """Every rank joins the process group at the first one's address and loads its shard."""
        self.build = build
        self.settings = settings
        if not self.workers:
            return
        (meeting_point,) = await self.all([self.workers[0].address.remote()])
        address, port = meeting_point

        calls = []
        for rank, worker in enumerate(self.workers):
            # Ray shows each actor only its GPU, so every rank is local rank 0.
            local_rank = 0
            calls.append(worker.start.remote(build, settings, rank, self.shape, address, port, local_rank))
        await self.all(calls)

    async def restart(self) -> None:
        """Replace all ranks by new ones, with the weights they first had; the caller loads a checkpoint."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = [self.spawn(rank) for rank in range(self.shape.world_size)]
        await self.start(self.build, self.settings)

    async def fetch(self, plans: Sequence[RankPlan], groups: Sequence[ray.ObjectRef]) -> set[int]:
        """Every rank gets the samples of its plan. Returns the indices of groups whose arrays some rank cannot get."""
        calls = [worker.fetch.remote(groups_of(plan, groups)) for worker, plan in self.with_plans(plans)]
        return set(chain.from_iterable(await self.all(calls)))

    async def infer(self, plans: Sequence[RankPlan], routes: Sequence[Route]) -> ArrayRefs:
        """Log-probs or values of the samples that were fetched. routes: one per data-parallel rank."""
        calls = []
        for rank, (worker, plan) in enumerate(self.with_plans(plans)):
            route = routes[self.shape.data_rank(rank)]
            infer = worker.infer.options(num_returns=1 + len(route.readers))
            calls.append(infer.remote(plan, route))
        _, arrays = await self.light_and_heavy(calls, routes)
        return arrays

    async def merged(self, calls: list[ray.ObjectRef]) -> dict[str, Metric]:
        """The metrics of all data-parallel ranks. What a step reduced over ranks is the same on each of them."""
        return merge(self.of_first_peers(await self.all(calls)))

    async def save(self, tmp: Path, background: bool) -> None:
        """Every rank's part of a checkpoint; with `background` it is on disk when `written` returns."""
        await self.all([worker.save.remote(tmp, background) for worker in self.workers])

    async def written(self, tmp: Path) -> None:
        """Wait until every rank's part is on disk."""
        await self.all([worker.written.remote(tmp) for worker in self.workers])

    async def load(self, path: Path) -> None:
        """Restore every rank from a checkpoint."""
        await self.all([worker.load.remote(path) for worker in self.workers])

    async def evidence(self) -> list[Evidence]:
        """The steps that were skipped since this was called last, of all ranks together."""
        return merge_evidence(await self.all([worker.evidence.remote() for worker in self.workers]))

    def with_plans(self, plans: Sequence[RankPlan]) -> Iterator[tuple[Any, RankPlan]]:
        """Every rank with the plan of its data-parallel rank. plans: one per data-parallel rank."""
        assert len(plans) == self.shape.data_ranks, "a batch is planned for the data-parallel ranks"
        for rank, worker in enumerate(self.workers):
            yield worker, plans[self.shape.data_rank(rank)]

    def of_first_peers(self, of_ranks: Sequence[T]) -> list[T]:
        """One value per data-parallel rank, from one per rank: its peers have the same, which counts once."""
        return [value for rank, value in enumerate(of_ranks) if self.shape.is_first_peer(rank)]

    async def light_and_heavy(
        self, calls: Sequence[ray.ObjectRef | Sequence[ray.ObjectRef]], routes: Sequence[Route]
    ) -> tuple[list[Any], ArrayRefs]:
        """What `exchange.light_and_heavy` returned: the light values per data-parallel rank, the arrays by reader."""
        light: list[ray.ObjectRef] = []
        heavy: list[Sequence[ray.ObjectRef]] = []
        for call in calls:
            references = [call] if isinstance(call, ray.ObjectRef) else call
            light.append(references[0])
            heavy.append(references[1:])

        arrays: ArrayRefs = {}
        for route, references in zip(routes, self.of_first_peers(heavy), strict=True):
            for reader, reference in zip(route.readers, references, strict=True):
                arrays.setdefault(reader, []).append(reference)
        return self.of_first_peers(await self.all(light)), arrays

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
            await self._raise_if_lost(tasks, error)
            raise

    async def _raise_if_lost(self, tasks: Sequence[asyncio.Future], error: Exception) -> None:
        """Raise `RankLostError` if the death or the silence of a rank explains what another one raised."""
        done, silent = await asyncio.wait(tasks, timeout=PEER_S)
        for task in tasks:
            death = task.exception() if task in done else None
            if isinstance(death, DEAD):
                raise self._lost(f"died ({death})") from death
        if silent and _timed_out_in_collective(error):
            raise self._lost(f"hangs: another one waited for it and timed out ({_cause(error)})") from error

    def _lost(self, how: str) -> RankLostError:
        return RankLostError(
            f"a {self.name} rank {how}: its part of the weights is gone. If this stops the run, free memory if the "
            "system killed it, look for a rank that waits for another one, then resume with --ckpt.load_enable."
        )


def _timed_out_in_collective(error: Exception) -> bool:
    """Whether a rank's collective took longer than it may. NCCL ends the process itself then."""
    # gloo has no class for it.
    return isinstance(error, RayTaskError) and "Timed out waiting" in str(_cause(error))


def _cause(error: Exception) -> object:
    """What a remote method raised."""
    return getattr(error, "cause", None)
