"""A process that hosts agents: runs the rollouts of many groups concurrently.

`run_group` returns the light record and, as a second return value, the heavy arrays: the driver then
owns them and they outlive this process.
"""

import asyncio
import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.load import load_runner
from molt.agents.step_runner import CLOSE_S, Episode, EpisodeContext
from molt.chat.chat_renderer import load_chat_renderer
from molt.chat.render import load_renderer
from molt.config import EvalConfig, PromptDataConfig, RolloutConfig
from molt.errors import UnusableRow
from molt.rollout.engine_pool import EnginePool
from molt.rollout.engine_worker import Sampling
from molt.rollout.samples import describe, to_sample
from molt.rollout.watchdog import LoopLag, RolloutState
from molt.types import InfraFailure, Media, Prompt, RolloutInfo, Sample, Turn


@dataclass(frozen=True)
class RunnerSettings:
    """What a runner needs to know; derived from the run's config by `cluster`."""

    agent_path: str
    model: str
    data: PromptDataConfig
    rollout: RolloutConfig
    seed: int


@dataclass(frozen=True)
class GroupTask:
    """One prompt to roll out `n` times."""

    prompt: Prompt
    n: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None


def longest_s(rollout: RolloutConfig) -> float:
    """No group takes longer in its runner: every attempt ends, and is closed, within a limit."""
    return (rollout.max_retries + 1) * (rollout.timeout_s + CLOSE_S)


SAMPLING = ("n_samples_per_prompt", "temperature", "top_p", "top_k", "max_new_tokens")


def group_task(prompt: Prompt, rollout: RolloutConfig, overrides: EvalConfig | None = None) -> GroupTask:
    """The rollouts of `prompt` as `rollout` says, where `overrides` does not say otherwise."""
    chosen = ((getattr(overrides, name, None), getattr(rollout, name)) for name in SAMPLING)
    return GroupTask(prompt, *(default if value is None else value for value, default in chosen))


@dataclass(frozen=True)
class GroupResult:
    """The light part of a finished group."""

    rollouts: list[RolloutInfo]
    unusable: str | None = None
    """Why the prompt cannot be rolled out at all, such as being longer than the context."""


