"""Ray kills a process itself when its node runs out of memory, and says so by an error that is no `RayActorError`."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from molt.errors import LostError, RankLostError
from molt.parallel.shape import MeshShape
from molt.rollout.engine_group import EngineGroup
from molt.rollout.engine_pool import EnginePool
from molt.rollout.group_task import GroupTask
from molt.rollout.runner_pool import RunnerPool
from molt.train.rank_worker import Ranks
from molt.types import InfraFailure, Prompt


async def gone(*args):
    raise OutOfMemoryError("Task was killed due to the node running low on memory.")


def failed_call() -> asyncio.Future:
    """A call that nobody has to await, as with Ray's references."""
    call = asyncio.ensure_future(gone())
    call.add_done_callback(asyncio.Future.exception)  # else asyncio logs it whenever it is collected, in any test
    return call


class Handle:
    """Of an actor that was killed."""

    def __getattr__(self, name):
        def remote(*args, **kwargs):
            calls = [failed_call() for _ in range(self.returns)]
            return calls[0] if self.returns == 1 else calls

        return SimpleNamespace(remote=remote, options=self._options)

    returns = 1

    def _options(self, num_returns):
        self.returns = num_returns
        return SimpleNamespace(remote=self.__getattr__("again").remote)


def test_a_rank_is_lost():
    ranks = Ranks(lambda rank: Handle(), MeshShape(dp_shard=2), name="policy", timeout_s=5)

    async def main():
        await ranks.evidence()

    with pytest.raises(RankLostError, match=r"a policy rank died .*running low on memory"):
        asyncio.run(main())


def test_an_engine_is_lost_and_its_requests_go_elsewhere():
    async def main():
        events = []
        group = EngineGroup([Handle()], timeout_s=5, on_event=lambda kind, **fields: events.append((kind, fields)))
        assert await group.examine() and not group.present
        ((kind, fields),) = events
        assert kind == "engine_lost" and "running low on memory" in fields["reason"]
        with pytest.raises(InfraFailure, match="3 attempts failed"):
            pool = EnginePool([Handle()], "runner0")
            pool._serving_engine = lambda after: asyncio.sleep(0, after)
            await pool.generate("rollout", [1], None, 5.0)

    asyncio.run(main())


@pytest.mark.parametrize("notices", ["the watchdog", "a group"])
def test_a_runner_is_replaced(monkeypatch, notices):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)

    async def main():
        pool = RunnerPool(lambda name: Handle(), 1, deadline_s=5, attempts=2, max_restarts=1)
        first = pool.runners[0]
        task = GroupTask(Prompt(0, 0, 0, None, "say"), 1, 1.0, 1.0, -1, 4)
        with pytest.raises(LostError, match=r"replaced 1 times in a row .*running low on memory"):
            if notices == "a group":
                await pool.run_group(task)
            for _ in range(2):
                assert await pool.states() == []
        assert killed[0] is first and len(killed) == 2

    asyncio.run(main())
