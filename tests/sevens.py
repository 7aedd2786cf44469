"""An agent that a random model learns in a few steps: the reward is the share of sevens in the answer."""

import os
from pathlib import Path

from molt.agents import Env, Result, StepEnvRunner


class Sevens(Env):
    async def step(self, state):
        self.misbehave(state)
        action = state["action"]
        return Result(reward=action.count("7") / 4, info={"sevens": action.count("7")})

    def misbehave(self, state):
        """The label says what goes wrong: `raise`, or `die:FILE` once, until FILE exists."""
        label = state["label"] or ""
        if "raise" in label:
            raise RuntimeError("the sandbox is gone")
        if "die" in label:
            flag = Path(label.split(":", 1)[1])
            if not flag.exists():
                flag.touch()
                os._exit(1)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sevens)
