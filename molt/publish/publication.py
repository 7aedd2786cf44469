"""One publication: send, commit, prove, resume; again when an engine is lost in it.

docs/architecture.md, "Publication", says what the proofs are.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from molt.errors import EngineError, PublicationError
from molt.publish.proof import (
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


class Policy(Protocol):
    """The trainer as a publication sees it: all ranks together."""

    async def connect(self, engines: Sequence[int]) -> None: ...
    async def send_weights(self) -> dict[str, int]: ...
    async def probe(self, sequences: list[list[int]]) -> list[np.ndarray]: ...


class Engines(Protocol):
    """The engines as a publication sees them: all that are present together."""

    @property
    def present(self) -> dict[int, int]: ...
    async def some(self) -> dict[int, int]: ...
    async def commit(self, version: int, engines: Sequence[int]) -> list[Receipt]: ...
    async def resume(self, engines: Sequence[int]) -> None: ...
    async def logprobs(self, sequences: list[list[int]], engines: Sequence[int]) -> list[list[np.ndarray]]: ...
    async def examine(self, suspects: Iterable[int] = ()) -> bool: ...


class Publisher:
    """Owns the probe: the same token sequences at every publication of a run."""

    def __init__(
        self,
        policy: Policy,
        engines: Engines,
        probe: Sequence[Sequence[int]],
        *,
        bound: float,
        use_max: bool,
        workers_per_engine: int,
        on_event: Callable[..., None] = lambda kind, **fields: None,
    ):
        self.policy, self.engines = policy, engines
        self.probe = [list(ids) for ids in probe]
        self.bound, self.use_max = bound, use_max
        self.workers_per_engine = workers_per_engine
        self.on_event = on_event
        self.connected: dict[int, int] = {}
        """The engines, and their lives, that the trainer has met."""
        self.digests: list[int] | None = None
        """Of what was sent at the last publication, then of what each worker of those engines held after it."""

    async def publish(self, version: int) -> dict[str, Metric]:
        """Copy the trainer's weights to every engine that is present as `version`; return `mismatch/*`.

        When an engine dies in it, or holds something else after it, that engine is given up and the whole publication
        is repeated with the others; none serves before its bytes are proven. Raises `PublicationError` when a proof
        fails on all engines alike, or again and again.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await self._publish(version)
            except (PublicationError, EngineError) as error:
                ill = await self.engines.examine(self._suspects(error)) or self.engines.present != self.connected
                if attempt == MAX_ATTEMPTS or not ill:
                    raise
                self.forget()
                self.on_event("publication_failed", version=version, attempt=attempt, error=_said(error))
        raise AssertionError("unreachable")

    async def _publish(self, version: int) -> dict[str, Metric]:
        present = await self.engines.some()
        if present != self.connected:
            await self.policy.connect(list(present))
            self.connected, self.digests = present, None
        engines = list(present)
        sent = await self.policy.send_weights()
        receipts = await self.engines.commit(version, engines)
        check_transport(sent, receipts, version)
        check_digests(receipts, self.workers_per_engine)
        digests = [combine(sent), *(receipt.digest for receipt in receipts)]
        if self.digests is not None:
            trainer, *workers = zip(self.digests, digests, strict=True)
            check_in_use(trainer, workers)
        self.digests = digests
        await self.engines.resume(engines)
        ours, theirs = await asyncio.gather(self.policy.probe(self.probe), self.engines.logprobs(self.probe, engines))
        proofs = [compare_probe(ours, engine) for engine in theirs]
        asked = {"bound": self.bound, "use_max": self.use_max, "workers_per_engine": self.workers_per_engine}
        check_probe(proofs, version=version, **asked)
        return merge(proofs)

    def forget(self) -> None:
        """The trainer, or an engine, is a new one: they meet again at the next publication."""
        self.connected = {}

    def _suspects(self, error: Exception) -> list[int]:
        """The engine that a proof names."""
        worker = getattr(error, "worker", None)
        return [] if worker is None else [list(self.connected)[worker // self.workers_per_engine]]


def _said(error: Exception) -> str:
    """What it says itself, when it comes out of another process with a traceback around it."""
    return str(getattr(error, "cause", error))
