"""The model calls of one attempt at a rollout, and their sampling seeds."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from molt.agents.episode import ChosenSampling
from molt.rollout.attempt import Attempt
from molt.rollout.engine_pool import EnginePool
from molt.rollout.engine_worker import Sampling
from molt.rollout.group_task import GroupTask
from molt.types import Media, Turn

TRAINED = 0
FREE = 1
"""Kinds of calls in a seed, where an agent makes both."""


def seed_of(*parts: int) -> int:
    """63-bit sampling seed; equal only for equal parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class RolloutKey:
    """What the seeds of a rollout follow from. A policy version is not in it: `molt eval` gives a run's numbers."""

    train_seed: int
    epoch: int
    position: int
    """Of the prompt in its epoch."""
    index: int
    """Of the rollout in its group."""
    attempt: int = 0
    """How many attempts at the rollout failed before. A group that starts again on another runner, or after a resume,
    is at attempt 0 again, so that it gets the same numbers."""

    def episode_seed(self) -> int:
        """For the agent's own random numbers."""
        return self.call_seed(-1)

    def call_seed(self, number: int, *place: int) -> int:
        """Of call `number` among those at `place`; without a place, among all of the rollout.

        A retry samples anew: the answer that broke a sandbox would break it again. The first attempt has no number.
        """
        attempt = (self.attempt,) if self.attempt else ()
        return seed_of(self.train_seed, self.epoch, self.position, self.index, number, *place, *attempt)


class Seeds(Protocol):
    """The seeds of consecutive calls."""

    def next(self, prompt_ids: Sequence[int], media: Sequence[Media]) -> int: ...


class SeedsByTurn:
    """For an `Env`, which calls the model turn by turn: a seed depends on the number of the turn."""

    def __init__(self, key: RolloutKey):
        self._key = key
        self._turns = 0

    def next(self, prompt_ids: Sequence[int], media: Sequence[Media]) -> int:
        seed = self._key.call_seed(self._turns)
        self._turns += 1
        return seed


class SeedsByPrompt:
    """For a caller with parallel calls: a seed depends on the prompt, and not on which call came first.

    Equal prompts are numbered.
    """

    def __init__(self, key: RolloutKey, kind: int):
        """kind: `TRAINED` or `FREE`."""
        self._key = key
        self._kind = kind
        self._calls: Counter[int] = Counter()
        """Calls so far, by the checksum of their prompt."""

    def next(self, prompt_ids: Sequence[int], media: Sequence[Media]) -> int:
        checksum = _checksum(prompt_ids, media)
        seed = self._key.call_seed(self._calls[checksum], self._kind, checksum)
        self._calls[checksum] += 1
        return seed


class ModelCalls:
    """The calls of one attempt to the engines."""

    def __init__(
        self,
        pool: EnginePool,
        attempt: Attempt,
        task: GroupTask,
        *,
        trained_seeds: Seeds,
        free_seeds: Seeds,
        stop_token_ids: tuple[int, ...],
        timeout_s: float,
        candidates: int = 0,
    ):
        """task: says the distribution of the policy. timeout_s: of one call. candidates: as in `Sampling`."""
        self.pool = pool
        self.attempt = attempt
        self.task = task
        self.trained_seeds = trained_seeds
        self.free_seeds = free_seeds
        self.stop_token_ids = stop_token_ids
        self.timeout_s = timeout_s
        self.candidates = candidates

    async def trained(self, prompt_ids: list[int], max_tokens: int, *, media: Sequence[Media] = ()) -> Turn:
        """Sample from the policy; the turn may be trained on. Raises as `EnginePool.generate` does."""
        sampling = Sampling(
            temperature=self.task.temperature,
            top_p=self.task.top_p,
            top_k=self.task.top_k,
            max_tokens=max_tokens,
            seed=self.trained_seeds.next(prompt_ids, media),
            stop_token_ids=self.stop_token_ids,
            candidates=self.candidates,
        )
        return await self._generate(prompt_ids, sampling, media)

    async def free(
        self, prompt_ids: list[int], max_tokens: int, chosen: ChosenSampling, *, media: Sequence[Media] = ()
    ) -> Turn:
        """Sample with what the caller chose; the turn is never trained on.

        Raises as `EnginePool.generate` does, and `StructureError` if the structure cannot be enforced.
        """
        seed = self.free_seeds.next(prompt_ids, media)
        sampling = Sampling(
            temperature=chosen.get("temperature", self.task.temperature),
            top_p=chosen.get("top_p", self.task.top_p),
            top_k=chosen.get("top_k", self.task.top_k),
            max_tokens=max_tokens,
            seed=chosen.get("seed", seed),
            stop_token_ids=self.stop_token_ids,
            structure=chosen.get("structure"),
        )
        return await self._generate(prompt_ids, sampling, media)

    async def _generate(self, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media]) -> Turn:
        with self.attempt.model_call():
            return await self.pool.generate(self.attempt.rollout, prompt_ids, sampling, self.timeout_s, media)


def _checksum(prompt_ids: Sequence[int], media: Sequence[Media]) -> int:
    """CRC-32 of a prompt with its images."""
    images = b"".join(each.data for each in media)
    return zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes() + images)
