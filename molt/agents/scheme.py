"""The order of a group's rollouts: a plug-in of one file, `--rollout.scheme FILE.py`.

    async def run_group(task: SchemeTask, rollout: RunRollout) -> None:
        draft = await rollout(0)
        await rollout(1, prompt=[*task.prompt, ...draft.answer...])

A scheme says which rollout starts when, and what it gets of finished ones. Retries, seeds, deadlines, the count of
failures, filter, baseline, ledger and resume are the framework's. Without a scheme all rollouts start at once.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from molt.errors import ConfigError, did_you_mean
from molt.types import CutReason, InfraFailure, Json, Outcome, PolicyFailure, Sample, Scored, Turn, Unscored
from molt.user_module import load_module

Conversation = list[Json] | str
"""Chat messages, or a plain text, as in the dataset."""
Decode = Callable[[list[int]], str]
"""Ids to text."""


@dataclass(frozen=True)
class SchemeTask:
    """The group that a scheme runs."""

    prompt: Conversation
    """The row's messages, or its text."""
    label: Any
    data_source: str
    n: int
    """Rollouts of the group: each of 0 .. n-1 runs once."""
    seed: int
    """For random numbers of the scheme: the same when the group starts again."""


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that has ended. What a failed one would have is an `InfraFailure`, which ends the scheme."""

    index: int
    cut: CutReason | None
    """Why it was cut before its end."""
    info: dict[str, float]
    """The numbers in `Result.info`."""
    _outcome: Outcome
    _turns: Sequence[Turn] = field(repr=False)
    _samples: Sequence[Sample] = field(repr=False)
    _decode: Decode = field(repr=False)

    @property
    def failed(self) -> bool:
        """Whether the infrastructure failed in every attempt. Its group is replaced, whatever the scheme does then."""
        return isinstance(self._outcome, InfraFailure)

    @property
    def reward(self) -> float:
        return self._graded().reward

    @property
    def score(self) -> float:
        return self._graded().score

    @property
    def answers(self) -> list[str]:
        """What the model said in each of its calls, without special tokens."""
        self._graded()
        return [self._decode(turn.token_ids.tolist()) for turn in self._turns]

    @property
    def answer(self) -> str:
        """What the model said last; empty if it was never called."""
        answers = self.answers
        return answers[-1] if answers else ""

    @property
    def texts(self) -> list[str]:
        """The trajectory with its prompt, segment by segment, without special tokens."""
        self._graded()
        return [self._decode(sample.token_ids.tolist()) for sample in self._samples]

    def _graded(self) -> Scored | PolicyFailure:
        """The outcome. Raises the `InfraFailure` of a failed rollout."""
        if isinstance(self._outcome, InfraFailure):
            raise self._outcome
        assert not isinstance(self._outcome, Unscored), "a scheme gets a rollout once it has its score"
        return self._outcome


class RunRollout(Protocol):
    """Runs one rollout of the group, retries included."""

    async def __call__(
        self, index: int, /, *, prompt: Conversation | None = None, given: Json | None = None
    ) -> FinishedRollout:
        """prompt: instead of the row's. given: what the agent gets, as `state["given"]` or `ctx.given`."""
        ...


class Scheme(Protocol):
    """What a file exports as `run_group`."""

    async def __call__(self, task: SchemeTask, rollout: RunRollout, /) -> None: ...


def load_scheme(path: str) -> Scheme:
    """The `run_group` of FILE.py. Raises `ConfigError` with what is wrong and the fix."""
    module = load_module(path, "rollout.scheme")
    run_group = getattr(module, "run_group", None)
    if run_group is None:
        near = did_you_mean("run_group", vars(module))
        raise ConfigError(
            f"`rollout.scheme` (={path}) exports no `run_group`: no rollout would start.{near} Add "
            "`async def run_group(task, rollout)`."
        )
    if not inspect.iscoroutinefunction(run_group) or not _takes_two(run_group):
        raise ConfigError(
            f"`run_group` in `rollout.scheme` (={path}) is no coroutine of two arguments: molt cannot run it. Write "
            "`async def run_group(task, rollout)`."
        )
    return run_group


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("task", "rollout")
    except TypeError:
        return False
    return True
