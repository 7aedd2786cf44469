"""The loopback server: sessions under unguessable URLs, three protocols, nothing else.

    POST /s/{id}/v1/chat/completions, /v1/responses, /v1/messages
    POST /s/{id}/v1/messages/count_tokens, /v1/responses/input_tokens, /v1/responses/compact
    GET  /s/{id}/v1/responses/{response}, /v1/responses/{response}/input_items; DELETE and POST .../cancel
    GET  /s/{id}/v1/models, /v1/models/{name}, /s/{id}, /health

`/v1` may be left out or doubled, as base URLs of clients have it. A session that records nothing (a judge) lives under
`/judge/{id}`. Generation is not incremental: a stream is silent but for comments until the reply is there. While a
request is worked on, its connection is watched: a client that goes away stops its generation. WebSockets are refused
with a 426, after which clients use HTTP.
"""

import asyncio
import contextlib
import hashlib
import json
import marshal
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from molt.chat.off_loop import LIGHT_BYTES, aside
from molt.chat.protocol import ChatError, ChatReply, ChatRequest
from molt.chat.reply_stream import ReplyStream
from molt.chat.session import IDEMPOTENCY, RETRY, Session
from molt.chat.stored_responses import ExpandedBody, StoredResponses
from molt.chat.wires import chat, compact, messages, responses
from molt.chat.wires.fields import refuse
from molt.chat.wires.shared import Wire
from molt.rare_gc import collect_rarely
from molt.types import Json

WIRES: dict[str, Wire] = {
    "/chat/completions": chat,
    "/responses": responses,
    "/messages": messages,
}
COMPACT = "/responses/compact"
COUNTING: dict[str, Wire] = {
    "/messages/count_tokens": messages,
    "/responses/input_tokens": responses,
}
"""Calls for the length of a prompt."""
HINTS = (RETRY, IDEMPOTENCY, "x-claude-code-agent-id", "x-session-id", "x-parent-session-id")
KEEP_ALIVE_S = 75
"""Longer than clients keep a connection (httpx: 5 s): else both ends may close it just as a request is sent."""
STABLE_FORMAT = 2
"""The version of `marshal` that writes equal data equally."""
CLIENT_LEFT = 499
"""The status that nobody receives."""
MODEL = {
    "id": "policy",
    "object": "model",
    "type": "model",
    "created": 0,
    "owned_by": "molt",
    "display_name": "policy",
    "created_at": "1970-01-01T00:00:00Z",
    "lifecycle": "active",
}


@dataclass(frozen=True)
class Call:
    """A chat call that arrived."""

    body: Json
    """With the whole conversation, where the client named a response to continue."""
    added: list[Json]
    """Of the responses protocol: the items of the client's own input."""
    request: ChatRequest
    key: str
    """Equal for what could be retries, streamed or not."""


@dataclass(frozen=True)
class Target:
    """What a URL's path names."""

    session: str
    """`s/{id}`, `judge/{id}`, or whatever stands there."""
    path: str
    """The rest, without `/v1`."""


class QuietProtocol(AutoHTTPProtocol):
    """Does not warn of WebSockets, which are refused with a status."""

    def _unsupported_upgrade_warning(self) -> None:
        pass


