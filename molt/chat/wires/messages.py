"""Anthropic messages."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.wires.shared import Json, call, chat_request, content, items, message, refuse

STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "api_error"}
APART = ("thinking", "redacted_thinking", "tool_use")
SIGNATURE = "bW9sdA=="
"""Clients drop a thought without one."""


def request(body: Json) -> ChatRequest:
    messages = [message("system", content(body["system"], "system"))] if body.get("system") else []
    for index, turn in enumerate(items(body, "messages")):
        messages += _messages(turn, f"messages[{index}]")
    output_format = (body.get("output_config") or {}).get("format") or body.get("output_format")
    return replace(chat_request(messages, body, output_format), n=1)  # this protocol has one answer


def _messages(turn: Json, where: str) -> Iterator[Message]:
    """One message, or several: each tool result of a user's turn is one of its own."""
    role, given = turn.get("role"), turn.get("content")
    if role not in ("system", "user", "assistant"):
        refuse(f"`{where}.role` is {role!r}: it must be user, assistant or system.")
    if not isinstance(given, list):
        yield message(role, content(given, where))
    elif role == "assistant":
        yield _assistant(items(turn, "content"), where)
    else:
        for is_result, group in groupby(items(turn, "content"), lambda block: block.get("type") == "tool_result"):
            blocks = list(group)
            yield from map(_result, blocks) if is_result else [message(role, content(blocks, where))]


def _result(block: Json) -> Message:
    return message("tool", content(block.get("content"), "tool_result"), tool_call_id=block.get("tool_use_id"))


def _assistant(blocks: list[Json], where: str) -> Message:
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    thoughts = [block for block in blocks if block.get("type") == "thinking"]
    return message(
        "assistant",
        content([block for block in blocks if block.get("type") not in APART], where),
        reasoning_content=content(thoughts, where),
        tool_calls=[call(block.get("id"), block.get("name"), block.get("input", {})) for block in calls],
    )


def reply(reply: ChatReply, body: Json) -> Json:
    (answer,) = reply.answers
    stop = getattr(answer, "stop_sequence", None)
    usage = {
        "input_tokens": reply.prompt_tokens, "output_tokens": answer.completion_tokens, "server_tool_use": None,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "service_tier": "standard",
    }  # fmt: skip
    return {
        "id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": body.get("model") or "policy",
        "content": list(_blocks(answer)), "stop_reason": "stop_sequence" if stop else STOP[answer.finish_reason],
        "stop_sequence": stop, "container": None, "usage": usage,
    }  # fmt: skip


def _blocks(answer: Answer) -> Iterator[Json]:
    if answer.reasoning:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE}
    if answer.content or not answer.tool_calls:
        yield {"type": "text", "text": answer.content, "citations": None}
    for made in answer.tool_calls:
        yield {"type": "tool_use", "id": made.id, "name": made.name, "input": json.loads(made.arguments)}


def events(full: Json, body: Json) -> Iterator[tuple[str, Json]]:
    yield from ((event["type"], event) for event in _events(full))


def _events(full: Json) -> Iterator[Json]:
    ending = {"stop_reason": full["stop_reason"], "stop_sequence": full["stop_sequence"]}
    begun = {**full, "content": [], **dict.fromkeys(ending), "usage": {**full["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(full["content"]):
        bare, *deltas = _pieces(block)
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **bare}}
        yield from ({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {**ending, "container": None}, "usage": full["usage"]}
    yield {"type": "message_stop"}


def _pieces(block: Json) -> list[Json]:
    """What is not in the block yet when it starts, then its deltas."""
    if block["type"] == "tool_use":
        return [{"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "text":
        return [{"text": ""}, {"type": "text_delta", "text": block["text"]}]
    deltas = [{"type": f"{key}_delta", key: block[key]} for key in ("thinking", "signature")]
    return [{"thinking": "", "signature": ""}, *deltas]


def error(error: ChatError) -> Json:
    shaped = {"type": KINDS.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": shaped, "request_id": None}
