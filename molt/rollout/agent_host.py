"""What runs in the process of a runner: the user's agent, and the rollouts of many groups at once."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.episode import Episode, EpisodeContext
from molt.agents.load import load_runner
from molt.agents.loop_lag import Block, LoopLag, report_from_thread
from molt.agents.scheme import Scheme, independent, load_scheme
from molt.agents.step_runner import CLOSE_S
from molt.chat.chat_renderer import load_chat_renderer
from molt.chat.render import load_renderer
from molt.config import PromptDataConfig, RolloutConfig
from molt.errors import UnusableRow
from molt.rollout.attempt import Attempt
from molt.rollout.engine_pool import EnginePool
from molt.rollout.fault_boundary import failure_of, task_is_cancelled, without_user_types
from molt.rollout.group_run import GroupRun, PlayedRollout
from molt.rollout.group_task import GroupResult, GroupTask
from molt.rollout.handles import EngineHandle
from molt.rollout.model_calls import FREE, TRAINED, ModelCalls, RolloutKey, Seeds, SeedsByPrompt, SeedsByTurn
from molt.rollout.samples import describe, to_sample
from molt.rollout.watchdog import LoopTimes, RolloutState
from molt.types import InfraFailure, Json, ReplaceGroup, RolloutInfo, Sample


@dataclass(frozen=True)
class RunnerSettings:
    """What a runner needs to know; `cluster` derives it from the run's config."""

    agent_path: str
    model: str
    data: PromptDataConfig
    rollout: RolloutConfig
    seed: int
    candidates: int = 0
    """`algo.advantage.score_centering_top_k`."""


SCHEME = -1
"""Stands for the index of a rollout in the seeds of a scheme."""


def longest_s(rollout: RolloutConfig) -> float:
    """Seconds within which a runner finishes any group: every attempt, and its closing, has a limit.

    A scheme may run the rollouts of a group one after another.
    """
    attempts = rollout.max_retries + 1
    if rollout.scheme is not None:
        attempts *= rollout.n_samples_per_prompt
    return attempts * (rollout.timeout_s + CLOSE_S)