class QuietServer(uvicorn.Server):
    """Leaves signals to the process: they are not for a server inside it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ChatServer:
    """`async with ChatServer() as server`, then `server.open(session)` for the base URL of a session."""

    port: int
    """Known once it serves."""

    def __init__(self, *, max_body: int = 32 << 20, body_s: float = 60.0, ping_s: float = 10.0):
        """max_body: bytes; body_s: how long a client may take to send one; ping_s: between comments of a stream."""
        self.max_body = max_body
        self.body_s = body_s
        self.ping_s = ping_s
        self._sessions: dict[str, Session] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: one request."""
        response = await self._route(Request(scope, receive, send))
        await response(scope, receive, send)

    async def __aenter__(self) -> "ChatServer":
        listener = _listen()
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            lifespan="off",
            ws="none",
            http=QuietProtocol,
            proxy_headers=False,
            log_level="warning",
            access_log=False,
        )
        self._server = QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                await self._serving  # raises what went wrong
            await asyncio.sleep(0.005)
        collect_rarely()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        await self._serving

    def open(self, session: Session) -> str:
        """The base URL under which `session` can be reached from now on."""
        kind = "judge"
        if session.record:
            kind = "s"
        path = f"{kind}/{secrets.token_urlsafe(24)}"
        self._sessions[path] = session
        return f"http://127.0.0.1:{self.port}/{path}"

    def close(self, url: str) -> None:
        """The session is over: what it still samples is stopped, its URL unknown."""
        path = "/".join(url.rsplit("/", 2)[1:])
        session = self._sessions.pop(path)
        session.close()

    async def _route(self, request: Request) -> Response:
        target = _target(request.scope["path"])
        wire = _wire_of(target.path)
        try:
            return await self._respond(request, target, wire)
        except ChatError as error:
            # None of the refusals would go better if repeated, and the SDKs believe that.
            return _json(wire.error(error), error.status, {"x-should-retry": "false"})

    async def _respond(self, request: Request, target: Target, wire: Wire) -> Response:
        if target.session == "health":
            return _json({"status": "ok"})
        session = self._sessions.get(target.session)
        if session is None:
            refuse(f"there is no session {target.session[:80]!r}, or it is over.", 404, "not_found")
        if _wants_websocket(request):
            return _no_websocket(wire)
        try:
            return await self._respond_in(request, target.path, wire, session)
        except ChatError as error:
            session.note_refusal(error)
            raise

    async def _respond_in(self, request: Request, path: str, wire: Wire, session: Session) -> Response:
        is_post = request.method == "POST"
        if is_post and path in WIRES:
            return await self._reply(request, wire, session)
        if is_post and path == COMPACT:
            return await self._reply(request, compact, session)
        if is_post and path in COUNTING:
            return await self._count_tokens(request, wire, session)
        stored = re.fullmatch(r"/responses/([^/]+)(/[a-z_]+)?", path)
        if stored is not None:
            return _stored_response(request.method, stored[1], stored[2], session.responses)
        return _get(request.method, path, session)

    async def _count_tokens(self, request: Request, wire: Wire, session: Session) -> Response:
        call = await self._receive_call(request, wire, session)
        tokens = await session.count(call.request)
        if wire is responses:
            return _json({"object": "response.input_tokens", "input_tokens": tokens})
        return _json({"input_tokens": tokens})

    async def _reply(self, request: Request, wire: Wire, session: Session) -> Response:
        call = await self._receive_call(request, wire, session)
        work = session.ask(call.request, call.key)
        task = work.task
        gone = asyncio.create_task(_disconnected(request))

        is_streamed = bool(call.body.get("stream"))
        patience = None
        if is_streamed:  # a stream that is refused this soon is refused with a status, like any other reply
            patience = self.ping_s
        await asyncio.wait({task, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)

        client_left = not gone.cancel()  # a task that is done cannot be cancelled
        if client_left or task.cancelled():
            session.leave(work)
            return Response(status_code=CLIENT_LEFT)
        is_refused = task.done() and task.exception() is not None
        if is_streamed and not is_refused:
            build = partial(_full_reply, wire, call, session)
            stream = ReplyStream(request, wire, build, call.body, session, work, ping_s=self.ping_s)
            return stream.response()
        return _json(_full_reply(wire, call, session, task.result()))

    async def _receive_call(self, request: Request, wire: Wire, session: Session) -> Call:
        raw = await self._read(request)
        hints = {name: request.headers[name] for name in HINTS if name in request.headers}
        train = session.record and request.headers.get("x-molt-train") != "0"
        if len(raw) <= LIGHT_BYTES:
            return parse_call(wire, raw, hints, train, session.responses)
        return await aside(parse_call, wire, raw, hints, train, session.responses)

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


def parse_call(
    wire: Wire, raw: bytes, hints: dict[str, str], train: bool, stored: StoredResponses | None = None
) -> Call:
    """The call that a body holds. stored: responses that it may continue, None: none. Raises ChatError."""
    if stored is None:
        stored = StoredResponses()
    try:
        body = json.loads(raw)
        added: list[Json] = []
        if wire in (responses, compact):
            expanded = stored.expanded(body)
            body = expanded.body
            added = expanded.added
        requested = wire.request(body)
        every_field = tuple(vars(requested).values())  # as the body alone determines them
        identity = (every_field, train, hints.get(IDEMPOTENCY))
        # Quick, since no other thread runs meanwhile.
        key = hashlib.blake2b(marshal.dumps(identity, STABLE_FORMAT)).hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse(f"the body is not of this protocol: {error!r}"[:500])
    request = replace(requested, train=train, hints=hints, size=len(raw))
    return Call(body=body, added=added, request=request, key=key)


def _full_reply(wire: Wire, call: Call, session: Session, answered: ChatReply) -> Json:
    """The body of an unstreamed reply, stored where the protocol has that."""
    full = wire.reply(answered, call.body)
    if wire is responses:
        expanded = ExpandedBody(body=call.body, added=call.added)
        session.responses.keep(full, expanded, call.request.size)
    return full


def _listen() -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's algorithm on: 40 ms per reply.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    return listener


def _target(url_path: str) -> Target:
    parts = url_path.removeprefix("/").split("/")
    rest = parts[2:]
    while rest and rest[0] == "v1":
        rest = rest[1:]
    path = "".join(f"/{part}" for part in rest)
    return Target(session="/".join(parts[:2]), path=path.rstrip("/"))


def _wire_of(path: str) -> Wire:
    """The protocol of a path: for paths of none, the one that a refusal is most likely understood in."""
    if path in WIRES:
        return WIRES[path]
    if path.startswith("/messages"):
        return messages
    if path.startswith("/responses"):
        return responses
    return chat


async def _disconnected(request: Request) -> None:
    while True:
        event = await request.receive()
        if event["type"] == "http.disconnect":
            return


def _wants_websocket(request: Request) -> bool:
    return request.headers.get("upgrade", "").lower() == "websocket"


def _no_websocket(wire: Wire) -> Response:
    refusal = ChatError(426, "upgrade_required", "WebSockets are not served here. Use HTTP.")
    return _json(wire.error(refusal), 426, {"upgrade": "HTTP/1.1", "x-should-retry": "false"})


def _stored_response(method: str, id: str, action: str | None, stored: StoredResponses) -> Response:
    """What is requested of a stored response. Raises ChatError."""
    if method == "GET" and action is None:
        return _json(stored.get(id))
    if method == "POST" and action == "/cancel":
        return _json(stored.get(id))  # it is complete: there is nothing to cancel
    if method == "GET" and action == "/input_items":
        listed = [{"id": f"item_{index}", **item} for index, item in enumerate(stored.input_items(id))]
        return _json({"object": "list", "data": listed, "has_more": False, "first_id": None, "last_id": None})
    if method == "DELETE" and action is None:
        stored.delete(id)
        return _json({"id": id, "object": "response", "deleted": True})
    refuse(f"{method} {(action or '')[:80]!r} of a response is not served here.", 404, "not_found")


def _get(method: str, path: str, session: Session) -> Response:
    known = re.fullmatch(r"|/health|/models(?:/(.+))?", path)
    if method not in ("GET", "HEAD") or known is None:
        refuse(f"{method} {path[:80]!r} is not served here. Use one of the three protocols.", 404, "not_found")
    if not path.startswith("/models"):
        return _json({"status": "ok"})

    model = {
        **MODEL,
        "id": known[1] or "policy",
        "max_input_tokens": session.max_len,
        "max_model_len": session.max_len,
    }
    if path != "/models":
        return _json(model)
    return _json(
        {
            "object": "list",
            "data": [model],
            "has_more": False,
            "first_id": "policy",
            "last_id": "policy",
        }
    )


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII: what a client sent may hold half a surrogate pair, which has no UTF-8.
    return Response(json.dumps(body), status, headers, "application/json")
