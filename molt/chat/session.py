"""One episode's conversation with its model: requests in, replies out, every sampled token in the tree.

A request is matched to the tree, rendered as the exact ids already there and what it adds, sampled, and recorded.
Between the end of sampling and the return only reading the answers is awaited, and nothing after the first is recorded:
a reply is in the tree whole or, if the client went away before, not at all.
"""

import asyncio
import base64
import io
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from molt.chat.chat_renderer import ChatRenderer, name_results
from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.tree import Match, Tree
from molt.chat.wires.shared import call, message, refuse
from molt.types import InfraFailure, Turn

CallModel = Callable[[list[int], int], Awaitable[Turn]]
CallFreely = Callable[[list[int], int, dict[str, Any]], Awaitable[Turn]]
"""As `CallModel`, with the client's own sampling: for calls that are not trained."""

RETRY, IDEMPOTENCY = "x-stainless-retry-count", "idempotency-key"
HONOURED = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value == -1 or value >= 1,
}
"""What a call that is not trained may choose, and what it may choose it to be."""
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="molt-chat")
"""Of the server alone: agents with synchronous clients fill the event loop's own, and would wait for themselves."""


async def aside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *args)


@dataclass(eq=False)
class Session:
    """What one session id stands for."""

    renderer: ChatRenderer
    call_model: CallModel
    _: KW_ONLY
    max_len: int
    max_new_tokens: int | None = None
    max_requests: int = 1000
    """Answers, so a request for n counts n times."""
    record: bool = True
    """False for a judge, whose calls are in no tree."""
    call_freely: CallFreely | None = None
    allow_image_urls: bool = False
    tree: Tree = field(default_factory=Tree)
    counters: Counter[str] = field(default_factory=Counter)
    failure: InfraFailure | None = None
    """Ends the episode: whoever runs it waits for `failed`."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    finishes: dict[int, str] = field(default_factory=dict)
    """How each recorded call ended, by the index of its node."""
    running: set[asyncio.Task[ChatReply]] = field(default_factory=set)
    _last: dict[str, ChatReply] = field(default_factory=dict)
    _lost: dict[str, list[ChatReply]] = field(default_factory=dict)

    async def answer(self, request: ChatRequest, key: str | None = None) -> ChatReply:
        """The reply, sampled or replayed. `key`: equal for requests that could be one another's retries.

        Raises ChatError. Whatever goes wrong other than by the client's doing is the session's `failure`.
        """
        try:
            if self.failure is None:
                return self._replayed(request, key) or await self._sample(request, key)
        except ChatError:
            raise
        except Exception as error:  # fault boundary: one engine request
            self.failure = error if isinstance(error, InfraFailure) else InfraFailure(type(error).__name__, str(error))
            self.failure.__cause__ = error.__cause__ if error is self.failure else error
            self.failed.set()
        refuse(f"the policy cannot answer, so the episode ends: {self.failure!r}", 503, "engine")

    async def count(self, request: ChatRequest) -> int:
        """The prompt tokens that `answer` would report."""
        return len(await aside(self._render, request, self._match(request)))

    def lost(self, key: str, reply: ChatReply) -> None:
        """The client went away before `reply` reached it: its next equal request gets this one."""
        self._lost.setdefault(key, []).append(reply)

    def _replayed(self, request: ChatRequest, key: str | None) -> ChatReply | None:
        """A lost reply, or one that the client's SDK says it is asking for again."""
        lost = self._lost.get(key)
        again = request.hints.get(RETRY, "0") != "0" or IDEMPOTENCY in request.hints
        retried = self._last.get(key) if again else None
        found = lost.pop(0) if lost else retried
        self.counters["replayed"] += found is not None
        return found

    async def _sample(self, request: ChatRequest, key: str | None) -> ChatReply:
        self._last.pop(key, None)  # what follows is a new sample, not that one
        self._admit(request)
        match = self._match(request)
        ids = await aside(self._render, request, match)
        if len(ids) >= self.max_len:
            said = f"prompt is too long: {len(ids)} tokens > {self.max_len} maximum"
            refuse(said, code="context_length_exceeded")
        limit = min(filter(None, [self.max_len - len(ids), self.max_new_tokens, request.max_tokens]))
        calls = [asyncio.ensure_future(self._call(ids, limit, request)) for _ in range(request.n)]
        try:
            turns = await asyncio.gather(*calls)
        finally:  # where one fails, the others end with it
            for call in calls:
                call.cancel()
        read = await aside(lambda: [self._read(turn, request) for turn in turns])
        for turn, answer, malformed in read:
            self.counters["malformed_calls"] += malformed
            if match is not None:
                node = self.tree.add(match, ids, turn, _echo(answer), train=request.train)
                self.finishes[node.index] = answer.finish_reason
        reply = ChatReply(secrets.token_hex(12), tuple(answer for _, answer, _ in read), len(ids))
        if key is not None:
            self._last[key] = reply
        return reply

    def _admit(self, request: ChatRequest) -> None:
        self.counters["requests"] += request.n
        if self.counters["requests"] > self.max_requests:
            refuse(f"this session has had its {self.max_requests} answers.", 429, "too_many_requests")
        if request.train and request.constrained:
            refuse(
                f"{request.constrained}: it samples from another distribution than the policy's, so the call cannot be "
                "trained. Leave it out, or send the header `x-molt-train: 0` to keep the call out of training."
            )
        honoured = {} if request.train or self.call_freely is None else HONOURED
        for name, value in request.sampling.items():
            if name in honoured and not honoured[name](value):
                refuse(f"`{name}` is {value!r}: there is no such distribution.")
        ignored = {name: value for name, value in request.sampling.items() if name not in honoured}
        ignored |= {"constraint": request.constrained} | ({} if honoured else {"seed": request.seed})
        self.counters.update(f"ignored_{name}" for name, value in ignored.items() if value is not None)

    def _match(self, request: ChatRequest) -> Match | None:
        return self.tree.match(request.messages, request.tools) if self.record else None

    def _render(self, request: ChatRequest, match: Match | None) -> list[int]:
        """The ids of the matched path and what the rest adds; the whole rendering if they cannot be continued."""
        new = request.messages if match is None else match.rest
        for part in (part for said in new if isinstance(said["content"], list) for part in said["content"]):
            if part["type"] == "image_url":
                _check_image(part["image_url"]["url"], self.allow_image_urls)
        if match is not None and match.node is not self.tree.root:
            named = name_results(request.messages)[len(request.messages) - len(new) :]
            past, sampled = self.tree.ids(match.node).tolist(), len(match.node.token_ids)
            if (longer := self.renderer.bridge(past, named, request.tools, sampled=sampled)) is not None:
                return longer
        return self.renderer.render(request.messages, request.tools)

    async def _call(self, ids: list[int], limit: int, request: ChatRequest) -> Turn:
        if request.train or self.call_freely is None:
            return await self.call_model(ids, limit)
        seed = {} if request.seed is None else {"seed": request.seed}
        chosen = {name: value for name, value in request.sampling.items() if name in HONOURED}
        return await self.call_freely(ids, limit, chosen | seed)

    def _read(self, turn: Turn, request: ChatRequest) -> tuple[Turn, Answer, int]:
        """The turn as it is recorded, what the client gets, and how many calls in it could not be read."""
        turn, stop = self._cut(turn, request.stop)
        parsed = self.renderer.parse(turn.token_ids.tolist(), request.tools, turn.prompt_ids.tolist())
        content = parsed.content.partition(stop)[0] if stop else parsed.content
        finish = "tool_calls" if parsed.tool_calls and turn.finish_reason == "stop" else turn.finish_reason
        calls = tuple(parsed.tool_calls)
        answer = Answer(content, parsed.reasoning, calls, finish, len(turn.token_ids), stop)
        return turn, answer, len(parsed.malformed)

    def _cut(self, turn: Turn, stops: tuple[str, ...]) -> tuple[Turn, str | None]:
        """The turn up to the token in which the first stop string completes, and that string."""
        ids = turn.token_ids.tolist()

        def found(length: int) -> list[tuple[int, str]]:
            text = self.renderer.tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)
            return sorted((text.find(stop), stop) for stop in stops if stop in text)

        if not stops or not found(len(ids)):
            return turn, None
        end = bisect_left(range(len(ids)), True, key=lambda length: bool(found(length)))
        kept = {name: getattr(turn, name)[:end] for name in ("token_ids", "logprobs", "versions")}
        return replace(turn, **kept, finish_reason="stop"), found(end)[0][1]


def _echo(answer: Answer) -> Message:
    """The reply as the client is expected to send it back."""
    calls = [call(made.id, made.name, made.arguments) for made in answer.tool_calls]
    return message("assistant", answer.content, reasoning_content=answer.reasoning, tool_calls=calls)


def _check_image(url: str, allow_urls: bool) -> None:
    from PIL import Image

    if not url.startswith("data:"):
        if not allow_urls:
            refuse(f"the image {url[:80]!r} would have to be fetched: not allowed here. Send it as a `data:` URL.")
        return
    try:
        Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2], validate=True))).verify()
    except (ValueError, OSError, SyntaxError, NotImplementedError, Image.DecompressionBombError) as error:
        refuse(f"the image {url[:40]!r} cannot be read ({error}). Send a PNG or a JPEG as a base64 `data:` URL.")
