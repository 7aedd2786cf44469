"""One episode's conversation with its model: requests in, replies out, every sampled token in the tree.

A request is matched to the tree, rendered as the exact ids already there and what it adds, sampled, and recorded.
Between the end of sampling and the return only reading the answers is awaited, and nothing after the first is recorded:
a reply is in the tree whole or, if the client went away before, not at all.
"""

import asyncio
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from molt.chat.chat_renderer import ChatRenderer, name_results
from molt.chat.images import read_images
from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message
from molt.chat.tree import Match, Tree
from molt.chat.wires.shared import call, message, refuse
from molt.types import InfraFailure, Media, Turn

CallModel = Callable[..., Awaitable[Turn]]
"""`(prompt_ids, max_tokens) -> Turn`; and `media=`, where the prompt shows images."""
CallFreely = Callable[..., Awaitable[Turn]]
"""As `CallModel`, with the client's own sampling third: for calls that are not trained."""

RETRY, IDEMPOTENCY = "x-stainless-retry-count", "idempotency-key"
HONOURED = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value == -1 or value >= 1,
}
"""What a call that is not trained may choose, and what it may choose it to be."""
LIGHT_BYTES, LIGHT_TEXT, LIGHT_TOKENS = 1 << 15, 2048, 512
"""What takes well under a millisecond: a body to parse, new text in it to render, sampled tokens to read."""
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="molt-chat")
"""Of the server alone: agents with synchronous clients fill the event loop's own, and would wait for themselves."""


async def aside(function: Callable[..., Any], *args: Any, light: bool = False) -> Any:
    """`function(*args)` off the event loop; on it if it is `light`: no more than the way to a thread and back."""
    if light:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *args)


