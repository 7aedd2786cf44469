"""An agent whose file declares a token column of its own, and an engine that fills it. Nothing else knows of it."""

from dataclasses import replace

import ray

from molt.agents import StepEnvRunner
from molt.columns import Column
from tests.fakes import FakeEngine
from tests.sevens import Sevens

SURPRISE = Column("surprise", "float64", fill=-1.0, shape=(2,))
"""For each sampled token `[-logprob, token id]`."""


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
