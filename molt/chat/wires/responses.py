"""OpenAI responses. Stateless: the whole conversation comes in `input`, as with `store: false` of the original."""

import time
from collections.abc import Iterator
from dataclasses import replace

from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.wires import chat
from molt.chat.wires.shared import Json, call, chat_request, content, items, message, openai_error, refuse

ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""The items of one assistant turn come in this order; one that falls back begins the next turn."""


def request(body: Json) -> ChatRequest:
    if body.get("previous_response_id") or body.get("conversation"):
        refuse("responses are not stored here, so `previous_response_id` names none. Send the whole `input`.")
    given, rank = body.get("input"), 3
    entries = [{"role": "user", "content": given}] if isinstance(given, str) else items(body, "input")
    messages = [message("system", content(body["instructions"], "instructions"))] if body.get("instructions") else []
    for index, entry in enumerate(entries):
        said = _message(entry, f"input[{index}]")
        place = ORDER[entry.get("type") or "message"] if said["role"] == "assistant" else 3
        if rank < place < 3 or rank == place == 2:  # several calls belong to one turn, two texts do not
            calls = [*messages[-1].pop("tool_calls", []), *said.pop("tool_calls", [])]
            merged = messages[-1] | {"content": messages[-1]["content"] or said["content"]}
            messages[-1] = merged | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(said)
        rank = place
    return replace(
        chat_request(messages, body, (body.get("text") or {}).get("format")), n=1
    )  # this protocol has one answer


def _message(entry: Json, where: str) -> Message:
    kind = entry.get("type") or "message"
    if kind == "message":
        return chat.turn(entry, where)
    if kind == "reasoning":
        thoughts = content(items(entry, "content") or items(entry, "summary"), where)
        return message("assistant", "", reasoning_content=thoughts)
    if kind == "function_call":
        made = call(entry.get("call_id"), entry.get("name"), entry.get("arguments"))
        return message("assistant", "", tool_calls=[made])
    if kind == "function_call_output":
        return message("tool", content(entry.get("output"), where), tool_call_id=entry.get("call_id"))
    refuse(
        f"`{where}` is of type {kind!r}, which this server neither makes nor keeps. Send messages and function calls."
    )


def reply(reply: ChatReply, body: Json) -> Json:
    (answer,) = reply.answers
    cut, now = answer.finish_reason == "length", int(time.time())
    echoed = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "model": "policy", "parallel_tool_calls": True,
        "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None,
        "user": None,
    }  # fmt: skip
    usage = {
        "input_tokens": reply.prompt_tokens, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + answer.completion_tokens,
    }  # fmt: skip
    return {
        "id": f"resp_{reply.id}", "object": "response", "created_at": now, "completed_at": now, "background": False,
        "error": None, "max_tool_calls": None, "previous_response_id": None, "service_tier": "default", "store": False,
        "top_logprobs": 0, "truncation": "disabled", "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_output(reply.id, answer)), "usage": usage,
        **{key: default if body.get(key) is None else body[key] for key, default in echoed.items()},
    }  # fmt: skip


def _output(id: str, answer: Answer) -> Iterator[Json]:
    done = {"status": "completed"}
    if answer.reasoning:
        thought = {"summary": [], "content": [{"type": "reasoning_text", "text": answer.reasoning}]}
        yield {"id": f"rs_{id}", "type": "reasoning", **thought, "encrypted_content": None, **done}
    if answer.content or not answer.tool_calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        yield {"id": f"msg_{id}", "type": "message", "role": "assistant", "content": [text], **done}
    for index, made in enumerate(answer.tool_calls):
        named = {"call_id": made.id, "name": made.name, "arguments": made.arguments}
        yield {"id": f"fc_{id}_{index}", "type": "function_call", **named, **done}


def events(full: Json, body: Json) -> Iterator[tuple[str, Json]]:
    for number, (kind, event) in enumerate(_events(full)):
        yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number, **event}


def _events(full: Json) -> Iterator[tuple[str, Json]]:
    begun = {**full, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(full["output"]):
        bare = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "output_item.added", {"output_index": index, "item": {**item, **bare, "status": "in_progress"}}
        for kind, event in _pieces(item):
            yield kind, {"item_id": item["id"], "output_index": index, **event}
        yield "output_item.done", {"output_index": index, "item": item}
    yield full["status"], {"response": full}


def _pieces(item: Json) -> Iterator[tuple[str, Json]]:
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    place = {"content_index": 0, **({"logprobs": []} if part["type"] == "output_text" else {})}
    yield "content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
    yield f"{part['type']}.delta", {"delta": part["text"], **place}
    yield f"{part['type']}.done", {"text": part["text"], **place}
    yield "content_part.done", {"content_index": 0, "part": part}


def error(error: ChatError) -> Json:
    """In a stream the fields stand in the event itself; the object beside them is what the Python SDK looks for."""
    shaped = openai_error(error)
    return {"sequence_number": 0, **shaped["error"], "type": "error", **shaped}
