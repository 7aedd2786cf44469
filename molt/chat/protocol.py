"""What a chat call is, whatever protocol it came over: the neutral records between wires, session and tree.

Messages are dicts in the shape of OpenAI chat completions, normalised by the wires:

    {"role": "system" | "user" | "assistant" | "tool", "content": str | list of parts,
     "reasoning_content": str, "tool_calls": [{"id", "type": "function", "function": {"name", "arguments"}}],
     "tool_call_id": str}

`content` is always there, "" if there is none; the other keys are absent without a value. `arguments` is JSON text, and
a tool message may have the `name` of the tool. A part is `{"type": "text", "text"}` or `{"type": "image_url",
"image_url": {"url"}}`.
"""

from dataclasses import dataclass, field
from typing import Literal

from molt.types import Json

Message = Json

Tools = list[Json] | None
"""OpenAI function schemas; None when no tools are offered."""

Retention = Literal["all", "tool_cycle", "template"]
"""How long earlier reasoning stays in the context."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the model made it."""

    id: str
    name: str
    arguments: str
    """The JSON text that the model sampled."""


@dataclass(frozen=True)
class ChatRequest:
    """One call of a client."""

    messages: list[Message]
    tools: Tools = None
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    sampling: Json = field(default_factory=dict)
    """temperature, top_p, top_k of the client: honoured only where the call is not trained."""
    constrained: str | None = None
    """What requires constrained decoding (a response format, a forced tool), in the client's words."""
    train: bool = True
    """False: the call opted out of training (header `x-molt-train: 0`)."""
    hints: dict[str, str] = field(default_factory=dict)
    """Headers that name sub-agents and sub-sessions (correctness never depends on them), and the SDKs' retry count."""
    size: int = 0
    """Bytes of the request's body: how much work it may be."""


@dataclass(frozen=True)
class Answer:
    """One of the n answers to a call."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length or tool_calls."""
    completion_tokens: int
    stop_sequence: str | None = None
    """The client's stop string that ended it, which is not part of `content`."""


@dataclass(frozen=True)
class ChatReply:
    """All answers to a call."""

    id: str
    answers: tuple[Answer, ...]
    prompt_tokens: int


class ChatError(Exception):
    """A refusal, in words that each wire puts into its own shape.

    code: `context_length_exceeded`, `invalid_request`, `not_found`, `too_many_requests`, `engine`.
    """

    def __init__(self, status: int, code: str, message: str):
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message


class PolicyRefusal(ChatError):
    """A refusal because of what the policy itself has sampled before: no client could have avoided it."""
