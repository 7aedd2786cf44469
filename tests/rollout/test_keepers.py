"""Keepers that die, copies on other nodes, arrays that are lost: with handles whose answers the test gives."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError

from molt.config import RLCkptConfig
from molt.errors import LostError
from molt.records.checkpoints import Checkpoints
from molt.records.state import RunState
from molt.rollout import keeper_worker
from molt.rollout.keepers import Keepers
from molt.types import Group, Prompt


class Handle:
    """Of a keeper. `deaths` calls of it fail for its death; it notes the others."""

    def __init__(self, node, deaths):
        self.node = node
        self.deaths = deaths
        self.calls = []
        for name in ("hold", "release", "write_arrays"):
            setattr(self, name, SimpleNamespace(remote=self._method(name)))

    def _method(self, name):
        def remote(*arguments):
            answer = asyncio.get_running_loop().create_future()
            if self.deaths:
                self.deaths -= 1
                answer.set_exception(ActorDiedError())
            else:
                self.calls.append((name, *arguments))
                answer.set_result([])
            return answer

        return remote


@pytest.fixture
def world(monkeypatch):
    """`world.keepers(nodes)`; the handles it spawned, the ones that it killed, and its events."""
    made = SimpleNamespace(handles=[], killed=[], events=[], deaths={})
    monkeypatch.setattr(ray, "kill", made.killed.append)

    def spawn(node):
        handle = Handle(node, made.deaths.get(node, 0))
        made.handles.append(handle)
        return handle

    def keepers(nodes, **settings):
        settings = {"replicate": True, "max_restarts": 2} | settings
        return Keepers(spawn, nodes, on_event=lambda kind, **fields: made.events.append((kind, fields)), **settings)

    made.keepers = keepers
    return made


def test_a_keeper_that_dies_is_replaced_and_its_call_repeated(world, tmp_path, capsys):
    world.deaths["here"] = 1

    async def main():
        keepers = world.keepers(["here"])
        first = keepers.handles[0]
        world.deaths.clear()
        assert await keepers.write_arrays(tmp_path, ["a", "b"]) == []
        assert world.killed == [first] and keepers.handles[0] is not first
        assert keepers.handles[0].calls == [("write_arrays", tmp_path, ["a", "b"])]
        assert [kind for kind, _ in world.events] == ["keeper_lost"]
        assert "the keeper is replaced" in capsys.readouterr().err

    asyncio.run(main())


def test_calls_that_failed_together_replace_it_once(world, tmp_path):
    world.deaths["here"] = 2

    async def main():
        keepers = world.keepers(["here"])
        world.deaths.clear()
        await asyncio.gather(keepers.write_arrays(tmp_path, ["a"]), keepers.write_arrays(tmp_path, ["b"]))
        assert len(world.handles) == 2 and len(keepers.handles[0].calls) == 2

    asyncio.run(main())


def test_a_keeper_that_dies_again_and_again_stops_the_run(world, tmp_path):
    world.deaths["here"] = 1

    async def main():
        keepers = world.keepers(["here"], max_restarts=2)
        with pytest.raises(LostError, match=r"died 3 times in a row \(train.max_restarts\)"):
            await keepers.write_arrays(tmp_path, ["a"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("nodes", "of_group", "copied_to"),
    [
        (["here"], "here", None),
        (["here", "b", "c"], "here", None),  # without the driver's node there is no run
        (["here", "b", "c"], "b", "c"),
        (["here", "b", "c"], "c", "here"),  # after the last node comes the first
        (["here", "b"], "unknown", None),  # a node that joined later
    ],
)
def test_where_the_second_copy_goes(world, nodes, of_group, copied_to):
    async def main():
        keepers = world.keepers(nodes)
        await keepers.copy("0:3", "samples", of_group)
        holders = {handle.node: handle.calls for handle in world.handles if handle.calls}
        assert holders == ({} if copied_to is None else {copied_to: [("hold", "0:3", "samples")]})
        keepers.release(["0:3", "0:4"])
        keepers.release(["0:3"])
        releases = [call for handle in world.handles for call in handle.calls if call[0] == "release"]
        assert releases == ([] if copied_to is None else [("release", ["0:3"])])

    asyncio.run(main())


def test_without_replicate_there_is_no_copy(world):
    async def main():
        keepers = world.keepers(["here", "b", "c"], replicate=False)
        await keepers.copy("0:3", "samples", "b")
        assert not any(handle.calls for handle in world.handles)

    asyncio.run(main())


def test_a_copy_that_cannot_be_made_is_reported_and_the_group_stays(world):
    world.deaths["c"] = 1

    async def main():
        keepers = world.keepers(["here", "b", "c"])
        await keepers.copy("0:3", "samples", "b")
        ((kind, fields),) = world.events
        assert kind == "copy_failed" and fields["group"] == "0:3" and fields["node"] == "c"

    asyncio.run(main())


def test_what_is_lost_is_named_and_the_rest_is_there(monkeypatch):
    def get(reference, timeout):
        if reference == "gone":
            raise ObjectLostError("0" * 56, None, "")
        if reference == "late":
            raise GetTimeoutError
        return [[reference]]

    monkeypatch.setattr(ray, "get", get)
    assert keeper_worker.fetch(["a", "gone", "b", "late"]) == ([[["a"]], [["b"]]], [1, 3])


class LosesTheFirst:
    """Keepers that find the arrays of the first group lost, once in each folder."""

    def __init__(self):
        self.written = []

    async def write_arrays(self, directory, samples):
        is_first = directory.name not in [name for name, _ in self.written]
        self.written.append((directory.name, samples))
        return [0] if is_first else []


def test_groups_that_wait_for_scores_are_saved_without_those_whose_arrays_are_lost(tmp_path):
    def group(order, **more):
        return Group(Prompt(0, order, order, None, "say"), order, start_step=0, samples=f"of {order}", **more)

    aside = tmp_path / "aside"
    aside.mkdir()
    finished = tuple(group(order, rollouts=[1]) for order in (1, 2))
    unscored = tuple(group(order, unscored=[1]) for order in (3, 4, 5))
    ledger = {"position": 9, "in_flight": [3, 4, 5], "filter": [0, 0]}
    state = RunState(step=2, total_batches=9, ledger=ledger, finished=finished, unscored=unscored)
    keepers = LosesTheFirst()
    saved = asyncio.run(Checkpoints(RLCkptConfig(), None, keepers, None, None)._write_arrays(aside, state))
    assert saved.finished == finished[1:] and saved.unscored == unscored[1:]
    assert saved.ledger["in_flight"] == [1, 3, 4, 5]
    assert keepers.written == [
        ("aside", ["of 1", "of 2"]),
        ("aside", ["of 2"]),
        ("unscored", ["of 3", "of 4", "of 5"]),
        ("unscored", ["of 4", "of 5"]),
    ]


def test_a_checkpoint_holds_groups_whose_arrays_are_lost_as_prompts_in_flight():
    groups = [Group(Prompt(0, order, order, None, "say"), order, start_step=0) for order in (3, 5, 6)]
    ledger = {"position": 9, "in_flight": [4, 8], "filter": [0, 0]}
    state = RunState(step=2, total_batches=9, ledger=ledger, finished=tuple(groups)).without([0, 2])
    assert state.finished == (groups[1],)
    assert state.ledger == {"position": 9, "in_flight": [3, 4, 6, 8], "filter": [0, 0]}