class AgentHost:
    """Hosts the user's agent; `RunnerWorker` is the Ray actor of it."""

    def __init__(self, settings: RunnerSettings, engines: Sequence[EngineHandle], name: str):
        self.settings = settings
        self.name = name
        self.pool = EnginePool(engines, name)
        self.attempts: set[Attempt] = set()
        """In flight."""
        self.lag = LoopLag()
        self._lag_task: asyncio.Task[None] | None = None
        self._blocks: list[Block] = []
        """Not asked for yet; a thread adds to them."""

        data = settings.data
        self.runner = load_runner(settings.agent_path)
        self.scheme: Scheme | None = None
        if settings.rollout.scheme is not None:
            self.scheme = load_scheme(settings.rollout.scheme)
        self.renderer = load_renderer(settings.model, data.chat_template, apply_chat_template=data.apply_chat_template)
        self.chat = None
        if self.runner.needs_chat or data.tools_key:
            self.chat = load_chat_renderer(
                settings.model, data.chat_template, thinking_retention=settings.rollout.thinking_retention
            )
            self.renderer.eos_ids = sorted({*self.renderer.eos_ids, *self.chat.eos_ids})
        self.stop_token_ids = tuple(self.renderer.eos_ids)

    async def ready(self) -> None:
        """Answers when the constructor is done."""

    async def states(self) -> tuple[list[RolloutState], LoopTimes]:
        """Every rollout in flight, and the worst delays of the event loop since the last call."""
        if self._lag_task is None:
            self._lag_task = asyncio.create_task(self.lag.run())
            report_from_thread(self.lag, self._report_block)
        states = [attempt.state(self.name) for attempt in self.attempts]
        return states, LoopTimes(lag_s=self.lag.take_s(), blocked_s=self.lag.take_blocked_s())

    async def blocks(self) -> list[Block]:
        """What blocked the event loop since the last call, or does now.

        `RunnerWorker` answers in another thread, so that the driver learns it during the block.
        """
        blocks = []
        while self._blocks:
            blocks.append(self._blocks.pop(0))
        return blocks

    def _report_block(self, block: Block) -> None:
        self._blocks.append(block)
        print(
            f"{self.name}: the event loop is blocked at {block.place}, for {block.seconds:.0f} s so far: all rollouts "
            "of this runner wait. Await an async client, or move the work to a thread (docs/agents.md, 'What must not "
            "happen in an agent').",
            file=sys.stderr,
            flush=True,
        )

    async def run_group(self, task: GroupTask) -> tuple[GroupResult, list[list[Sample]]]:
        """All rollouts of a group, and the samples of each. A failed rollout is retried, up to `max_retries` times.

        The samples are a second value, so that the driver owns them: they outlive this process.
        """
        unusable = self._unusable(task)
        if unusable is not None:
            return GroupResult([], unusable=unusable), []

        scheme = independent
        limit_s = None
        if task.by_scheme and self.scheme is not None:
            scheme = self.scheme
            limit_s = longest_s(self.settings.rollout)
        key = self._key(task, SCHEME)
        run = GroupRun(task, scheme, self._rollout, self.renderer.decode, seed=key.episode_seed(), limit_s=limit_s)
        return await run.run()

    def _unusable(self, task: GroupTask) -> str | None:
        """Why the prompt cannot be rolled out, or None."""
        max_len = self.settings.data.max_len
        try:
            length = len(self.renderer.prompt_ids(task.prompt))
        except UnusableRow as error:
            return str(error)
        if length >= max_len:
            return f"prompt of {length:,} tokens leaves no room in data.max_len (={max_len:,})"
        return None

    async def _rollout(self, task: GroupTask, index: int, given: Json) -> PlayedRollout:
        """Attempts until one succeeds, or `max_retries` are used up. given: by a scheme to the agent."""
        started = time.monotonic()
        failures: list[InfraFailure] = []
        while len(failures) <= self.settings.rollout.max_retries:
            try:
                episode = await self._attempt(task, index, given, number=len(failures))
            except InfraFailure as failure:
                failures.append(without_user_types(failure))
            else:
                return self._finished(task, index, episode, failures, started)

        info = RolloutInfo(
            group_id=task.prompt.group_id,
            index=index,
            outcome=failures[-1],
            cut=None,
            turns=0,
            samples=(),
            failures=tuple(failures[:-1]),
            duration_s=time.monotonic() - started,
        )
        return PlayedRollout(info, samples=[], turns=[])

    def _finished(
        self, task: GroupTask, index: int, episode: Episode, failures: list[InfraFailure], started: float
    ) -> PlayedRollout:
        """The record and the samples of a rollout that has an episode."""
        samples = episode.samples
        if samples is None:  # its turns are one stream
            samples = [to_sample(episode.turns)] if episode.turns else []
        info = RolloutInfo(
            group_id=task.prompt.group_id,
            index=index,
            outcome=episode.outcome,
            cut=episode.cut,
            turns=len(episode.turns),
            samples=tuple(describe(sample) for sample in samples),
            failures=tuple(failures),
            duration_s=time.monotonic() - started,
            metrics=episode.info,
        )
        return PlayedRollout(info, samples, episode.turns)

    async def _attempt(self, task: GroupTask, index: int, given: Json, number: int) -> Episode:
        """One attempt at an episode.

        This is the fault boundary of a rollout: whatever the agent raises becomes an `InfraFailure`, never a reward.
        Only `ReplaceGroup` passes, which is about the group.
        """
        attempt = Attempt(task.prompt.group_id, index, number)
        context = self._context(task, attempt, given)
        timeout_s = self.settings.rollout.timeout_s
        deadline = asyncio.timeout(timeout_s)
        self.attempts.add(attempt)
        try:
            async with deadline:
                return await self.runner.run(context)
        except (InfraFailure, ReplaceGroup):
            raise
        except (Exception, asyncio.CancelledError) as error:  # fault boundary: one rollout
            if task_is_cancelled():
                raise  # otherwise the cancellation is one of the agent's tasks
            if isinstance(error, TimeoutError) and deadline.expired():  # otherwise it is a time limit of the agent
                raise InfraFailure("timeout", f"no end within rollout.timeout_s (={timeout_s:g})") from None
            raise failure_of(error) from error
        finally:
            self.pool.forget(attempt.rollout)
            self.attempts.discard(attempt)

    def _key(self, task: GroupTask, index: int, attempt: int = 0) -> RolloutKey:
        """What the seeds of a rollout follow from, or with `SCHEME` those of the group's scheme."""
        return RolloutKey(
            train_seed=self.settings.seed,
            epoch=task.prompt.epoch,
            position=task.prompt.position,
            index=index,
            attempt=attempt,
        )

    def _context(self, task: GroupTask, attempt: Attempt, given: Json) -> EpisodeContext:
        """What the runner of the agent gets for one attempt."""
        key = self._key(task, attempt.index, attempt.number)
        calls = ModelCalls(
            self.pool,
            attempt,
            task,
            trained_seeds=self._trained_seeds(key),
            free_seeds=SeedsByPrompt(key, FREE),
            stop_token_ids=self.stop_token_ids,
            timeout_s=self.settings.rollout.timeout_s,
            candidates=self.settings.candidates,
        )
        return EpisodeContext(
            prompt=task.prompt,
            call_model=calls.trained,
            renderer=self.renderer,
            seed=key.episode_seed(),
            max_len=self.settings.data.max_len,
            max_new_tokens=task.max_new_tokens,
            max_turns=self.settings.rollout.max_turns,
            chat=self.chat,
            call_freely=calls.free,
            given=given,
        )

    def _trained_seeds(self, key: RolloutKey) -> Seeds:
        if isinstance(self.runner, ChatAgentRunner):
            return SeedsByPrompt(key, TRAINED)
        return SeedsByTurn(key)
