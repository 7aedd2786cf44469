"""What of a conversation a chat template does not show.

Found by sentinels, not by a list of templates: each part of the conversation gets a word of its own, the conversation
is rendered once, and a part whose word is not in the text is not shown. So the model neither sees nor learns it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from molt.chat.messages import REASONING_KEYS, WEIGHT_KEYS
from molt.chat.protocol import Message, Tools
from molt.chat.render import render_text
from molt.chat.tool_arguments import decode_arguments
from molt.errors import UnusableRow
from molt.types import Json

READ_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING_KEYS, *WEIGHT_KEYS}
"""Keys of a message that molt reads, or knows to be ids."""
THINK_TAGS = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")
LEADING_MARKUP = re.compile(r"\s*(?:<[^<>\n]*>)?\s*")
"""What a template may look at to tell what a text is: the sentinel comes after it."""


class Part(Enum):
    """A part of a message, or of the request."""

    CONTENT = "the content"
    REASONING = "the reasoning"
    CALLS = "the tool calls"
    TOOLS = "the tools"


@dataclass(frozen=True)
class Hidden:
    """A part that the template does not show."""

    part: Part
    index: int | None = None
    """Of the message; None for the tools that are offered."""
    role: str = ""

    def __str__(self) -> str:
        if self.index is None:
            return self.part.value
        article = "an" if self.role == "assistant" else "a"
        return f"{self.part.value} of {article} {self.role} message"


def hidden_parts(tokenizer: Any, messages: list[Message], tools: Tools) -> list[Hidden]:
    """What the template leaves out; [] where it rejects the sentinels, which says nothing.

    messages: as the template takes them (`render.for_template`).
    """
    sentinels = _Sentinels()
    marked = [sentinels.message(index, message) for index, message in enumerate(messages)]
    marked_tools = sentinels.tools(tools)
    try:
        text = render_text(tokenizer, marked, tools=marked_tools)
    except UnusableRow:
        return []
    return list(sentinels.missing_in(text))


def ignored_keys(tokenizer: Any, messages: list[Message], tools: Tools, *, text: str) -> list[str]:
    """Keys of messages that neither molt nor the template reads. text: the rendering with them."""
    keys = sorted({key for message in messages for key in message} - READ_KEYS)
    ignored = []
    for key in keys:
        without = [{name: value for name, value in message.items() if name != key} for message in messages]
        try:
            if render_text(tokenizer, without, tools=tools) == text:
                ignored.append(key)
        except UnusableRow:  # it is needed
            continue
    return ignored


class _Sentinels:
    """Words that occur nowhere else, and what each stands for."""

    def __init__(self) -> None:
        self._places: dict[str, Hidden] = {}
        self._call_ids: dict[str, str] = {}
        """By sentinel of a name: the id, which some templates show instead."""

    def _new(self, part: Part, index: int | None = None, role: str = "") -> str:
        word = f"moltshown{len(self._places)}x7f3a"
        self._places[word] = Hidden(part, index, role)
        return word

    def missing_in(self, text: str) -> Iterator[Hidden]:
        """Each part once."""
        missing: dict[Hidden, None] = {}
        for word, place in self._places.items():
            call_id = self._call_ids.get(word)
            shown_by_id = call_id is not None and call_id in text
            if word not in text and not shown_by_id:
                missing[place] = None
        yield from missing

    def message(self, index: int, message: Message) -> Message:
        """The message with a sentinel in all that it says."""
        role = message["role"]
        marked = dict(message)
        if isinstance(message["content"], str):
            marked["content"] = self._content(index, role, message["content"])
        for key in REASONING_KEYS:
            if key in message:
                marked[key] = self._inserted(message[key], Part.REASONING, index, role)
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, role, call) for call in message["tool_calls"]]
        return marked

    def tools(self, tools: Tools) -> Tools:
        """The tools with a sentinel in their names."""
        if not tools:
            return tools
        marked = []
        for tool in tools:
            inner = tool.get("function")
            if isinstance(inner, dict):
                marked.append(tool | {"function": self._named(inner)})
            else:
                marked.append(self._named(tool))
        return marked

    def _named(self, function: Json) -> Json:
        word = self._new(Part.TOOLS)
        return function | {"name": f"{function.get('name', '')}{word}"}

    def _content(self, index: int, role: str, content: str) -> str:
        """An assistant's content may hold its reasoning, between tags."""
        if role != "assistant":
            return self._inserted(content, Part.CONTENT, index, role)
        first_tag = THINK_TAGS.search(content)
        begins_inside = first_tag is not None and _closes(first_tag[0])
        part = Part.REASONING if begins_inside else Part.CONTENT
        marked = []
        for piece in THINK_TAGS.split(content):
            if not THINK_TAGS.fullmatch(piece):
                piece = self._inserted(piece, part, index, role)
            elif _closes(piece):
                part = Part.CONTENT
            else:
                part = Part.REASONING
            marked.append(piece)
        return "".join(marked)

    def _inserted(self, text: str, part: Part, index: int, role: str) -> str:
        if not text.strip():
            return text
        start = LEADING_MARKUP.match(text)
        at = start.end() if start else 0
        return text[:at] + self._new(part, index, role) + " " + text[at:]

    def _call(self, index: int, role: str, call: Json) -> Json:
        """In the arguments; in the name where there are none."""
        function = dict(call["function"])
        arguments = decode_arguments(function.get("arguments"))
        word = self._new(Part.CALLS, index, role)
        if not isinstance(arguments, dict):
            function["name"] = f"{function['name']}{word}"
            if isinstance(call.get("id"), str):
                self._call_ids[word] = call["id"]
            return call | {"function": function}

        arguments = arguments | {word: word}
        are_text = isinstance(function["arguments"], str)
        function["arguments"] = json.dumps(arguments) if are_text else arguments
        return call | {"function": function}


def _closes(tag: str) -> bool:
    return tag.startswith(("</", "[/"))
