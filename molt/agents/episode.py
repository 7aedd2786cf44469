"""What one episode of an agent gets (`EpisodeContext`), and what it gives (`Episode`).

A runner of an agent knows a prompt, a model to call with token ids, a renderer and limits. It knows nothing of engines,
Ray or training.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypedDict, TypeVar

from molt.agents.env import Env, Result, info_numbers
from molt.agents.own_thread import OwnThread
from molt.agents.user_errors import contained
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.render import Renderer
from molt.chat.tree import Tree
from molt.columns import TURN_REWARD
from molt.errors import AgentError
from molt.types import CutReason, InfraFailure, Json, Media, PolicyFailure, Prompt, Sample, Scored, Turn
from molt.user_module import place_of

Agent = TypeVar("Agent")

NOTHING_EARNED = Scored(0.0, 0.0)
METHODS = {
    "reset": "reset(self, state)",
    "step": "step(self, state)",
    "close": "close(self)",
    "run": "run(self, ctx)",
}
"""What molt calls of an agent."""


class ChosenSampling(TypedDict, total=False):
    """What the caller of an untrained call may choose; the rest is as for the policy."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    structure: Json
    """What the engine enforces, as arguments of vLLM's `StructuredOutputsParams`."""


class CallModel(Protocol):
    """`(prompt_ids, max_tokens) -> Turn`, sampled from the current policy."""

    async def __call__(self, prompt_ids: list[int], max_tokens: int, /, *, media: tuple[Media, ...] = ()) -> Turn: ...


class CallFreely(Protocol):
    """As `CallModel`, with sampling parameters of the caller: what it samples is never trained."""

    async def __call__(
        self, prompt_ids: list[int], max_tokens: int, chosen: ChosenSampling, /, *, media: tuple[Media, ...] = ()
    ) -> Turn: ...


@dataclass(frozen=True)
class EpisodeContext:
    """Everything one episode gets."""

    prompt: Prompt
    call_model: CallModel
    renderer: Renderer
    seed: int
    max_len: int
    max_new_tokens: int | None = None
    max_turns: int | None = None
    chat: ChatRenderer | None = None
    """For a `ChatAgent`, and for an `Env` with tools or a judge; else None."""
    call_freely: CallFreely | None = None
    given: Json = field(default_factory=dict)
    """By the scheme of the group."""

    @property
    def chat_renderer(self) -> ChatRenderer:
        """`chat`, where the episode cannot do without."""
        assert self.chat is not None, "a ChatAgent, tools and a judge need a chat renderer"
        return self.chat


@dataclass
class Episode:
    """Everything one episode gives: its turns exactly as sampled, and how it ended."""

    turns: list[Turn] = field(default_factory=list)
    outcome: Scored | PolicyFailure = NOTHING_EARNED
    cut: CutReason | None = None
    """Why it was cut before its end."""
    info: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] | None = None
    """None: the turns are one stream."""
    tree: Tree | None = None
    """Of a `ChatAgent`."""
    messages: list[Json] = field(default_factory=list)
    """Of an `Env`: the conversation so far."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Of a `ChatAgent`: what its clients were refused, in words, and how often."""
    returned_info: Json = field(default_factory=dict)
    """All that `Result.info` had, by key."""
    _rewards: list[float] = field(default_factory=list)
    """Of the steps so far."""
    _score: float | None = None
    """The last score that a result had."""

    @property
    def truncated(self) -> bool:
        """Whether it was cut before its end."""
        return self.cut is not None

    def add(self, result: Result) -> None:
        """Take in what one step earned: rewards add up, a score replaces the one before it."""
        self._rewards.append(float(result.reward))
        if result.score is not None:
            self._score = float(result.score)

        reward = sum(self._rewards)
        score = reward if self._score is None else self._score
        self.outcome = Scored(reward, score)
        self.returned_info.update(result.info)
        self.info.update(info_numbers(result.info))

    def count(self, name: str, more: int) -> None:
        """Add to one of the counters that an `Env` and a `ChatAgent` have in common."""
        if more:
            key = f"chat_{name}"
            self.info[key] = self.info.get(key, 0.0) + more

    def with_turn_rewards(self) -> list[Turn]:
        """The turns, each with what it earned at its last token, if one before the last earned anything."""
        if not any(self._rewards[:-1]):
            return self.turns
        turns = list(self.turns)
        for index, reward in enumerate(self._rewards):
            sampled = turns[index].sampled
            rewards = TURN_REWARD.filled(len(sampled))
            rewards[-1:] = reward
            turns[index] = replace(turns[index], sampled=sampled.with_column(TURN_REWARD, rewards))
        return turns


