"""An agent that a random model learns in a few steps: the reward is the share of sevens in the answer."""

import asyncio
import os
import time
from contextlib import suppress
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
        """The label says what goes wrong: `raise`, `hang`, `nan`; or `die:FILE`, `hang:FILE`, `block:FILE`, `deaf:FILE`
        (it does not let itself be cancelled) once, until FILE exists; or `hold:FILE`, every time until FILE is gone."""
        label = state["label"] or ""
        if label == "raise":
            raise RuntimeError("the sandbox is gone")
        if label == "hang":
            await asyncio.sleep(3600)
        once, _, file = label.partition(":")
        if once == "hold":
            while Path(file).exists():
                Path(f"{file}.held").touch()
                await asyncio.sleep(0.1)
        elif file and not Path(file).exists():
            Path(file).touch()
            if once == "die":
                os._exit(1)
            if once == "block":
                time.sleep(3600)
            while True:
                with suppress(asyncio.CancelledError if once == "deaf" else ()):
                    await asyncio.sleep(3600)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sevens)
