"""The engine pool inside each runner: affinity, least load, bounded retries, deadlines."""

import asyncio
import itertools
from collections.abc import Sequence

import ray
from ray.exceptions import RayActorError, RayTaskError

from molt.errors import EngineError
from molt.rollout.engine_worker import Sampling
from molt.types import InfraFailure, Turn

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

    async def generate(self, rollout: str, prompt_ids: list[int], sampling: Sampling, timeout_s: float) -> Turn:
        """One turn. Raises `InfraFailure` when no engine answers within the attempts and the deadline."""
        failed: list[str] = []
        async with asyncio.timeout(timeout_s):
            for _ in range(MAX_ATTEMPTS):
                index = self._affinity.setdefault(rollout, self._least_loaded())
                try:
                    return await self._call(index, prompt_ids, sampling)
                except (EngineError, RayActorError, RayTaskError) as error:
                    failed.append(f"engine {index}: {error!r}")
                    self._affinity.pop(rollout, None)
        raise InfraFailure("engine", f"{MAX_ATTEMPTS} attempts failed: {failed[-1]}")

    def forget(self, rollout: str) -> None:
        """The rollout is over."""
        self._affinity.pop(rollout, None)

    async def _call(self, index: int, prompt_ids: list[int], sampling: Sampling) -> Turn:
        request_id = f"{self.name}-{next(self._requests)}"
        call = self.engines[index].generate.remote(request_id, prompt_ids, sampling)
        self.in_flight[index] += 1
        try:
            return await call
        except asyncio.CancelledError:
            ray.cancel(call)  # aborts the request inside the engine
            raise
        finally:
            self.in_flight[index] -= 1

    def _least_loaded(self) -> int:
        return min(range(len(self.engines)), key=self.in_flight.__getitem__)
