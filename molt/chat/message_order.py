"""Which orders of messages a model's template takes, and conversations in an order that it takes.

Clients send what templates refuse or drop: several system messages, a system message in the middle, two
messages of one role in a row. What a template takes is found out once, by rendering conversations of marked texts. A
message that it would not show is then rendered in the nearest way that it takes; a template that takes all
gets all as it was sent. How the beginning of a conversation is adapted does not depend on what follows, so prompts grow
by appending.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from molt.chat.probes import TOOLS, object_call
from molt.chat.protocol import Message, Tools

RenderText = Callable[[list[Message], Tools], str]
"""The text of a conversation with a generation prompt; raises anything if the template refuses it."""

MARKS = ["moltfirst7f3a", "moltsecond7f3a", "moltthird7f3a", "moltfourth7f3a"]
CALL_ID = "moltcall1"
"""Nine letters and digits, as some templates ask."""
BETWEEN = "\n\n"
"""Between the texts of messages that become one."""
OPENING = "(The conversation begins with an answer.)"
"""The user's message before an answer that nothing precedes, for templates that want one there."""


@dataclass(frozen=True)
class Adapted:
    """Messages as they are rendered."""

    messages: list[Message]
    changes: int
    """How many of the original ones are rendered in another role or joined to another."""


@dataclass(frozen=True)
class MessageOrder:
    """What a template does not take."""

    results_as_user: bool = False
    """Results of tools: they become a user's messages."""
    joins_systems: bool = False
    """Several system messages at the beginning: they become one."""
    late_system_as_user: bool = False
    """System messages after others: they become a user's."""
    system_as_user: bool = False
    """System messages at all: they become a user's."""
    needs_user: bool = False
    """Only system messages: the last one becomes a user's."""
    joins_neighbours: bool = False
    """Two messages of a user, or of the assistant, in a row: they become one."""
    opens_with_user: bool = False
    """An answer at the beginning: a user's message is put before it."""

    def adapt(self, messages: Sequence[Message], *, begins: bool) -> Adapted:
        """The messages as the template takes them. begins: they are the beginning of a conversation."""
        if self == TAKES_ALL:
            return Adapted(list(messages), 0)
        turned = self._with_roles(messages, begins=begins)
        changes = sum(before is not after for before, after in zip(messages, turned, strict=True))
        joined: list[Message] = []
        for message in turned:
            if joined and self._joins(joined[-1], message, follows_system_only=_all_system(joined)):
                joined[-1] = _joined(joined[-1], message)
                changes += 1
            else:
                joined.append(message)
        if begins and self.opens_with_user and _first_role(joined) == "assistant":
            start = len(joined) - len(_after_systems(joined))
            joined.insert(start, {"role": "user", "content": OPENING})
            changes += 1
        return Adapted(joined, changes)

    def _with_roles(self, messages: Sequence[Message], *, begins: bool) -> list[Message]:
        """Each message in a role that the template takes at its place."""
        turned = []
        leading = begins
        last_of_systems = None
        if begins and self.needs_user and _all_system(messages):
            last_of_systems = messages[-1]
        for message in messages:
            leading = leading and message["role"] == "system"
            late = not leading
            if message is last_of_systems or self._becomes_user(message, late=late):
                message = {"role": "user", "content": message["content"]}
            turned.append(message)
        return turned

    def _becomes_user(self, message: Message, *, late: bool) -> bool:
        if message["role"] == "tool":
            return self.results_as_user
        if message["role"] != "system":
            return False
        return self.system_as_user or (late and self.late_system_as_user)

    def _joins(self, last: Message, message: Message, *, follows_system_only: bool) -> bool:
        if last["role"] != message["role"]:
            return False
        if message["role"] == "system":
            return self.joins_systems and follows_system_only
        return self.joins_neighbours and message["role"] in ("user", "assistant")


TAKES_ALL = MessageOrder()


def find_order(render: RenderText) -> MessageOrder:
    """What the template does not take, as far as it takes the adapted conversation instead."""
    user, other, third, fourth = MARKS
    order = MessageOrder()
    # From the most basic to what builds on it: each is tried with what was found before.
    trials: list[tuple[str, list[Message], Tools]] = [
        ("joins_neighbours", [_said("user", user), _said("user", other)], None),
        ("joins_neighbours", [_said("user", user), *_answers(other, third), _said("user", fourth)], None),
        ("system_as_user", [_said("system", user), _said("user", other)], None),
        ("needs_user", [_said("system", user)], None),
        ("joins_systems", [_said("system", user), _said("system", other), _said("user", third)], None),
        ("late_system_as_user", [_said("user", user), _said("system", other)], None),
        ("late_system_as_user", [_said("user", user), _said("assistant", other), _said("system", third)], None),
        ("opens_with_user", [_said("assistant", user), _said("user", other)], None),
        ("results_as_user", [_said("user", user), _call(other), _result(third)], TOOLS),
    ]
    for name, messages, tools in trials:
        if _is_taken(render, order, messages, tools):
            continue
        candidate = MessageOrder(**{**vars(order), name: True})
        if _is_taken(render, candidate, messages, tools):
            order = candidate
    return order


def _is_taken(render: RenderText, order: MessageOrder, messages: list[Message], tools: Tools) -> bool:
    """Whether all texts of the conversation are rendered. A template may move them: then the conversation branches."""
    try:
        text = render(order.adapt(messages, begins=True).messages, tools)
    except Exception:  # templates and families raise anything
        return False
    return all(message["content"] in text for message in messages)


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _answers(*texts: str) -> list[Message]:
    return [_said("assistant", text) for text in texts]


def _call(text: str) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [object_call(CALL_ID, "add", {"a": text})]}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": CALL_ID, "name": "add"}


def _joined(first: Message, second: Message) -> Message:
    """Two messages of one role as one."""
    joined = first | {"content": _joined_content(first["content"], second["content"])}
    calls = [*first.get("tool_calls", []), *second.get("tool_calls", [])]
    if calls:
        joined["tool_calls"] = calls
    thoughts = [each["reasoning_content"] for each in (first, second) if each.get("reasoning_content")]
    if thoughts:
        joined["reasoning_content"] = BETWEEN.join(thoughts)
    return joined


def _joined_content(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + BETWEEN + second
    return [*_parts(first), {"type": "text", "text": BETWEEN}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _all_system(messages: Sequence[Message]) -> bool:
    return all(message["role"] == "system" for message in messages)


def _after_systems(messages: list[Message]) -> list[Message]:
    for index, message in enumerate(messages):
        if message["role"] != "system":
            return messages[index:]
    return []


def _first_role(messages: list[Message]) -> str | None:
    """Of the first message that is not of the system."""
    for message in _after_systems(messages):
        return message["role"]
    return None
