"""Arguments of tool calls: JSON text in the protocols, objects in templates."""

import json
from collections.abc import Callable
from typing import Any

from molt.chat.protocol import Message
from molt.types import Json


def decode_arguments(arguments: Any) -> Any:
    """The JSON value that `arguments` spell; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def arguments_as_objects(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of their calls decoded."""
    return _convert_arguments(messages, decode_arguments)


def arguments_as_text(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of their calls as JSON text."""
    return _convert_arguments(messages, _encode_arguments)


def _encode_arguments(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _convert_arguments(messages: list[Message], convert: Callable[[Any], Any]) -> list[Message]:
    converted = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_convert_call(call, convert) for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        converted.append(message)
    return converted


def _convert_call(call: Json, convert: Callable[[Any], Any]) -> Json:
    function = call["function"]
    if "arguments" not in function:
        return call
    converted = function | {"arguments": convert(function["arguments"])}
    return call | {"function": converted}
