"""What the protocols have in common: blocks of content, tools, limits, refusals."""

import json
from typing import Any, NoReturn

from molt.chat.protocol import ChatError, ChatRequest, Message

Json = dict[str, Any]

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logit_bias", *PENALTIES)
WHOLE = ("seed", "top_k")
NOT_TEXT = {"input_audio", "audio", "video", "video_url", "file", "input_file", "document"}
TEXT_FIELDS = ("text", "refusal", "thinking")


def refuse(message: str, status: int = 400, code: str = "invalid_request") -> NoReturn:
    raise ChatError(status, code, message)


def items(body: Json, key: str) -> list[Json]:
    """`body[key]`, a list of objects; absent or null is an empty one."""
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        refuse(f"`{key}` must be a list of objects. Send it as the protocol has it.")
    return value


def content(value: Any, where: str) -> str | list[Json]:
    """Text blocks alone become one string, as templates want it; with images among them, a list of parts."""
    if not isinstance(value, str | list | None):
        refuse(f"`{where}` is a {type(value).__name__}: it must be a string or a list of blocks.")
    if not isinstance(value, list):
        return value or ""
    parts = [_part(block, f"{where}[{i}]") for i, block in enumerate(value)]
    return parts if any("image_url" in part for part in parts) else "\n".join(part["text"] for part in parts)


def _part(block: Any, where: str) -> Json:
    block = {"text": block} if isinstance(block, str) else block
    kind = block.get("type")
    if kind in NOT_TEXT:
        refuse(f"`{where}` is of type {kind!r}, which the model cannot be shown. Send text or images.")
    if kind in ("image_url", "input_image", "image"):
        source = block.get("source") or block.get("image_url")
        url = source if isinstance(source, str) else source.get("url")
        url = url or f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": str(url)}}
    # A block that no protocol had when this was written still reaches the model, as the client wrote it.
    text = next((block[key] for key in TEXT_FIELDS if isinstance(block.get(key), str)), None)
    return {"type": "text", "text": json.dumps(block) if text is None else text}


def message(role: str, content: Any, **fields: Any) -> Message:
    """A message in the shape of `protocol`: fields without a value are left out, `content` never is."""
    if not isinstance(thought := fields.get("reasoning_content"), str | None):
        refuse(f"the reasoning of a message is a {type(thought).__name__}: it must be text.")
    return {"role": role, "content": content, **{key: value for key, value in fields.items() if value}}


def call(id: Any, name: Any, arguments: Any) -> Json:
    """A tool call of an assistant message; arguments that come as an object become JSON text."""
    if not isinstance(name, str) or not isinstance(id, str):
        refuse(f"a tool call has the id {id!r} and the name {name!r}: both must be strings.")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def chat_request(messages: list[Message], body: Json, output_format: Any) -> ChatRequest:
    """With the options that all protocols spell alike, or nearly so."""
    if not messages:
        refuse("the conversation is empty: there is nothing to answer. Send at least one message.")
    choice, form = _kind(body.get("tool_choice")), _kind(output_format)
    forced = None if choice in (None, "auto", "none") else f"tool_choice {json.dumps(body['tool_choice'])}"
    stop = body.get("stop", body.get("stop_sequences")) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        refuse(f"the stop strings are {stop!r}: they must be texts that are not empty.")
    sampling = {key: body[key] for key in (*SAMPLING, "seed") if body.get(key) is not None}
    if wrong := {key: value for key, value in sampling.items() if not _fits(key, value)}:
        refuse(f"the sampling parameters {wrong!r} are not the numbers they must be. Mend them, or leave them out.")
    return ChatRequest(
        messages,
        tools=None if choice == "none" else [_function(t) for t in items(body, "tools") if _callable(t)] or None,
        max_tokens=_count(body, "max_completion_tokens", "max_output_tokens", "max_tokens"),
        n=_count(body, "n") or 1,
        stop=tuple(stop),
        seed=sampling.pop("seed", None),
        sampling=sampling,
        constrained=forced if form in (None, "text") else f"output format {form!r}",
    )


def _fits(name: str, value: Any) -> bool:
    """Whether it is of the type that the parameter has. Larger than 64 bits is none: it would kill the engine."""
    if name == "logit_bias":
        return isinstance(value, dict)
    return type(value) in ((int,) if name in WHOLE else (int, float)) and -(1 << 63) <= value < 1 << 64  # NaN is not


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else value


def _count(body: Json, *names: str) -> int | None:
    name = next((name for name in names if body.get(name) is not None), None)
    if name is not None and (type(body[name]) is not int or body[name] < 1):
        refuse(f"`{name}` is {body[name]!r}: it must be a whole number of at least 1.")
    return body[name] if name else None


def _callable(tool: Json) -> bool:
    """False for tools that only the protocol's own servers can run: they are not offered to the model."""
    return tool.get("type") in (None, "function") or (tool["type"] == "custom" and "input_schema" in tool)


def _function(tool: Json) -> Json:
    spec = tool.get("function", tool)
    name, schema = spec.get("name"), spec.get("parameters", spec.get("input_schema")) or {"type": "object"}
    if not isinstance(name, str) or not name:
        refuse(f"a tool has the name {name!r}: the model could not call it. Name it with a string.")
    fits = isinstance(schema, dict) and schema.get("type", "object") == "object"
    if not fits or not isinstance(schema.get("properties", {}), dict):
        refuse(f"the parameters of tool {name!r} are not the JSON schema of an object: {json.dumps(schema)[:200]}")
    described = {"description": spec["description"]} if spec.get("description") else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def openai_error(error: ChatError) -> Json:
    """The error object of both OpenAI protocols."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    long = "This model's maximum context length is exceeded: " * (error.code == "context_length_exceeded")
    return {"error": {"message": long + error.message, "type": kind, "param": None, "code": error.code}}