@dataclass(eq=False)
class Attempt:
    """A rollout that is in flight, and its last event. Times are of `time.monotonic`."""

    group_id: str
    index: int
    started: float
    doing: str = "agent"
    since: float = 0.0
    turns: int = 0

    def now(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()


class AgentHost:
    """Hosts the user's agent; `RunnerWorker` is the Ray actor of it."""

    def __init__(self, settings: RunnerSettings, engines: Sequence[ray.actor.ActorHandle], name: str):
        self.settings, self.name = settings, name
        self.pool = EnginePool(engines, name)
        self.attempts: set[Attempt] = set()
        self.lag = LoopLag()
        self.watching: asyncio.Task | None = None
        self.renderer = load_renderer(
            settings.model, settings.data.chat_template, apply_chat_template=settings.data.apply_chat_template
        )
        self.runner = load_runner(settings.agent_path)
        self.chat = None
        self.chats = isinstance(self.runner, ChatAgentRunner)
        if self.chats or self.runner.judge or settings.data.tools_key:
            retention = settings.rollout.thinking_retention
            self.chat = load_chat_renderer(settings.model, settings.data.chat_template, thinking_retention=retention)
            self.renderer.eos_ids = sorted({*self.renderer.eos_ids, *self.chat.eos_ids})
        self.stop_token_ids = tuple(self.renderer.eos_ids)

    async def ready(self) -> None:
        """Answers when the constructor is done."""

    async def states(self) -> tuple[list[RolloutState], float]:
        """Every rollout in flight, and the worst lag of the event loop since the last call, in seconds."""
        self.watching = self.watching or asyncio.create_task(self.lag.run())
        now, name = time.monotonic(), self.name
        states = [
            RolloutState(a.group_id, a.index, name, a.doing, a.turns, now - a.started, now - a.since)
            for a in self.attempts
        ]
        return states, self.lag.take_s()

    async def run_group(self, task: GroupTask) -> tuple[GroupResult, list[list[Sample]]]:
        """All rollouts of a group; a failed one is retried here, within `max_retries`."""
        try:
            length = len(self.renderer.prompt_ids(task.prompt))
        except UnusableRow as error:
            return GroupResult([], unusable=str(error)), []
        if length >= self.settings.data.max_len:
            reason = f"prompt of {length:,} tokens leaves no room in data.max_len (={self.settings.data.max_len:,})"
            return GroupResult([], unusable=reason), []
        done = await asyncio.gather(*(self._rollout(task, index) for index in range(task.n)))
        return GroupResult([info for info, _ in done]), [samples for _, samples in done]

    async def _rollout(self, task: GroupTask, index: int) -> tuple[RolloutInfo, list[Sample]]:
        started = time.monotonic()
        failures: list[InfraFailure] = []
        episode = None
        while episode is None and len(failures) <= self.settings.rollout.max_retries:
            try:
                episode = await self._attempt(task, index)
            except InfraFailure as failure:
                # Only what it says: a user's subclass means nothing to the driver, and a traceback keeps its frames.
                failures.append(InfraFailure(str(failure.reason), str(failure.detail)))
        samples = [] if episode is None else episode.samples
        if samples is None:
            samples = [to_sample(episode.turns)] if episode.turns else []
        info = RolloutInfo(
            group_id=task.prompt.group_id,
            index=index,
            outcome=episode.outcome if episode else failures.pop(),
            truncated=bool(episode and episode.truncated),
            turns=len(episode.turns) if episode else 0,
            samples=tuple(describe(sample) for sample in samples),
            failures=tuple(failures),
            duration_s=time.monotonic() - started,
            metrics=episode.info if episode else {},
        )
        return info, samples

    async def _attempt(self, task: GroupTask, index: int) -> Episode:
        """One attempt at an episode. This is the fault boundary of a rollout: whatever the agent
        raises is an `InfraFailure`, never a reward."""
        prompt = task.prompt
        rollout = f"{prompt.group_id}:{index}"
        identity = (self.settings.seed, prompt.epoch, prompt.position, index)
        calls: Counter[tuple[int, ...]] = Counter()
        attempt = Attempt(prompt.group_id, index, time.monotonic())
        attempt.now("agent")

        async def sample(
            prompt_ids: list[int], max_tokens: int, kind: tuple[int, ...], shown: dict[str, Any], **asked: Any
        ) -> Turn:
            seed = seed_of(*identity, calls[kind], *kind)
            calls[kind] += 1
            policy = Sampling(task.temperature, task.top_p, task.top_k, max_tokens, seed, self.stop_token_ids)
            attempt.now("engine")
            try:
                return await self.pool.generate(
                    rollout, prompt_ids, replace(policy, **asked), self.settings.rollout.timeout_s, **shown
                )
            finally:
                attempt.turns += 1
                attempt.now("agent")

        def place(prompt_ids: list[int], media: Sequence[Media] = ()) -> int:
            # An agent with a loop of its own calls at any time: its calls are numbered by prompt, so that the seed of
            # one does not depend on which of two came first.
            return zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes() + b"".join(each.data for each in media))

        async def call_model(prompt_ids: list[int], max_tokens: int, **shown: Sequence[Media]) -> Turn:
            return await sample(prompt_ids, max_tokens, (0, place(prompt_ids, **shown)) if self.chats else (), shown)

        async def call_freely(
            prompt_ids: list[int], max_tokens: int, asked: dict[str, Any], **shown: Sequence[Media]
        ) -> Turn:
            return await sample(prompt_ids, max_tokens, (1, place(prompt_ids, **shown)), shown, **asked)

        context = EpisodeContext(
            prompt=prompt,
            call_model=call_model,
            renderer=self.renderer,
            seed=seed_of(*identity, -1),
            max_len=self.settings.data.max_len,
            max_new_tokens=task.max_new_tokens,
            max_turns=self.settings.rollout.max_turns,
            chat=self.chat,
            call_freely=call_freely,
        )
        self.attempts.add(attempt)
        try:
            async with asyncio.timeout(self.settings.rollout.timeout_s) as deadline:
                return await self.runner.run(context)
        except InfraFailure:
            raise
        except (Exception, asyncio.CancelledError) as error:  # fault boundary: one rollout
            if asyncio.current_task().cancelling():
                raise  # somebody wants this task to end; otherwise the agent met a cancellation of its own
            if isinstance(error, TimeoutError) and deadline.expired():  # not a time limit of the agent's own
                detail = f"no end within rollout.timeout_s (={self.settings.rollout.timeout_s:g})"
                raise InfraFailure("timeout", detail) from None
            raise InfraFailure(type(error).__name__, _where(error)) from error
        finally:
            self.pool.forget(rollout)
            self.attempts.discard(attempt)


@ray.remote(max_concurrency=16384)
class RunnerWorker(AgentHost):
    """An `AgentHost` in a process of its own."""


def seed_of(*parts: int) -> int:
    """63-bit sampling seed from `(train.seed, epoch, position, rollout, turn)`; equal only for equal parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _where(error: BaseException) -> str:
    """`repr` of an error and the line of the user's file that raised it."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
    return f"{error!r}{where}"
