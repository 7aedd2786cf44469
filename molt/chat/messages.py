"""Messages that a user wrote in a dataset, in the one shape that `protocol` has.

People write the same conversation in many ways: `content` as null or as parts, reasoning under three keys, calls in the
old form of OpenAI. The wires read what clients send into the same shape, so a conversation is trained as it is served.
"""

import json
from typing import Any

from molt.chat.protocol import Message, Tools
from molt.errors import UnusableRow
from molt.types import Json

ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles. Any other role is left to the chat template."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts whose `text` is shown; a part that says no type is text too."""
THOUGHT_PARTS = ("thinking", "reasoning")
"""Types of parts that are the message's reasoning."""
IMAGE_PARTS = ("image_url", "input_image", "image")
WEIGHT_KEYS = ("weight", "train", "training", "trainable", "loss")
"""Keys of a message that say whether its tokens are trained: `weight` of OpenAI's files, others of other trainers."""


def read_messages(value: Any, column: str) -> list[Message]:
    """`value` as messages: `content` is text, reasoning is `reasoning_content`, calls have their `function`.

    Fields without a value are left out, others stay. `column` is where it comes from, for messages. Raises UnusableRow.
    """
    if not isinstance(value, list):
        raise UnusableRow(f"whose `{column}` is a {type(value).__name__}, not a list of messages")
    if not value:
        raise UnusableRow(f"whose `{column}` has no messages")
    return [_read_message(item, column) for item in value]


def _read_message(item: Any, column: str) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise UnusableRow(f"whose `{column}` has a message without a role")
    message = {key: value for key, value in item.items() if value is not None}
    message["role"] = ROLES.get(item["role"], item["role"])
    message["content"] = _content(item.get("content"), column)

    reasoning = _reasoning(item, column)
    for key in REASONING_KEYS:
        message.pop(key, None)
    if reasoning:
        message["reasoning_content"] = reasoning

    calls = _calls(item, column)
    message.pop("function_call", None)
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls

    # An assistant message that only calls tools, or only reasons, has no content.
    if item.get("content") is None and not calls and not reasoning:
        raise UnusableRow(f"whose `{column}` has a message without text or tool calls")
    return message


def _content(content: Any, column: str) -> str | list[Json]:
    """Text; with images among it, the parts as they are."""
    if isinstance(content, list):
        kinds = [part.get("type") for part in content if isinstance(part, dict)]
        if any(kind in IMAGE_PARTS for kind in kinds):
            return content
    return _text(content, column)


def _text(content: Any, column: str) -> str:
    """Text parts are joined by line breaks, as the chat server joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableRow(f"whose `{column}` has a content that is a {type(content).__name__}, not text")
    return "\n".join(_text_of_part(part, column) for part in content if not _is_thought(part))


def _text_of_part(part: Any, column: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise UnusableRow(f"whose `{column}` has a part of type {kind}, which is no text")
    return text


def _reasoning(item: Json, column: str) -> str:
    """The first of `REASONING_KEYS` that says something, or else the parts of the content that are reasoning."""
    for key in REASONING_KEYS:
        text = _text(item.get(key), column)
        if text:
            return text
    if not isinstance(item.get("content"), list):
        return ""
    thoughts = [part for part in item["content"] if _is_thought(part)]
    return "\n".join(str(part.get("thinking") or part.get("text") or "") for part in thoughts)


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _calls(item: Json, column: str) -> list[Json]:
    """The calls of a message, each with its `function`; also the one call of OpenAI's old form."""
    calls = item.get("tool_calls") or []
    if isinstance(calls, str):
        calls = _parsed(calls)
    if not isinstance(calls, list):
        raise UnusableRow(f"whose `{column}` has `tool_calls` that are no list")
    if item.get("function_call"):
        calls = [*calls, {"type": "function", "function": item["function_call"]}]
    return [_read_call(call, column) for call in calls]


def _read_call(call: Any, column: str) -> Json:
    if not isinstance(call, dict):
        raise UnusableRow(f"whose `{column}` has a tool call that is no object")
    if "function" not in call:  # the function alone
        called = {key: value for key, value in call.items() if key not in ("id", "type")}
        outer = {key: value for key, value in call.items() if key == "id"}
        call = {**outer, "type": "function", "function": called}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(f"whose `{column}` has a tool call without the name of its function")
    if function.get("arguments", {}) in (None, ""):
        function = function | {"arguments": {}}
    filled = {key: value for key, value in call.items() if value is not None}
    return filled | {"function": function}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def name_results(messages: list[Message]) -> list[Message]:
    """The conversation with the name of its function in every tool result, by the call that it answers."""
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = call["function"]["name"]
    names.pop(None, None)

    named = []
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]]} | message
        named.append(message)
    return named


def read_tools(value: Any, column: str) -> Tools:
    """`value` as tool schemas: a list of objects, or JSON text of one; None if there are none. Raises UnusableRow."""
    tools = value
    if isinstance(value, str) and value.strip():
        tools = _parsed(value)
        if isinstance(tools, str):
            raise UnusableRow(f"whose `{column}` is not valid JSON")
    if not tools:
        return None

    are_schemas = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if not are_schemas:
        raise UnusableRow(f"whose `{column}` is not a list of tool schemas")
    return tools


def require_unicode(value: Any, column: str) -> None:
    """Raise UnusableRow if a text in `value` is no Unicode (half a surrogate pair), or JSON cannot hold it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UnusableRow(
            f"whose `{column}` has half of a surrogate pair ({half}), which no tokenizer can read; write the whole "
            "character"
        ) from None
    except RecursionError:
        raise UnusableRow(f"whose `{column}` is nested too deeply") from None


def as_unicode(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which programs print and no tokenizer reads."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def trained_weight(message: Message, column: str) -> bool:
    """False where a key of `WEIGHT_KEYS` says 0 or false. Raises UnusableRow for any other weight than 0 and 1."""
    weights = [(key, message[key]) for key in WEIGHT_KEYS if key in message]
    for key, weight in weights:
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise UnusableRow(
                f"whose `{column}` has a message with `{key}` {weight!r}: a message is trained (1) or not (0)"
            )
    return all(weight for _, weight in weights)
