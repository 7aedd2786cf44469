"""Dispatch, retries and replacements of runners, with handles whose answers the test gives."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ObjectLostError

from molt.agents.loop_lag import Block
from molt.errors import LostError
from molt.rollout import runner_pool
from molt.rollout.group_task import GroupResult, GroupTask
from molt.rollout.runner_pool import RunnerPool
from molt.rollout.watchdog import LoopTimes, RolloutState
from molt.types import InfraFailure, Prompt, RolloutInfo, Scored, Unscored


class Handle:
    """Of a runner: `results` are futures in the order of the calls, `answer` is what `states` gives or raises."""

    def __init__(self, name):
        self.name = name
        self.results = []
        self.answer = []
        self.blocked = []
        self.lag_s = 0.0
        self.killed = False
        self.states = SimpleNamespace(remote=self._states)
        self.blocks = SimpleNamespace(remote=self._blocks)
        self.loop_times = SimpleNamespace(remote=self._loop_times)
        self.ready = SimpleNamespace(remote=self._ready)
        self.run_group = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._run_group))
        self.score_group = SimpleNamespace(remote=self._score_group)
        self.begun = []
        """What the calls said of the group, None for a new one."""

    def _score_group(self, task, begun, samples):
        self.begun.append(("score", begun))
        self.results.append(asyncio.get_running_loop().create_future())
        return self.results[-1]

    def _run_group(self, task, begun=None, samples=()):
        self.begun.append(("run", begun))
        loop = asyncio.get_running_loop()
        result, samples = loop.create_future(), loop.create_future()
        samples.set_result([])
        self.results.append(result)
        return result, samples

    async def _states(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.sleep(60)
        return self.answer, LoopTimes(lag_s=0.25, blocked_s=0.125)

    async def _loop_times(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return LoopTimes(lag_s=self.lag_s)

    async def _blocks(self):
        return self.blocked

    async def _ready(self):
        pass


@pytest.fixture
def world(monkeypatch):
    """`world.pool(count)`; the handles it spawned, the futures it cancelled, and its events."""
    handles, cancelled, events = [], [], []
    monkeypatch.setattr(ray, "kill", lambda handle: setattr(handle, "killed", True))
    monkeypatch.setattr(ray, "cancel", cancelled.append)

    def spawn(name):
        handles.append(Handle(name))
        return handles[-1]

    def pool(count, **settings):
        settings = {"deadline_s": 5.0, "attempts": 3, "silence_s": 0.05, "max_restarts": 1} | settings
        return RunnerPool(spawn, count, on_event=lambda kind, **fields: events.append((kind, fields)), **settings)

    return SimpleNamespace(pool=pool, handles=handles, cancelled=cancelled, events=events)


def task(position):
    return GroupTask(Prompt(0, position, 0, None, "say"), 1, 1.0, 1.0, -1, 4)


def state(group_id):
    return RolloutState(group_id, 0, "runner0", "agent", 0, age_s=1.0, silent_s=1.0)


async def started(pool, positions):
    groups = [asyncio.create_task(pool.run_group(task(position))) for position in positions]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return groups


def test_a_group_goes_to_the_runner_with_the_fewest(world):
    async def main():
        pool = world.pool(2)
        groups = await started(pool, range(3))
        assert pool.in_flight == [2, 1]
        for handle in world.handles:
            for result in handle.results:
                result.set_result(GroupResult([]))
        answers = await asyncio.gather(*groups)
        assert all(result == GroupResult([]) for result, _ in answers) and pool.in_flight == [0, 0]

    asyncio.run(main())


def answer(*outcomes, sampling=()):
    infos = [RolloutInfo("0:0", index, outcome, None, 1, ()) for index, outcome in enumerate(outcomes)]
    return GroupResult(infos, sampling=sampling)


WAITS = answer(Unscored("{}"))
AGAIN = answer(InfraFailure("scorer_exit"), sampling=(0,))
DONE = answer(Scored(1.0, 1.0))


def test_a_group_is_rolled_out_then_scored_and_rolled_out_again_where_a_score_failed(world):
    async def main():
        pool, seen = world.pool(1), []
        group = asyncio.create_task(pool.run_group(task(0), lambda result, samples: seen.append(result)))
        for number, result in enumerate([WAITS, AGAIN, WAITS, DONE]):
            await asyncio.sleep(0.01)
            world.handles[0].results[number].set_result(result)
        assert (await group)[0] == DONE and seen == [WAITS, AGAIN, WAITS]
        assert world.handles[0].begun == [("run", None), ("score", WAITS), ("run", AGAIN), ("score", WAITS)]
        assert pool.in_flight == [0]

    asyncio.run(main())


def test_a_runner_that_dies_while_it_scores_costs_no_rollout(world):
    async def main():
        pool = world.pool(1)
        group = asyncio.create_task(pool.run_group(task(0)))
        await asyncio.sleep(0.01)
        world.handles[0].results[0].set_result(WAITS)
        await asyncio.sleep(0.01)
        world.handles[0].results[1].set_exception(ActorDiedError())
        await asyncio.sleep(0.01)
        assert world.handles[1].begun == [("score", WAITS)]
        world.handles[1].results[0].set_result(DONE)
        assert (await group)[0] == DONE

    asyncio.run(main())


def test_a_group_whose_arrays_are_lost_while_it_is_scored_starts_again(world):
    async def main():
        pool, seen = world.pool(1), []
        group = asyncio.create_task(pool.run_group(task(0), lambda *progress: seen.append(progress)))
        await asyncio.sleep(0.01)
        world.handles[0].results[0].set_result(WAITS)
        await asyncio.sleep(0.01)
        world.handles[0].results[1].set_exception(ObjectLostError("0" * 56, None, ""))
        await asyncio.sleep(0.01)
        assert world.handles[0].begun == [("run", None), ("score", WAITS), ("run", None)]
        assert seen[1] == (GroupResult([]), None)  # nothing is past generation
        assert world.events == [("group_lost", {"group": "0:0"})]
        world.handles[0].results[2].set_result(DONE)
        assert (await group)[0] == DONE and pool.in_flight == [0]

    asyncio.run(main())


def test_a_resumed_group_is_only_scored(world):
    async def main():
        pool = world.pool(1)
        samples = asyncio.get_running_loop().create_future()
        samples.set_result([])
        group = asyncio.create_task(pool.run_group(task(0), begun=(WAITS, samples)))
        await asyncio.sleep(0.01)
        assert world.handles[0].begun == [("score", WAITS)]
        world.handles[0].results[0].set_result(DONE)
        assert await group == (DONE, samples)

    asyncio.run(main())


def test_a_group_that_is_to_be_retried_is_cancelled_and_sent_again(world):
    async def main():
        pool = world.pool(1)
        (group,) = await started(pool, [4])
        pool.again({"0:4", "0:5"})  # the other one is not in flight
        await asyncio.sleep(0.01)
        first, second = world.handles[0].results
        assert world.cancelled == [first] and not world.handles[0].killed
        second.set_result(GroupResult([]))
        assert (await group)[0] == GroupResult([]) and pool.in_flight == [0]

    asyncio.run(main())


def test_a_runner_that_dies_is_replaced_once_for_all_its_groups(world, capsys):
    async def main():
        pool = world.pool(1, attempts=2)
        groups = await started(pool, [0, 1])
        world.handles[0].answer = [state("0:0")]
        assert [found.group_id for found in await pool.states()] == ["0:0"]
        assert await pool.loop_times() == LoopTimes(0.25, 0.125) and await pool.loop_times() == LoopTimes(0.0, 0.0)
        for result in world.handles[0].results:
            result.set_exception(ActorDiedError())
        await asyncio.sleep(0.01)
        assert world.handles[0].killed and len(world.handles) == 2 and pool.runners == world.handles[1:]
        for result in world.handles[1].results:
            result.set_result(GroupResult([]))
        await asyncio.gather(*groups)

    asyncio.run(main())
    ((kind, fields),) = world.events
    assert kind == "runner_lost" and (fields["runner"], fields["in_flight"]) == (0, 2)
    table = capsys.readouterr().err
    assert "0:0:0" in table and "0:1:0" in table  # also the group that the runner had not spoken of


def test_a_runner_whose_group_does_not_end_is_replaced(world):
    async def main():
        pool = world.pool(1, deadline_s=0.02, attempts=1)
        with pytest.raises(InfraFailure, match="no runner finished the group in 1 attempts"):
            await pool.run_group(task(0))
        assert world.handles[0].killed and "no end of a group within" in world.events[0][1]["reason"]

    asyncio.run(main())


def test_lost_samples_are_sampled_again_without_a_replacement(world):
    async def main():
        pool = world.pool(1)
        (group,) = await started(pool, [0])
        world.handles[0].results[0].set_exception(ObjectLostError("0" * 56, None, ""))
        await asyncio.sleep(0.01)
        world.handles[0].results[1].set_result(GroupResult([]))
        await group
        assert len(world.handles) == 1 and world.events == []

    asyncio.run(main())


def test_a_silent_runner_may_load_and_is_replaced_once_it_has_answered(world, monkeypatch):
    async def main():
        pool = world.pool(1)
        world.handles[0].answer = None
        assert await pool.states() == [] and len(world.handles) == 1  # it loads its agent
        await pool.ready()
        assert await pool.states() == [] and len(world.handles) == 2
        assert "no answer within train.watchdog_s" in world.events[0][1]["reason"]
        monkeypatch.setattr(runner_pool, "LOADING_S", 0.0)
        world.handles[1].answer = None
        with pytest.raises(LostError, match=r"replaced 1 times in a row \(train.max_restarts\)"):
            await pool.states()

    asyncio.run(main())


def test_an_answer_resets_the_count_of_restarts(world):
    async def main():
        pool = world.pool(1)
        for _ in range(3):
            world.handles[-1].answer = ActorDiedError()
            await pool.states()
            world.handles[-1].answer = []
            await pool.states()
        assert len(world.handles) == 4

    asyncio.run(main())


def test_what_blocks_a_runner_is_told_with_the_runner(world):
    async def main():
        pool = world.pool(2)
        world.handles[1].blocked = [Block("agent.py:7", 6.0)]
        assert await pool.blocks() == [("runner1", Block("agent.py:7", 6.0))]

    asyncio.run(main())


def test_the_worst_delay_is_asked_for_and_a_dead_runner_has_none(world):
    async def main():
        pool = world.pool(3)
        world.handles[0].lag_s = 2.0
        world.handles[1].lag_s = 11.5
        world.handles[2].answer = ActorDiedError()
        assert await pool.loop_times() == LoopTimes(11.5, 0.0)

    asyncio.run(main())


def test_a_group_that_kills_its_runner_every_time_costs_no_other_its_last_attempt(world):
    """Groups 0, 1 and 2 are lost twice with the runner that 1 kills; then one at a time is tried."""

    async def main():
        pool = world.pool(1, max_restarts=5)
        groups = await started(pool, [0, 1, 2])
        for _ in range(2):
            for result in world.handles[-1].results:
                result.set_exception(ActorDiedError())
            await asyncio.sleep(0.01)
        assert [len(handle.results) for handle in world.handles] == [3, 3, 1]
        world.handles[2].results[0].set_result(DONE)
        await asyncio.sleep(0.01)
        assert len(world.handles[2].results) == 2
        world.handles[2].results[1].set_exception(ActorDiedError())  # group 1 again
        await asyncio.sleep(0.01)
        (last,) = world.handles[3].results
        last.set_result(DONE)
        return await asyncio.gather(*groups, return_exceptions=True)

    first, killer, third = asyncio.run(main())
    assert first[0] == third[0] == DONE
    assert isinstance(killer, InfraFailure) and killer.reason == "runner"


def test_groups_that_are_restarted_without_a_loss_do_not_wait_for_each_other(world):
    async def main():
        pool = world.pool(1)
        groups = await started(pool, [0, 1])
        for _ in range(2):
            pool.again({"0:0", "0:1"})
            await asyncio.sleep(0.01)
        assert len(world.handles[0].results) == 6
        for result in world.handles[0].results[4:]:
            result.set_result(DONE)
        await asyncio.gather(*groups)

    asyncio.run(main())
