"""Engines as their two callers see them: the runners (`EnginePool`) and the driver (`EngineGroup`).

A dead engine is the same Ray actor again when it is restarted, so every handle stays valid. Until it has been given
the trainer's weights it refuses requests, and those go elsewhere or wait.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from molt.errors import EngineError
from molt.publish.proof import Receipt
from molt.rollout.engine_worker import Sampling
from molt.types import InfraFailure, Media, Turn

DEAD = RayActorError, OutOfMemoryError
"""What a call on a process raises that is gone; Ray kills one itself when its node runs out of memory."""
MAX_ATTEMPTS = 3
HEARTBEAT_S = 1.0
"""Between two looks at an engine or a runner."""
ANSWER_S = 5.0
"""For an engine to say whether it serves, when a request looks for another one."""


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

        Waits for an engine that serves; raises `InfraFailure` when `MAX_ATTEMPTS` fail on the request.
        """
        failed: list[str] = []
        async with asyncio.timeout(timeout_s):
            while len(failed) < MAX_ATTEMPTS:
                index = self._affinity.setdefault(rollout, self._least_loaded())
                try:
                    return await self._call(index, prompt_ids, sampling, shown)
                except (EngineError, RayTaskError, *DEAD) as error:
                    failed.append(f"engine {index}: {error!r}")
                    self._affinity[rollout] = await self._serving(after=index)
        raise InfraFailure("engine", f"{MAX_ATTEMPTS} attempts failed: {'; '.join(failed)}")

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

    def _least_loaded(self) -> int:
        return min(range(len(self.engines)), key=self.in_flight.__getitem__)

    async def _serving(self, after: int) -> int:
        """An engine that takes requests, rather another one than `after`; waits until there is one."""
        others = sorted(range(len(self.engines)), key=lambda index: (index == after, self.in_flight[index]))
        while True:
            for index in others:
                with suppress(TimeoutError, RayError, EngineError):
                    async with asyncio.timeout(ANSWER_S):
                        if await self.engines[index].alive.remote():
                            return index
            await asyncio.sleep(HEARTBEAT_S)


