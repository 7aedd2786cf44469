"""The token tree: what a session's clients asked and the engine sampled, as exact ids.

A node is one model call. It holds what the call added to its parent: messages (the last is the reply), the ids
of the prompt that the parent's path does not have, and the sampled ids with their log-probs and versions. Ids
along a path are what the engine saw, never text that was tokenised again. A path that is trained is a *segment*:

    root ── a ── b ── c        c = b, edited by the client: samples `a b` and `a c`; the second has `a`
              └─ c'            as context (version -1), so that every sampled token is trained once

A request goes on at the deepest node whose messages it repeats *by meaning*; it starts another branch for a
reason: `root` (nothing like it was said), `side` (no tools, another system prompt than the main
conversation's: a title, a summary), `again` (a request that was answered before), `edit` (it leaves a path at a
message that differs), `compaction` (sampled replies come back without what stood before them), `template` (the
ids of the prompt rewrite history). Only `side` changes what is trained; the rest tells people why.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import numpy as np

from molt.chat.protocol import Message
from molt.types import NOT_GENERATED, Media, Sample, Turn

SHORTER = 2
"""Messages by which a compaction shortens history; by one it is a dropped reply, an edit."""
QUOTE_LENGTH, QUOTE_PLACES = 20, 4
"""A summary quotes a line of a sampled reply: at least so many characters, in one of the first new messages."""
_JSON_IN, _JSON_OUT = json.JSONDecoder(parse_int=float), json.JSONEncoder(sort_keys=True)
NO_IDS = np.empty(0, np.int32)


class Meaning(NamedTuple):
    """A message without what clients change when they send it back."""

    role: str
    content: list[Any]
    """Texts and other parts in order. An assistant's white space is normalised; in a tool result it may matter."""
    calls: list[tuple[str, str]]
    """Names and parsed arguments; ids of calls are the wire's."""
    reasoning: str
    marks: tuple
    """What tells replies of equal meaning apart, if the client kept it."""

    def echoes(self, said: "Meaning") -> bool:
        """This, in a request, is what was `said`: reasoning left out is no difference."""
        same = self is said or self[:3] == said[:3]
        return same and self.reasoning in ("", said.reasoning)

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.content if isinstance(part, str))


def meaning(message: Message) -> Meaning:
    role = "system" if message["role"] == "developer" else message["role"]
    calls = message.get("tool_calls") or []
    named = [(call["function"]["name"], _parsed(call["function"].get("arguments") or "{}")) for call in calls]
    reasoning = _one_spaced(message.get("reasoning_content") or "")
    marks = (message.get("content"), message.get("tool_call_id"), [call.get("id") for call in calls])
    return Meaning(role, _content(message.get("content"), role), named, reasoning, marks)


def _content(content: str | list[dict[str, Any]] | None, role: str) -> list[Any]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    found: list[Any] = []
    for is_text, group in groupby(parts, key=lambda part: part.get("type") == "text"):
        if is_text:
            text = "\n".join(part["text"] for part in group)
            found.append(_one_spaced(text) if role == "assistant" else text.strip())
        else:
            found += map(_bare, group)
    return [part for part in found if part != ""]


def _parsed(arguments: str) -> str:
    """One spelling for equal JSON (1 and 1.0 are equal, 1 and true are not); other text as it is."""
    try:
        return _JSON_OUT.encode(_JSON_IN.decode(arguments))
    except (ValueError, RecursionError):  # what a model takes for JSON
        return _one_spaced(arguments)


def _one_spaced(text: str) -> str:
    return " ".join(text.split())


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "cache_control"}


def _system(said: list[Meaning]) -> list[list[Any]]:
    return [message.content for message in takewhile(lambda message: message.role == "system", said)]


