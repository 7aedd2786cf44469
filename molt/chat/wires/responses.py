"""OpenAI responses. `input` is the whole conversation: `molt/chat/stored_responses.py` has put in what it names."""

import base64
import binascii
import time
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum

from molt.chat.protocol import (
    TEXT_ARGUMENT,
    Answer,
    ChatError,
    ChatReply,
    ChatRequest,
    Message,
    ToolCall,
    flat_name,
)
from molt.chat.wires.chat import read_message
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

SUMMARISE = (
    "Summarise the conversation so far for yourself: you will go on from this summary alone. Keep the task, what was "
    "done and found, decisions, file names, and what is still to do. Answer with the summary, and call no tool."
)
"""What a compaction trigger says to the model."""
SUMMARY = "Summary of the conversation so far:\n"
"""What stands before a summary that comes back."""
NO_SUMMARY = "(none)"
"""A summary may not be empty."""


class Place(IntEnum):
    """Where an item stands in a turn. The items of an assistant's turn come in this order."""

    REASONING = 0
    TEXT = 1
    CALL = 2
    OTHER = 3
    """Not an assistant's."""


PLACES = {
    "reasoning": Place.REASONING,
    "message": Place.TEXT,
    "function_call": Place.CALL,
    "custom_tool_call": Place.CALL,
}


def request(body: Json) -> ChatRequest:
    """See `shared.Wire`."""
    if body.get("conversation"):
        refuse("conversations are not stored here. Send the whole `input`, or name a `previous_response_id`.")
    if body.get("prompt"):
        refuse("prompt templates are not stored here, so `prompt` names none. Send its text in `instructions`.")
    messages = []
    if body.get("instructions"):
        messages.append(message("system", content(body["instructions"], "instructions")))
    messages += _read_input(body)

    text_options = body.get("text") or {}
    read = chat_request(messages, body, text_options.get("format"), tools=_additional_tools(body))
    return replace(read, n=1)  # this protocol has one answer


def input_items(body: Json) -> list[Json]:
    """`input` as a list of items. Raises ChatError."""
    if isinstance(body.get("input"), str):
        return [{"type": "message", "role": "user", "content": body["input"]}]
    return items(body, "input")


def _read_input(body: Json) -> list[Message]:
    """The messages of `input`. Consecutive items of one assistant turn become one message."""
    messages: list[Message] = []
    last_place = Place.OTHER
    for index, entry in enumerate(input_items(body)):
        if entry.get("type") == "additional_tools":
            continue
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


def _additional_tools(body: Json) -> list[Json]:
    """Tools that items of the input add to those of the body."""
    tools = []
    for entry in input_items(body):
        if entry.get("type") == "additional_tools":
            tools += items(entry, "tools")
    return tools


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
    if kind in ("function_call", "custom_tool_call"):
        return message("assistant", "", tool_calls=[_read_call(entry)])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return message("tool", result_content(entry.get("output"), where), tool_call_id=entry.get("call_id"))
    if kind == "compaction_trigger":
        return message("user", SUMMARISE)
    if kind in ("compaction", "compaction_summary"):
        return message("user", SUMMARY + _read_summary(entry, where))
    refuse(
        f"`{where}` is of type {kind!r}, which this server neither makes nor keeps. Send messages and calls of "
        "functions or custom tools."
    )


def _read_call(entry: Json) -> Json:
    arguments = entry.get("arguments")
    if entry["type"] == "custom_tool_call":
        arguments = {TEXT_ARGUMENT: entry.get("input")}
    name = entry.get("name")
    if isinstance(name, str):
        name = flat_name(entry.get("namespace"), name)
    return call(entry.get("call_id"), name, arguments)


def _read_summary(entry: Json, where: str) -> str:
    try:
        return base64.b64decode(entry["encrypted_content"], validate=True).decode()
    except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
        refuse(f"`{where}` is a compaction that another server made, and only that can read it. Send the messages.")


def wants_summary(body: Json) -> bool:
    """Whether the reply is a compaction item."""
    entries = input_items(body)
    return bool(entries) and entries[-1].get("type") == "compaction_trigger"


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
        "background": bool(body.get("background")),
        "error": None,
        "max_tool_calls": None,
        "previous_response_id": body.get("previous_response_id"),
        "service_tier": "default",
        "store": body.get("store") is not False,
        "top_logprobs": 0,
        "truncation": "disabled",
        "status": status,
        "incomplete_details": incomplete_details,
        "output": _output(answered.id, answer, body),
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


def _output(id: str, answer: Answer, body: Json) -> list[Json]:
    output = []
    if answer.reasoning:
        output.append(_reasoning_item(id, answer.reasoning))
    if wants_summary(body):
        return [*output, _compaction_item(id, answer)]
    if answer.content or not answer.tool_calls:
        output.append(_message_item(id, answer))
    for index, made in enumerate(answer.tool_calls):
        output.append(_call_item(f"{id}_{index}", made))
    return output


def _call_item(id: str, made: ToolCall) -> Json:
    item: Json = {"call_id": made.id, "name": made.own_name, "status": "completed"}
    if made.namespace is not None:
        item["namespace"] = made.namespace
    if made.text is not None:
        return {"id": f"ctc_{id}", "type": "custom_tool_call", **item, "input": made.text}
    return {"id": f"fc_{id}", "type": "function_call", **item, "arguments": made.arguments}


def _compaction_item(id: str, answer: Answer) -> Json:
    """The summary, in the field that clients send back as it is."""
    summary = answer.content or NO_SUMMARY
    return {
        "id": f"cmp_{id}",
        "type": "compaction",
        "encrypted_content": base64.b64encode(summary.encode(errors="replace")).decode(),
    }


def _reasoning_item(id: str, reasoning: str) -> Json:
    return {
        "id": f"rs_{id}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": reasoning}],
        "encrypted_content": None,
        "status": "completed",
    }


def _message_item(id: str, answer: Answer) -> Json:
    part = {
        "type": "output_text",
        "text": answer.content,
        "annotations": [],
        "logprobs": logprob_items(answer.logprobs),
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
    if item["type"] == "compaction":
        return {**item, "encrypted_content": ""}
    started = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        started["arguments"] = ""
    elif item["type"] == "custom_tool_call":
        started["input"] = ""
    else:
        started["content"] = []
    return started


def _item_events(item: Json) -> Iterator[tuple[str, Json]]:
    if item["type"] == "compaction":
        yield "compaction.compacting", {}
        return
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {"delta": item["arguments"]}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    if item["type"] == "custom_tool_call":
        yield "custom_tool_call_input.delta", {"delta": item["input"]}
        yield "custom_tool_call_input.done", {"input": item["input"]}
        return

    (part,) = item["content"]
    place: Json = {"content_index": 0}
    if part["type"] == "output_text":
        place["logprobs"] = part["logprobs"]
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
