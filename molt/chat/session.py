"""One episode's conversation with its model: requests in, replies out, every sampled token in the tree.

A request is matched to the tree, rendered as the exact ids already there and what it adds, sampled, and recorded.
Between the end of sampling and the return only reading the answers is awaited, and nothing after the first is recorded:
a reply is in the tree whole or, if the client went away before, not at all.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.images import read_images
from molt.chat.messages import name_results
from molt.chat.off_loop import LIGHT_BYTES, LIGHT_TEXT, LIGHT_TOKENS, aside
from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, Message, PolicyRefusal
from molt.chat.reading import ReadTurn, read_structured, read_turn
from molt.chat.stored_responses import StoredResponses
from molt.chat.tree import Match, Tree
from molt.chat.wires.fields import refuse
from molt.chat.wires.options import metric_name
from molt.chat.wires.shared import call, message
from molt.errors import StructureError
from molt.types import InfraFailure, Json, Media, Turn

CallModel = Callable[..., Awaitable[Turn]]
"""`(prompt_ids, max_tokens) -> Turn`; and `media=`, where the prompt shows images."""
CallFreely = Callable[..., Awaitable[Turn]]
"""As `CallModel`, with the client's own sampling third: for calls that are not trained."""

RETRY = "x-stainless-retry-count"
IDEMPOTENCY = "idempotency-key"
HONOURED = ("temperature", "top_p", "top_k")
"""Sampling parameters that a call may choose if it is not trained."""
MAX_REFUSALS = 20
"""Kinds of refusals that a session keeps."""
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class RenderedPrompt:
    """What the engine is given."""

    ids: list[int]
    media: tuple[Media, ...]
    """The images in `ids`."""


@dataclass(frozen=True)
class MatchedPrompt:
    """A request's prompt, and where the tree continues."""

    match: Match | None
    """None: nothing is recorded."""
    prompt: RenderedPrompt
    adapted: int
    """New messages that are rendered in another role or joined, since the model's template refuses them as they are."""


