"""What a scorer is given: a finished rollout as plain values.

It is a function of the dataset row and of what the model and the agent did. Nothing random and nothing that depends on
time, the policy version or the process is in it, so equal rollouts of two runs have equal trajectories, and scores can
be kept on disk (`--reward.cache_dir`).
"""

import json
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from molt.types import CutReason, Json


@dataclass(frozen=True)
class Trajectory:
    """One finished rollout."""

    prompt: list[Json] | str
    """Of the dataset row: its messages, or its text."""
    label: Any
    """Of the dataset row."""
    data_source: str
    tools: list[Json] | None
    """The schemas that the chat template showed, or None."""
    branches: list[list[Json]]
    """The conversations that are trained, each a list of messages in OpenAI's shape. An `Env` has one; a `ChatAgent`
    has one for each branch of its token tree, in the order in which they ended. Call ids are `call_0`, `call_1`, ..."""
    turns: int
    """Model calls."""
    prompt_tokens: int
    """Of the first prompt."""
    generated_tokens: int
    """Sampled in all branches."""
    context_tokens: int
    """Length of the longest branch."""
    cut_reason: CutReason | None
    """Why the rollout was cut before its end; None: it was not."""
    info: Json
    """What the agent put into `Result.info`, as far as JSON can hold it."""
    agent_reward: float
    """The sum of the rewards that the agent returned. The scorer's reward replaces it."""
    agent_score: float
    """The score that the agent returned, otherwise its reward."""

    @property
    def messages(self) -> list[Json]:
        """The last of `branches`; the prompt where the model was never called."""
        if self.branches:
            return self.branches[-1]
        return as_messages(self.prompt)

    @property
    def answer(self) -> str:
        """The text of the last assistant message, "" if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return text_of(message.get("content"))
        return ""

    @property
    def truncated(self) -> bool:
        """Whether the rollout was cut before its end."""
        return self.cut_reason is not None

    def to_json(self) -> str:
        """Canonical: equal trajectories have equal texts. Raises `TypeError` for a value that JSON cannot hold."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":"), default=_plain)

    @staticmethod
    def from_json(text: str) -> "Trajectory":
        """Inverse of `to_json`."""
        return Trajectory(**json.loads(text))


def as_messages(prompt: list[Json] | str) -> list[Json]:
    """A prompt as messages; a text is one message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(prompt)


def text_of(content: object) -> str:
    """The text of a message's content: the content itself, or its parts that are text, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def json_part(info: Json) -> Json:
    """The entries that JSON can hold."""
    kept: Json = {}
    for name, value in info.items():
        try:
            kept[name] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError, RecursionError):
            continue
    return kept


def _plain(value: Any) -> Any:
    """A value of a dataset, or of numpy, as JSON has it."""
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return value.tolist()
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80} cannot be JSON")
