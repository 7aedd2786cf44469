"""Anthropic messages."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.wires.fields import items, refuse
from molt.chat.wires.shared import call, chat_request, content, message, result_content
from molt.types import Json

ROLES = ("system", "user", "assistant")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "api_error",
}
NOT_CONTENT = ("thinking", "redacted_thinking", "tool_use")
"""Blocks of an assistant's turn that are no part of its content."""
SIGNATURE = "bW9sdA=="
"""Clients drop a thought without one."""


def request(body: Json) -> ChatRequest:
    """See `shared.Wire`."""
    messages = []
    if body.get("system"):
        messages.append(message("system", content(body["system"], "system")))
    for index, turn in enumerate(items(body, "messages")):
        messages += _read_turn(turn, f"messages[{index}]")

    output_config = body.get("output_config") or {}
    output_format = output_config.get("format") or body.get("output_format")
    read = chat_request(messages, body, output_format)
    return replace(read, n=1)  # this protocol has one answer


def _read_turn(turn: Json, where: str) -> list[Message]:
    """One message, or several: each tool result of a user's turn is a message."""
    role = turn.get("role")
    if role not in ROLES:
        refuse(f"`{where}.role` is {role!r}: it must be user, assistant or system.")
    if not isinstance(turn.get("content"), list):
        return [message(role, content(turn.get("content"), where))]

    blocks = items(turn, "content")
    if role == "assistant":
        return [_read_assistant(blocks, where)]
    messages = []
    for is_result, group in groupby(blocks, key=_is_tool_result):
        if is_result:
            messages += [_read_result(block) for block in group]
        else:
            messages.append(message(role, content(list(group), where)))
    return messages


def _is_tool_result(block: Json) -> bool:
    return block.get("type") == "tool_result"


def _read_result(block: Json) -> Message:
    said = result_content(block.get("content"), "tool_result")
    return message("tool", said, tool_call_id=block.get("tool_use_id"))


def _read_assistant(blocks: list[Json], where: str) -> Message:
    spoken = [block for block in blocks if block.get("type") not in NOT_CONTENT]
    thoughts = [block for block in blocks if block.get("type") == "thinking"]
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            calls.append(call(block.get("id"), block.get("name"), block.get("input", {})))
    return message(
        "assistant",
        content(spoken, where),
        reasoning_content=content(thoughts, where),
        tool_calls=calls,
    )


def reply(answered: ChatReply, body: Json) -> Json:
    """See `shared.Wire`."""
    (answer,) = answered.answers
    stop_reason = STOP_REASONS[answer.finish_reason]
    if answer.stop_sequence:
        stop_reason = "stop_sequence"
    return {
        "id": f"msg_{answered.id}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": _blocks(answer),
        "stop_reason": stop_reason,
        "stop_sequence": answer.stop_sequence,
        "container": None,
        "usage": _usage(answered, answer),
    }


def _usage(answered: ChatReply, answer: Answer) -> Json:
    return {
        "input_tokens": answered.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "server_tool_use": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "service_tier": "standard",
    }


def _blocks(answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content, "citations": None})
    for made in answer.tool_calls:
        arguments = json.loads(made.arguments)
        blocks.append({"type": "tool_use", "id": made.id, "name": made.name, "input": arguments})
    return blocks


def events(full: Json, body: Json) -> Iterator[tuple[str, Json]]:
    """See `shared.Wire`."""
    for event in _events(full):
        yield event["type"], event


def _events(full: Json) -> Iterator[Json]:
    yield {"type": "message_start", "message": _started(full)}
    for index, block in enumerate(full["content"]):
        streamed = _stream_block(block)
        yield {"type": "content_block_start", "index": index, "content_block": streamed.start}
        for delta in streamed.deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    ending = {
        "stop_reason": full["stop_reason"],
        "stop_sequence": full["stop_sequence"],
        "container": None,
    }
    yield {"type": "message_delta", "delta": ending, "usage": full["usage"]}
    yield {"type": "message_stop"}


def _started(full: Json) -> Json:
    """The message before anything was sampled."""
    return {
        **full,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**full["usage"], "output_tokens": 0},
    }


@dataclass(frozen=True)
class StreamedBlock:
    """A block of content as it starts, and the deltas that complete it."""

    start: Json
    deltas: list[Json]


def _stream_block(block: Json) -> StreamedBlock:
    if block["type"] == "tool_use":
        arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return StreamedBlock(start={**block, "input": {}}, deltas=[arguments])
    if block["type"] == "text":
        text = {"type": "text_delta", "text": block["text"]}
        return StreamedBlock(start={**block, "text": ""}, deltas=[text])
    thought = {"type": "thinking_delta", "thinking": block["thinking"]}
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return StreamedBlock(start={**block, "thinking": "", "signature": ""}, deltas=[thought, signature])


def error(refusal: ChatError) -> Json:
    """See `shared.Wire`."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": refusal.message},
        "request_id": None,
    }
