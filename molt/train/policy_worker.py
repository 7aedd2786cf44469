"""Policy, critic and reference ranks as Ray actors, and all ranks of the policy as the driver sees them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from molt.batch.plan import RankPlan
from molt.chat.render import load_tokenizer
from molt.errors import PublicationError, SilentEngineError
from molt.publish.transfer import build_sender
from molt.report.metrics import merge
from molt.train.critic import Critic
from molt.train.exchange import Route, light_and_heavy
from molt.train.policy import Policy
from molt.train.rank_worker import ArrayRefs, Ranks, RankWorker, TrainedWorker, fetch_arrays
from molt.train.reference import Reference
from molt.types import NO_ROLLBACK, Lineage, Metric

SAVING = {"saving": 1}
"""Ray's concurrency group of `TrainedWorker.written`: it waits beside the other methods."""


@ray.remote
class ReferenceWorker(RankWorker[Reference]):
    """One rank of the frozen reference."""

    def infer(self, plan: RankPlan, route: Route) -> Any:
        """Log-probs of the batch that was fetched, to those who read them."""
        arrays = self.model.infer(plan, self.samples)
        self.samples = {}
        return light_and_heavy(None, arrays, route)


@ray.remote(concurrency_groups=SAVING)  # pyright: ignore[reportCallIssue]  Ray's stubs do not have it
class CriticWorker(TrainedWorker[Critic]):
    """One rank of the critic."""

    def infer(self, plan: RankPlan, route: Route) -> Any:
        """Values of the batch that was fetched, to those who read them; the model keeps the batch for `train`."""
        arrays = self.model.infer(plan, self.samples)
        self.samples = {}
        return light_and_heavy(None, arrays, route)

    def train(self, returns: list[ray.ObjectRef]) -> dict[str, Metric]:
        """returns: `TokenArrays` that ranks of the policy made for this one."""
        return self.model.train(fetch_arrays(returns))


@ray.remote(concurrency_groups=SAVING)  # pyright: ignore[reportCallIssue]  Ray's stubs do not have it
class PolicyWorker(TrainedWorker[Policy]):
    """One rank of the policy."""

    def connect(self, link: "EngineLink", engines: Sequence[int]) -> None:
        """Meet these engines of the link."""
        client = RayEngineClient(
            [link.engines[number] for number in engines],
            link.timeout_s,
            drain_s=link.drain_s,
            numbers=engines,
            workers_per_engine=link.workers_per_engine,
        )
        self.sender = build_sender(
            link.backend,
            client=client,
            source=self.model.named_tensors,
            mesh=self.model.mesh,
            engine_workers=len(engines) * link.workers_per_engine,
        )

    def prepare(
        self,
        plan: RankPlan,
        inferred: dict[str, list[ray.ObjectRef]],
        route: Route,
        batches_trained: int,
        kl_coef: float,
        lineage: Lineage,
    ) -> Any:
        """As `Policy.prepare`, of the batch that was fetched. inferred: what other ranks made for this one, by name.

        Returns the metrics, and the returns to the ranks of the critic that learn them.
        """
        arrays = {name: fetch_arrays(refs) for name, refs in inferred.items()}
        samples = self.samples
        self.samples = {}
        metrics, returns = self.model.prepare(plan, samples, arrays, batches_trained, kl_coef, lineage)
        return light_and_heavy(metrics, returns, route)

    def train(self) -> dict[str, Metric]:
        return self.model.train()

    def send_weights(self) -> dict[str, int]:
        return self.sender.send()

    def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return self.model.probe(sequences)

    def export(self, model: str, chat_template: str | None, path: Path) -> None:
        """model: whose tokenizer is written beside the weights."""
        self.model.export(load_tokenizer(model, chat_template), path)


