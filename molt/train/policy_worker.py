"""Policy, critic and reference ranks as Ray actors, and all ranks of the policy as the driver sees them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from molt.batch.plan import RankPlan, Scores
from molt.chat.render import load_tokenizer
from molt.errors import PublicationError
from molt.publish.transfer import build_sender
from molt.report.metrics import merge
from molt.train.rank_worker import Ranks, RankWorker, ScoreRefs, TrainedWorker, fetch, fetch_scores
from molt.types import NO_ROLLBACK, Lineage, Metric


@ray.remote
class ReferenceWorker(RankWorker):
    """One rank of the frozen reference."""


@ray.remote(concurrency_groups={"saving": 1})
class CriticWorker(TrainedWorker):
    """One rank of the critic."""

    def train(self, returns: list[ray.ObjectRef]) -> dict[str, Metric]:
        return self.model.train(fetch_scores(returns))


@ray.remote(concurrency_groups={"saving": 1})
class PolicyWorker(TrainedWorker):
    """One rank of the policy."""

    def connect(self, engines: Sequence[Any], backend: str, engine_workers: int, timeout_s: float) -> None:
        """Meet the engines."""
        client = RayEngineClient(engines, timeout_s)
        self.sender = build_sender(
            backend, client=client, source=self.model.named_tensors, rank=self.rank, engine_workers=engine_workers
        )

    def prepare(
        self, plan: RankPlan, groups: dict[int, ray.ObjectRef], scores: ScoreRefs, *moment: Any
    ) -> tuple[dict[str, Metric], Scores]:
        """moment: step, coefficient of the KL, lineage."""
        found = {name: fetch_scores(refs) for name, refs in scores.items()}
        return self.model.prepare(plan, fetch(groups), found, *moment)

    def train(self) -> dict[str, Metric]:
        return self.model.train()

    def send_weights(self) -> dict[str, int]:
        return self.sender.send()

    def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return self.model.probe(sequences)

    def export(self, model: str, chat_template: str | None, path: Path) -> None:
        self.model.export(load_tokenizer(model, chat_template), path)


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
                f"an engine is dead, or did not take the weights within {self.timeout_s:.0f} s. If this stops the run, "
                "mend what its output says, then resume with --ckpt.load_enable. It said: "
                f"{str(error).strip().splitlines()[-1]}"
            ) from error


class PolicyRanks(Ranks):
    """All ranks of the policy."""

    def meeting(self, engines: Sequence[Any], backend: str, workers_per_engine: int, timeout_s: float) -> None:
        """Whom `connect` lets them meet."""
        self.engines, self.backend = list(engines), backend
        self.workers_per_engine, self.publication_s = workers_per_engine, timeout_s

    async def connect(self, engines: Sequence[int]) -> None:
        """Meet these engines, and publish to them from now on."""
        handles = [self.engines[index] for index in engines]
        world = len(handles) * self.workers_per_engine
        await self.all([w.connect.remote(handles, self.backend, world, self.publication_s) for w in self.workers])

    async def prepare(
        self,
        plans: Sequence[RankPlan],
        groups: Sequence[ray.ObjectRef],
        scores: ScoreRefs,
        step: int,
        kl_coef: float,
        lineage: Lineage = NO_ROLLBACK,
    ) -> tuple[dict[str, Metric], list[ray.ObjectRef]]:
        """Everything that a batch needs before its first step: the metrics of all ranks, and what a critic learns."""
        moment = step, kl_coef, lineage
        per_rank, returns = await self.both(lambda worker: worker.prepare, plans, groups, scores, *moment)
        return merge(per_rank), returns

    async def send_weights(self) -> dict[str, int]:
        return (await self.all([w.send_weights.remote() for w in self.workers]))[0]

    async def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return (await self.all([w.probe.remote(sequences) for w in self.workers]))[0]

    async def export(self, model: str, chat_template: str | None, path: Path) -> None:
        await self.all([w.export.remote(model, chat_template, path) for w in self.workers])