class EngineGroup:
    """All engines as the driver sees them: it starts, watches and restarts them, and publishes to them.

    An engine is *present* when it can be given weights: it serves, or it was restarted and waits for them. `restarted`
    is set while one waits, `unserved` while one waits and none serves.
    """

    def __init__(
        self,
        engines: Sequence[ray.actor.ActorHandle],
        *,
        timeout_s: float,
        silence_s: float = 600.0,
        start_timeout_s: float = 1800.0,
        max_restarts: int = 3,
    ):
        """timeout_s: for a publication's calls. silence_s: an engine that says nothing for so long is restarted.

        max_restarts: of one engine, without weights in between.
        """
        self.engines = list(engines)
        self.timeout_s, self.silence_s, self.start_timeout_s = timeout_s, silence_s, start_timeout_s
        self.max_restarts = max_restarts
        self.on_event: Callable[..., None] = lambda kind, **fields: None
        self.restarted, self.unserved = asyncio.Event(), asyncio.Event()
        self._lives = [0] * len(engines)
        """Starts of each engine, the first one not counted."""
        self._in_vain = [0] * len(engines)
        """Restarts since it last had weights."""
        self._lost: set[int] = set()
        self._waiting: set[int] = set()
        """Restarted, and without weights of the trainer."""
        self._changed = asyncio.Event()
        self._given_up: EngineError | None = None

    async def start(self) -> None:
        """Load the models and serve the weights that are on disk."""
        await asyncio.gather(*(engine.start.remote() for engine in self.engines))
        await self._all("resume", self.present)

    @property
    def present(self) -> dict[int, int]:
        """The engines that can be given weights, and the life each is in."""
        return {index: life for index, life in enumerate(self._lives) if index not in self._lost}

    @property
    def mending(self) -> bool:
        """Whether one is being restarted, or waits for weights."""
        return bool(self._lost or self._waiting)

    async def some(self) -> dict[int, int]:
        """`present`, once there is one. Raises what `watch` gave up with."""
        while not self.present:
            if self._given_up:
                raise self._given_up
            self._changed.clear()
            await self._changed.wait()
        return self.present

    async def commit(self, version: int, engines: Iterable[int]) -> list[Receipt]:
        """Receipts of all workers, engine by engine."""
        receipts = await self._all("commit", engines, version)
        return [receipt for per_engine in receipts for receipt in per_engine]

    async def resume(self, engines: Iterable[int]) -> None:
        """These have the trainer's weights: they serve."""
        await self._all("resume", engines)
        for index in engines:
            self._in_vain[index] = 0
        self._waiting.difference_update(engines)
        self._noted()

    async def logprobs(self, sequences: list[list[int]], engines: Iterable[int]) -> list[list[np.ndarray]]:
        """The probe's log-probs, engine by engine."""
        return await self._all("logprobs", engines, sequences)

    async def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Turn]:
        """One turn per prompt from the first engine."""
        generate = self.engines[0].generate
        return await self._answers([generate.remote(f"sample-{i}", ids, sampling) for i, ids in enumerate(prompts)])

    async def watch(self) -> None:
        """Restart every engine that is dead or silent, for ever. Raises `EngineError` when that is in vain."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self.engines)):
                tasks.create_task(self._watch(index))

    async def serve(self) -> None:
        """Let every engine that `watch` restarts serve what is on disk, for ever: there is no trainer."""
        while True:
            await self.restarted.wait()
            await self.resume(list(self._waiting))

    async def examine(self, suspects: Iterable[int] = ()) -> bool:
        """Whether any engine is ill, now; `suspects` are, whatever they answer. They are restarted by `watch`."""
        present, suspects = list(self.present), set(suspects)
        found = await asyncio.gather(*(self._illness(index) for index in present))
        for index, illness in zip(present, found, strict=True):
            if index in suspects and not illness:
                illness = "its weights are not the trainer's"
            if illness:
                self._lose(index, illness)
        return bool(suspects) or any(found)

    async def _watch(self, index: int) -> None:
        while True:
            if index in self._lost:
                await self._restart(index)
            await asyncio.sleep(HEARTBEAT_S)
            if index not in self._lost and (illness := await self._illness(index)):
                self._lose(index, illness)

    async def _illness(self, index: int) -> str | None:
        try:
            async with asyncio.timeout(self.silence_s):
                serves = await self.engines[index].alive.remote()
        except TimeoutError:
            return f"no answer within train.watchdog_s (={self.silence_s:g})"
        except (EngineError, RayTaskError, *DEAD) as error:
            return repr(error).strip().splitlines()[-1]
        return None if serves or index in self._waiting else "its process is a new one"

    def _lose(self, index: int, reason: str) -> None:
        if index not in self._lost:
            self._lost.add(index)
            self._waiting.discard(index)
            self._noted()
            self.on_event("engine_lost", engine=index, reason=reason)

    async def _restart(self, index: int) -> None:
        self._in_vain[index] += 1
        if self._in_vain[index] > self.max_restarts:
            self._given_up = EngineError(
                f"engine {index} was restarted {self.max_restarts} times in a row (train.max_restarts) and never took "
                "weights again: the run stops. Mend what its output says, then resume with --ckpt.load_enable."
            )
            self._changed.set()
            raise self._given_up
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await self._end(self.engines[index])
                await self._begin(self.engines[index])
        except (TimeoutError, RayError) as error:
            self.on_event("engine_lost", engine=index, reason=f"restart failed: {error!r}")
            return  # `_watch` tries again
        self._lost.discard(index)
        self._waiting.add(index)
        self._lives[index] += 1
        self._noted()
        self.on_event("engine_restarted", engine=index)

    def _noted(self) -> None:
        """Set the events by the engines that are lost or wait."""
        serving = self.present.keys() - self._waiting
        for event, due in (self.restarted, self._waiting), (self.unserved, self._waiting and not serving):
            event.set() if due else event.clear()
        self._changed.set()

    async def _end(self, engine: ray.actor.ActorHandle) -> None:
        """Returns when what is left of the old process is gone: the next call must not reach it."""
        ray.kill(engine, no_restart=False)  # requests on it fail now
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await engine.alive.remote()
            except DEAD:
                return
            except (TimeoutError, RayTaskError):
                continue
            await asyncio.sleep(HEARTBEAT_S / 10)

    async def _begin(self, engine: ray.actor.ActorHandle) -> None:
        """Start it, once Ray has made the new process. Raises when that dies of it, or cannot load the model."""
        while True:
            with suppress(ActorUnavailableError):
                await engine.alive.remote()
                break
            await asyncio.sleep(HEARTBEAT_S / 2)
        await engine.start.remote()

    async def _all(self, method: str, engines: Iterable[int], *args: Any) -> list[Any]:
        return await self._answers([getattr(self.engines[index], method).remote(*args) for index in engines])

    async def _answers(self, calls: list[ray.ObjectRef]) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*calls)
        except (TimeoutError, RayError) as error:
            raise EngineError(
                f"an engine is dead, or did not answer within {self.timeout_s:.0f} s. If this stops the run, mend what "
                "its output says, then resume with --ckpt.load_enable. It said: "
                f"{repr(error).strip().splitlines()[-1]}"
            ) from error