@dataclass(eq=False)
class Work:
    """One sampling of a reply, and the connections that want it."""

    task: asyncio.Task[ChatReply]
    key: str
    wanted: int = 0
    """Connections that wait for the reply, or got it."""
    attempt: str = "0"
    """The retry count of the latest request for it."""


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
    strict: bool = False
    """Refuse structured outputs and forced tools in trained calls, which are otherwise ignored by name."""
    out_of_context: bool = False
    """Whether the last prompt to be trained, side conversations apart, did not fit into the context."""
    responses: StoredResponses = field(default_factory=StoredResponses)
    refusals: Counter[str] = field(default_factory=Counter)
    """What was refused, in words, and how often; the first `MAX_REFUSALS` kinds."""
    refusal: str = ""
    """Why the last prompt that did not fit was refused."""
    policy_refusal: str | None = None
    """Why the conversation cannot go on after what the policy has sampled."""
    failure: InfraFailure | None = None
    """Ends the episode: whoever runs it waits for `failed`."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    finishes: dict[int, str] = field(default_factory=dict)
    """How each recorded call ended, by the index of its node."""
    _works: dict[str, list[Work]] = field(default_factory=dict)
    """By key: the work under way, the lost replies, which nobody wants any more, and the last delivered ones."""
    _closed: bool = False

    # Connections ------------------------------------------------------------------------------------------------------

    def ask(self, request: ChatRequest, key: str) -> Work:
        """New work on a reply, or older work that `request` retries. `key`: equal for what could be retries.

        A lost reply is retried by any equal request. A call that may have gone well (it is under way, or delivered)
        is retried only by a client that marks its request as a retry: an unmarked equal request is a new sample.
        Raises ChatError if the session is over.
        """
        if self._closed:
            refuse("the session is over.", 404, "not_found")
        works = self._works.setdefault(key, [])
        work = _retried_work(works, request)
        if work is None:
            work = self._start(request, key)
            works[:] = [*(other for other in works if not other.task.done()), work]
        else:
            self.counters["replayed"] += 1
        work.wanted += 1
        work.attempt = _attempt(request)
        return work

    def _start(self, request: ChatRequest, key: str) -> Work:
        work = Work(task=asyncio.create_task(self.answer(request)), key=key)

        def forget_if_it_failed(task: asyncio.Task[ChatReply]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._forget(work)

        work.task.add_done_callback(forget_if_it_failed)
        return work

    def leave(self, work: Work) -> None:
        """A client went away before the reply reached it. If nobody else wants it: stop it, or keep it for a retry."""
        work.wanted -= 1
        if work.wanted == 0 and work.task.cancel():
            self._forget(work)

    def close(self) -> None:
        """Stop what is under way; further requests are refused."""
        self._closed = True
        for works in self._works.values():
            for work in works:
                work.task.cancel()

    def _forget(self, work: Work) -> None:
        self._works[work.key] = [other for other in self._works[work.key] if other is not work]

    # Answers ----------------------------------------------------------------------------------------------------------

    async def answer(self, request: ChatRequest) -> ChatReply:
        """Sample a reply, whatever was requested before.

        Raises ChatError. Whatever goes wrong other than by the client's doing is the session's `failure`.
        """
        if self.failure is None:
            try:
                return await self._sample(request)
            except PolicyRefusal as error:
                self.policy_refusal = error.message
                raise
            except ChatError:
                raise
            except Exception as error:  # fault boundary: one engine request, and the record of it
                self._fail(error)
        refuse(f"the policy cannot answer, so the episode ends: {self.failure!r}", 503, "engine")

    def _fail(self, error: Exception) -> None:
        if isinstance(error, InfraFailure):
            self.failure = error
        else:
            self.failure = InfraFailure(type(error).__name__, str(error))
            self.failure.__cause__ = error
        self.failed.set()

    async def count(self, request: ChatRequest) -> int:
        """The prompt tokens that `answer` would report. Raises ChatError."""
        matched = await self._prompt(request)
        return len(matched.prompt.ids)

    async def _sample(self, request: ChatRequest) -> ChatReply:
        matched = await self._prompt(request)
        prompt = matched.prompt
        self._require_room(matched, request)
        self._require_possible(request)
        self._count_answers(request)
        self.counters["adapted_messages"] += matched.adapted

        max_tokens = self._max_tokens(prompt.ids, request)
        calls = [self._call(prompt, max_tokens, request, index) for index in range(request.n)]
        turns = await _gather(calls)
        if self._is_main(matched.match, request):
            self.out_of_context = False

        read = await self._read(turns, prompt.ids, request)
        for each in read:
            self.counters["malformed_calls"] += each.malformed_calls
            if request.one_call and len(each.answer.tool_calls) > 1:
                self.counters["ignored_parallel_tool_calls"] += 1
            self.counters["tool_offers"] += bool(request.tools)
            self.counters["tool_calls"] += len(each.answer.tool_calls)
            if matched.match is not None:
                self._record(matched.match, prompt, each, request)
        return ChatReply(
            id=secrets.token_hex(12),
            answers=tuple(each.answer for each in read),
            prompt_tokens=len(prompt.ids),
        )

    async def _read(self, turns: list[Turn], prompt_ids: list[int], request: ChatRequest) -> list[ReadTurn]:
        structured = self._structure(request) is not None

        def read_all() -> list[ReadTurn]:
            if structured:
                return [read_structured(self.renderer, turn, request) for turn in turns]
            return [read_turn(self.renderer, turn, prompt_ids, request) for turn in turns]

        tokens = sum(len(turn.token_ids) for turn in turns)
        if tokens <= LIGHT_TOKENS:
            return read_all()
        return await aside(read_all)

    def _record(self, match: Match, prompt: RenderedPrompt, read: ReadTurn, request: ChatRequest) -> None:
        node = self.tree.add(
            match,
            prompt.ids,
            read.turn,
            echo_of(read.answer),
            train=request.train,
            media=prompt.media,
            stops=request.stop,
        )
        self.finishes[node.index] = read.answer.finish_reason

    async def _call(self, prompt: RenderedPrompt, max_tokens: int, request: ChatRequest, index: int) -> Turn:
        """One of the n turns: the trained distribution, or the client's if the call opted out of training."""
        shown: Json = {}
        if prompt.media:
            shown["media"] = prompt.media
        if request.train or self.call_freely is None:
            return await self.call_model(prompt.ids, max_tokens, **shown)

        sampling = {name: value for name, value in request.sampling.items() if name in HONOURED}
        if request.seed is not None:
            sampling["seed"] = min(request.seed + index, MAX_SEED)  # answers to one request differ, as vLLM's do
        structure = self._structure(request)
        if structure is not None:
            sampling["structure"] = structure
        try:
            return await self.call_freely(prompt.ids, max_tokens, sampling, **shown)
        except StructureError as error:
            raise ChatError(400, "invalid_request", str(error)) from error

    def _structure(self, request: ChatRequest) -> Json | None:
        """What the engine has to enforce, as arguments of vLLM's `StructuredOutputsParams`: only in free calls."""
        if request.train or self.call_freely is None:
            return None
        if request.structure:
            return request.structure
        return structure_of_calls(request)

    # Limits -----------------------------------------------------------------------------------------------------------

    def note_refusal(self, error: ChatError) -> None:
        """Keep what was refused, for people."""
        words = f"{error.status} {error.message}"
        if words in self.refusals or len(self.refusals) < MAX_REFUSALS:
            self.refusals[words] += 1

    def _is_main(self, match: Match | None, request: ChatRequest) -> bool:
        """Whether the request is of a conversation that is trained, other than on request."""
        return match is not None and request.train and not self.tree.is_side(match)

    def _require_room(self, matched: MatchedPrompt, request: ChatRequest) -> None:
        ids = matched.prompt.ids
        if len(ids) >= self.max_len:
            self.counters["out_of_context"] += 1
            if self._is_main(matched.match, request):
                self.out_of_context = True
            why = f"prompt is too long: {len(ids)} tokens > {self.max_len} maximum"
            self.refusal = why
            refuse(why, code="context_length_exceeded")

    def _require_possible(self, request: ChatRequest) -> None:
        """Refuse distributions that do not exist, and if strict, what would be ignored though it changes the answer."""
        constraints = self._ignored_constraints(request)
        if self.strict and constraints:
            refuse(
                f"`{constraints[0]}`: a trained answer is sampled from the model as it is, never constrained. Leave it "
                "out, and check what the model says."
            )
        for name in self._honoured(request):
            if name in request.sampling and not _is_valid_sampling(name, request.sampling[name]):
                refuse(f"`{name}` is {request.sampling[name]!r}: there is no such distribution.")

    def _count_answers(self, request: ChatRequest) -> None:
        """Count the answers that are sampled now and the parameters that are ignored, or refuse above the limit."""
        used = self.counters["requests"]
        if used + request.n > self.max_requests:
            refuse(
                f"this request is for {request.n} more answers, and the session has had {used} of its "
                f"{self.max_requests} answers.",
                429,
                "too_many_requests",
            )
        self.counters["requests"] += request.n

        honoured = self._honoured(request)
        for name, value in request.sampling.items():
            if name not in honoured and value is not None:
                self.counters[f"ignored_{name}"] += 1
        if not honoured and request.seed is not None:
            self.counters["ignored_seed"] += 1

        constraints = self._ignored_constraints(request)
        if constraints:
            self.counters["ignored_constraint"] += 1
        for name in (*constraints, *request.ignored):
            self.counters[f"ignored_{name}"] += 1
        for kind in request.ignored_tools:
            self.counters["ignored_tools"] += 1
            self.counters[f"ignored_tool_{metric_name(kind)}"] += 1

    def _ignored_constraints(self, request: ChatRequest) -> list[str]:
        """What the client wants an answer to be, and the model is not made to say."""
        if self._structure(request) is not None:
            return []
        constraints = []
        if request.structure is not None:
            constraints.append("response_format")
        if request.required_tools is not None:
            constraints.append("tool_choice")
        return constraints

    def _honoured(self, request: ChatRequest) -> tuple[str, ...]:
        """The sampling parameters that this request may choose."""
        if request.train or self.call_freely is None:
            return ()
        return HONOURED

    def _max_tokens(self, ids: list[int], request: ChatRequest) -> int:
        limits = [self.max_len - len(ids)]
        for limit in (self.max_new_tokens, request.max_tokens):
            if limit:
                limits.append(limit)
        return min(limits)

    # Prompts ----------------------------------------------------------------------------------------------------------

    async def _prompt(self, request: ChatRequest) -> MatchedPrompt:
        """Where the request continues, its ids and its images. Raises nothing but ChatError."""
        try:
            match = None
            prompt = None
            if self.record:
                match = self.tree.match(request.messages, request.tools)
                prompt = await self._continued(request, match)
            if prompt is None:
                prompt = await aside(self._render, request, match)
        except ChatError:
            raise
        except Exception as error:  # fault boundary: what one client sent
            why = f"the messages or tools could not be rendered ({error!r:.300}). Send them as the protocol has them."
            raise ChatError(400, "invalid_request", why) from error
        rest = request.messages if match is None else match.rest
        begins = match is None or match.node is self.tree.root
        adapted = self.renderer.order.adapt(rest, begins=begins).changes
        return MatchedPrompt(match=match, prompt=prompt, adapted=adapted)

    async def _continued(self, request: ChatRequest, match: Match) -> RenderedPrompt | None:
        """The matched path and what the request adds; None if that cannot be continued."""
        if _is_light(request, match):
            return self._bridge(request, match)
        return await aside(self._bridge, request, match)

    def _bridge(self, request: ChatRequest, match: Match) -> RenderedPrompt | None:
        if match.node is self.tree.root:
            return None
        files = read_images(match.rest)
        past = match.ids.tolist()
        longer = self.renderer.bridge(
            past,
            _named_rest(request, match),
            request.tools,
            sampled=len(match.node.token_ids),
        )
        if longer is None:
            return None
        before = self.tree.media(match.node)
        ids, media = self.renderer.place(longer, files, start=len(past), before=before)
        return RenderedPrompt(ids=ids, media=media)

    def _render(self, request: ChatRequest, match: Match | None) -> RenderedPrompt:
        """The ids of the whole conversation, with its images."""
        messages = request.messages
        if match is not None:  # with reasoning that the client dropped
            messages = [*self.tree.messages(match.node), *_named_rest(request, match)]
        files = read_images(messages)
        ids, media = self.renderer.place(self.renderer.render(messages, request.tools), files)
        return RenderedPrompt(ids=ids, media=media)


