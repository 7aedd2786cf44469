"""The loopback server: sessions under unguessable URLs, three protocols, nothing else.

    POST /s/{id}/v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    GET  /s/{id}/v1/models, /v1/models/{name}, /s/{id}, /health

`/v1` may be left out or doubled, as base URLs of clients have it. A session that records nothing (a judge) lives under
`/judge/{id}`. Generation is not incremental: a stream is silent but for comments until the reply is there. While a
request is worked on, its connection is watched: a client that goes away stops its generation.
"""

import asyncio
import contextlib
import hashlib
import json
import marshal
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import dropwhile
from types import ModuleType
from typing import Any

import uvicorn
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from molt.chat.protocol import ChatError, ChatReply, ChatRequest
from molt.chat.session import IDEMPOTENCY, LIGHT_BYTES, RETRY, Session, aside
from molt.chat.wires import WIRES
from molt.chat.wires.shared import Json, refuse
from molt.rare_gc import collect_rarely

HINTS = (RETRY, IDEMPOTENCY, "x-claude-code-agent-id", "x-session-id", "x-parent-session-id")
KEEP_ALIVE_S = 75
"""Longer than clients keep a connection (httpx: 5 s): else both ends may close it just as a request is sent."""
MODEL = {
    "id": "policy", "object": "model", "type": "model", "created": 0, "owned_by": "molt", "display_name": "policy",
    "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
}  # fmt: skip


