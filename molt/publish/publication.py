"""One weight sync ("publication"): send, commit, prove, resume; repeated when an engine is lost in it.

docs/architecture.md, "Publication", says what the proofs are.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from molt.errors import EngineError, PublicationError, SilentEngineError
from molt.publish.proof import (
    Digests,
    Receipt,
    check_digests,
    check_in_use,
    check_probe,
    check_transport,
    combine,
    compare_probe,
)
from molt.report.metrics import merge
from molt.types import Metric

MAX_ATTEMPTS = 3


class Trainer(Protocol):
    """The policy as a publication sees it: all ranks together."""

    async def connect(self, engines: Sequence[int]) -> None:
        """Meet these engines, and send to them from now on."""
        ...

    async def send_weights(self) -> dict[str, int]:
        """The checksum of every tensor as sent."""
        ...

    async def probe(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs, float32 `[T]`, of each sequence."""
        ...


class Engines(Protocol):
    """The engines as a publication sees them: all that are present together."""

    @property
    def present(self) -> dict[int, int]:
        """How often each present engine was started, by its index."""
        ...

    async def some(self) -> dict[int, int]:
        """`present`, once there is one."""
        ...

    async def commit(self, version: int, engines: Sequence[int]) -> list[Receipt]:
        """Call the weights they received `version`; a receipt of each worker."""
        ...

    async def resume(self, engines: Sequence[int]) -> None: ...

    async def logprobs(self, sequences: list[list[int]], engines: Sequence[int]) -> list[list[np.ndarray]]:
        """By engine, log-probs, float32 `[T]`, of each sequence."""
        ...

    def give_up(self, engine: int, reason: str) -> None:
        """The engine takes part no more until it is a new one."""
        ...

    async def examine(self, suspects: Iterable[int] = ()) -> bool:
        """Whether an engine is given up: a suspect, or one that does not answer."""
        ...


def _ignore_event(kind: str, **fields: object) -> None:
    """Nobody records it."""


class Publisher:
    """Owns the probe: the same token sequences at every publication of a run."""

    def __init__(
        self,
        policy: Trainer,
        engines: Engines,
        probe: Sequence[Sequence[int]],
        *,
        bound: float,
        use_max: bool,
        workers_per_engine: int,
        on_event: Callable[..., None] = _ignore_event,
    ):
        self.policy = policy
        self.engines = engines
        self.probe = [list(ids) for ids in probe]
        self.bound = bound
        self.use_max = use_max
        self.workers_per_engine = workers_per_engine
        self.on_event = on_event
        self.connected: dict[int, int] = {}
        """The engines that the trainer has met: how often each had been started, by its index."""
        self.digests: Digests | None = None
        """Of the last publication to these engines; None before the first."""

    async def publish(self, version: int) -> dict[str, Metric]:
        """Copy the trainer's weights to every engine that is present as `version`; return `mismatch/*`.

        When an engine dies in it, or holds something else after it, that engine is given up and the publication is
        repeated with the others; none serves before its bytes are proven. Raises `PublicationError` when a proof
        fails on all engines alike, or repeatedly.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await self._publish(version)
            except (PublicationError, EngineError) as error:
                lost_an_engine = await self._lost_an_engine(error)
                if attempt == MAX_ATTEMPTS or not lost_an_engine:
                    raise
                self.forget()
                message = _message(error)
                self.on_event("publication_failed", version=version, attempt=attempt, error=message)
                print(f"weight sync of version {version} is repeated: {message}", file=sys.stderr)
        raise AssertionError("unreachable")

    async def _lost_an_engine(self, error: Exception) -> bool:
        """Whether an engine explains the error: it is given up, so another attempt may succeed with the others."""
        suspects = self._suspects(error)
        if isinstance(error, SilentEngineError):
            for engine in suspects:
                self.engines.give_up(engine, _message(error))
            suspects = []
        if await self.engines.examine(suspects):
            return True
        return self.engines.present != self.connected

    async def _publish(self, version: int) -> dict[str, Metric]:
        present = await self.engines.some()
        if present != self.connected:
            self.connected = present  # before the trainer meets them: what fails then names one of these
            self.digests = None
            await self.policy.connect(list(present))
        engines = list(present)

        sent = await self.policy.send_weights()
        receipts = await self.engines.commit(version, engines)
        self._prove_transport(sent, receipts, version)
        await self.engines.resume(engines)
        return await self._prove_by_probe(engines, version)

    def _prove_transport(self, sent: dict[str, int], receipts: list[Receipt], version: int) -> None:
        """All tensors arrived, all engines hold the same, and what they hold changed if the weights did."""
        check_transport(sent, receipts, version)
        check_digests(receipts, self.workers_per_engine)
        digests = Digests(
            sent=combine(sent),
            held=tuple(receipt.digest for receipt in receipts),
        )
        if self.digests is not None:
            check_in_use(self.digests, digests)
        self.digests = digests

    async def _prove_by_probe(self, engines: list[int], version: int) -> dict[str, Metric]:
        """The log-prob probe: `mismatch/*` of all engines together."""
        of_trainer, of_engines = await asyncio.gather(
            self.policy.probe(self.probe),
            self.engines.logprobs(self.probe, engines),
        )
        mismatches = [compare_probe(of_trainer, of_engine) for of_engine in of_engines]
        check_probe(
            mismatches,
            bound=self.bound,
            use_max=self.use_max,
            version=version,
            workers_per_engine=self.workers_per_engine,
        )
        return merge(mismatches)

    def forget(self) -> None:
        """The trainer, or an engine, is a new one: they meet again at the next publication."""
        self.connected = {}

    def _suspects(self, error: Exception) -> list[int]:
        """The engine that an error names, unless it has been given up meanwhile: then it is a new one."""
        worker = getattr(error, "worker", None)  # an `EngineError` names none
        if worker is None:
            return []
        engine = list(self.connected)[worker // self.workers_per_engine]
        if self.engines.present.get(engine) != self.connected[engine]:
            return []
        return [engine]


def _message(error: Exception) -> str:
    """Its message, without the traceback around it when it comes out of another process."""
    return str(getattr(error, "cause", error))
