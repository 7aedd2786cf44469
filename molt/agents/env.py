"""The `Env` contract: the framework owns the model loop, the environment answers.

Gymnasium's words with Gymnasium's meaning. One instance serves one episode.
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

from molt.errors import AgentError, did_you_mean
from molt.types import CUT_REASONS, CutReason, Json
from molt.user_module import place_of

_SAMPLING_KEYS = {"max_new_tokens"}
NO_NUMBERS = ("m", "M", "c")
"""numpy's kinds of durations, dates and complex numbers, some of which `float` would take."""


@dataclass(frozen=True)
class Result:
    """What one `step` of an environment returns."""

    reward: float
    """Added to the rewards of the episode so far. A non-finite reward is an infrastructure failure."""
    observation: str | list[str] | None = ""
    """The content of the next message; the framework renders the turn around it. Unused when the episode ends, where
    None will do. After tool calls it is the result of the one call, or a list with one for each."""
    terminated: bool = True
    """The task reached its end: an answer was given, a goal was reached."""
    truncated: bool | CutReason = False
    """The episode was cut before its end by a limit outside the task, such as a step budget. True is the reason
    `agent`; `"time"` or `"length"` say that it was such a limit."""
    info: Json = field(default_factory=dict)
    """Anything; its numbers are logged as `rollout/info/<key>`: what `info_numbers` takes for one."""
    score: float | None = None
    """Measures success for evaluation. Unset: the episode's reward."""
    sampling_params: Json | None = None
    """For the next turn: `max_new_tokens`. Temperature and the like would break the importance ratio."""

    @property
    def cut(self) -> CutReason | None:
        """Why the agent cut the episode."""
        if isinstance(self.truncated, str):
            return self.truncated
        return "agent" if self.truncated else None

    @property
    def ends(self) -> bool:
        """Whether the episode ends with it."""
        return self.terminated or bool(self.truncated)

    def __post_init__(self):
        _require_number("reward", self.reward)
        if self.score is not None:
            _require_number("score", self.score)
        is_left_out = self.observation is None and self.ends
        if not is_left_out:
            _require_text(self.observation)
        _require_cut_reason(self.truncated)
        if self.sampling_params is not None:
            _require_sampling(self.sampling_params)


def info_numbers(info: Json) -> dict[str, float]:
    """The numbers among the values of `Result.info`, by the key as text.

    A number is what `float` takes, of Python, numpy, torch or another library: a truth value, a decimal, an array of a
    single element. Text is none, and neither are dates, complex numbers, and integers that no float can hold.
    """
    numbers = {}
    for name, value in info.items():
        number = _as_number(value)
        if number is not None:
            numbers[str(name)] = number
    return numbers


def _as_number(value: Any) -> float | None:
    if getattr(getattr(value, "dtype", None), "kind", "") in NO_NUMBERS:
        return None
    try:
        if hasattr(value, "item"):  # of numpy, torch, jax; raises for several elements
            value = value.item()
        if isinstance(value, str | bytes | bytearray):  # which `float` would read
            return None
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _require_number(name: str, value: object) -> None:
    try:
        math.isfinite(value)  # pyright: ignore[reportArgumentType]  # refuses text, which float() would read
    except (TypeError, ValueError, RuntimeError):
        raise AgentError(
            f"Result.{name} (={value!r}) is not a number: nothing could be learned from it. Return a float."
        ) from None


def _require_text(observation: object) -> None:
    texts = observation if isinstance(observation, list) else [observation]
    if not all(isinstance(text, str) for text in texts):
        raise AgentError(
            f"Result.observation is {observation!r:.80}: the framework renders text. Return the content of the next "
            "message as a string, or after tool calls a list of strings."
        )


def _require_cut_reason(truncated: object) -> None:
    if isinstance(truncated, str) and truncated not in CUT_REASONS:
        raise AgentError(
            f"Result.truncated (={truncated!r}) is no reason, so the cut would be counted nowhere. Use True, or one of "
            f"{', '.join(CUT_REASONS)}."
        )


def _require_sampling(params: Json) -> None:
    unknown = set(params) - _SAMPLING_KEYS
    if unknown:
        raise AgentError(
            f"Result.sampling_params has {sorted(unknown)}: only {sorted(_SAMPLING_KEYS)} can change within an "
            "episode, anything else would make the sampled log-probs those of another distribution. Remove it."
        )
    limit = params.get("max_new_tokens", 1)
    if not _is_count(limit):
        raise AgentError(
            f"Result.sampling_params max_new_tokens (={limit!r}): the model could not answer the next turn. "
            "Use an integer >= 1, or end the episode."
        )


class Env:
    """Subclass this; `reset` and `close` are optional.

    `state` is one dict for the whole episode. molt sets:

    * `prompt`: list of chat messages, or text; what `reset` leaves there is what the model sees first
    * `label`, `data_source`: from the dataset row
    * `seed`: an integer that no other rollout has
    * `given`: what a scheme passes on (`--rollout.scheme`); {} without one
    * `judge_url`: with `StepEnvRunner(..., judge=True)`, the engines for a reward function; recorded nowhere
    * `turn`: number of the model call, from 0
    * `action`: the text the model answered in this turn
    * `finish_reason`: `stop`, or `length` when the answer was cut
    * `tool_calls`, `malformed_calls`, `content`: where tools are offered, the calls of this turn as `{"name",
      "arguments"}`, the texts of those that cannot be read, and the rest of the answer
    """

    async def reset(self, state: Json) -> Json:
        """Prepare the episode; may replace `state["prompt"]`."""
        return state

    async def step(self, state: Json) -> Result:
        """Judge `state["action"]`. Raise `PolicyFailure` when the model's own doing cannot be judged."""
        env = type(self)
        near = did_you_mean("step", vars(env))
        raise AgentError(
            f"{env.__name__}{place_of(env)} defines no `async def step(self, state)`: no reward can arise.{near} "
            "Add it."
        )

    async def close(self) -> None:
        """Release what the episode held; runs however the episode ended."""


def _is_count(value: Any) -> bool:
    """Whether it is an integer, numpy's included, of at least 1."""
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False
