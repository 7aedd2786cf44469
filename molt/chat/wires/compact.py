"""`POST /responses/compact` of OpenAI: the summary of a conversation, as the one item to go on from."""

from collections.abc import Iterator
from typing import Any

from molt.chat.protocol import ChatError, ChatReply, ChatRequest
from molt.chat.wires import responses
from molt.chat.wires.fields import refuse
from molt.types import Json


def request(body: Json) -> ChatRequest:
    """See `shared.Wire`."""
    if body.get("stream"):
        refuse("a compaction is not streamed. Leave `stream` out.")
    return responses.request(_triggered(body))


def reply(answered: ChatReply, body: Json) -> Json:
    """See `shared.Wire`."""
    full = responses.reply(answered, _triggered(body))
    return {
        "id": full["id"],
        "object": "response.compaction",
        "created_at": full["created_at"],
        "output": full["output"][-1:],
        "usage": full["usage"],
    }


def events(full: Json, body: Json) -> Iterator[tuple[str | None, Any]]:
    """Never called: see `request`."""
    raise AssertionError("a compaction is not streamed")


def error(refusal: ChatError) -> Json:
    """See `shared.Wire`."""
    return responses.error(refusal)


def _triggered(body: Json) -> Json:
    return body | {"input": [*responses.input_items(body), {"type": "compaction_trigger"}]}
