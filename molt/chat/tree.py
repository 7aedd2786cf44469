"""The token tree: what a session's clients requested and the engine sampled, as exact ids.

A node is one model call. It holds what the call added to its parent: messages (the last is the reply), the ids
of the prompt that the parent's path does not have, and the sampled ids with their log-probs and versions. Ids
along a path are what the engine saw, never text that was tokenised again. A path that is trained is a *segment*:

    root ── a ── b ── c        c = b, edited by the client: samples `a b` and `a c`; the second has `a`
              └─ c'            as context (version -1), so that every sampled token is trained once

A request continues at the deepest node whose messages it repeats *by meaning* (`chat/normalized.py`). Otherwise it
starts a branch, for one of the reasons in `BranchReason`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt.chat.branch_reason import Branch, Divergence, explain_branch, was_answered_before
from molt.chat.node import NO_IDS, BranchReason, Node, root_node
from molt.chat.normalized import (
    NormalizedMessage,
    leading_system,
    normalize_message,
    normalize_reply,
    without_cache_mark,
)
from molt.chat.protocol import Message
from molt.columns import concat, context
from molt.types import Json, Media, Sample, Turn

EXCERPT = 60
"""Characters that `Tree.show` prints of each end of a text."""


@dataclass(frozen=True)
class Match:
    """Where a request continues."""

    node: Node
    rest: list[Message]
    """Its messages after those of the node's path; none if it ends with a reply."""
    reason: BranchReason
    normalized: list[NormalizedMessage]
    """One for each message of `rest`."""
    tools: list[Json]
    ids: np.ndarray
    """int32 `[T]`, of the node's path."""


@dataclass(order=True, slots=True)
class Candidate:
    """A node whose path a request repeats. The largest is where the request continues."""

    depth: int
    """Messages that the request shares with the path."""
    marks_kept: int
    """Messages that came back with their call ids and spelling: tells replies of equal meaning apart."""
    is_fresh: bool
    """Nothing follows it yet: parallel agents that got the same answer continue from one each."""
    index: int
    """The latest wins."""
    node: Node = field(compare=False)


@dataclass(frozen=True)
class Segment:
    """A path that is one training sample."""

    leaf: Node
    """Its last call."""
    trained: set[Node]
    """The calls of the path whose sampled ids are trained in this segment; the others are context."""