class ChatServer:
    """`async with ChatServer() as server`, then `server.open(session)` for the base URL of a session."""

    def __init__(self, *, max_body: int = 32 << 20, body_s: float = 60.0, ping_s: float = 10.0):
        """max_body: bytes; body_s: how long a client may take to send one; ping_s: between comments of a stream."""
        self.max_body, self.body_s, self.ping_s = max_body, body_s, ping_s
        self._sessions: dict[str, Session] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: one request."""
        response = await self._route(Request(scope, receive, send))
        await response(scope, receive, send)

    async def __aenter__(self) -> "ChatServer":
        # Named as TCP, or asyncio leaves Nagle's algorithm on: 40 ms per reply.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        quiet = {"lifespan": "off", "ws": "none", "proxy_headers": False, "log_level": "warning", "access_log": False}
        config = uvicorn.Config(self, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1, **quiet)
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # signals belong to the process, not to a server in it
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                await self._serving  # raises what went wrong
            await asyncio.sleep(0.005)
        collect_rarely()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving

    def open(self, session: Session) -> str:
        """The base URL under which `session` can be reached from now on."""
        path = f"{'s' if session.record else 'judge'}/{secrets.token_urlsafe(24)}"
        self._sessions[path] = session
        return f"http://127.0.0.1:{self.port}/{path}"

    def close(self, url: str) -> None:
        """The session is over: what it still samples is stopped, its URL unknown."""
        self._sessions.pop("/".join(url.rsplit("/", 2)[1:])).close()

    async def _route(self, request: Request) -> Response:
        parts = request.scope["path"].removeprefix("/").split("/")
        at, path = "/".join(parts[:2]), "".join(f"/{part}" for part in dropwhile("v1".__eq__, parts[2:])).rstrip("/")
        wire = WIRES.get(path, WIRES["/messages" if path.startswith("/messages") else "/chat/completions"])
        try:
            if at == "health":
                return _json({"status": "ok"})
            if at not in self._sessions:
                refuse(f"there is no session {at[:80]!r}, or it is over.", 404, "not_found")
            if request.method == "POST" and (path in WIRES or path == "/messages/count_tokens"):
                return await self._post(request, wire, self._sessions[at], counting=path not in WIRES)
            return _get(request.method, path, self._sessions[at])
        except ChatError as error:  # none of them would go better if repeated, and the SDKs believe that
            return _json(wire.error(error), error.status, {"x-should-retry": "false"})

    async def _post(self, request: Request, wire: ModuleType, session: Session, counting: bool) -> Response:
        raw, heads = await self._read(request), request.headers
        hints = {name: heads[name] for name in HINTS if name in heads}
        train = session.record and heads.get("x-molt-train") != "0"
        body, asked, key = await aside(_parse, wire, raw, hints, train, light=len(raw) <= LIGHT_BYTES)
        session.counters["ignored_tools"] += len(body.get("tools") or []) - len(asked.tools or [])
        if counting:
            return _json({"input_tokens": await session.count(asked)})
        work, gone = session.ask(asked, key), asyncio.create_task(_disconnected(request))
        task = work.task
        # A stream that is refused within the first seconds is refused with a status, like any other answer.
        patience = self.ping_s if body.get("stream") else None
        await asyncio.wait({task, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not gone.cancel() or task.cancelled():  # what is done cannot be cancelled
            session.leave(work)
            return Response(status_code=499)
        if body.get("stream") and not (task.done() and task.exception()):
            return self._stream(request, wire, body, task, lambda: session.leave(work))
        return _json(wire.reply(task.result(), body))

    def _stream(
        self, request: Request, wire: ModuleType, body: Json, task: asyncio.Task[ChatReply], leave: Callable[[], None]
    ) -> Response:
        delivered = False

        async def events() -> AsyncIterator[str]:
            nonlocal delivered
            while not (await asyncio.wait({task}, timeout=self.ping_s))[0]:
                yield ": still sampling\n\n"
            try:
                if task.cancelled():
                    raise ChatError(503, "engine", "the session is over.")
                sent = list(wire.events(wire.reply(task.result(), body), body))
            except ChatError as error:
                sent = [("error", wire.error(error))]
            for name, data in sent:
                text = data if isinstance(data, str) else json.dumps(data)
                yield f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
            delivered = not await request.is_disconnected()  # uvicorn takes what is sent to nobody without a word

        async def finish() -> None:  # runs also if the client left before the first event
            if not delivered:
                leave()

        headers = {"cache-control": "no-cache"}
        return StreamingResponse(events(), 200, headers, "text/event-stream", BackgroundTask(finish))

    async def _read(self, request: Request) -> bytes:
        raw = bytearray()
        try:
            async with asyncio.timeout(self.body_s):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > self.max_body:
                        refuse(f"the body is larger than {self.max_body:,} bytes.", 413)
        except (TimeoutError, ClientDisconnect):
            refuse(f"the body did not arrive within {self.body_s:g} s.", 408)
        return bytes(raw)


def _parse(wire: ModuleType, raw: bytes, hints: dict[str, str], train: bool) -> tuple[Json, ChatRequest, str]:
    """The body, what it asks for, and a key that is equal for what could be retries, streamed or not."""
    try:
        body = json.loads(raw)
        asked = wire.request(body)
        # Of a version that writes equal data equally; quick, since no other thread runs meanwhile.
        key = hashlib.blake2b(marshal.dumps((*vars(asked).values(), train, hints.get(IDEMPOTENCY)), 2)).hexdigest()
        return body, replace(asked, train=train, hints=hints, size=len(raw)), key
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse(f"the body is not of this protocol: {error!r}"[:500])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _get(method: str, path: str, session: Session) -> Response:
    known = re.fullmatch(r"|/health|/models(?:/(.+))?", path)
    if method not in ("GET", "HEAD") or known is None:
        refuse(f"{method} {path[:80]!r} is not served here. Use one of the three protocols.", 404, "not_found")
    model = {**MODEL, "id": known[1] or "policy", "max_input_tokens": session.max_len, "max_model_len": session.max_len}
    ends = {"has_more": False, "first_id": "policy", "last_id": "policy"}
    listed = {"object": "list", "data": [model], **ends} if path == "/models" else model
    return _json(listed if path.startswith("/models") else {"status": "ok"})


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII: what a client sent may hold half a surrogate pair, which has no UTF-8.
    return Response(json.dumps(body), status, headers, "application/json")
