"""A sampled turn as the client gets it: cut at stop strings, its reasoning and tool calls apart."""

import json
from bisect import bisect_left
from dataclasses import dataclass, replace

from molt.chat.chat_parser import call_of_json
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.protocol import TEXT_ARGUMENT, Answer, ChatRequest, TokenLogprob, ToolCall, flat_name
from molt.types import Turn


@dataclass(frozen=True)
class ReadTurn:
    """A turn that was sampled, and what it says."""

    turn: Turn
    """As it is recorded: up to the token in which a stop string completes."""
    answer: Answer
    malformed_calls: int
    """Calls in it that could not be read."""


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string ended a turn."""

    tokens: int
    """Tokens up to the one in which it completes."""
    stop: str


def read_turn(renderer: ChatRenderer, turn: Turn, prompt_ids: list[int], request: ChatRequest) -> ReadTurn:
    """The turn as it is recorded and as the client gets it. prompt_ids: what it was sampled from."""
    match = find_stop(renderer, turn.token_ids.tolist(), request.stop)
    if match is not None:
        turn = _cut(turn, match.tokens)
    if request.one_call and request.tools:
        end = _end_of_first_call(renderer, turn.token_ids.tolist(), prompt_ids, request)
        if end < len(turn.token_ids):
            turn = _cut(turn, end)
            match = None

    ids = turn.token_ids.tolist()
    parsed = renderer.parse(ids, request.tools, prompt_ids)
    content = parsed.content
    calls = tuple(_as_offered(made, request) for made in parsed.tool_calls)
    if calls and not request.tools:  # nothing can be called: to the client it is text
        content = renderer.unparsed(ids)
        calls = ()

    stop_sequence = None
    if match is not None:
        stop_sequence = match.stop
        content = content.partition(match.stop)[0]
    finish_reason = turn.finish_reason
    if calls and finish_reason == "stop":
        finish_reason = "tool_calls"
    answer = Answer(
        content=content,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        finish_reason=finish_reason,
        completion_tokens=len(ids),
        stop_sequence=stop_sequence,
        logprobs=_logprobs(renderer, turn, request),
    )
    return ReadTurn(turn=turn, answer=answer, malformed_calls=len(parsed.malformed))


def read_structured(renderer: ChatRenderer, turn: Turn, request: ChatRequest) -> ReadTurn:
    """A turn that the engine had to give a structure: text, or one call as `{"name", "arguments"}`."""
    match = find_stop(renderer, turn.token_ids.tolist(), request.stop)
    stop_sequence = None
    if match is not None:
        turn = _cut(turn, match.tokens)
        stop_sequence = match.stop
    text = renderer.spoken(turn.token_ids.tolist())
    content = text
    if stop_sequence is not None:
        content = text.partition(stop_sequence)[0]
    calls: tuple[ToolCall, ...] = ()
    finish_reason = turn.finish_reason
    if not request.structure:
        made = call_of_json(text)
        if made is not None:
            content = ""
            calls = (_as_offered(made, request),)
            finish_reason = "tool_calls"
    answer = Answer(
        content=content,
        reasoning=None,
        tool_calls=calls,
        finish_reason=finish_reason,
        completion_tokens=len(turn.token_ids),
        stop_sequence=stop_sequence,
        logprobs=_logprobs(renderer, turn, request),
    )
    return ReadTurn(turn=turn, answer=answer, malformed_calls=0)


def _cut(turn: Turn, tokens: int) -> Turn:
    """The turn up to so many tokens, as one that ended there."""
    return replace(turn, sampled=turn.sampled.slice(0, tokens), finish_reason="stop")


def _end_of_first_call(renderer: ChatRenderer, ids: list[int], prompt_ids: list[int], request: ChatRequest) -> int:
    """How many tokens there are up to the end of the first call, if another one follows it; else all."""
    made = renderer.parse(ids, request.tools, prompt_ids).tool_calls
    if len(made) < 2:
        return len(ids)
    first = (made[0].name, made[0].arguments)

    def calls_in(tokens: int) -> list[tuple[str, str]]:
        read = renderer.parse(ids[:tokens], request.tools, prompt_ids).tool_calls
        return [(call.name, call.arguments) for call in read]

    def has_first(tokens: int) -> bool:
        return calls_in(tokens)[:1] == [first]

    tokens = bisect_left(range(len(ids)), True, key=has_first)
    if calls_in(tokens) != [first]:  # a format in which calls end together
        return len(ids)
    return tokens


def _as_offered(made: ToolCall, request: ChatRequest) -> ToolCall:
    """The call by the name of an offered tool, as the client knows it."""
    name = made.name
    if name not in request.namespaces:  # a model may leave the namespace out
        namesakes = [flat for flat, namespace in request.namespaces.items() if flat == flat_name(namespace, name)]
        offered = [tool["function"]["name"] for tool in request.tools or []]
        if len(namesakes) == 1 and name not in offered:
            name = namesakes[0]
    made = replace(made, name=name, namespace=request.namespaces.get(name))
    if name not in request.text_tools:
        return made
    text = _text_argument(made.arguments)
    return replace(made, text=text, arguments=json.dumps({TEXT_ARGUMENT: text}, ensure_ascii=False))


def _text_argument(arguments: str) -> str:
    """The text of a call of a tool that takes free text; of other arguments their JSON text."""
    text = json.loads(arguments).get(TEXT_ARGUMENT)
    if isinstance(text, str):
        return text
    return arguments


def _logprobs(renderer: ChatRenderer, turn: Turn, request: ChatRequest) -> tuple[TokenLogprob, ...] | None:
    if not request.logprobs:
        return None
    found = []
    for token, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
        if token not in renderer.eos_ids:
            found.append(TokenLogprob(text=renderer.tokenizer.text([token]), logprob=logprob))
    return tuple(found)


def find_stop(renderer: ChatRenderer, ids: list[int], stops: tuple[str, ...]) -> StopMatch | None:
    """The first token in which a stop string completes; None if none does.

    Of several stop strings that complete in the same token, the one that begins first counts.
    """

    def found_in(tokens: int) -> list[tuple[int, str]]:
        """Where each stop string begins in the text of the first `tokens` tokens."""
        text = renderer.tokenizer.text(ids[:tokens])
        return [(text.find(stop), stop) for stop in stops if stop in text]

    def completes_in(tokens: int) -> bool:
        return bool(found_in(tokens))

    if not stops or not completes_in(len(ids)):
        return None
    tokens = bisect_left(range(len(ids)), True, key=completes_in)
    _, first = min(found_in(tokens))
    return StopMatch(tokens=tokens, stop=first)