class Tree:
    """The model calls of one session. Nothing is recorded before `add`."""

    def __init__(self, *, train_side: bool = False):
        self.root = root_node()
        self.nodes: list[Node] = []
        """All calls in the order of creation, so parents come before their children."""
        self.children: dict[Node, list[Node]] = {self.root: []}
        """Not in the nodes, so that there are no cycles: a dropped tree is gone without the garbage collector."""
        self.train_side = train_side
        self._excluded_nodes: set[Node] = set()
        self._exclusions: list[Callable[[Node], bool]] = []
        self._trained_tops: set[Node] = set()
        """First calls of the conversations that have a call to train."""

    # Matching ---------------------------------------------------------------------------------------------------------

    def match(self, messages: list[Message], tools: list[Json] | None = None) -> Match:
        """The deepest node whose path `messages` repeat by meaning, under the same tools.

        Of replies that mean the same, the one whose call ids and spelling came back; then one that nothing
        followed yet (parallel agents that got the same answer); then the latest.
        """
        offered = self._shared_tools(tools)
        normalized = self._normalize(messages)
        candidates, divergences = self._follow(normalized, offered)

        node = self.root
        if candidates:
            node = max(candidates).node
        return Match(
            node=node,
            rest=messages[node.end :],
            reason=self._reason(node, normalized, offered, divergences),
            normalized=normalized[node.end :],
            tools=offered,
            ids=self.ids(node),
        )

    def _shared_tools(self, tools: list[Json] | None) -> list[Json]:
        """The tools without cache marks; one list however many conversations offer the same."""
        offered = [without_cache_mark(tool) for tool in tools or []]
        for top in self.children[self.root]:
            if top.tools == offered:
                return top.tools
        return offered

    def _normalize(self, messages: list[Message]) -> list[NormalizedMessage]:
        """One for each message. A request repeats the whole history: messages that came back letter by letter are
        not normalized again."""
        normalized: list[NormalizedMessage] = []
        node: Node | None = self.root
        while node is not None:
            normalized += node.normalized
            node = self._literal_child(node, messages)
        normalized += [normalize_message(message) for message in messages[len(normalized) :]]
        return normalized

    def _literal_child(self, node: Node, messages: list[Message]) -> Node | None:
        """The latest child whose messages are in the request letter by letter."""
        for child in reversed(self.children[node]):
            if child.messages == messages[child.begin : child.end]:
                return child
        return None

    def _follow(self, messages: list[NormalizedMessage], tools: list[Json]) -> tuple[list[Candidate], list[Divergence]]:
        """The nodes whose paths the request repeats, and where it leaves the paths that it repeats in part."""
        candidates: list[Candidate] = []
        divergences: list[Divergence] = []
        tops = [top for top in self.children[self.root] if top.tools == tools]
        pending = [(child, 0) for child in tops]
        while pending:
            child, marks_kept = pending.pop()
            shared = _shared_messages(messages, child)
            if shared < len(child.normalized):
                divergences.append(Divergence(place=child.begin + shared, expected=child.normalized[shared:]))
                continue

            for echo, original in zip(messages[child.begin : child.end], child.normalized, strict=True):
                if echo.spelling == original.spelling:
                    marks_kept += 1
            following = self.children[child]
            candidates.append(
                Candidate(
                    depth=child.end,
                    marks_kept=marks_kept,
                    is_fresh=not following,
                    index=child.index,
                    node=child,
                )
            )
            pending += [(grandchild, marks_kept) for grandchild in following]
        return candidates, divergences

    def _reason(
        self,
        node: Node,
        messages: list[NormalizedMessage],
        tools: list[Json],
        divergences: list[Divergence],
    ) -> BranchReason:
        if was_answered_before(messages, divergences):
            return BranchReason.AGAIN
        if not node.is_root and not self.children[node]:
            return BranchReason.CONTINUES
        if node.is_root and _is_side(tools, leading_system(messages), self._main_conversation()):
            return BranchReason.SIDE
        branch = Branch(node=node, messages=messages, divergences=divergences, calls=self.nodes)
        return explain_branch(branch)

    # Recording --------------------------------------------------------------------------------------------------------

    def add(
        self,
        match: Match,
        prompt_ids: list[int],
        turn: Turn,
        reply: Message,
        *,
        train: bool = True,
        media: tuple[Media, ...] = (),
        stops: tuple[str, ...] = (),
    ) -> Node:
        """Record a call that succeeded. For n > 1: once per answer, with the same match.

        media: of the whole prompt. stops: the stop strings of the request.

        Where the engine was not given the exact ids of the matched path, the node branches off at the deepest
        node of the path whose ids begin the prompt, for the reason `template`.
        """
        given = np.asarray(turn.prompt_ids, np.int32)
        parent, start = _deepest_prefix(match, given)
        same = len(given) == len(prompt_ids) and given[start:].tolist() == prompt_ids[start:]
        assert same, "the turn was sampled from another prompt than is recorded"

        reason = match.reason
        if parent is not match.node:
            reason = BranchReason.TEMPLATE
        messages: list[Message] = []
        normalized: list[NormalizedMessage] = []
        for rewritten in match.node.path:
            if rewritten.end > parent.end:
                messages += rewritten.messages
                normalized += rewritten.normalized
        messages += [*match.rest, reply]
        normalized += [*match.normalized, normalize_reply(reply, stops)]

        node = Node(
            parent=parent,
            index=len(self.nodes),
            reason=reason,
            messages=messages,
            normalized=normalized,
            tools=match.tools,
            context_ids=given[start:].copy(),  # a view would keep every whole prompt in memory
            sampled=turn.sampled,
            train=train,
            media=tuple(each for each in media if each.start >= start),
        )
        self.children[parent].append(node)
        self.children[node] = []
        self.nodes.append(node)
        if train:
            self._trained_tops.add(node.path[0])
        return node

    def exclude(self, branch: Node | Callable[[Node], bool]) -> None:
        """Train neither the node (or every node for which the function is true, now or later) nor what follows it."""
        if isinstance(branch, Node):
            self._excluded_nodes.add(branch)
        else:
            self._exclusions.append(branch)

    # Paths ------------------------------------------------------------------------------------------------------------

    def ids(self, node: Node) -> np.ndarray:
        """int32 `[T]`, every prompt and sampled id of the path, as the engine saw them."""
        arrays = [NO_IDS]
        for call in node.path:
            arrays.append(call.context_ids)
            arrays.append(call.token_ids)
        return np.concatenate(arrays)

    def media(self, node: Node) -> tuple[Media, ...]:
        """The images of the path, in order."""
        return tuple(each for call in node.path for each in call.media)

    def messages(self, node: Node) -> list[Message]:
        """The messages of the path; replies as they were first given, with reasoning that clients drop."""
        return [message for call in node.path for message in call.messages]

    def side(self, node: Node) -> bool:
        """Whether it belongs to a side conversation: one without tools, under another system prompt than the main one.

        The main conversation is the first with tools, or else the first. One that the agent leaves out of training
        (no call is trained, or its first one is excluded) is never the main one.
        """
        return _is_side(node.tools, node.system, self._main_conversation())

    def is_side(self, match: Match) -> bool:
        """Whether a request that continues there belongs to a side conversation."""
        system = match.node.system
        if match.node.is_root:
            system = leading_system(match.normalized)
        return _is_side(match.tools, system, self._main_conversation())

    def _main_conversation(self) -> Node | None:
        """The first call of the main conversation; None while there is none."""
        first = None
        for top in self.children[self.root]:
            if top not in self._trained_tops or self._is_excluded(top):
                continue
            if top.tools:
                return top
            if first is None:
                first = top
        return first

    def _is_excluded(self, node: Node) -> bool:
        return node in self._excluded_nodes or any(excludes(node) for excludes in self._exclusions)

    # Samples ----------------------------------------------------------------------------------------------------------

    def leaves(self) -> list[Node]:
        """The last call of each sample, in the order of the samples."""
        return [segment.leaf for segment in self._segments()]

    def samples(self) -> list[Sample]:
        """One per segment, in the order in which their last calls were made."""
        return [self._sample(segment) for segment in self._segments()]

    def _sample(self, segment: Segment) -> Sample:
        parts = []
        for node in segment.leaf.path:
            sampled = node.sampled
            if node not in segment.trained:
                sampled = sampled.mask_out(slice(None))
            parts.append(context(node.context_ids))
            parts.append(sampled)
        return Sample(concat(parts), media=self.media(segment.leaf))

    def _segments(self) -> list[Segment]:
        """One per trained node that no trained node follows. A node is trained in the first segment that holds it."""
        trained = self._trained_nodes()
        remaining = set(trained)
        followed = self._ancestors(remaining)
        segments = []
        for leaf in trained:
            if leaf in followed:
                continue
            in_this_segment = remaining & set(leaf.path)
            remaining -= in_this_segment
            segments.append(Segment(leaf=leaf, trained=in_this_segment))
        return segments

    def _trained_nodes(self) -> list[Node]:
        main = self._main_conversation()
        left_out: set[Node] = set()
        trained = []
        for node in self.nodes:
            if node.parent in left_out or self._is_excluded(node):
                left_out.add(node)
                continue
            if not node.train or len(node.token_ids) == 0:
                continue
            if _is_side(node.tools, node.system, main) and not self.train_side:
                continue
            trained.append(node)
        return trained

    def _ancestors(self, nodes: set[Node]) -> set[Node]:
        ancestors: set[Node] = set()
        for node in reversed(self.nodes):
            is_on_a_path = node in nodes or node in ancestors
            if is_on_a_path and node.parent is not None:
                ancestors.add(node.parent)
        return ancestors

    # Text -------------------------------------------------------------------------------------------------------------

    def show(self, decode: Callable[[list[int]], str]) -> str:
        """The tree as text: a head line per call, then the ids it was given (-) and those it sampled (+)."""
        sample_of: dict[Node, int] = {}
        for number, segment in enumerate(self._segments()):
            for node in segment.trained:
                sample_of[node] = number

        lines = []
        pending = [(top, 0) for top in reversed(self.children[self.root])]
        while pending:
            node, depth = pending.pop()
            indent = "  " * depth
            given = _excerpt(decode(node.context_ids.tolist()))
            sampled = _excerpt(decode(node.token_ids.tolist()))
            lines.append(f"{indent}{self._head(node, sample_of.get(node))}")
            lines.append(f"{indent}  - {len(node.context_ids):>6,} {given}")
            lines.append(f"{indent}  + {len(node.token_ids):>6,} {sampled}")

            children = self.children[node]
            if len(children) > 1:  # a conversation without branches stays at the margin
                depth += 1
            pending += [(child, depth) for child in reversed(children)]
        return "\n".join(lines)

    def _head(self, node: Node, sample: int | None) -> str:
        place = "at the root"
        if node.parent is not None and not node.parent.is_root:
            place = f"after #{node.parent.index}"

        reason = ""
        if node.reason and node.reason != BranchReason.SIDE and self.side(node):
            reason = f" ({node.reason}, side)"
        elif node.reason:
            reason = f" ({node.reason})"

        versions = ", ".join(str(version) for version in np.unique(node.sampled.versions)) or "none"
        images = ""
        if len(node.media) == 1:
            images = "1 image, "
        elif node.media:
            images = f"{len(node.media)} images, "
        use = "not trained"
        if sample is not None:
            use = f"trained in sample {sample}"
        return f"#{node.index} {place}{reason}: versions {versions}, {images}{use}"


def _shared_messages(messages: list[NormalizedMessage], call: Node) -> int:
    """How many of the call's messages the request repeats at their place before one differs or is missing."""
    shared = 0
    for echo, original in zip(messages[call.begin : call.end], call.normalized, strict=False):
        if not echo.echoes(original):
            break
        shared += 1
    return shared


def _is_side(tools: list[Json], system: list[list[Any]], main: Node | None) -> bool:
    """Whether a conversation with these tools and system messages is a side conversation beside `main`."""
    return main is not None and not tools and system != main.system


def _deepest_prefix(match: Match, prompt_ids: np.ndarray) -> tuple[Node, int]:
    """The deepest node of the matched path whose ids begin the prompt, and how many ids that are."""
    shared = min(len(match.ids), len(prompt_ids))
    differs = np.flatnonzero(match.ids[:shared] != prompt_ids[:shared])
    if len(differs):
        shared = int(differs[0])

    node = match.node
    length = len(match.ids)
    while length > shared and node.parent is not None:
        length -= node.length
        node = node.parent
    return node, length


def _excerpt(text: str) -> str:
    if len(text) > 2 * EXCERPT:
        text = f"{text[:EXCERPT]} … {text[-EXCERPT:]}"
    return repr(text)