@dataclass(eq=False)
class Node:
    """One model call, as what it added to its parent's path."""

    parent: "Node | None"
    """None for the tree's root, which is no call and holds nothing."""
    index: int
    """Place in the order of creation."""
    reason: str
    """Why a branch starts here; "" if the node goes on from its parent."""
    messages: list[Message]
    said: list[Meaning]
    """Of each message."""
    tools: list[dict[str, Any]]
    context_ids: np.ndarray
    """int32 `[C]`, the prompt's ids after the parent's."""
    token_ids: np.ndarray
    """int32 `[T]`, sampled; `logprobs` float32 `[T]` and `versions` int32 `[T]` belong to them."""
    logprobs: np.ndarray
    versions: np.ndarray
    train: bool
    """False: sampled from another distribution or opted out; its ids stay context for what follows."""
    media: tuple[Media, ...] = ()
    """Images in `context_ids`; their places are those in the whole path."""

    def __post_init__(self):
        self.begin: int = self.parent.end if self.parent else 0
        self.end: int = self.begin + len(self.messages)
        """Its messages are those from `begin` to `end` of the conversation."""

    @property
    def path(self) -> list["Node"]:
        """From the first call of the conversation to this one."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


@dataclass(frozen=True)
class Match:
    """Where a request goes on."""

    node: Node
    rest: list[Message]
    """Its messages after those of the node's path; none if it ends with a reply."""
    reason: str
    said: list[Meaning]
    """Of each message in `rest`."""
    tools: list[dict[str, Any]]
    ids: np.ndarray
    """int32, of the node's path."""


