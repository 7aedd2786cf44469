"""OpenAI chat completions."""

import time
from collections.abc import Iterator
from typing import Any

from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.wires.shared import call, chat_request, content, items, message, openai_error, refuse
from molt.types import Json

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def request(body: Json) -> ChatRequest:
    """See `shared.Wire`."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        refuse(f"`stream_options` is {options!r}: it must be an object, or left out.")
    messages = [read_message(item, f"messages[{index}]") for index, item in enumerate(items(body, "messages"))]
    return chat_request(messages, body, body.get("response_format"))


def read_message(item: Json, where: str) -> Message:
    """A message of this protocol. Raises ChatError."""
    role = item.get("role")
    if role not in ROLES:
        refuse(f"`{where}.role` is {role!r}: it must be one of {', '.join(ROLES)}.")
    calls = []
    for made in items(item, "tool_calls"):
        function = made["function"]
        calls.append(call(made.get("id"), function.get("name"), function.get("arguments")))
    return message(
        ROLES[role],
        content(item.get("content"), f"{where}.content"),
        reasoning_content=item.get("reasoning_content") or item.get("reasoning"),
        tool_calls=calls,
        tool_call_id=item.get("tool_call_id"),
    )


def reply(answered: ChatReply, body: Json) -> Json:
    """See `shared.Wire`."""
    return {
        "id": f"chatcmpl-{answered.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or "policy",
        "usage": _usage(answered),
        "service_tier": "default",
        "system_fingerprint": None,
        "choices": [_choice(index, answer) for index, answer in enumerate(answered.answers)],
    }


def _usage(answered: ChatReply) -> Json:
    completion_tokens = sum(answer.completion_tokens for answer in answered.answers)
    return {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": answered.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _choice(index: int, answer: Answer) -> Json:
    calls = [call(made.id, made.name, made.arguments) for made in answer.tool_calls]
    text: str | None = answer.content
    if calls and not text:
        text = None
    spoken = message("assistant", text, reasoning_content=answer.reasoning, tool_calls=calls)
    spoken["refusal"] = None
    spoken["annotations"] = []
    return {
        "index": index,
        "message": spoken,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }


def events(full: Json, body: Json) -> Iterator[tuple[str | None, Any]]:
    """See `shared.Wire`. Usage comes in a chunk of its own if the client wants it there, else with the last choice."""
    options = body.get("stream_options") or {}
    usage_apart = bool(options.get("include_usage"))
    last = full["choices"][-1]
    for choice in full["choices"]:
        for delta in _deltas(choice["message"]):
            yield None, _chunk(full, [_chunk_choice(choice, delta, finish_reason=None)])
        usage = None
        if choice is last and not usage_apart:
            usage = full["usage"]
        yield None, _chunk(full, [_chunk_choice(choice, {}, finish_reason=choice["finish_reason"])], usage)
    if usage_apart:
        yield None, _chunk(full, [], full["usage"])
    yield None, "[DONE]"


def _chunk(full: Json, choices: list[Json], usage: Json | None = None) -> Json:
    return {
        **full,
        "object": "chat.completion.chunk",
        "usage": usage,
        "choices": choices,
    }


def _chunk_choice(choice: Json, delta: Json, *, finish_reason: str | None) -> Json:
    return {
        "index": choice["index"],
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def _deltas(spoken: Json) -> Iterator[Json]:
    """A message in pieces: its role, its texts, its calls."""
    yield {"role": "assistant", "content": "", "refusal": None}
    for key in ("reasoning_content", "content"):
        if spoken.get(key):
            yield {key: spoken[key]}
    for index, made in enumerate(spoken.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **made}]}


def error(refusal: ChatError) -> Json:
    """See `shared.Wire`."""
    return openai_error(refusal)
