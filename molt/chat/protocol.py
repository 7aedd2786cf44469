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


TEXT_ARGUMENT = "input"
"""The one argument of a tool that takes free text."""


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which the model is offered a function of a namespace."""
    if not namespace:
        return name
    return f"{namespace}__{name}"


@dataclass(frozen=True)
class ToolCall:
    """A call as the model made it."""

    id: str
    name: str
    """As the model was offered it, with its namespace."""
    arguments: str
    """The JSON text that the model sampled."""
    namespace: str | None = None
    """Of the function, in the client's request."""
    text: str | None = None
    """The argument of a tool that takes free text; None for other tools."""

    @property
    def own_name(self) -> str:
        """Without the namespace."""
        return self.name.removeprefix(flat_name(self.namespace, ""))


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
    structure: Json | None = None
    """The text that the client wants, as arguments of vLLM's `StructuredOutputsParams`. Empty: a kind without one."""
    required_tools: list[str] | None = None
    """Names of tools of which the client wants one to be called. Empty: one that is not offered."""
    one_call: bool = False
    """At most one tool is to be called: the turn ends with its first call."""
    logprobs: bool = False
    """The client wants the log-prob of each token."""
    text_tools: list[str] = field(default_factory=list)
    """Names of tools that take free text."""
    namespaces: dict[str, str] = field(default_factory=dict)
    """The namespace of a tool, by the name that the model is offered."""
    ignored: list[str] = field(default_factory=list)
    """Names of options without an effect here."""
    ignored_tools: list[str] = field(default_factory=list)
    """Types of tools that are not offered."""
    train: bool = True
    """False: the call opted out of training (header `x-molt-train: 0`)."""
    hints: dict[str, str] = field(default_factory=dict)
    """Headers that name sub-agents and sub-sessions (correctness never depends on them), and the SDKs' retry count."""
    size: int = 0
    """Bytes of the request's body: how much work it may be."""


@dataclass(frozen=True)
class TokenLogprob:
    """A sampled token, and how likely it was."""

    text: str
    logprob: float


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
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of its tokens without the one that ends the turn; None if the client did not ask for them."""


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
