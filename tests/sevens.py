"""An agent that a random model learns in a few steps: the reward is the share of sevens in the answer."""

import asyncio
import os
from pathlib import Path

from molt.agents import Env, Result, StepEnvRunner


class Sevens(Env):
    async def step(self, state):
        await self.misbehave(state)
        action = state["action"]
        if state["label"] == "nan":
            return Result(reward=float("nan"))
        return Result(reward=action.count("7") / 4, info={"sevens": action.count("7")})

    async def misbehave(self, state):
        """The label says what goes wrong: `raise`, `hang`, `nan`, or `die:FILE` once, until FILE exists."""
        label = state["label"] or ""
        if label == "raise":
            raise RuntimeError("the sandbox is gone")
        if label == "hang":
            await asyncio.sleep(3600)
        if label.startswith("die:"):
            flag = Path(label.split(":", 1)[1])
            if not flag.exists():
                flag.touch()
                os._exit(1)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sevens)
