"""Policy ranks as Ray actors, and all of them together as the driver sees them."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError

from molt.batch.plan import RankPlan
from molt.chat.render import load_tokenizer
from molt.errors import PublicationError, TrainingError
from molt.publish.transfer import build_sender
from molt.report.metrics import merge
from molt.train.policy import Policy, PolicySettings
from molt.types import Metric


@ray.remote(concurrency_groups={"saving": 1})
class PolicyWorker:
    """One rank. Methods run one after another, in the order the driver calls them; `written` runs beside them."""

    def address(self) -> tuple[str, int]:
        """A host and free port where the ranks can meet; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, settings: PolicySettings, rank: int, world_size: int, address: str, port: int, local_rank: int):
        """Build the model; returns when all ranks have."""
        self.policy = Policy(settings, rank, world_size, address, port, local_rank)
        self.rank = rank

    def connect(self, engines: Sequence[Any], backend: str, engine_workers: int, timeout_s: float) -> None:
        """Meet the engines."""
        client = RayEngineClient(engines, timeout_s)
        self.sender = build_sender(
            backend, client=client, source=self.policy.named_tensors, rank=self.rank, engine_workers=engine_workers
        )

    def train(self, plan: RankPlan, groups: dict[int, ray.ObjectRef], version: int) -> dict[str, Metric]:
        """One training batch; `groups` holds the references this rank's plan needs, by index in the batch."""
        samples = dict(zip(groups, ray.get(list(groups.values())), strict=True))
        return self.policy.train(plan, samples, version)

    def send_weights(self) -> dict[str, int]:
        return self.sender.send()

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return self.policy.score(sequences)

    def save(self, tmp: Path, background: bool) -> None:
        self.policy.save(tmp, background)

    @ray.method(concurrency_group="saving")
    def written(self, tmp: Path) -> None:
        self.policy.written(tmp)

    def load(self, path: Path) -> None:
        self.policy.load(path)

    def export(self, model: str, chat_template: str | None, path: Path) -> None:
        self.policy.export(load_tokenizer(model, chat_template), path)


class RayEngineClient:
    """vLLM's `VLLMWeightSyncClient` over engine actors, with a deadline on every call."""

    def __init__(self, engines: Sequence[Any], timeout_s: float):
        self.engines, self.timeout_s = engines, timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait([engine.init_weight_transfer_engine.remote(init_info) for engine in self.engines])

    def start_weight_update(self) -> None:
        self._wait([engine.start_weight_update.remote() for engine in self.engines])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._wait([engine.update_weights.remote(update_info) for engine in self.engines])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait([engine.finish_weight_update.remote(weight_version) for engine in self.engines])

    def _wait(self, calls: list[ray.ObjectRef]) -> None:
        try:
            ray.get(calls, timeout=self.timeout_s)
        except RayError as error:
            raise PublicationError(
                f"an engine is dead, or did not take the weights within {self.timeout_s:.0f} s: the run stops. Mend "
                "what its output says, then resume from the last checkpoint with --ckpt.load_enable. It said: "
                f"{str(error).strip().splitlines()[-1]}"
            ) from error


class PolicyRanks:
    """All ranks of the policy: every call reaches each of them and waits for all, within a deadline."""

    def __init__(self, workers: Sequence[Any], *, timeout_s: float):
        self.workers, self.timeout_s = list(workers), timeout_s

    async def train(
        self, plans: Sequence[RankPlan], groups: Sequence[ray.ObjectRef], version: int
    ) -> dict[str, Metric]:
        """Run every rank's plan; the merged metrics of all ranks."""
        calls = []
        for worker, plan in zip(self.workers, plans, strict=True):
            needed = {task.group for step in plan for micro_batch in step for task in micro_batch}
            calls.append(worker.train.remote(plan, {g: groups[g] for g in sorted(needed)}, version))
        per_rank = await self._all(calls)
        # What the step reduced over ranks is the same on each of them; the rest is a rank's own share.
        return merge(per_rank)

    async def send_weights(self) -> dict[str, int]:
        return (await self._all([w.send_weights.remote() for w in self.workers]))[0]

    async def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return (await self._all([w.score.remote(sequences) for w in self.workers]))[0]

    async def save(self, tmp: Path, background: bool) -> None:
        """Every rank's part of a checkpoint; with `background` it is on disk when `written` returns."""
        await self._all([w.save.remote(tmp, background) for w in self.workers])

    async def written(self, tmp: Path) -> None:
        await self._all([w.written.remote(tmp) for w in self.workers])

    async def load(self, path: Path) -> None:
        await self._all([w.load.remote(path) for w in self.workers])

    async def export(self, model: str, chat_template: str | None, path: Path) -> None:
        await self._all([w.export.remote(model, chat_template, path) for w in self.workers])

    async def _all(self, calls: list[ray.ObjectRef]) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*calls)
        except TimeoutError:
            raise TrainingError(
                f"the policy ranks did not answer within {self.timeout_s:.0f} s: the run cannot go on. Look for a rank "
                "that waits for another one, then resume with --ckpt.load_enable."
            ) from None
        except RayActorError as error:
            raise TrainingError(
                f"a policy rank died ({error}): its part of the weights is gone. Free memory if the system killed it, "
                "then resume with --ckpt.load_enable."
            ) from error
