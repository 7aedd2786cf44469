"""The engines as one runner sees them: each model call goes to one that serves.

An engine that was restarted keeps its handle. Until it has the trainer's weights it refuses requests; those go to
another engine, or wait.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.exceptions import RayError, RayTaskError

from molt.errors import EngineError, StructureError
from molt.rollout.engine_worker import Sampling
from molt.rollout.handles import ANSWER_S, DEAD, HEARTBEAT_S, EngineHandle
from molt.types import InfraFailure, Media, Turn

MAX_ATTEMPTS = 3


@dataclass(eq=False)
class PooledEngine:
    """One engine, and how busy this runner keeps it."""

    index: int
    handle: EngineHandle
    in_flight: int = 0
    """Calls of this runner that the engine has not answered yet."""


class EnginePool:
    """Routes model calls to engines.

    A rollout stays on its engine, which has its prefix in the cache, until a call on that engine fails. A new rollout
    goes to the engine with the fewest calls in flight.
    """

    def __init__(self, engines: Sequence[EngineHandle], name: str):
        """name: of the runner; it makes the ids of its requests unique."""
        self.engines = [PooledEngine(index, handle) for index, handle in enumerate(engines)]
        self.name = name
        self._engine_of: dict[str, PooledEngine] = {}
        """By rollout."""
        self._request_numbers = itertools.count()

    @property
    def in_flight(self) -> list[int]:
        """Calls in flight, engine by engine."""
        return [engine.in_flight for engine in self.engines]

    async def generate(
        self,
        rollout: str,
        prompt_ids: list[int],
        sampling: Sampling,
        timeout_s: float,
        media: Sequence[Media] = (),
    ) -> Turn:
        """One turn of `rollout`. Waits until an engine serves.

        Raises `InfraFailure` after `MAX_ATTEMPTS` failed calls, `TimeoutError` after `timeout_s`, `StructureError` if
        no engine could enforce `sampling.structure`.
        """
        failures: list[str] = []
        async with asyncio.timeout(timeout_s):
            while len(failures) < MAX_ATTEMPTS:
                engine = self._engine_of.setdefault(rollout, self._least_loaded())
                try:
                    return await self._call(engine, prompt_ids, sampling, media)
                except StructureError:
                    raise
                except (EngineError, RayTaskError, *DEAD) as error:
                    failures.append(f"engine {engine.index}: {error!r}")
                    self._engine_of[rollout] = await self._serving_engine(after=engine)
        raise InfraFailure("engine", f"{MAX_ATTEMPTS} attempts failed: {'; '.join(failures)}")

    def forget(self, rollout: str) -> None:
        """Release the engine of a rollout that has ended."""
        self._engine_of.pop(rollout, None)

    async def _call(
        self, engine: PooledEngine, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media]
    ) -> Turn:
        request_id = f"{self.name}-{next(self._request_numbers)}"
        call = engine.handle.generate.remote(request_id, prompt_ids, sampling, media)
        engine.in_flight += 1
        try:
            return await call
        except asyncio.CancelledError:
            ray.cancel(call)  # aborts the request inside the engine
            raise
        finally:
            engine.in_flight -= 1

    def _least_loaded(self) -> PooledEngine:
        return min(self.engines, key=_load)

    async def _serving_engine(self, after: PooledEngine) -> PooledEngine:
        """Wait for an engine that serves: the least loaded other one, or else `after` again."""
        others = [engine for engine in self.engines if engine is not after]
        candidates = [*sorted(others, key=_load), after]

        while True:
            for engine in candidates:
                with suppress(TimeoutError, RayError, EngineError):
                    async with asyncio.timeout(ANSWER_S):
                        if await engine.handle.alive.remote():
                            return engine
            await asyncio.sleep(HEARTBEAT_S)


def _load(engine: PooledEngine) -> int:
    return engine.in_flight