@dataclass(eq=False)
class Work:
    """One sampling of a reply, and the connections that want it."""

    task: asyncio.Task[ChatReply]
    key: str
    wanted: int = 0
    attempt: str = "0"
    """The retry count of who asked for it last."""


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
    tree: Tree = field(default_factory=Tree)
    counters: Counter[str] = field(default_factory=Counter)
    refused: bool = False
    """Whether the last prompt did not fit into the context."""
    failure: InfraFailure | None = None
    """Ends the episode: whoever runs it waits for `failed`."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    finishes: dict[int, str] = field(default_factory=dict)
    """How each recorded call ended, by the index of its node."""
    _works: dict[str, list[Work]] = field(default_factory=dict)
    """By key. What is under way; what was lost, which nobody wants any more; the last that was delivered."""
    _closed: bool = False

    def ask(self, request: ChatRequest, key: str) -> Work:
        """New work on a reply, or older work that `request` retries. `key`: equal for what could be retries.

        A reply that was lost is retried by whatever is equal to it; a call that may have gone well (it is under way,
        or delivered) only by a client that says that it repeats itself: without a word, an equal call is a new sample.
        Raises ChatError if the session is over.
        """
        if self._closed:
            refuse("the session is over.", 404, "not_found")
        works, attempt = self._works.setdefault(key, []), request.hints.get(RETRY, "0")
        # Parallel calls that are equal have the same count when each is tried again: each retries one of its own.
        again = (work for work in works if IDEMPOTENCY in request.hints or attempt not in ("0", work.attempt))
        work = next((work for work in works if not work.wanted), next(again, None))
        self.counters["replayed"] += work is not None
        if work is None:
            works[:] = [work for work in works if not work.task.done()]
            works.append(work := Work(asyncio.create_task(self.answer(request)), key))
            work.task.add_done_callback(lambda task: None if _went_well(task) else self._forget(work))
        work.wanted, work.attempt = work.wanted + 1, attempt
        return work

    def leave(self, work: Work) -> None:
        """A client went away before the reply reached it. If nobody else wants it: stop it, or keep it for a retry."""
        work.wanted -= 1
        if not work.wanted and work.task.cancel():
            self._forget(work)

    def close(self) -> None:
        """Stop what is under way; nothing more can be asked."""
        self._closed = True
        for works in self._works.values():
            for work in works:
                work.task.cancel()

    def _forget(self, work: Work) -> None:
        self._works[work.key] = [other for other in self._works[work.key] if other is not work]

    async def answer(self, request: ChatRequest) -> ChatReply:
        """Sample a reply, whatever was asked before.

        Raises ChatError. Whatever goes wrong other than by the client's doing is the session's `failure`.
        """
        try:
            if self.failure is None:
                return await self._sample(request)
        except ChatError:
            raise
        except Exception as error:  # fault boundary: one engine request, and the record of it
            self.failure = error if isinstance(error, InfraFailure) else InfraFailure(type(error).__name__, str(error))
            self.failure.__cause__ = error.__cause__ if error is self.failure else error
            self.failed.set()
        refuse(f"the policy cannot answer, so the episode ends: {self.failure!r}", 503, "engine")

    async def count(self, request: ChatRequest) -> int:
        """The prompt tokens that `answer` would report. Raises ChatError."""
        return len((await self._prompt(request))[1])

    async def _sample(self, request: ChatRequest) -> ChatReply:
        match, ids, media = await self._prompt(request)
        if len(ids) >= self.max_len:
            self.counters["out_of_context"] += 1
            self.refused = True
            said = f"prompt is too long: {len(ids)} tokens > {self.max_len} maximum"
            refuse(said, code="context_length_exceeded")
        self._admit(request)
        limit = min(filter(None, [self.max_len - len(ids), self.max_new_tokens, request.max_tokens]))
        turns = await _all([self._call(ids, limit, request, media, index) for index in range(request.n)])
        self.refused = False
        light = sum(len(turn.token_ids) for turn in turns) <= LIGHT_TOKENS
        read = await aside(lambda: [self._read(turn, ids, request) for turn in turns], light=light)
        for turn, answer, malformed in read:
            self.counters["malformed_calls"] += malformed
            if match is not None:
                node = self.tree.add(match, ids, turn, _echo(answer), train=request.train, media=media)
                self.finishes[node.index] = answer.finish_reason
        return ChatReply(secrets.token_hex(12), tuple(answer for _, answer, _ in read), len(ids))

    def _admit(self, request: ChatRequest) -> None:
        """Count what is sampled now and what of it is ignored, or refuse it."""
        if request.constrained:
            refuse(
                f"{request.constrained}: an answer is sampled from the model as it is, never constrained. Leave it "
                "out, and check what the model says."
            )
        honoured = {} if request.train or self.call_freely is None else HONOURED
        for name, value in request.sampling.items():
            if name in honoured and not honoured[name](value):
                refuse(f"`{name}` is {value!r}: there is no such distribution.")
        if self.counters["requests"] + request.n > self.max_requests:
            asked = f"this request asks for {request.n}, and the session has had {self.counters['requests']}"
            refuse(f"{asked} of its {self.max_requests} answers.", 429, "too_many_requests")
        self.counters["requests"] += request.n
        ignored = {name: value for name, value in request.sampling.items() if name not in honoured}
        ignored |= {} if honoured else {"seed": request.seed}
        self.counters.update(f"ignored_{name}" for name, value in ignored.items() if value is not None)

    async def _prompt(self, request: ChatRequest) -> tuple[Match | None, list[int], tuple[Media, ...]]:
        """Where the request goes on (None: nothing is recorded), its ids and its images. Raises ChatError alone."""
        try:
            match = self.tree.match(request.messages, request.tools) if self.record else None
            longer = match and await aside(self._bridge, request, match, light=_light(request, match))
            return match, *(longer or await aside(self._render, request, match))
        except ChatError:
            raise
        except Exception as error:  # fault boundary: what one client sent
            why = f"the messages or tools could not be rendered ({error!r:.300}). Send them as the protocol has them."
            raise ChatError(400, "invalid_request", why) from error

    def _bridge(self, request: ChatRequest, match: Match) -> tuple[list[int], tuple[Media, ...]] | None:
        """The ids of the matched path and what the rest adds, with their images; None if they cannot be continued."""
        if match.node is self.tree.root:
            return None
        files, before = read_images(match.rest), self.tree.media(match.node)
        past, sampled = match.ids.tolist(), len(match.node.token_ids)
        longer = self.renderer.bridge(past, _named_rest(request, match), request.tools, sampled=sampled)
        return longer and self.renderer.place(longer, files, start=len(past), before=before)

    def _render(self, request: ChatRequest, match: Match | None) -> tuple[list[int], tuple[Media, ...]]:
        """The ids of the whole conversation, with its images."""
        whole = request.messages
        if match is not None:  # with reasoning that the client dropped
            whole = [*self.tree.messages(match.node), *_named_rest(request, match)]
        files = read_images(whole)
        return self.renderer.place(self.renderer.render(whole, request.tools), files)

    async def _call(
        self, ids: list[int], limit: int, request: ChatRequest, media: tuple[Media, ...], index: int
    ) -> Turn:
        shown = {"media": media} if media else {}
        if request.train or self.call_freely is None:
            return await self.call_model(ids, limit, **shown)
        # Answers to one request differ, as vLLM's do.
        seed = {} if request.seed is None else {"seed": min(request.seed + index, 2**64 - 1)}
        chosen = {name: value for name, value in request.sampling.items() if name in HONOURED}
        return await self.call_freely(ids, limit, chosen | seed, **shown)

    def _read(self, turn: Turn, ids: list[int], request: ChatRequest) -> tuple[Turn, Answer, int]:
        """The turn as it is recorded, what the client gets, and how many calls in it could not be read."""
        turn, stop = self._cut(turn, request.stop)
        parsed = self.renderer.parse(turn.token_ids.tolist(), request.tools, ids)
        content, calls = parsed.content, tuple(parsed.tool_calls)
        if calls and not request.tools:  # nothing can be called: to the client it is text
            content, calls = self.renderer.unparsed(turn.token_ids.tolist()), ()
        content = content.partition(stop)[0] if stop else content
        finish = "tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason
        answer = Answer(content, parsed.reasoning, calls, finish, len(turn.token_ids), stop)
        return turn, answer, len(parsed.malformed)

    def _cut(self, turn: Turn, stops: tuple[str, ...]) -> tuple[Turn, str | None]:
        """The turn up to the token in which the first stop string completes, and that string."""
        ids = turn.token_ids.tolist()

        def found(length: int) -> list[tuple[int, str]]:
            text = self.renderer.tokenizer.text(ids[:length])
            return sorted((text.find(stop), stop) for stop in stops if stop in text)

        if not stops or not found(len(ids)):
            return turn, None
        end = bisect_left(range(len(ids)), True, key=lambda length: bool(found(length)))
        kept = {name: getattr(turn, name)[:end] for name in ("token_ids", "logprobs", "versions")}
        return replace(turn, **kept, finish_reason="stop"), found(end)[0][1]


def _light(request: ChatRequest, match: Match) -> bool:
    """Whether the next turn is rendered in little time."""
    texts = [message["content"] for message in match.rest]
    short = all(isinstance(text, str) for text in texts) and sum(map(len, texts)) <= LIGHT_TEXT
    return short and request.size <= LIGHT_BYTES


def _named_rest(request: ChatRequest, match: Match) -> list[Message]:
    return name_results(request.messages)[len(request.messages) - len(match.rest) :]


async def _all(calls: list[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """What each returns. Where one fails, the others end with it."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _went_well(task: asyncio.Task[ChatReply]) -> bool:
    return not task.cancelled() and task.exception() is None


def _echo(answer: Answer) -> Message:
    """The reply as the client is expected to send it back."""
    calls = [call(made.id, made.name, made.arguments) for made in answer.tool_calls]
    return message("assistant", answer.content, reasoning_content=answer.reasoning, tool_calls=calls)
