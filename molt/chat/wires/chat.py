"""OpenAI chat completions."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from molt.chat.protocol import TEXT_ARGUMENT, Answer, ChatError, ChatReply, ChatRequest, Message, ToolCall
from molt.chat.wires.fields import items, refuse
from molt.chat.wires.shared import (
    call,
    chat_request,
    content,
    logprob_items,
    message,
    openai_error,
    result_content,
)
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
    read = chat_request(
        _read_messages(body), body, body.get("response_format"), tools=_tools_of_functions(items(body, "functions"))
    )
    return replace(read, one_call=read.one_call or _is_legacy(body))


def _read_messages(body: Json) -> list[Message]:
    messages = []
    last_call_id = _legacy_id(0)
    for index, item in enumerate(items(body, "messages")):
        if item.get("function_call"):
            last_call_id = _legacy_id(index)
        messages.append(read_message(_without_legacy(item, last_call_id), f"messages[{index}]"))
    return messages


def read_message(item: Json, where: str) -> Message:
    """A message of this protocol. Raises ChatError."""
    role = item.get("role")
    if role not in ROLES:
        refuse(f"`{where}.role` is {role!r}: it must be one of {', '.join(ROLES)}.")
    calls = [_read_call(made) for made in items(item, "tool_calls")]
    said = item.get("content")
    where = f"{where}.content"
    return message(
        ROLES[role],
        result_content(said, where) if role == "tool" else content(said, where),
        reasoning_content=item.get("reasoning_content") or item.get("reasoning"),
        tool_calls=calls,
        tool_call_id=item.get("tool_call_id"),
    )


def _read_call(made: Json) -> Json:
    if isinstance(made.get("custom"), dict):
        custom = made["custom"]
        return call(made.get("id"), custom.get("name"), {TEXT_ARGUMENT: custom.get("input")})
    function = made["function"]
    return call(made.get("id"), function.get("name"), function.get("arguments"))


# `functions`, `function_call` and the role `function`, from before there were tools.


def _is_legacy(body: Json) -> bool:
    """Whether calls are answered as `function_call`."""
    return bool(body.get("functions")) and not body.get("tools")


def _tools_of_functions(functions: list[Json]) -> list[Json]:
    return [{"type": "function", "function": function} for function in functions]


def _without_legacy(item: Json, call_id: str) -> Json:
    """The message as it would be with tools. call_id: of the call that it makes or answers."""
    made = item.get("function_call")
    if made:
        if not isinstance(made, dict):
            refuse(f"a message has the `function_call` {made!r}: it must be an object with a name and arguments.")
        return {**item, "tool_calls": [{"id": call_id, "type": "function", "function": made}]}
    if item.get("role") == "function":
        return {**item, "role": "tool", "tool_call_id": call_id}
    return item


def _legacy_id(index: int) -> str:
    """Of the call in the message at this index; nine letters and digits, as some templates ask."""
    return f"call{index:05}"


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
        "choices": [_choice(index, answer, body) for index, answer in enumerate(answered.answers)],
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


def _choice(index: int, answer: Answer, body: Json) -> Json:
    calls = [_made_call(made) for made in answer.tool_calls]
    text: str | None = answer.content
    if calls and not text:
        text = None
    finish_reason = answer.finish_reason
    spoken = message("assistant", text, reasoning_content=answer.reasoning, tool_calls=calls)
    if calls and _is_legacy(body):
        (made,) = spoken.pop("tool_calls")[:1]
        spoken["function_call"] = made["function"]
        if finish_reason == "tool_calls":
            finish_reason = "function_call"
    spoken["refusal"] = None
    spoken["annotations"] = []
    logprobs = None
    if answer.logprobs is not None:
        logprobs = {"content": logprob_items(answer.logprobs), "refusal": None}
    return {
        "index": index,
        "message": spoken,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def _made_call(made: ToolCall) -> Json:
    if made.text is None:
        return call(made.id, made.name, made.arguments)
    return {"id": made.id, "type": "custom", "custom": {"name": made.name, "input": made.text}}


def events(full: Json, body: Json) -> Iterator[tuple[str | None, Any]]:
    """See `shared.Wire`. Usage comes in a chunk of its own if the client wants it there, else with the last choice."""
    options = body.get("stream_options") or {}
    usage_apart = bool(options.get("include_usage"))
    last = full["choices"][-1]
    for choice in full["choices"]:
        for delta in _deltas(choice["message"]):
            yield None, _chunk(full, [_chunk_choice(choice, delta)])
        usage = None
        if choice is last and not usage_apart:
            usage = full["usage"]
        yield None, _chunk(full, [_last_choice(choice)], usage)
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


def _chunk_choice(choice: Json, delta: Json) -> Json:
    return {
        "index": choice["index"],
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
    }


def _last_choice(choice: Json) -> Json:
    """The end of a choice; all log-probs come with it."""
    end = {"logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}
    return _chunk_choice(choice, {}) | end


def _deltas(spoken: Json) -> Iterator[Json]:
    """A message in pieces: its role, its texts, its calls."""
    yield {"role": "assistant", "content": "", "refusal": None}
    for key in ("reasoning_content", "content", "function_call"):
        if spoken.get(key):
            yield {key: spoken[key]}
    for index, made in enumerate(spoken.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **made}]}


def error(refusal: ChatError) -> Json:
    """See `shared.Wire`."""
    return openai_error(refusal)
