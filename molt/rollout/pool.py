"""Engines as their two callers see them: the runners (`EnginePool`) and the publication (`EngineGroup`)."""

import asyncio
import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from molt.errors import EngineError
from molt.publish.proof import Receipt
from molt.rollout.engine_worker import Sampling
from molt.types import InfraFailure, Media, Turn

MAX_ATTEMPTS = 3


class EnginePool:
    """Hands each model call to an engine.

    A rollout stays on its engine (its prefix is cached there) until that engine fails; a new one goes
    to the engine with the fewest calls in flight.
    """

    def __init__(self, engines: Sequence[ray.actor.ActorHandle], name: str):
        self.engines = list(engines)
        self.name = name
        self.in_flight = [0] * len(engines)
        self._affinity: dict[str, int] = {}
        self._requests = itertools.count()

    async def generate(
        self, rollout: str, prompt_ids: list[int], sampling: Sampling, timeout_s: float, **shown: Sequence[Media]
    ) -> Turn:
        """One turn. `shown`: `media`, if there is any.

        Raises `InfraFailure` when no engine answers within the attempts and the deadline.
        """
        failed: dict[int, str] = {}
        async with asyncio.timeout(timeout_s):
            for _ in range(MAX_ATTEMPTS):
                index = self._affinity.setdefault(rollout, self._least_loaded(failed))
                try:
                    return await self._call(index, prompt_ids, sampling, shown)
                except (EngineError, RayActorError, RayTaskError) as error:
                    failed[index] = f"engine {index}: {error!r}"
                    self._affinity.pop(rollout, None)
        raise InfraFailure("engine", f"{MAX_ATTEMPTS} attempts failed: {'; '.join(failed.values())}")

    def forget(self, rollout: str) -> None:
        """The rollout is over."""
        self._affinity.pop(rollout, None)

    async def _call(self, index: int, prompt_ids: list[int], sampling: Sampling, shown: dict[str, Any]) -> Turn:
        request_id = f"{self.name}-{next(self._requests)}"
        call = self.engines[index].generate.remote(request_id, prompt_ids, sampling, **shown)
        self.in_flight[index] += 1
        try:
            return await call
        except asyncio.CancelledError:
            ray.cancel(call)  # aborts the request inside the engine
            raise
        finally:
            self.in_flight[index] -= 1

    def _least_loaded(self, failed: Container[int]) -> int:
        """A dead engine answers at once and looks idle, so one that just failed comes last."""
        return min(range(len(self.engines)), key=lambda index: (index in failed, self.in_flight[index]))


class EngineGroup:
    """All engines as the publication sees them."""

    def __init__(self, engines: Sequence[ray.actor.ActorHandle], *, timeout_s: float):
        self.engines = list(engines)
        self.timeout_s = timeout_s

    async def commit(self, version: int) -> list[Receipt]:
        """Receipts of all workers, engine by engine."""
        receipts = await self._all([engine.commit.remote(version) for engine in self.engines])
        return [receipt for per_engine in receipts for receipt in per_engine]

    async def score(self, sequences: list[list[int]]) -> list[list[np.ndarray]]:
        """The probe's log-probs, engine by engine."""
        return await self._all([engine.score.remote(sequences) for engine in self.engines])

    async def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Turn]:
        """One turn per prompt from the first engine."""
        generate = self.engines[0].generate
        return await self._all([generate.remote(f"sample-{i}", ids, sampling) for i, ids in enumerate(prompts)])

    async def _all(self, calls: list[ray.ObjectRef]) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*calls)
        except (TimeoutError, RayError) as error:
            raise EngineError(
                f"an engine is dead, or did not answer within {self.timeout_s:.0f} s: the run stops. Mend what its "
                "output says, then resume from the last checkpoint with --ckpt.load_enable. It said: "
                f"{repr(error).strip().splitlines()[-1]}"
            ) from error
