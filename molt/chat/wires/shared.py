"""What the protocols have in common: blocks of content, tools, limits, refusals."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from molt.chat.protocol import ChatError, ChatReply, ChatRequest, Message, Tools
from molt.types import Json

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
INTEGERS = ("seed", "top_k")
"""Sampling parameters that take no fraction."""
MIN_NUMBER = -(1 << 63)
END_NUMBER = 1 << 64
"""Numbers outside would kill the engine."""
NOT_TEXT = {"input_audio", "audio", "video", "video_url", "file", "input_file", "document"}
IMAGES = ("image_url", "input_image", "image")
TEXT_FIELDS = ("text", "refusal", "thinking")
SHOWN_SCHEMA = 200
"""Characters of a bad schema that a refusal shows."""


class Wire(Protocol):
    """One protocol: what every module of this package defines."""

    def request(self, body: Json) -> ChatRequest:
        """What a body requests. Raises ChatError; further keys and unknown tool types are accepted."""
        ...

    def reply(self, answered: ChatReply, body: Json) -> Json:
        """The body of an unstreamed reply, every field of the protocol in it."""
        ...

    def events(self, full: Json, body: Json) -> Iterator[tuple[str | None, Any]]:
        """The same reply (`full`, from `reply`) as server-sent events: name and data."""
        ...

    def error(self, refusal: ChatError) -> Json:
        """A refusal in the protocol's shape and words."""
        ...


def refuse(message: str, status: int = 400, code: str = "invalid_request") -> NoReturn:
    """Raise ChatError."""
    raise ChatError(status, code, message)


def items(body: Json, key: str) -> list[Json]:
    """`body[key]`, a list of objects; absent or null is an empty one."""
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        refuse(f"`{key}` must be a list of objects. Send it as the protocol has it.")
    return value


# Content --------------------------------------------------------------------------------------------------------------


