"""The form in which the token tree compares messages: without what clients change when they send one back."""

import json
from itertools import groupby
from typing import Any, NamedTuple

from molt.chat.protocol import Message
from molt.types import Json

_DECODER = json.JSONDecoder(parse_int=float)
_ENCODER = json.JSONEncoder(sort_keys=True)


class NormalizedCall(NamedTuple):
    """A tool call by what it does; its id belongs to the protocol."""

    name: str
    arguments: str


class Spelling(NamedTuple):
    """How a client wrote a message: tells replies with the same meaning apart, if the client kept it."""

    content: Any
    tool_call_id: str | None
    call_ids: list[str | None]


class NormalizedMessage(NamedTuple):
    """A message by its meaning."""

    role: str
    content: list[Any]
    """Texts (`str`) and other parts (`dict`) in order, without empty texts."""
    calls: list[NormalizedCall]
    reasoning: str
    spelling: Spelling
    stops: tuple[str, ...] = ()
    """Of a reply: the stop strings of its request."""

    def echoes(self, original: "NormalizedMessage") -> bool:
        """Whether this message of a request means the same as `original`.

        Clients may leave the reasoning out, and put back the stop string at which a reply was cut.
        """
        if self is original:
            return True
        if self.role != original.role or self.calls != original.calls:
            return False
        if self.content != original.content and not self._puts_back_a_stop(original):
            return False
        return self.reasoning in ("", original.reasoning)

    def _puts_back_a_stop(self, original: "NormalizedMessage") -> bool:
        said = original.spelling.content or ""
        return any(self.content == _normalize_content(f"{said}{stop}", self.role) for stop in original.stops)

    @property
    def text(self) -> str:
        texts = [part for part in self.content if isinstance(part, str)]
        return "\n".join(texts)


def normalize_message(message: Message) -> NormalizedMessage:
    """The message as the tree compares it."""
    role = message["role"]
    if role == "developer":
        role = "system"
    calls = message.get("tool_calls") or []
    spelling = Spelling(
        content=message.get("content"),
        tool_call_id=message.get("tool_call_id"),
        call_ids=[call.get("id") for call in calls],
    )
    return NormalizedMessage(
        role=role,
        content=_normalize_content(message.get("content"), role),
        calls=[_normalize_call(call) for call in calls],
        reasoning=collapse_whitespace(message.get("reasoning_content") or ""),
        spelling=spelling,
    )


def normalize_reply(message: Message, stops: tuple[str, ...]) -> NormalizedMessage:
    """A sampled reply as the tree compares it. stops: the stop strings of its request."""
    return normalize_message(message)._replace(stops=stops)


def leading_system(messages: list[NormalizedMessage]) -> list[list[Any]]:
    """The contents of the system messages that a conversation begins with."""
    contents = []
    for message in messages:
        if message.role != "system":
            break
        contents.append(message.content)
    return contents


def collapse_whitespace(text: str) -> str:
    """Every run of white space as one space, none at the ends."""
    return " ".join(text.split())


def without_cache_mark(item: Json) -> Json:
    """A content part or a tool without `cache_control`, which clients move from turn to turn."""
    return {key: value for key, value in item.items() if key != "cache_control"}


def _normalize_content(content: str | list[Json] | None, role: str) -> list[Any]:
    if not isinstance(content, list):
        content = [{"type": "text", "text": content or ""}]

    normalized: list[Any] = []
    for is_text, parts in groupby(content, key=_is_text):
        if not is_text:
            normalized += [without_cache_mark(part) for part in parts]
            continue
        text = _normalize_text("\n".join(part["text"] for part in parts), role)
        if text:
            normalized.append(text)
    return normalized


def _is_text(part: Json) -> bool:
    return part.get("type") == "text"


def _normalize_text(text: str, role: str) -> str:
    """White space inside a text is kept unless the model wrote it: in a tool result it may matter."""
    if role == "assistant":
        return collapse_whitespace(text)
    return text.strip()


def _normalize_call(call: Json) -> NormalizedCall:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    return NormalizedCall(name=function["name"], arguments=_normalize_arguments(arguments))


def _normalize_arguments(arguments: str) -> str:
    """One spelling for equal JSON (1 and 1.0 are equal, 1 and true are not); other text with white space collapsed."""
    try:
        return _ENCODER.encode(_DECODER.decode(arguments))
    except (ValueError, RecursionError):  # a model may write anything as arguments
        return collapse_whitespace(arguments)
