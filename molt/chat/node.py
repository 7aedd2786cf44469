"""A node of the token tree: one model call, as what it added to the conversation before it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from molt.chat.normalized import NormalizedMessage, leading_system
from molt.chat.protocol import Message
from molt.columns import TokenColumns, context
from molt.types import Json, Media

NO_IDS = np.empty(0, np.int32)


class BranchReason(StrEnum):
    """Why a call starts a branch. Only `SIDE` changes what is trained; the others inform people."""

    CONTINUES = ""
    """No branch: the call is the first to follow its parent."""
    ROOT = "root"
    """Nothing like it was recorded before."""
    SIDE = "side"
    """No tools and another system prompt than the main conversation: a title, a summary."""
    AGAIN = "again"
    """The same request was answered before."""
    EDIT = "edit"
    """The request leaves a recorded path at a message that differs."""
    COMPACTION = "compaction"
    """Sampled replies return without the messages that stood before them."""
    TEMPLATE = "template"
    """The prompt's ids rewrite the history."""


@dataclass(eq=False, kw_only=True)
class Node:
    """One model call, as what it added to its parent's path."""

    parent: "Node | None"
    """None for the tree's root, which is no call and holds nothing."""
    index: int
    """Place in the order of creation."""
    reason: BranchReason
    messages: list[Message]
    """The messages it added; the last one is the reply."""
    normalized: list[NormalizedMessage]
    """One for each of `messages`."""
    tools: list[Json]
    """The tools offered, the same in all calls of a conversation."""
    context_ids: np.ndarray
    """int32 `[C]`, the prompt's ids after the parent's path."""
    sampled: TokenColumns
    """What the engine sampled after the prompt."""
    train: bool
    """False: sampled from another distribution or opted out; its ids stay context for later calls."""
    media: tuple[Media, ...] = ()
    """Images in `context_ids`; their starts count from the beginning of the path."""

    begin: int = field(init=False)
    """Its messages are those from `begin` to `end` of the conversation."""
    end: int = field(init=False)
    system: list[list[Any]] = field(init=False)
    """Contents of the system messages at the beginning of the conversation."""

    def __post_init__(self):
        self.begin = 0
        if self.parent is not None:
            self.begin = self.parent.end
        self.end = self.begin + len(self.messages)

        if self.parent is None or self.parent.is_root:
            self.system = leading_system(self.normalized)
        else:
            self.system = self.parent.system

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def token_ids(self) -> np.ndarray:
        """int32 `[T]`, sampled."""
        return self.sampled.token_ids

    @property
    def length(self) -> int:
        """How many ids it adds to the path."""
        return len(self.context_ids) + len(self.sampled)

    @property
    def path(self) -> list["Node"]:
        """The calls from the first of the conversation to this one."""
        path: list[Node] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path


def root_node() -> Node:
    """The node that stands before every conversation."""
    return Node(
        parent=None,
        index=-1,
        reason=BranchReason.CONTINUES,
        messages=[],
        normalized=[],
        tools=[],
        context_ids=NO_IDS,
        sampled=context(NO_IDS),
        train=False,
    )
