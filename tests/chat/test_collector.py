"""When full collections happen beside a server."""

import gc
import weakref

from molt.chat.collector import AT_LATEST, BETWEEN, Collector
from molt.chat.tree import Tree
from tests.chat.scripted import turn_of


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.self = self


def full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def grow() -> list[list]:
    return [[] for _ in range(300_000)]


def collected(sessions: int, still_open: int) -> bool:
    """Whether garbage that is old is found once so many sessions have ended."""
    with Collector() as collector:
        knot = Knot()
        gc.collect(1)  # what lives is old from here on
        knot = weakref.ref(knot)
        assert knot() is not None
        for _ in range(sessions):
            collector.ended(still_open)
        return knot() is None


def test_full_collections_wait_for_the_sessions_and_are_as_before_after_it():
    threshold = gc.get_threshold()
    with Collector():
        before = full_collections()
        kept = grow()
        assert full_collections() == before and len(kept) == 300_000
        assert gc.get_threshold()[:2] == threshold[:2]
    assert gc.get_threshold() == threshold
    kept = grow()
    assert full_collections() > before


def test_they_come_when_no_session_is_open_or_many_have_ended():
    assert not collected(BETWEEN - 1, 0) and collected(BETWEEN, 0)
    assert not collected(AT_LATEST - 1, 7) and collected(AT_LATEST, 7)


def test_a_tree_needs_no_collector():
    tree, said, prompt = Tree(), [], []
    for question in "one", "two":
        said.append({"role": "user", "content": question})
        turn = turn_of("yes", prompt := [*prompt, 7])
        reply = {"role": "assistant", "content": "yes"}
        tree.add(tree.match(said), prompt, turn, reply)
        said.append(reply)
        prompt = [*prompt, *turn.token_ids.tolist()]
    (leaf,) = tree.leaves()
    assert len(leaf.path) == 2
    gc.disable()
    try:
        node = weakref.ref(leaf)
        del tree, leaf
        assert node() is None
    finally:
        gc.enable()
