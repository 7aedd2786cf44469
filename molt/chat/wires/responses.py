"""OpenAI responses. Stateless: the whole conversation comes in `input`, as with `store: false` of the original."""

import time
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum

from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.wires.chat import read_message
from molt.chat.wires.shared import call, chat_request, content, items, message, openai_error, refuse
from molt.types import Json


class Place(IntEnum):
    """Where an item stands in a turn. The items of an assistant's turn come in this order."""

    REASONING = 0
    TEXT = 1
    CALL = 2
    OTHER = 3
    """Not an assistant's."""


PLACES = {"reasoning": Place.REASONING, "message": Place.TEXT, "function_call": Place.CALL}


def request(body: Json) -> ChatRequest:
    """See `shared.Wire`."""
    if body.get("previous_response_id") or body.get("conversation"):
        refuse("responses are not stored here, so `previous_response_id` names none. Send the whole `input`.")
    messages = []
    if body.get("instructions"):
        messages.append(message("system", content(body["instructions"], "instructions")))
    messages += _read_input(body)

    text_options = body.get("text") or {}
    read = chat_request(messages, body, text_options.get("format"))
    return replace(read, n=1)  # this protocol has one answer


def _read_input(body: Json) -> list[Message]:
    """The messages of `input`. Consecutive items of one assistant turn become one message."""
    if isinstance(body.get("input"), str):
        return [message("user", body["input"])]

    messages: list[Message] = []
    last_place = Place.OTHER
    for index, entry in enumerate(items(body, "input")):
        read = _read_item(entry, f"input[{index}]")
        place = Place.OTHER
        if read["role"] == "assistant":
            place = PLACES[entry.get("type") or "message"]
        if _is_same_turn(last_place, place):
            messages[-1] = _merge(messages[-1], read)
        else:
            messages.append(read)
        last_place = place
    return messages


def _is_same_turn(last: Place, place: Place) -> bool:
    """Whether an item belongs to the turn of the item before it: several calls may, two texts may not."""
    if place == Place.OTHER or last == Place.OTHER:
        return False
    return last < place or last == place == Place.CALL


def _merge(turn: Message, item: Message) -> Message:
    """The turn with the item in it."""
    calls = [*turn.get("tool_calls", []), *item.get("tool_calls", [])]
    merged = turn | {"content": turn["content"] or item["content"]}
    if calls:
        merged["tool_calls"] = calls
    return merged


def _read_item(entry: Json, where: str) -> Message:
    kind = entry.get("type") or "message"
    if kind == "message":
        return read_message(entry, where)
    if kind == "reasoning":
        thoughts = items(entry, "content") or items(entry, "summary")
        return message("assistant", "", reasoning_content=content(thoughts, where))
    if kind == "function_call":
        made = call(entry.get("call_id"), entry.get("name"), entry.get("arguments"))
        return message("assistant", "", tool_calls=[made])
    if kind == "function_call_output":
        return message("tool", content(entry.get("output"), where), tool_call_id=entry.get("call_id"))
    refuse(
        f"`{where}` is of type {kind!r}, which this server neither makes nor keeps. Send messages and function calls."
    )


def reply(answered: ChatReply, body: Json) -> Json:
    """See `shared.Wire`."""
    (answer,) = answered.answers
    now = int(time.time())
    status = "completed"
    incomplete_details = None
    if answer.finish_reason == "length":
        status = "incomplete"
        incomplete_details = {"reason": "max_output_tokens"}
    return {
        "id": f"resp_{answered.id}",
        "object": "response",
        "created_at": now,
        "completed_at": now,
        "background": False,
        "error": None,
        "max_tool_calls": None,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "top_logprobs": 0,
        "truncation": "disabled",
        "status": status,
        "incomplete_details": incomplete_details,
        "output": _output(answered.id, answer),
        "usage": _usage(answered, answer),
        **_echoed_settings(body),
    }


def _echoed_settings(body: Json) -> Json:
    """The settings that the protocol repeats in its reply: the client's, or these."""
    settings: Json = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": "policy",
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "user": None,
    }
    for name in settings:
        if body.get(name) is not None:
            settings[name] = body[name]
    return settings


def _usage(answered: ChatReply, answer: Answer) -> Json:
    return {
        "input_tokens": answered.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answered.prompt_tokens + answer.completion_tokens,
    }


def _output(id: str, answer: Answer) -> list[Json]:
    output = []
    if answer.reasoning:
        output.append(_reasoning_item(id, answer.reasoning))
    if answer.content or not answer.tool_calls:
        output.append(_message_item(id, answer.content))
    for index, made in enumerate(answer.tool_calls):
        output.append(
            {
                "id": f"fc_{id}_{index}",
                "type": "function_call",
                "call_id": made.id,
                "name": made.name,
                "arguments": made.arguments,
                "status": "completed",
            }
        )
    return output


def _reasoning_item(id: str, reasoning: str) -> Json:
    return {
        "id": f"rs_{id}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": reasoning}],
        "encrypted_content": None,
        "status": "completed",
    }


def _message_item(id: str, text: str) -> Json:
    part = {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": [],
    }
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "content": [part],
        "status": "completed",
    }


def events(full: Json, body: Json) -> Iterator[tuple[str, Json]]:
    """See `shared.Wire`."""
    for number, (name, event) in enumerate(_events(full)):
        kind = f"response.{name}"
        yield kind, {"type": kind, "sequence_number": number, **event}


def _events(full: Json) -> Iterator[tuple[str, Json]]:
    started = {
        **full,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield "created", {"response": started}
    yield "in_progress", {"response": started}
    for index, item in enumerate(full["output"]):
        yield "output_item.added", {"output_index": index, "item": _started_item(item)}
        for name, event in _item_events(item):
            yield name, {"item_id": item["id"], "output_index": index, **event}
        yield "output_item.done", {"output_index": index, "item": item}
    yield full["status"], {"response": full}


def _started_item(item: Json) -> Json:
    """The item before anything of it was sampled."""
    started = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        started["arguments"] = ""
    else:
        started["content"] = []
    return started


def _item_events(item: Json) -> Iterator[tuple[str, Json]]:
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return

    (part,) = item["content"]
    place: Json = {"content_index": 0}
    if part["type"] == "output_text":
        place["logprobs"] = []
    yield "content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
    yield f"{part['type']}.delta", {"delta": part["text"], **place}
    yield f"{part['type']}.done", {"text": part["text"], **place}
    yield "content_part.done", {"content_index": 0, "part": part}


def error(refusal: ChatError) -> Json:
    """In a stream the fields stand in the event itself; the object beside them is what the Python SDK looks for."""
    shaped = openai_error(refusal)
    return {
        "sequence_number": 0,
        **shaped["error"],
        "type": "error",
        **shaped,
    }