def built(agent_class: Callable[[], Agent]) -> Agent:
    """An agent for one episode.

    Raises `AgentError` if its constructor needs arguments; the errors that it raises itself pass through.
    """
    try:
        with contained():
            return agent_class()
    except TypeError as error:
        problem = _misfit(agent_class)
        if problem is None:  # the constructor itself raised it
            raise
        name = getattr(agent_class, "__name__", repr(agent_class))
        raise AgentError(
            f"{name}{place_of(agent_class)} cannot be built ({problem}): molt makes one for each episode, without "
            "arguments. Give them defaults."
        ) from error


class AgentMethods:
    """The methods of one agent: an `async def` runs in the event loop, a plain `def` in a thread of the episode."""

    def __init__(self, agent: object):
        self.agent = agent
        self._thread = OwnThread(f"molt-{type(agent).__name__}")

    async def call(self, method: str, *arguments: object) -> Any:
        """What a method returns.

        Raises `AgentError` if it does not take these arguments, and `InfraFailure` for what is no `Exception`; the
        errors that it raises itself pass through.
        """
        function = getattr(self.agent, method)
        try:
            with contained():
                return await self._answer(function, arguments)
        except TypeError as error:
            problem = _misfit(function, *arguments)
            if problem is None:  # the method itself raised it
                raise
            raise AgentError(
                f"{described_method(self.agent, method)} cannot be called ({problem}): no episode could end. Write "
                f"`async def {METHODS[method]}`."
            ) from error

    def end(self) -> None:
        """The episode is over; a method that still runs in the thread is left behind."""
        self._thread.end()

    async def _answer(self, function: Callable[..., Any], arguments: Sequence[object]) -> Any:
        if _is_coroutine_function(function):
            return await function(*arguments)
        answer = await self._thread.call(function, *arguments)
        if inspect.isawaitable(answer):  # a `def` that returns a coroutine
            return await answer
        return answer


def _is_coroutine_function(function: Any) -> bool:
    """Whether calling it only makes a coroutine. Decorators that name what they wrap are looked through."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))


def _misfit(function: Callable[..., object], *arguments: object) -> str | None:
    """Why the function cannot be called with these arguments, or None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C has none
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def described_method(agent: object, method: str) -> str:
    """`MyEnv.step (FILE:LINE)`."""
    function = getattr(type(agent), method)
    return f"{type(agent).__name__}.{method}{place_of(function)}"


def checked(result: object, agent: object) -> Result:
    """What `Env.step` or `ChatAgent.run` returned.

    Raises `AgentError` if it is not a `Result`, `InfraFailure` if its reward or score is not finite.
    """
    if not isinstance(result, Result):
        raise AgentError(
            f"{described_method(agent, _method_name(agent))} returned a {type(result).__name__}: reward and end of "
            "the episode are unknown. Return molt.agents.Result(reward=...)."
        )
    _require_finite(agent, "reward", result.reward)
    if result.score is not None:
        _require_finite(agent, "score", result.score)
    return result


def outcome_of(failure: PolicyFailure, agent: object) -> PolicyFailure:
    """A plain copy: the driver cannot import a user's subclass. Raises `InfraFailure` if its reward is not finite."""
    _require_finite(agent, "reward", failure.reward)
    return PolicyFailure(failure.reward, str(failure.reason))


def _require_finite(agent: object, name: str, value: float) -> None:
    if not math.isfinite(value):
        method = described_method(agent, _method_name(agent))
        raise InfraFailure("reward_not_finite", f"{method} returned {name} {value}")


def _method_name(agent: object) -> str:
    """The method of an agent that returns a `Result`."""
    return "step" if isinstance(agent, Env) else "run"
