"""The states of engines, with handles of processes that the test starts and ends."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError

from molt.errors import EngineError
from molt.rollout import engine_group
from molt.rollout.engine_group import EngineGroup


class Handle:
    """Of an engine whose process dies and starts as the test says."""

    def __init__(self):
        self.dead = False
        self.serves = True
        self.starts = True
        self.alive = SimpleNamespace(remote=self._alive)
        self.start = SimpleNamespace(remote=self._start)
        self.resume = SimpleNamespace(remote=self._resume)

    async def _alive(self):
        if self.dead:
            self.dead = False  # Ray starts the next process
            raise ActorDiedError()
        return self.serves

    async def _start(self):
        if not self.starts:
            raise ActorDiedError()

    async def _resume(self):
        self.serves = True

    def kill(self):
        self.dead = True
        self.serves = False


@pytest.fixture
def world(monkeypatch):
    """Two engines, their group, and the events it reported."""
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: handle.kill())
    monkeypatch.setattr(engine_group, "HEARTBEAT_S", 0.01)
    events = []
    engines = [Handle(), Handle()]
    group = EngineGroup(
        engines, timeout_s=5, max_restarts=2, on_event=lambda kind, **fields: events.append((kind, fields["engine"]))
    )
    return SimpleNamespace(engines=engines, group=group, events=events)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def flags(group):
    return group.repairing, group.restarted.is_set(), group.unserved.is_set()


def test_an_engine_is_lost_then_waits_for_weights_then_serves(world):
    group = world.group

    async def main():
        assert group.present == {0: 0, 1: 0} and flags(group) == (False, False, False)
        world.engines[1].kill()
        assert await group.examine()
        assert group.present == {0: 0} and flags(group) == (True, False, False)
        watching = asyncio.create_task(group.watch())
        await until(group.restarted.is_set)
        assert group.present == {0: 0, 1: 1} and flags(group) == (True, True, False)  # engine 0 still serves
        await asyncio.sleep(0.05)
        assert group.present == {0: 0, 1: 1}  # it waits for weights, which is no reason to restart it
        await group.resume([0, 1])
        assert group.present == {0: 0, 1: 1} and flags(group) == (False, False, False)
        assert await group.examine() is False
        watching.cancel()

    asyncio.run(main())
    assert world.events == [("engine_lost", 1), ("engine_restarted", 1)]


def test_nobody_serves_while_all_engines_wait_for_weights(world):
    group = world.group

    async def main():
        for engine in world.engines:
            engine.kill()
        assert await group.examine() and group.present == {}
        assert not group.unserved.is_set()  # none can take weights yet
        some = asyncio.create_task(group.some())
        watching = asyncio.create_task(group.watch())
        await until(lambda: len(group.present) == 2)
        assert some.done() and some.result() and flags(group) == (True, True, True)
        await group.resume([1])
        assert flags(group) == (True, True, False)
        watching.cancel()

    asyncio.run(main())


def test_an_engine_with_other_weights_is_lost_though_it_answers(world):
    async def main():
        assert await world.group.examine(suspects=[0])
        assert world.group.present == {1: 0}

    asyncio.run(main())
    assert world.events == [("engine_lost", 0)]


def test_an_engine_that_answers_but_hangs_in_a_weight_sync_is_lost_and_named(world):
    """`alive` answers all the time, so that the watch alone would never restart it."""
    world.group.timeout_s = 0.05

    async def commit(engine, version):
        if engine == 1:
            await asyncio.sleep(60)
        return []

    async def main():
        for number, engine in enumerate(world.engines):
            engine.commit = SimpleNamespace(remote=partial(commit, number))
        with pytest.raises(EngineError, match=r"engines 1: no answer to `commit` within train.watchdog_s \(=0.05\)"):
            await world.group.commit(3, [0, 1])
        assert world.group.present == {0: 0}
        watching = asyncio.create_task(world.group.watch())
        await until(lambda: world.group.present == {0: 0, 1: 1})
        watching.cancel()

    asyncio.run(main())
    assert world.events == [("engine_lost", 1), ("engine_restarted", 1)]


def test_without_a_trainer_a_restarted_engine_serves_again(world):
    group = world.group

    async def main():
        world.engines[0].kill()
        tasks = [asyncio.create_task(group.watch()), asyncio.create_task(group.serve())]
        await until(lambda: group.present.get(0) == 1 and not group.repairing)
        for task in tasks:
            task.cancel()

    asyncio.run(main())


def test_too_many_restarts_without_a_weight_sync_end_the_watch_and_all_waiting(world):
    group = world.group

    async def main():
        for engine in world.engines:
            engine.starts = False
            engine.kill()
        await group.examine()
        some = asyncio.create_task(group.some())
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(group.watch(), 5)
        assert raised.group_contains(EngineError, match=r"restarted 2 times in a row \(train.max_restarts\)")
        with pytest.raises(EngineError, match="restarted 2 times in a row"):
            await asyncio.wait_for(some, 5)

    asyncio.run(main())


def test_a_weight_sync_resets_the_count_of_restarts(world):
    group = world.group

    async def main():
        watching = asyncio.create_task(group.watch())
        for life in (1, 2, 3, 4):
            world.engines[0].kill()
            await until(lambda life=life: group.present.get(0) == life)
            await group.resume([0, 1])
        assert not watching.done()
        watching.cancel()

    asyncio.run(main())
