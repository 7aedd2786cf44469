"""A sampled turn as the client gets it: cut at stop strings, its reasoning and tool calls apart."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.protocol import Answer, ChatRequest
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
        turn = replace(
            turn,
            sampled=turn.sampled.slice(0, match.tokens),
            finish_reason="stop",
        )

    ids = turn.token_ids.tolist()
    parsed = renderer.parse(ids, request.tools, prompt_ids)
    content = parsed.content
    calls = tuple(parsed.tool_calls)
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
    )
    return ReadTurn(turn=turn, answer=answer, malformed_calls=len(parsed.malformed))


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
