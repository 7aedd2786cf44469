"""Ranks as the driver sees them: whose fault it is when one fails."""

import asyncio
import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayTaskError

from molt.config import FsdpConfig
from molt.errors import RankLostError
from molt.parallel.shape import MeshShape
from molt.train.rank_worker import Ranks, RankWorker

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Rank(RankWorker):
    """Two of them meet in a collective, which may take 5 s; the second one has a fault."""

    def step(self, fault: str) -> None:
        is_second = dist.get_rank() == 1
        if is_second and fault == "hang":
            time.sleep(3600)
        if is_second and fault == "raise":
            raise ValueError("a plug-in's mistake")
        dist.all_reduce(torch.ones(1), group=self.model)


def build(settings, mesh):
    return dist.new_group(timeout=timedelta(seconds=5))


@pytest.mark.parametrize(("fault", "error", "message"), [
    ("hang", RankLostError, r"policy rank hangs: another one waited for it and timed out \(.*Timed out waiting 5000ms"),
    ("raise", RayTaskError, "a plug-in's mistake"),
])  # fmt: skip
def test_a_rank_that_hangs_is_lost_and_one_that_raises_is_not(ray_session, fault, error, message):
    async def main():
        ranks = Ranks(lambda rank: Rank.remote(), MeshShape(dp_shard=2), name="policy", timeout_s=60)
        try:
            await ranks.start(build, SimpleNamespace(fsdp=FsdpConfig(device="cpu")))
            await ranks.all([worker.step.remote(fault) for worker in ranks.workers])
        finally:
            for worker in ranks.workers:
                ray.kill(worker)

    with pytest.raises(error) as raised:
        asyncio.run(main())
    assert re.search(message, str(raised.value))