def content(value: Any, where: str) -> str | list[Json]:
    """Text blocks alone become one string, as templates want it; with images among them, a list of parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(f"`{where}` is a {type(value).__name__}: it must be a string or a list of blocks.")

    parts = [_part(block, f"{where}[{index}]") for index, block in enumerate(value)]
    if any("image_url" in part for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(block: Any, where: str) -> Json:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    kind = block.get("type")
    if kind in NOT_TEXT:
        refuse(f"`{where}` is of type {kind!r}, which the model cannot be shown. Send text or images.")
    if kind in IMAGES:
        return {"type": "image_url", "image_url": {"url": _image_url(block)}}
    for field in TEXT_FIELDS:
        if isinstance(block.get(field), str):
            return {"type": "text", "text": block[field]}
    # A block that no protocol had when this was written still reaches the model, as the client wrote it.
    return {"type": "text", "text": json.dumps(block)}


def _image_url(block: Json) -> str:
    """The URL of an image block of any protocol: text, an object with `url`, or base64 data."""
    source: Any = block.get("source") or block.get("image_url")
    if source and isinstance(source, str):
        return source
    url = source.get("url")
    if not url:
        url = f"data:{source['media_type']};base64,{source['data']}"
    return str(url)


# Messages -------------------------------------------------------------------------------------------------------------


def message(role: str, content: Any, **fields: Any) -> Message:
    """A message in the shape of `protocol`: fields without a value are left out, `content` never is."""
    reasoning = fields.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        refuse(f"the reasoning of a message is a {type(reasoning).__name__}: it must be text.")
    built: Message = {"role": role, "content": content}
    for name, value in fields.items():
        if value:
            built[name] = value
    return built


def call(id: Any, name: Any, arguments: Any) -> Json:
    """A tool call of an assistant message; arguments that come as an object become JSON text."""
    if not isinstance(name, str) or not isinstance(id, str):
        refuse(f"a tool call has the id {id!r} and the name {name!r}: both must be strings.")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


# Requests -------------------------------------------------------------------------------------------------------------


def chat_request(messages: list[Message], body: Json, output_format: Any) -> ChatRequest:
    """With the options that all protocols spell alike, or nearly so."""
    if not messages:
        refuse("the conversation is empty: there is nothing to answer. Send at least one message.")
    stop = _stop_strings(body)
    sampling = _sampling(body)
    seed = sampling.pop("seed", None)
    return ChatRequest(
        messages=messages,
        tools=_tools(body),
        max_tokens=_count(body, "max_completion_tokens", "max_output_tokens", "max_tokens"),
        n=_count(body, "n") or 1,
        stop=stop,
        seed=seed,
        sampling=sampling,
        constrained=_constraint(body, output_format),
    )


def _stop_strings(body: Json) -> tuple[str, ...]:
    stop = body.get("stop", body.get("stop_sequences")) or []
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        refuse(f"the stop strings are {stop!r}: they must be texts that are not empty.")
    return tuple(stop)


def _sampling(body: Json) -> Json:
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    wrong = {name: value for name, value in sampling.items() if not _has_right_type(name, value)}
    if wrong:
        refuse(f"the sampling parameters {wrong!r} are not the numbers they must be. Fix them, or leave them out.")
    return sampling


def _has_right_type(name: str, value: Any) -> bool:
    """Whether it is of the type that the parameter has. `type`, since a bool is an int to `isinstance`."""
    if name == "logit_bias":
        return isinstance(value, dict)
    if type(value) is not int and (type(value) is not float or name in INTEGERS):
        return False
    return MIN_NUMBER <= value < END_NUMBER  # false for NaN


def _constraint(body: Json, output_format: Any) -> str | None:
    """What requires constrained decoding, if anything does."""
    form = _kind(output_format)
    if form not in (None, "text"):
        return f"output format {form!r}"
    if _kind(body.get("tool_choice")) not in (None, "auto", "none"):
        return f"tool_choice {json.dumps(body['tool_choice'])}"
    return None


def _kind(value: Any) -> Any:
    """The type of an option that may be an object or its type alone."""
    if isinstance(value, dict):
        return value.get("type")
    return value


def _count(body: Json, *names: str) -> int | None:
    """The first of these options that is there."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            refuse(f"`{name}` is {value!r}: it must be a whole number of at least 1.")
        return value
    return None


# Tools ----------------------------------------------------------------------------------------------------------------


def _tools(body: Json) -> Tools:
    if _kind(body.get("tool_choice")) == "none":
        return None
    tools = [_function(tool) for tool in items(body, "tools") if _is_callable(tool)]
    return tools or None


def _is_callable(tool: Json) -> bool:
    """False for tools that only the protocol's own servers can run: they are not offered to the model."""
    kind = tool.get("type")
    if kind in (None, "function"):
        return True
    return kind == "custom" and "input_schema" in tool


def _function(tool: Json) -> Json:
    """A tool of any protocol as an OpenAI function schema."""
    spec = tool.get("function", tool)
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"a tool has the name {name!r}: the model could not call it. Name it with a string.")

    schema = spec.get("parameters", spec.get("input_schema")) or {"type": "object"}
    if not _is_object_schema(schema):
        shown = json.dumps(schema)[:SHOWN_SCHEMA]
        refuse(f"the parameters of tool {name!r} are not the JSON schema of an object: {shown}")

    function: Json = {"name": name}
    if spec.get("description"):
        function["description"] = spec["description"]
    function["parameters"] = schema
    return {"type": "function", "function": function}


def _is_object_schema(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return False
    return isinstance(schema.get("properties", {}), dict)


# Errors ---------------------------------------------------------------------------------------------------------------


def openai_error(refusal: ChatError) -> Json:
    """The error object of both OpenAI protocols."""
    kind = "invalid_request_error"
    if refusal.status >= 500:
        kind = "server_error"
    text = refusal.message
    if refusal.code == "context_length_exceeded":
        text = f"This model's maximum context length is exceeded: {text}"
    return {
        "error": {
            "message": text,
            "type": kind,
            "param": None,
            "code": refusal.code,
        }
    }
