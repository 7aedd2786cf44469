"""What runs in the process of a runner: the user's agent, and the rollouts of many groups at once."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from molt.agents.chat_runner import ChatAgentRunner
from molt.agents.episode import Episode, EpisodeContext
from molt.agents.load import load_runner
from molt.agents.loop_lag import Block, LoopLag, report_from_thread
from molt.agents.scheme import Scheme, load_scheme
from molt.agents.step_runner import CLOSE_S
from molt.agents.user_errors import contain_tasks, failure_of
from molt.chat.chat_renderer import ChatRenderer, load_chat_renderer
from molt.chat.render import load_renderer
from molt.config import PromptDataConfig, RewardConfig, RolloutConfig
from molt.errors import UnusableRow
from molt.rollout.attempt import Attempt
from molt.rollout.engine_pool import EnginePool
from molt.rollout.fault_boundary import plain_replacement, task_is_cancelled, without_user_types
from molt.rollout.group_progress import GroupProgress, RolloutProgress, Stage, begun_rollouts, new_rollouts
from molt.rollout.group_run import GroupRun, PlayedRollout
from molt.rollout.group_task import GroupResult, GroupTask
from molt.rollout.handles import EngineHandle
from molt.rollout.model_calls import FREE, TRAINED, ModelCalls, RolloutKey, Seeds, SeedsByPrompt, SeedsByTurn
from molt.rollout.reward import RewardStage, as_json, scoring_s, trajectory_of
from molt.rollout.samples import describe, to_sample
from molt.rollout.watchdog import LoopTimes, RolloutState
from molt.types import InfraFailure, Json, Outcome, ReplaceGroup, RolloutInfo, Sample, Scored, Scoring, Unscored


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
    reward: RewardConfig = field(default_factory=RewardConfig)


SCHEME = -1
"""Stands for the index of a rollout in the seeds of a scheme."""


def longest_s(rollout: RolloutConfig, reward: RewardConfig) -> float:
    """Seconds within which a runner finishes any group: every attempt, its closing and its score have a limit.

    A scheme may run the rollouts of a group one after another.
    """
    attempts = rollout.max_retries + 1
    if rollout.scheme is not None:
        attempts *= rollout.n_samples_per_prompt
    return attempts * (rollout.timeout_s + CLOSE_S + scoring_s(rollout, reward))


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
        self._groups: dict[str, GroupProgress] = {}
        """Those that are not finished and have no scheme, by `GroupProgress.key`."""
        self.reward: RewardStage | None = None
        if settings.reward.scorer is not None:
            self.reward = RewardStage(settings.reward.scorer, settings.reward)

        data = settings.data
        self.runner = load_runner(settings.agent_path)
        self.scheme: Scheme | None = None
        if settings.rollout.scheme is not None:
            self.scheme = load_scheme(settings.rollout.scheme)
        self.renderer = load_renderer(settings.model, data.chat_template, apply_chat_template=data.apply_chat_template)
        self.chat: ChatRenderer | None = None
        self._judge_chat: ChatRenderer | None = None
        """For the judge of a scorer, from its first call on."""
        if self.runner.needs_chat or data.tools_key:
            self.chat = self._load_chat()
            self.renderer.eos_ids = sorted({*self.renderer.eos_ids, *self.chat.eos_ids})
        self.stop_token_ids = tuple(self.renderer.eos_ids)

    async def ready(self) -> None:
        """Answers when the constructor is done, and the scorer, if there is one, is loaded. Raises `AgentError`."""
        self._watch_loop()
        if self.reward is not None:
            await self.reward.ready()

    async def states(self) -> tuple[list[RolloutState], LoopTimes]:
        """Every rollout in flight, and the worst delays of the event loop since the last call."""
        self._watch_loop()
        states = [attempt.state(self.name) for attempt in self.attempts]
        return states, self._take_loop_times()

    async def blocks(self) -> list[Block]:
        """What blocked the event loop since the last call, or does now.

        `RunnerWorker` answers in another thread, so that the driver learns it during the block.
        """
        blocks = []
        while self._blocks:
            blocks.append(self._blocks.pop(0))
        return blocks

    async def loop_times(self) -> LoopTimes:
        """The worst delays of the event loop since the last call, with one that lasts; in another thread, as `blocks`.

        Each delay is in the answer of this method or of `states`.
        """
        return self._take_loop_times()

    def _take_loop_times(self) -> LoopTimes:
        return LoopTimes(lag_s=self.lag.take_s(), blocked_s=self.lag.take_blocked_s())

    def _watch_loop(self) -> None:
        """From the first call on, no task can end the event loop, and what blocks it is measured and reported."""
        if self._lag_task is not None:
            return
        contain_tasks(asyncio.get_running_loop())
        self._lag_task = asyncio.create_task(self.lag.run())
        report_from_thread(self.lag, self._report_block, self._end_without_loop)

    def _end_without_loop(self) -> None:
        """The event loop has ended, so nothing would ever be answered: the driver starts a new process at once."""
        print(
            f"{self.name}: the event loop has ended, and with it all rollouts of this runner, which ends too. Look for "
            "`sys.exit` in a callback of the agent.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _report_block(self, block: Block) -> None:
        self._blocks.append(block)
        print(
            f"{self.name}: the event loop is blocked at {block.place}, for {block.seconds:.0f} s so far: all rollouts "
            "of this runner wait. Await an async client, or move the work to a thread (docs/agents.md, 'What must not "
            "happen in an agent').",
            file=sys.stderr,
            flush=True,
        )

    async def run_group(
        self, task: GroupTask, begun: GroupResult | None = None, samples: Sequence[list[Sample]] = ()
    ) -> tuple[GroupResult, list[list[Sample]]]:
        """Roll out a group until no rollout of it generates, and the samples of each.

        Without a scorer all rollouts are finished by then, and so they are under a scheme, which may look at rewards
        before it starts others. A failed rollout is retried, up to `max_retries` times.
        begun, samples: what an earlier call answered, for a group whose scores failed. The samples are a second value,
        so that the driver owns them: they outlive this process.
        """
        self._watch_loop()
        unusable = self._unusable(task)
        if unusable is not None:
            return GroupResult([], unusable=unusable), []
        if begun is None and task.by_scheme and self.scheme is not None:
            return await self._by_scheme(task, self.scheme)
        group = self._progress(task, begun, samples)
        result = await self._until_none_is(Stage.GENERATING, group)
        if result.replaced is not None:
            return result, []
        return result, group.samples()

    async def score_group(self, task: GroupTask, begun: GroupResult, samples: Sequence[list[Sample]]) -> GroupResult:
        """Wait until no rollout of the group waits for its score. begun, samples: the last answer about it."""
        group = self._progress(task, begun, samples)
        result = await self._until_none_is(Stage.SCORING, group)
        return replace(result, node=begun.node)

    async def close(self) -> None:
        """End the processes of the scorer."""
        if self.reward is not None:
            await self.reward.close()

    def _progress(self, task: GroupTask, begun: GroupResult | None, samples: Sequence[list[Sample]]) -> GroupProgress:
        """The group as this runner knows it, or work on it from where it is."""
        if begun is None:
            group = GroupProgress(new_rollouts(task.prompt.group_id, task.n))
        elif begun.progress in self._groups:
            return self._groups[begun.progress]
        else:
            group = GroupProgress(begun_rollouts(begun, samples))
        self._groups[group.key] = group
        for rollout in group.rollouts:
            if rollout.stage is not Stage.FINISHED:
                group.start(self._rollout(task, group, rollout, given={}))
        return group

    async def _until_none_is(self, stage: Stage, group: GroupProgress) -> GroupResult:
        """Where the rollouts are when none is in the stage, or why the agent does not want the group."""
        try:
            await group.until_none_is(stage)
        except ReplaceGroup as replaced:
            self._groups.pop(group.key, None)
            return GroupResult([], replaced=plain_replacement(replaced))
        except BaseException:
            self._groups.pop(group.key, None)
            raise
        if group.is_finished:
            self._groups.pop(group.key, None)
        return group.result()

    async def _by_scheme(self, task: GroupTask, scheme: Scheme) -> tuple[GroupResult, list[list[Sample]]]:
        """The whole group, with its scores: the scheme knows a rollout once it has a reward."""
        group = GroupProgress(new_rollouts(task.prompt.group_id, task.n))

        async def play(task: GroupTask, index: int, given: Json) -> PlayedRollout:
            rollout = group.rollouts[index]
            await self._rollout(task, group, rollout, given)
            return PlayedRollout(rollout.record, rollout.samples, rollout.turns)

        seed = self._key(task, SCHEME).episode_seed()
        limit_s = longest_s(self.settings.rollout, self.settings.reward)
        run = GroupRun(task, scheme, play, self.renderer.decode, seed=seed, limit_s=limit_s)
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

    async def _rollout(self, task: GroupTask, group: GroupProgress, rollout: RolloutProgress, given: Json) -> None:
        """Attempts until one succeeds, or `max_retries` are used up. given: by a scheme to the agent."""
        while len(rollout.failures) <= self.settings.rollout.max_retries:
            try:
                if rollout.stage is Stage.GENERATING:
                    episode = await self._attempt(task, rollout.index, given, number=len(rollout.failures))
                    info, rollout.samples = self._ended(task, rollout, episode)
                    rollout.turns = episode.turns
                    group.enter(rollout, Stage.SCORING, info)
                group.enter(rollout, Stage.FINISHED, await self._scored(task, rollout))
                return
            except InfraFailure as failure:
                rollout.failures.append(without_user_types(failure))
                rollout.samples = []
                rollout.turns = ()
                group.enter(rollout, Stage.GENERATING)
        group.enter(rollout, Stage.FINISHED, rollout.lost())

    def _ended(self, task: GroupTask, rollout: RolloutProgress, episode: Episode) -> tuple[RolloutInfo, list[Sample]]:
        """The record and the samples of a rollout that has an episode. With a scorer it has no reward yet."""
        samples = episode.samples
        if samples is None:  # its turns are one stream
            samples = [to_sample(episode.turns)] if episode.turns else []
        outcome: Outcome = episode.outcome
        if self.reward is not None and isinstance(outcome, Scored):
            outcome = Unscored(as_json(trajectory_of(task.prompt, episode, samples)))
        info = RolloutInfo(
            group_id=task.prompt.group_id,
            index=rollout.index,
            outcome=outcome,
            cut=episode.cut,
            turns=len(episode.turns),
            samples=tuple(describe(sample) for sample in samples),
            failures=tuple(rollout.failures),
            duration_s=time.monotonic() - rollout.started,
            metrics=episode.info,
        )
        return info, samples

    async def _scored(self, task: GroupTask, rollout: RolloutProgress) -> RolloutInfo:
        """The record of a rollout with its reward, which a scorer gives where there is one.

        This is the fault boundary of a score: what goes wrong with it becomes an `InfraFailure`.
        """
        info = rollout.info
        assert info is not None, "a rollout that is scored has ended"
        if self.reward is None or not isinstance(info.outcome, Unscored):
            return info
        started = time.monotonic()
        limit_s = scoring_s(self.settings.rollout, self.settings.reward)
        attempt = Attempt(info.group_id, info.index, len(rollout.failures), code="scorer", turns=info.turns)
        self.attempts.add(attempt)
        try:
            async with asyncio.timeout(limit_s):
                open_judge = partial(self._open_judge, task, attempt)
                grade = await self.reward.score(info.outcome.trajectory, open_judge, rollout.score_failures)
        except InfraFailure:
            raise
        except TimeoutError:
            raise InfraFailure("scorer_busy", f"no score within {limit_s:g} s. Raise --reward.num_scorers") from None
        except BaseException as error:  # fault boundary: one score
            if isinstance(error, GeneratorExit) or task_is_cancelled():
                raise
            raise failure_of(error) from error
        finally:
            self.pool.forget(attempt.rollout)
            self.attempts.discard(attempt)
        seconds = time.monotonic() - started
        return replace(
            info,
            outcome=grade.outcome,
            metrics=info.metrics | grade.info,
            duration_s=time.monotonic() - rollout.started,
            scoring=Scoring(seconds, grade.is_cached, tuple(rollout.score_failures)),
        )

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
        except BaseException as error:  # fault boundary: one rollout
            if isinstance(error, GeneratorExit) or task_is_cancelled():
                raise  # otherwise the cancellation is one of the agent's tasks
            if isinstance(error, TimeoutError) and deadline.expired():  # otherwise it is a time limit of the agent
                raise InfraFailure("timeout", f"no end within rollout.timeout_s (={timeout_s:g})") from None
            raise failure_of(error) from error
        finally:
            self.pool.forget(attempt.rollout)
            self.attempts.discard(attempt)

    def _context(self, task: GroupTask, attempt: Attempt, given: Json) -> EpisodeContext:
        """What the runner of the agent gets for one attempt."""
        key = self._key(task, attempt.index, attempt.number)
        calls = self._model_calls(task, attempt, key, self.stop_token_ids)
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

    def _key(self, task: GroupTask, index: int, attempt: int = 0) -> RolloutKey:
        """What the seeds of a rollout follow from, or with `SCHEME` those of the group's scheme."""
        return RolloutKey(
            train_seed=self.settings.seed,
            epoch=task.prompt.epoch,
            position=task.prompt.position,
            index=index,
            attempt=attempt,
        )

    def _model_calls(
        self, task: GroupTask, attempt: Attempt, key: RolloutKey, stop_token_ids: tuple[int, ...]
    ) -> ModelCalls:
        return ModelCalls(
            self.pool,
            attempt,
            task,
            trained_seeds=self._trained_seeds(key),
            free_seeds=SeedsByPrompt(key, FREE),
            stop_token_ids=stop_token_ids,
            timeout_s=self.settings.rollout.timeout_s,
            candidates=self.settings.candidates,
        )

    @asynccontextmanager
    async def _open_judge(self, task: GroupTask, attempt: Attempt) -> AsyncIterator[str]:
        """The URL of a judge for the score of a rollout."""
        if self._judge_chat is None:
            self._judge_chat = self.chat or await asyncio.to_thread(self._load_chat)
        chat = self._judge_chat
        ends = tuple(sorted({*self.stop_token_ids, *chat.eos_ids}))
        calls = self._model_calls(task, attempt, self._key(task, attempt.index, attempt.number), ends)
        context = self._context(task, attempt, given={})
        context = replace(context, chat=chat, call_model=calls.trained, call_freely=calls.free)
        async with self.runner.judge_url(context) as url:
            yield url

    def _load_chat(self) -> ChatRenderer:
        settings = self.settings
        return load_chat_renderer(
            settings.model, settings.data.chat_template, thinking_retention=settings.rollout.thinking_retention
        )

    def _trained_seeds(self, key: RolloutKey) -> Seeds:
        if isinstance(self.runner, ChatAgentRunner):
            return SeedsByPrompt(key, TRAINED)
        return SeedsByTurn(key)
