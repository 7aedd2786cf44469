"""Why a request that does not continue a recorded conversation starts a branch."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from molt.chat.node import BranchReason, Node
from molt.chat.normalized import NormalizedMessage, collapse_whitespace, leading_system

MIN_DROPPED = 2
"""Messages that a compaction drops at least; one dropped message is a reply that the client left out, an edit."""
QUOTE_LENGTH = 20
"""Characters that a line of a sampled reply must have to count as quoted by a summary."""
QUOTE_MESSAGES = 4
"""A summary quotes a reply in one of so many new messages."""


@dataclass(frozen=True)
class Divergence:
    """Where a request leaves a recorded path."""

    place: int
    """Index of the first message of the request that differs; the request's length if it ends there."""
    expected: list[NormalizedMessage]
    """The messages of the recorded call from there on, its reply included."""


@dataclass(frozen=True)
class Branch:
    """A request that starts a branch, and what was recorded before it."""

    node: Node
    """The deepest node whose path the request repeats."""
    messages: list[NormalizedMessage]
    """All messages of the request."""
    divergences: list[Divergence]
    calls: list[Node]
    """All calls that the tree recorded."""

    @property
    def new_messages(self) -> list[NormalizedMessage]:
        return self.messages[self.node.end :]


def was_answered_before(messages: list[NormalizedMessage], divergences: list[Divergence]) -> bool:
    """Whether the request ends exactly where a recorded call has its reply."""
    cut = [divergence for divergence in divergences if divergence.place == len(messages)]
    return any(len(divergence.expected) == 1 for divergence in cut)


def explain_branch(branch: Branch) -> BranchReason:
    """`compaction`, `edit` or `root`. Linear in the recorded calls and the new messages."""
    dropped = _messages_dropped_before_replies(branch)
    if max(dropped, default=0) >= MIN_DROPPED:
        return BranchReason.COMPACTION
    if _is_shorter_than_recorded(branch) and _quotes_a_reply(branch):
        return BranchReason.COMPACTION

    repeats_something = bool(dropped) or not branch.node.is_root
    if repeats_something or _leaves_after_the_system_prompt(branch) or _extends_a_first_message(branch):
        return BranchReason.EDIT
    return BranchReason.ROOT


def _messages_dropped_before_replies(branch: Branch) -> list[int]:
    """For each new message that is a recorded reply: how many messages fewer stand before it than when it was sampled.

    Of equal replies the deepest counts.
    """
    deepest_end: dict[Hashable, int] = {}
    for call in branch.calls:
        reply = call.normalized[-1]
        for key in (_key(reply, reply.reasoning), _key(reply, "")):  # clients may leave the reasoning out
            deepest_end[key] = max(call.end, deepest_end.get(key, 0))

    dropped = []
    for place, message in enumerate(branch.new_messages, start=branch.node.end):
        end = deepest_end.get(_key(message, message.reasoning))
        if end is not None:
            dropped.append(end - 1 - place)
    return dropped


def _key(message: NormalizedMessage, reasoning: str) -> Hashable:
    """Equal for messages that mean the same, with this reasoning."""
    return message.role, _hashable(message.content), tuple(message.calls), reasoning


def _hashable(value: Any) -> Hashable:
    """A JSON value as one that can be hashed; equal values stay equal."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return value


def _is_shorter_than_recorded(branch: Branch) -> bool:
    """Whether a recorded conversation with the same system prompt is longer than the request."""
    system = leading_system(branch.messages)
    longest = 0
    for call in branch.calls:
        if call.end > longest and call.system == system:
            longest = call.end
    return longest - len(branch.messages) >= MIN_DROPPED


def _quotes_a_reply(branch: Branch) -> bool:
    """Whether one of the first new messages quotes a line of a reply that is not in the request's history."""
    first_messages = branch.new_messages[:QUOTE_MESSAGES]
    texts = [collapse_whitespace(message.text) for message in first_messages]
    history = set(branch.node.path)
    others = [call for call in branch.calls if call not in history]
    return any(_is_quoted(call, texts) for call in others)


def _is_quoted(call: Node, texts: list[str]) -> bool:
    content = call.messages[-1].get("content") or ""
    for line in str(content).splitlines():
        line = collapse_whitespace(line)
        if len(line) < QUOTE_LENGTH:
            continue
        if any(line in text for text in texts):
            return True
    return False


def _leaves_after_the_system_prompt(branch: Branch) -> bool:
    """Whether the request repeats more of a recorded call than the system prompt before it leaves it."""
    system_messages = len(leading_system(branch.messages))
    return any(divergence.place > system_messages for divergence in branch.divergences)


def _extends_a_first_message(branch: Branch) -> bool:
    """Whether the first message after the system prompt contains the text that a recorded call has there."""
    place = len(leading_system(branch.messages))
    if place == len(branch.messages):
        return False
    text = branch.messages[place].text
    for divergence in branch.divergences:
        if divergence.place != place:
            continue
        recorded_text = divergence.expected[0].text
        if recorded_text and recorded_text in text:
            return True
    return False
