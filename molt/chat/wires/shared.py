"""What the protocols have in common: blocks of content, options, errors."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from molt.chat.protocol import ChatError, ChatReply, ChatRequest, Message, TokenLogprob
from molt.chat.wires.fields import items, refuse
from molt.chat.wires.options import ignored_options
from molt.chat.wires.structure import read_structure, with_instruction
from molt.chat.wires.tools import read_choice, read_tools
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


def result_content(value: Any, where: str) -> str | list[Json]:
    """Content of a tool's result, which may also be any JSON value: the model reads its JSON text."""
    is_blocks = isinstance(value, list) and all(isinstance(block, dict | str) for block in value)
    if is_blocks or isinstance(value, str) or value is None:
        return content(value, where)
    return json.dumps(value, ensure_ascii=False)


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


def chat_request(messages: list[Message], body: Json, output_format: Any, *, tools: Sequence[Json] = ()) -> ChatRequest:
    """With the options that all protocols spell alike, or nearly so. tools: beside those of the body."""
    if not messages:
        refuse("the conversation is empty: there is nothing to answer. Send at least one message.")
    stop = _stop_strings(body)
    sampling = _sampling(body)
    seed = sampling.pop("seed", None)
    structure = read_structure(body, output_format)

    offered = read_tools([*items(body, "tools"), *tools])
    choice = read_choice(body, offered)
    functions = offered.functions
    if choice.allowed is not None:
        functions = [tool for tool in functions if tool["function"]["name"] in choice.allowed]
    return ChatRequest(
        messages=with_instruction(messages, structure),
        tools=functions or None,
        max_tokens=_count(body, "max_completion_tokens", "max_output_tokens", "max_tokens"),
        n=_count(body, "n") or 1,
        stop=stop,
        seed=seed,
        sampling=sampling,
        structure=structure,
        required_tools=choice.required,
        one_call=_wants_one_call(body),
        logprobs=_wants_logprobs(body),
        text_tools=offered.text_tools,
        namespaces=offered.namespaces,
        ignored=ignored_options(body),
        ignored_tools=offered.ignored,
    )


def _wants_one_call(body: Json) -> bool:
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        return True
    return body.get("parallel_tool_calls") is False


def _wants_logprobs(body: Json) -> bool:
    included = body.get("include")
    if isinstance(included, list) and "message.output_text.logprobs" in included:
        return True
    return bool(body.get("logprobs"))


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


# Replies --------------------------------------------------------------------------------------------------------------


def logprob_items(logprobs: Sequence[TokenLogprob] | None) -> list[Json]:
    """Log-probs of tokens in the shape of both OpenAI protocols."""
    shaped = []
    for each in logprobs or ():
        spelled = list(each.text.encode(errors="replace"))
        shaped.append({"token": each.text, "bytes": spelled, "logprob": each.logprob, "top_logprobs": []})
    return shaped


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
