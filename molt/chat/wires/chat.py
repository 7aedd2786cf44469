"""OpenAI chat completions."""

import time
from collections.abc import Iterator
from typing import Any

from molt.chat.protocol import Answer, ChatReply, ChatRequest, Message
from molt.chat.wires.shared import Json, call, chat_request, content, items, message, openai_error, refuse

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

error = openai_error


def request(body: Json) -> ChatRequest:
    if not isinstance(options := body.get("stream_options"), dict | None):
        refuse(f"`stream_options` is {options!r}: it must be an object, or left out.")
    messages = [turn(item, f"messages[{i}]") for i, item in enumerate(items(body, "messages"))]
    return chat_request(messages, body, body.get("response_format"))


def turn(item: Json, where: str) -> Message:
    if item.get("role") not in ROLES:
        refuse(f"`{where}.role` is {item.get('role')!r}: it must be one of {', '.join(ROLES)}.")
    made = [(made.get("id"), made["function"]) for made in items(item, "tool_calls")]
    return message(
        ROLES[item["role"]],
        content(item.get("content"), f"{where}.content"),
        reasoning_content=item.get("reasoning_content") or item.get("reasoning"),
        tool_calls=[call(id, function.get("name"), function.get("arguments")) for id, function in made],
        tool_call_id=item.get("tool_call_id"),
    )


def reply(reply: ChatReply, body: Json) -> Json:
    completion = sum(answer.completion_tokens for answer in reply.answers)
    usage = {
        "prompt_tokens": reply.prompt_tokens, "completion_tokens": completion,
        "total_tokens": reply.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return {
        "id": f"chatcmpl-{reply.id}", "object": "chat.completion", "created": int(time.time()),
        "model": body.get("model") or "policy", "usage": usage, "service_tier": "default", "system_fingerprint": None,
        "choices": [_choice(index, answer) for index, answer in enumerate(reply.answers)],
    }  # fmt: skip


def _choice(index: int, answer: Answer) -> Json:
    calls = [call(made.id, made.name, made.arguments) for made in answer.tool_calls]
    said = answer.content or (None if calls else "")
    spoken = message("assistant", said, reasoning_content=answer.reasoning, tool_calls=calls)
    spoken |= {"refusal": None, "annotations": []}
    return {"index": index, "message": spoken, "logprobs": None, "finish_reason": answer.finish_reason}


def events(full: Json, body: Json) -> Iterator[tuple[str | None, Any]]:
    """Usage comes in a chunk of its own if asked for, else with the last choice."""
    apart = bool((body.get("stream_options") or {}).get("include_usage"))
    head = {**full, "object": "chat.completion.chunk", "usage": None}
    for choice in full["choices"]:
        bare = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": None}
        for delta in _deltas(choice["message"]):
            yield None, {**head, "choices": [{**bare, "delta": delta}]}
        usage = full["usage"] if choice is full["choices"][-1] and not apart else None
        yield None, {**head, "choices": [{**bare, "finish_reason": choice["finish_reason"]}], "usage": usage}
    if apart:
        yield None, {**head, "choices": [], "usage": full["usage"]}
    yield None, "[DONE]"


def _deltas(said: Json) -> Iterator[Json]:
    yield {"role": "assistant", "content": "", "refusal": None}
    yield from ({key: said[key]} for key in ("reasoning_content", "content") if said.get(key))
    yield from ({"tool_calls": [{"index": i, **made}]} for i, made in enumerate(said.get("tool_calls", [])))
