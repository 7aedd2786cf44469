"""The responses of one session that its client may name again: `previous_response_id`, `item_reference`, GET."""

from collections import OrderedDict
from dataclasses import dataclass

from molt.chat.wires.fields import refuse
from molt.chat.wires.responses import input_items
from molt.types import Json

MAX_BYTES = 8 << 20
"""Of the bodies whose responses are kept; the longest unused are forgotten first."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, and what it answered."""

    full: Json
    """As it was sent."""
    added: list[Json]
    """The items of its request's own input."""
    previous: str | None
    """The response that it follows."""
    size: int
    """Bytes of the request's body."""


@dataclass(frozen=True)
class ExpandedBody:
    """A body that names no other response."""

    body: Json
    """Its input is the whole conversation."""
    added: list[Json]
    """The items of its own input."""


class StoredResponses:
    """Responses by their ids."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        """The latest used last."""
        self._outputs: dict[str, Json] = {}
        """Output items by their ids."""
        self._size = 0

    def keep(self, full: Json, expanded: ExpandedBody, size: int) -> None:
        """Store a response, unless its request asks not to. size: bytes of its body."""
        if expanded.body.get("store") is False or full["id"] in self._by_id:
            return
        stored = StoredResponse(
            full=full,
            added=expanded.added,
            previous=expanded.body.get("previous_response_id"),
            size=size,
        )
        self._by_id[full["id"]] = stored
        self._size += size
        for item in full["output"]:
            self._outputs[item["id"]] = item
        while self._size > MAX_BYTES and len(self._by_id) > 1:
            self.delete(next(iter(self._by_id)))

    def expanded(self, body: Json) -> ExpandedBody:
        """The body with the conversation that it continues, and the items that it refers to. Raises ChatError."""
        added = [self._referred(item) for item in input_items(body)]
        before = self._conversation(body.get("previous_response_id"))
        return ExpandedBody(body=body | {"input": [*before, *added]}, added=added)

    def get(self, id: str) -> Json:
        """The response. Raises ChatError."""
        return self._stored(id, status=404, code="not_found").full

    def input_items(self, id: str) -> list[Json]:
        """What the response answered, from the beginning of the conversation. Raises ChatError."""
        stored = self._stored(id, status=404, code="not_found")
        return [*self._conversation(stored.previous), *stored.added]

    def delete(self, id: str) -> None:
        """Forget the response. Raises ChatError."""
        stored = self._stored(id, status=404, code="not_found")
        del self._by_id[id]
        self._size -= stored.size
        for item in stored.full["output"]:
            self._outputs.pop(item["id"], None)

    def _stored(self, id: object, *, status: int, code: str) -> StoredResponse:
        stored = None
        if isinstance(id, str):
            stored = self._by_id.get(id)
        if stored is None:
            refuse(
                f"Response with id {str(id)[:80]!r} not found: this session did not make it, was asked not to store "
                "it, or has forgotten it. Send the whole `input`.",
                status,
                code,
            )
        self._by_id.move_to_end(stored.full["id"])
        return stored

    def _conversation(self, id: object) -> list[Json]:
        """The items of the conversation up to the end of a response; none without one."""
        parts: list[list[Json]] = []
        while id:
            stored = self._stored(id, status=400, code="previous_response_not_found")
            parts.append([*stored.added, *stored.full["output"]])
            id = stored.previous
        parts.reverse()
        conversation: list[Json] = []
        for part in parts:
            conversation += part
        return conversation

    def _referred(self, item: Json) -> Json:
        if item.get("type") != "item_reference":
            return item
        found = self._outputs.get(str(item.get("id")))
        if found is None:
            refuse(f"Item with id {item.get('id')!r} not found: no stored response has it. Send the item itself.")
        return found