def echo_of(answer: Answer) -> Message:
    """The reply as the client is expected to send it back."""
    calls = [call(made.id, made.name, made.arguments) for made in answer.tool_calls]
    return message("assistant", answer.content, reasoning_content=answer.reasoning, tool_calls=calls)


def structure_of_calls(request: ChatRequest) -> Json | None:
    """The structure of one call of a required tool, as `{"name", "arguments"}`; None if none is required."""
    calls = []
    for tool in request.tools or []:
        function = tool["function"]
        if function["name"] in (request.required_tools or ()):
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
    if not calls:
        return None
    return {"json": {"anyOf": calls}}


def _retried_work(works: list[Work], request: ChatRequest) -> Work | None:
    """The work that the request repeats: a lost reply, or one that the client says it repeats."""
    for work in works:
        if work.wanted == 0:
            return work
    for work in works:
        if IDEMPOTENCY in request.hints:
            return work
        # Equal parallel calls have the same count when each is retried: each retries another of the works.
        if _attempt(request) not in ("0", work.attempt):
            return work
    return None


def _attempt(request: ChatRequest) -> str:
    return request.hints.get(RETRY, "0")


def _is_valid_sampling(name: str, value: Any) -> bool:
    """Whether there is a distribution with this value of an honoured parameter."""
    if name == "temperature":
        return value >= 0
    if name == "top_p":
        return 0 < value <= 1
    return value == -1 or value >= 1  # top_k


def _is_light(request: ChatRequest, match: Match) -> bool:
    """Whether the next turn is rendered in little time."""
    if request.size > LIGHT_BYTES:
        return False
    length = 0
    for each in match.rest:
        if not isinstance(each["content"], str):
            return False
        length += len(each["content"])
    return length <= LIGHT_TEXT


def _named_rest(request: ChatRequest, match: Match) -> list[Message]:
    """The new messages, with the names of functions in tool results."""
    known = len(request.messages) - len(match.rest)
    return name_results(request.messages)[known:]


async def _gather(calls: Sequence[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """What each returns. Where one fails, the others end with it."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(each) for each in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
