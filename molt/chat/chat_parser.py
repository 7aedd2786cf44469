"""Sampled ids to messages: content, reasoning, tool calls.

A family of `renderers` reads its own format. For other models reasoning is what stands in `<think>`, and calls are read
as Hermes and Qwen write them, in `<tool_call>`.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from molt.chat.chat_family import Family
from molt.chat.marked_tokenizer import MarkedTokenizer
from molt.chat.protocol import ToolCall, Tools
from molt.chat.tool_arguments import decode_arguments

if TYPE_CHECKING:
    from renderers.base import ParsedResponse

THINK = "<think>"
END_THINK = "</think>"
SPOKEN = [THINK, END_THINK, "<tool_call>", "</tool_call>"]
"""Special tokens that are part of what a turn says."""
CALL_BLOCK = re.compile(r"<tool_call>(?P<body>.*?)(?P<closed></tool_call>|\Z)", re.DOTALL)
UNREADABLE = {"unclosed_block", "malformed_structure", "missing_name"}
"""Statuses of `renderers` that leave no call. An unknown tool is a call: the client refuses it."""
OPENING_IDS = 16
"""Ids at the end of a prompt in which it may open the reasoning."""

_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True)
class Parsed:
    """What a sampled turn says."""

    content: str
    """Calls that cannot be read stay in it as text, so that the client sees what the model said."""
    reasoning: str | None
    tool_calls: list[ToolCall]
    malformed: list[str]
    """The text of each call that cannot be read."""


class ChatParser:
    """Reads the sampled turns of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: MarkedTokenizer, eos_ids: list[int], family: Family | None):
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._family = family
        spoken_ids = tokenizer.convert_tokens_to_ids(SPOKEN)
        self._silent_ids = set(tokenizer.all_special_ids) - set(spoken_ids)
        self._think_id: int | None = tokenizer.get_added_vocab().get(THINK)

    def parse(self, sampled_ids: list[int], tools: Tools, prompt_ids: list[int]) -> Parsed:
        """The turn as a message. Raises nothing, whatever the model says. prompt_ids: may open the reasoning."""
        if self._family is None:
            return self._parse_text(sampled_ids, prompt_ids)
        try:
            response = self._family.parse_response(sampled_ids, tools=tools, prompt_ids=prompt_ids)
        except Exception:  # another package's parser on a text that may be anything: one unreadable call
            text = self.spoken(sampled_ids)
            return Parsed(content=text, reasoning=None, tool_calls=[], malformed=[text])
        return _parsed_response(response)

    def unparsed(self, sampled_ids: list[int]) -> str:
        """The turn as text, calls as the model spells them; without its reasoning, if that ends."""
        after_reasoning = self.spoken(sampled_ids).rpartition(END_THINK)[2]
        return after_reasoning.strip()

    def spoken(self, ids: list[int]) -> str:
        """The text up to the end token, with the special tokens of reasoning and calls, but no others."""
        spoken = []
        for token in ids:
            if token in self._eos_ids:
                break
            if token not in self._silent_ids:
                spoken.append(token)
        return self._tokenizer.text(spoken)

    def _parse_text(self, sampled_ids: list[int], prompt_ids: list[int]) -> Parsed:
        text = self.spoken(sampled_ids)
        if self._opens_reasoning(prompt_ids):
            text = THINK + text

        reasoning = None
        if text.lstrip().startswith(THINK):
            thought, _, text = text.lstrip().removeprefix(THINK).partition(END_THINK)
            reasoning = thought.strip() or None
            text = text.lstrip("\n")

        calls = []
        malformed = []
        for block in list(CALL_BLOCK.finditer(text)):
            call = _read_block(block)
            if call is None:
                malformed.append(block[0])
            else:
                calls.append(call)
                text = text.replace(block[0], "", 1).strip()
        return Parsed(content=text, reasoning=reasoning, tool_calls=calls, malformed=malformed)

    def _opens_reasoning(self, prompt_ids: list[int]) -> bool:
        end = prompt_ids[-OPENING_IDS:]
        if self._think_id is not None and self._think_id not in end:
            return False
        return self._tokenizer.text(end).rstrip().endswith(THINK)


def _parsed_response(response: "ParsedResponse") -> Parsed:
    calls = []
    malformed = []
    for attempt in response.tool_calls:
        call = None
        if attempt.status not in UNREADABLE:
            call = read_call(attempt.name, attempt.arguments, attempt.id)
        if call is None:
            malformed.append(attempt.raw)
        else:
            calls.append(call)

    texts = [text for text in [response.content, *malformed] if text]
    return Parsed(
        content="\n".join(texts),
        reasoning=response.reasoning_content,
        tool_calls=calls,
        malformed=malformed,
    )


def _read_block(block: re.Match[str]) -> ToolCall | None:
    if not block["closed"]:
        return None
    return call_of_json(block["body"])


def call_of_json(text: str) -> ToolCall | None:
    """The call that a JSON object with `name` and `arguments` spells; None if it is none."""
    body = decode_arguments(text)
    if not isinstance(body, dict):
        return None
    return read_call(body.get("name"), body.get("arguments", {}))


def read_call(name: Any, arguments: Any, call_id: str | None = None) -> ToolCall | None:
    """The call, if it is one: a name, and arguments that are a JSON object or the text of one; else None."""
    arguments = decode_arguments(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = _as_json(arguments)
        (name + text).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    if not call_id:
        call_id = secrets.token_hex(5)[:9]  # nine characters, as Mistral's templates ask
    return ToolCall(id=call_id, name=name, arguments=text)