class Tree:
    """See the module's docstring. Nothing is recorded before `add`."""

    def __init__(self, *, train_side: bool = False):
        self.root = Node(None, -1, "", [], [], [], *[NO_IDS] * 4, train=False)
        self.nodes: list[Node] = []
        self.children: dict[Node, list[Node]] = {self.root: []}
        """Not in the nodes, so that there are no cycles: a dropped tree is gone, without the garbage collector."""
        self.train_side = train_side
        self._excluded: list[Callable[[Node], bool]] = []
        self._trained_tops: set[Node] = set()
        """The beginnings of conversations with a call to train."""

    def match(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Match:
        """The deepest node whose path `messages` repeat by meaning, under the same tools.

        Of replies that mean the same, the one whose call ids and spelling came back; then one that nothing
        followed yet (parallel agents that got the same answer); then the latest.
        """
        offered, said = self._offered(tools), self._meanings(messages)
        found, left, reached = [(0, 0, False, -1)], [], [(self.root, 0)]
        for node, marks in reached:  # grows while it is walked
            for child in self.children[node]:
                if node is self.root and child.tools != offered:
                    continue
                pairs = zip(said[node.end : node.end + len(child.said)], child.said, strict=False)
                pairs = list(takewhile(lambda pair: pair[0].echoes(pair[1]), pairs))
                if len(pairs) < len(child.said):
                    left.append((node.end + len(pairs), child.said[len(pairs) :]))
                    continue
                kept = marks + sum(echo.marks == original.marks for echo, original in pairs)
                found.append((child.end, kept, not self.children[child], child.index))
                reached.append((child, kept))
        index = max(found)[-1]
        node = self.nodes[index] if index >= 0 else self.root
        reason = self._reason(node, said, offered, left)
        return Match(node, messages[node.end :], reason, said[node.end :], offered, self.ids(node))

    def _offered(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The tools, kept once however many calls offer the same."""
        offered = [_bare(tool) for tool in tools or []]
        return next((top.tools for top in self.children[self.root] if top.tools == offered), offered)

    def _meanings(self, messages: list[Message]) -> list[Meaning]:
        """Of each message. A request repeats the whole history: what came back letter by letter is not read again."""
        node, said = self.root, []
        while node is not None:
            said += node.said
            children = self.children[node][::-1]
            node = next((child for child in children if child.messages == messages[child.begin : child.end]), None)
        return said + [meaning(message) for message in messages[len(said) :]]

    def _reason(self, node: Node, said: list[Meaning], tools: list, left: list[tuple[int, list[Meaning]]]) -> str:
        """`left`: how far the request follows each path that it leaves, and what that path says instead."""
        if any(at == len(said) and len(others) == 1 for at, others in left):
            return "again"
        if node is not self.root and not self.children[node]:
            return ""
        if node is self.root and self.nodes and self._aside(tools, said):
            return "side"
        system, new = _system(said), range(node.end, len(said))
        longest = max((n.end for n in self.nodes if _system(n.path[0].said) == system), default=0)
        echoed = [n.end - 1 - i for i in new for n in self.nodes if said[i].echoes(n.said[-1])]  # places it moved by
        early = [_one_spaced(said[i].text) for i in new[:QUOTE_PLACES]]
        quoted = (_quotes(text, n) for text in early for n in self.nodes if n not in node.path)
        if max(echoed, default=0) >= SHORTER or (longest - len(said) >= SHORTER and any(quoted)):
            return "compaction"
        said_before = any(at > len(system) for at, _ in left)
        merged = any(at == len(system) < len(said) and _within(others[0], said[at]) for at, others in left)
        return "edit" if node is not self.root or echoed or said_before or merged else "root"

    def add(
        self, match: Match, prompt_ids: list[int], turn: Turn, reply: Message, *, train: bool = True,
        media: tuple[Media, ...] = (),
    ) -> Node:  # fmt: skip
        """Record a call that succeeded. For n > 1: once per answer, with the same match. media: of the whole prompt.

        Where the engine was not given the exact ids of the matched path, the node goes off at the deepest
        node of it whose ids are the beginning of the prompt, for the reason `template`.
        """
        parent, reason, ids = match.node, match.reason, match.ids
        given = np.asarray(turn.prompt_ids, np.int32)
        while not np.array_equal(given[: len(ids)], ids):
            parent, reason = parent.parent, "template"
            ids = self.ids(parent)
        same = len(given) == len(prompt_ids) and given[len(ids) :].tolist() == prompt_ids[len(ids) :]
        assert same, "the turn was sampled from another prompt than is recorded"
        above = [n for n in match.node.path if n.end > parent.end]
        messages = [*(message for n in above for message in n.messages), *match.rest, reply]
        said = [*(message for n in above for message in n.said), *match.said, meaning(reply)]
        # A copy, since a view would keep every whole prompt.
        arrays = given[len(ids) :].copy(), np.asarray(turn.token_ids, np.int32), turn.logprobs, turn.versions
        new = tuple(each for each in media if each.start >= len(ids))
        node = Node(parent, len(self.nodes), reason, messages, said, match.tools, *arrays, train=train, media=new)
        self.children[parent].append(node)
        self.children[node] = []
        self.nodes.append(node)
        if train:
            self._trained_tops.add(node.path[0])
        return node

    def ids(self, node: Node) -> np.ndarray:
        """int32, every prompt and sampled id of the path, as the engine saw them."""
        return np.concatenate([NO_IDS, *(ids for n in node.path for ids in (n.context_ids, n.token_ids))])

    def media(self, node: Node) -> tuple[Media, ...]:
        """The images of the path, in order."""
        return tuple(each for n in node.path for each in n.media)

    def messages(self, node: Node) -> list[Message]:
        """Those of the path, replies as they were first given: with reasoning that clients drop."""
        return [message for n in node.path for message in n.messages]

    def side(self, node: Node) -> bool:
        """Whether it belongs to a side conversation. The main one is the first with tools, or else the first.

        One that the agent leaves out of training (no call is trained, or its first one is excluded) is never the main.
        """
        return self._aside(node.path[0].tools, node.path[0].said)

    def _aside(self, tools: list, said: list[Meaning]) -> bool:
        tops = [top for top in self.children[self.root] if top in self._trained_tops and not self._left_out(top)]
        main = next((top for top in tops if top.tools), tops[0] if tops else None)
        return main is not None and not tools and _system(said) != _system(main.said)

    def exclude(self, branch: Node | Callable[[Node], bool]) -> None:
        """Train neither the node (or every node of which the function is true, now or later) nor what follows it."""
        self._excluded.append((lambda node: node is branch) if isinstance(branch, Node) else branch)

    def leaves(self) -> list[Node]:
        """The last call of each sample, in their order."""
        return [leaf for leaf, _ in self._segments()]

    def samples(self) -> list[Sample]:
        """One per segment, in the order in which their last calls were made."""
        return [self._sample(leaf, owned) for leaf, owned in self._segments()]

    def _sample(self, leaf: Node, owned: set[Node]) -> Sample:
        token_ids, end = self.ids(leaf), 0
        versions = np.full(len(token_ids), NOT_GENERATED, np.int32)
        logprobs = np.zeros(len(token_ids), np.float32)
        for node in leaf.path:
            start = end + len(node.context_ids)
            end = start + len(node.token_ids)
            if node in owned:
                versions[start:end], logprobs[start:end] = node.versions, node.logprobs
        return Sample(token_ids, versions, logprobs, self.media(leaf))

    def _segments(self) -> list[tuple[Node, set[Node]]]:
        """Trained nodes that no trained node follows, each with the nodes that it is the first to hold."""
        trained = {node: None for node in self.nodes if self._trained(node)}
        followed = {above for node in trained for above in node.path[:-1]}
        segments, rest = [], set(trained)
        for leaf in trained:
            if leaf not in followed:
                segments.append((leaf, rest & set(leaf.path)))
                rest -= segments[-1][1]
        return segments

    def _trained(self, node: Node) -> bool:
        if not node.train or not len(node.token_ids) or (self.side(node) and not self.train_side):
            return False
        return not any(map(self._left_out, node.path))

    def _left_out(self, node: Node) -> bool:
        return any(excluded(node) for excluded in self._excluded)

    def show(self, decode: Callable[[list[int]], str]) -> str:
        """The tree as text: a head line per call, then what was given (-) and what was sampled (+)."""
        holder = {node: i for i, (_, owned) in enumerate(self._segments()) for node in owned}
        lines, todo = [], [(top, 0) for top in self.children[self.root][::-1]]
        while todo:
            node, depth = todo.pop()
            after = f"after #{node.parent.index}" if node.parent is not self.root else "at the root"
            versions = ", ".join(map(str, np.unique(node.versions))) or "none"
            use = f"trained in sample {holder[node]}" if node in holder else "not trained"
            use = f"{len(node.media)} image{'s' * (len(node.media) > 1)}, {use}" if node.media else use
            why = f" ({node.reason}{', side' * (self.side(node) and node.reason != 'side')})" * bool(node.reason)
            lines += [
                f"{'  ' * depth}#{node.index} {after}{why}: versions {versions}, {use}",
                f"{'  ' * depth}  - {len(node.context_ids):>6,} {_excerpt(decode(node.context_ids.tolist()))}",
                f"{'  ' * depth}  + {len(node.token_ids):>6,} {_excerpt(decode(node.token_ids.tolist()))}",
            ]
            # A conversation that only goes on stays at the margin.
            children = self.children[node]
            todo += [(child, depth + (len(children) > 1)) for child in children[::-1]]
        return "\n".join(lines)


def _within(message: Meaning, other: Meaning) -> bool:
    return bool(message.text) and message.text in other.text


def _quotes(text: str, node: Node) -> bool:
    lines = map(_one_spaced, str(node.messages[-1].get("content") or "").splitlines())
    return any(len(line) >= QUOTE_LENGTH and line in text for line in lines)


def _excerpt(text: str, ends: int = 60) -> str:
    return repr(text if len(text) <= 2 * ends else f"{text[:ends]} … {text[-ends:]}")
