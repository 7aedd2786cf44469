"""An agent as `sevens.py` whose grader does what no grader should: the label of the prompt says what."""

import asyncio
import os
import sys
import time
from pathlib import Path

from molt.agents import Env, Result, StepEnvRunner


class GraderTimedOut(BaseException):
    """As the time limits of some libraries are."""


class Exiting(Env):
    def step(self, state):
        self.misbehave(state["label"] or "")
        return Result(reward=state["action"].count("7") / 4)

    def misbehave(self, label):
        if label == "exit":
            sys.exit(1)
        if label == "time limit":
            raise GraderTimedOut("2 s")
        if label == "end the process":
            os._exit(1)

    async def close(self):
        if self.label == "exit in a task":
            await asyncio.gather(asyncio.sleep(0), self.exit_later())
        what, _, file = (self.label or "").partition(":")
        if what == "block" and not Path(file).exists():
            Path(file).touch()
            time.sleep(7)
        if what == "exit in a callback" and not Path(file).exists():
            Path(file).touch()
            asyncio.get_running_loop().call_soon(sys.exit)
            await asyncio.sleep(60)

    async def exit_later(self):
        await asyncio.sleep(0)
        sys.exit(1)

    def reset(self, state):
        self.label = state["label"]
        return state


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Exiting)
