"""An agent whose file declares token columns of its own, and engines that fill them. Nothing else knows of them."""

from dataclasses import replace

import numpy as np
import ray

from molt.agents import StepEnvRunner
from molt.columns import Column
from tests.fakes import FakeEngine
from tests.sevens import Sevens

SURPRISE = Column("surprise", "float64", fill=-1.0, shape=(2,))
"""For each sampled token `[-logprob, token id]`."""


BULK = Column("bulk", "float32", fill=0.0, shape=(4096,))
"""As large as what routing adds to a token; an engine still answers a turn of four without the object store."""


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sevens)


class ColumnEngine(FakeEngine):
    """Every turn has the column."""

    async def generate(self, *args, **kwargs):
        turn = await super().generate(*args, **kwargs)
        values = [[-logprob, token] for logprob, token in zip(turn.logprobs, turn.token_ids, strict=True)]
        return replace(turn, sampled=turn.sampled.with_column(SURPRISE, values))


ColumnEngineWorker = ray.remote(max_concurrency=16384)(ColumnEngine)


class BulkEngine(FakeEngine):
    """Every turn has the large column."""

    async def generate(self, *args, **kwargs):
        turn = await super().generate(*args, **kwargs)
        values = np.ones((len(turn.token_ids), *BULK.shape), BULK.dtype)
        return replace(turn, sampled=turn.sampled.with_column(BULK, values))


BulkEngineWorker = ray.remote(max_concurrency=16384)(BulkEngine)
