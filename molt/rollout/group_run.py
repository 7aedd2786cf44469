"""One group while its scheme (`agents/scheme.py`) says which rollout runs when."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from molt.agents.scheme import Conversation, Decode, FinishedRollout, Scheme, SchemeTask
from molt.agents.user_errors import failure_of
from molt.errors import AgentError
from molt.rollout.fault_boundary import plain_replacement, task_is_cancelled, without_user_types
from molt.rollout.group_task import GroupResult, GroupTask
from molt.types import InfraFailure, Json, Prompt, ReplaceGroup, RolloutInfo, Sample, Turn


@dataclass(frozen=True)
class PlayedRollout:
    """A rollout after its last attempt."""

    info: RolloutInfo
    samples: list[Sample]
    turns: Sequence[Turn]


Play = Callable[[GroupTask, int, Json], Awaitable[PlayedRollout]]
"""`(task, index, given)`: one rollout, retries included."""


class GroupRun:
    """Runs one group once; a group that is started again gets another one."""

    def __init__(
        self, task: GroupTask, scheme: Scheme, play: Play, decode: Decode, *, seed: int, limit_s: float | None
    ):
        """seed: for the scheme. limit_s: of the whole group; None: every rollout has its own."""
        self.task = task
        self.scheme = scheme
        self.play = play
        self.decode = decode
        self.seed = seed
        self.limit_s = limit_s
        self._started: dict[int, asyncio.Task[PlayedRollout]] = {}
        """By index."""
        self._is_over = False

    async def run(self) -> tuple[GroupResult, list[list[Sample]]]:
        """The light result, and the samples of each rollout. Raises what is no failure of the user's code."""
        try:
            failure = await self._run_scheme()
            ended = self._ended()
        except ReplaceGroup as replaced:
            return GroupResult([], replaced=plain_replacement(replaced)), []
        finally:
            self._is_over = True
            for rollout in self._started.values():
                rollout.cancel()

        rollouts = [played.info for played in ended]
        if any(rollout.failed for rollout in rollouts):
            failure = None  # the rollout has it, and what the scheme made of it does not matter
        elif failure is None and len(ended) < self.task.n:
            failure = InfraFailure(
                "scheme", f"run_group returned when {len(ended)} of {self.task.n} rollouts had ended: await all of them"
            )
        if failure is not None:
            return GroupResult(rollouts, failure=failure), []
        return GroupResult(rollouts), [played.samples for played in ended]

    async def _run_scheme(self) -> InfraFailure | None:
        """Why the scheme failed, or None."""
        deadline = asyncio.timeout(self.limit_s)
        try:
            async with deadline:
                await self.scheme(self._scheme_task(), self._rollout)
        except ReplaceGroup:
            raise
        except InfraFailure as failure:
            return without_user_types(failure)
        except BaseException as error:  # fault boundary: the scheme of one group
            if isinstance(error, GeneratorExit) or task_is_cancelled():
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                return InfraFailure("timeout", f"the scheme did not end within {self.limit_s:g} s")
            return failure_of(error)
        return None

    def _ended(self) -> list[PlayedRollout]:
        """The rollouts that have ended, by index. Raises what one of them raised, which the scheme may have caught."""
        ended = []
        for _, rollout in sorted(self._started.items()):
            if rollout.done() and not rollout.cancelled():
                ended.append(rollout.result())
        return ended

    def _scheme_task(self) -> SchemeTask:
        prompt = self.task.prompt
        conversation = prompt.text if prompt.messages is None else prompt.messages
        assert conversation is not None, "a prompt has a text or messages"
        return SchemeTask(
            prompt=copy.deepcopy(conversation),
            label=copy.deepcopy(prompt.label),
            data_source=prompt.data_source,
            n=self.task.n,
            seed=self.seed,
        )

    async def _rollout(
        self, index: int, /, *, prompt: Conversation | None = None, given: Json | None = None
    ) -> FinishedRollout:
        """See `RunRollout`. Raises `AgentError` for a rollout that there is not, or that was started before."""
        if not 0 <= index < self.task.n or index in self._started:
            raise AgentError(
                f"rollout({index}) in a group of {self.task.n} (rollout.n_samples_per_prompt), of which "
                f"{sorted(self._started)} were started: each of 0 .. {self.task.n - 1} runs once. Use another index."
            )
        if self._is_over:
            raise AgentError(
                f"rollout({index}) after run_group had ended: nobody would train it. Await every rollout in run_group."
            )
        task = self.task
        if prompt is not None:
            task = replace(task, prompt=_with_conversation(task.prompt, prompt))
        running = asyncio.ensure_future(self.play(task, index, copy.deepcopy(given or {})))
        self._started[index] = running
        played = await running
        return FinishedRollout(
            index=index,
            cut=played.info.cut,
            info=played.info.metrics,
            _outcome=played.info.outcome,
            _turns=played.turns,
            _samples=played.samples,
            _decode=self.decode,
        )


def _with_conversation(prompt: Prompt, conversation: object) -> Prompt:
    """The prompt with another text or other messages. Raises `AgentError` if that is of another kind than the row's."""
    if prompt.messages is None and isinstance(conversation, str):
        return replace(prompt, text=conversation)
    if prompt.messages is not None and isinstance(conversation, list):
        return replace(prompt, messages=copy.deepcopy(conversation))
    expected = "a text" if prompt.messages is None else "a list of messages"
    raise AgentError(
        f"rollout(..., prompt=...) is a {type(conversation).__name__}: the model cannot be shown it. Pass {expected}, "
        "as `task.prompt` is (data.apply_chat_template says which)."
    )
