"""A reply as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

from molt.chat.protocol import ChatError, ChatReply
from molt.chat.session import Session, Work
from molt.chat.wires.shared import Wire
from molt.types import Json


class ReplyStream:
    """The events of one reply to one connection. Comments are sent until the reply is there."""

    def __init__(
        self,
        request: Request,
        wire: Wire,
        build: Callable[[ChatReply], Json],
        body: Json,
        session: Session,
        work: Work,
        *,
        ping_s: float,
    ):
        """build: makes the body of an unstreamed reply. ping_s: seconds between comments."""
        self._request = request
        self._wire = wire
        self._build = build
        self._body = body
        self._session = session
        self._work = work
        self._ping_s = ping_s
        self._delivered = False

    def response(self) -> StreamingResponse:
        return StreamingResponse(
            self._send(),
            headers={"cache-control": "no-cache"},
            media_type="text/event-stream",
            background=BackgroundTask(self._finish),
        )

    async def _send(self) -> AsyncIterator[str]:
        while not await self._is_answered():
            yield ": still sampling\n\n"
        for name, data in self._events():
            yield _as_event(name, data)
        self._delivered = not await self._request.is_disconnected()  # uvicorn silently drops what nobody receives

    async def _is_answered(self) -> bool:
        """Waits for the reply, until the next comment is due."""
        done, _ = await asyncio.wait({self._work.task}, timeout=self._ping_s)
        return bool(done)

    def _events(self) -> list[tuple[str | None, Any]]:
        try:
            if self._work.task.cancelled():
                raise ChatError(503, "engine", "the session is over.")
            full = self._build(self._work.task.result())
            return list(self._wire.events(full, self._body))
        except ChatError as error:
            self._session.note_refusal(error)
            return [("error", self._wire.error(error))]

    async def _finish(self) -> None:
        """Runs also if the client left before the first event."""
        if not self._delivered:
            self._session.leave(self._work)


def _as_event(name: str | None, data: Any) -> str:
    text = data
    if not isinstance(data, str):
        text = json.dumps(data)
    if name is None:
        return f"data: {text}\n\n"
    return f"event: {name}\ndata: {text}\n\n"
