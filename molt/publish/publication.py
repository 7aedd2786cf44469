"""One publication: send, commit, prove (DESIGN.md section 10)."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

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


class Policy(Protocol):
    """The trainer as a publication sees it: all ranks together."""

    async def send_weights(self) -> dict[str, int]: ...
    async def probe(self, sequences: list[list[int]]) -> list[np.ndarray]: ...


class Engines(Protocol):
    """The engines as a publication sees them: all of them together."""

    async def commit(self, version: int) -> list[Receipt]: ...
    async def score(self, sequences: list[list[int]]) -> list[list[np.ndarray]]: ...


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
    ):
        self.policy, self.engines = policy, engines
        self.probe = [list(ids) for ids in probe]
        self.bound, self.use_max = bound, use_max
        self.workers_per_engine = workers_per_engine
        self.digests: list[int] | None = None
        """Of what was sent at the last publication, then of what each engine worker held after it."""

    async def publish(self, version: int) -> dict[str, Metric]:
        """Copy the trainer's weights to every engine as `version`; return `mismatch/*`.

        Raises `PublicationError` when any of the three proofs fails.
        """
        sent = await self.policy.send_weights()
        receipts = await self.engines.commit(version)
        check_transport(sent, receipts, version)
        check_digests(receipts, self.workers_per_engine)
        digests = [combine(sent), *(receipt.digest for receipt in receipts)]
        if self.digests is not None:
            trainer, *engines = zip(self.digests, digests, strict=True)
            check_in_use(trainer, engines)
        self.digests = digests
        ours, theirs = await asyncio.gather(self.policy.probe(self.probe), self.engines.score(self.probe))
        metrics = merge(compare_probe(ours, engine) for engine in theirs)
        check_probe(metrics, bound=self.bound, use_max=self.use_max, version=version)
        return metrics