class RayEngineClient:
    """vLLM's `VLLMWeightSyncClient` over engine actors, with a deadline on every call."""

    def __init__(
        self,
        engines: Sequence[Any],
        timeout_s: float,
        *,
        drain_s: float = 0.0,
        numbers: Sequence[int] | None = None,
        workers_per_engine: int = 1,
    ):
        """timeout_s: for one call. drain_s: what `start_weight_update` may take longer, while requests finish.

        numbers: of the engines, for messages; None: 0, 1, ...
        """
        self.engines = engines
        self.timeout_s = timeout_s
        self.drain_s = drain_s
        self.numbers = range(len(engines)) if numbers is None else numbers
        self.workers_per_engine = workers_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        calls = [engine.init_weight_transfer_engine.remote(init_info) for engine in self.engines]
        self._wait("init_weight_transfer_engine", calls, self.timeout_s)

    def start_weight_update(self) -> None:
        calls = [engine.start_weight_update.remote() for engine in self.engines]
        self._wait("start_weight_update", calls, self.timeout_s + self.drain_s)

    def update_weights(self, update_info: Any) -> None:
        calls = [engine.update_weights.remote(update_info) for engine in self.engines]
        self._wait("update_weights", calls, self.timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        calls = [engine.finish_weight_update.remote(weight_version) for engine in self.engines]
        self._wait("finish_weight_update", calls, self.timeout_s)

    def _wait(self, method: str, calls: list[ray.ObjectRef], limit_s: float) -> None:
        """Returns when every engine has answered. Raises `SilentEngineError` for the first that fails or does not."""
        deadline = time.monotonic() + limit_s
        position_of = {call: position for position, call in enumerate(calls)}
        pending = calls
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                why = f"did not answer `{method}` within {limit_s:g} s (train.watchdog_s)"
                raise self._lost(position_of[pending[0]], why)
            for call in ready:
                self._require_answer(method, call, position_of[call])

    def _require_answer(self, method: str, call: ray.ObjectRef, position: int) -> None:
        try:
            ray.get(call)
        except RayTaskError as error:  # the engine answers: whether it is to blame is found out by asking all
            raise PublicationError(_engine_said(self.numbers[position], method, error)) from error
        except RayError as error:
            raise self._lost(position, f"died in `{method}` ({str(error).strip().splitlines()[-1]})") from error

    def _lost(self, position: int, why: str) -> SilentEngineError:
        return SilentEngineError(
            f"engine {self.numbers[position]} {why}, so it does not have the weights. If this stops the run, fix what "
            "its output says, then resume with --ckpt.load_enable.",
            worker=position * self.workers_per_engine,
        )


def _engine_said(number: int, method: str, error: RayError) -> str:
    return (
        f"engine {number} failed in `{method}`, so it does not have the weights. If this stops the run, fix what its "
        f"output says, then resume with --ckpt.load_enable. Its error: {str(error).strip().splitlines()[-1]}"
    )


class CriticRanks(Ranks):
    """All ranks of the critic."""

    async def train(self, returns: ArrayRefs) -> dict[str, Metric]:
        """The steps of the batch whose values were inferred. returns: what each data-parallel rank learns."""
        calls = []
        for rank, worker in enumerate(self.workers):
            calls.append(worker.train.remote(returns.get(self.shape.data_rank(rank), [])))
        return await self.merged(calls)


@dataclass(frozen=True)
class EngineLink:
    """How the policy reaches the engines."""

    engines: list[Any]
    """The Ray actor of each."""
    backend: str
    """Of `molt.publish.transfer`."""
    workers_per_engine: int
    timeout_s: float
    """For one call to an engine."""
    drain_s: float
    """What an engine may take longer to begin, because running requests finish first."""


class PolicyRanks(Ranks):
    """All ranks of the policy."""

    link: EngineLink

    def meeting(self, link: EngineLink) -> None:
        """Say which engines `connect` may meet, and how."""
        self.link = link

    async def connect(self, engines: Sequence[int]) -> None:
        """Meet these engines, and publish to them from now on."""
        await self.all([worker.connect.remote(self.link, list(engines)) for worker in self.workers])

    async def prepare(
        self,
        plans: Sequence[RankPlan],
        inferred: Mapping[str, ArrayRefs],
        routes: Sequence[Route],
        batches_trained: int,
        kl_coef: float,
        lineage: Lineage = NO_ROLLBACK,
    ) -> tuple[dict[str, Metric], ArrayRefs]:
        """Everything that the batch that was fetched needs before its first step.

        inferred: reference log-probs and values, where they are needed. routes: one per data-parallel rank, of the
        returns that a critic learns. Returns the metrics of all data-parallel ranks, and the returns.
        """
        calls = []
        for rank, (worker, plan) in enumerate(self.with_plans(plans)):
            data_rank = self.shape.data_rank(rank)
            route = routes[data_rank]
            for_rank = {name: refs.get(data_rank, []) for name, refs in inferred.items()}
            prepare = worker.prepare.options(num_returns=1 + len(route.readers))
            calls.append(prepare.remote(plan, for_rank, route, batches_trained, kl_coef, lineage))
        metrics, returns = await self.light_and_heavy(calls, routes)
        return merge(metrics), returns

    async def train(self) -> dict[str, Metric]:
        """The steps of the batch that was prepared."""
        return await self.merged([worker.train.remote() for worker in self.workers])

    async def send_weights(self) -> dict[str, int]:
        """All ranks gather; the writer, rank 0, sends and answers with the checksum of every tensor."""
        checksums, *_ = await self.all([worker.send_weights.remote() for worker in self.workers])
        return checksums

    async def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """As `Policy.probe`; every rank computes the same."""
        logprobs, *_ = await self.all([worker.probe.remote(sequences) for worker in self.workers])
        return logprobs

    async def export(self, model: str, chat_template: str | None, path: Path) -> None:
        """All ranks gather; the writer writes a directory for `from_pretrained`."""
        await self.all([worker.export.remote(model, chat_template, path) for worker in self.workers])
