"""What one episode of an agent gets (`EpisodeContext`), and what it gives (`Episode`).

A runner of an agent knows a prompt, a model to call with token ids, a renderer and limits. It knows nothing of engines,
Ray or training.
"""

import inspect
import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol, TypedDict

from molt.agents.env import Env, Result
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.render import Renderer
from molt.chat.tree import Tree
from molt.errors import AgentError
from molt.types import CutReason, InfraFailure, Json, Media, PolicyFailure, Prompt, Sample, Scored, Turn

NOTHING_EARNED = Scored(0.0, 0.0)


class ChosenSampling(TypedDict, total=False):
    """What the caller of an untrained call may choose; the rest is as for the policy."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


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
    returned_info: Json = field(default_factory=dict)
    """All that `Result.info` had, by key."""
    _reward: float = 0.0
    """Sum of the rewards so far."""
    _score: float | None = None
    """The last score that a result had."""

    @property
    def truncated(self) -> bool:
        """Whether it was cut before its end."""
        return self.cut is not None

    def add(self, result: Result) -> None:
        """Take in what one step earned: rewards add up, a score replaces the one before it."""
        self._reward += float(result.reward)
        if result.score is not None:
            self._score = float(result.score)

        score = self._reward if self._score is None else self._score
        self.outcome = Scored(self._reward, score)
        self.returned_info.update(result.info)
        for name, value in result.info.items():
            if isinstance(value, Real):
                self.info[name] = float(value)


def checked(result: object, agent: object) -> Result:
    """What `Env.step` or `ChatAgent.run` returned.

    Raises `AgentError` if it is not a `Result`, `InfraFailure` if its reward or score is not finite.
    """
    if not isinstance(result, Result):
        raise AgentError(
            f"{type(agent).__name__}.{_method_name(agent)} returned a {type(result).__name__}: reward and end of the "
            "episode are unknown. Return molt.agents.Result(reward=...)."
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
        method = _method_name(agent)
        raise InfraFailure(
            "reward_not_finite",
            f"{type(agent).__name__}.{method}{_source_line(agent, method)} returned {name} {value}",
        )


def _method_name(agent: object) -> str:
    """The method of an agent that returns a `Result`."""
    return "step" if isinstance(agent, Env) else "run"


def _source_line(agent: object, method: str) -> str:
    """` (FILE:LINE)` of a method in the user's file, or nothing where Python does not know it."""
    function = inspect.unwrap(getattr(type(agent), method))
    if not inspect.isfunction(function):
        return ""
    return f" ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"
