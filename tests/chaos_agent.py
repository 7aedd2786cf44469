"""The agent of `tests/chaos.py`: sevens, counted by a subprocess that may be killed like anything else."""

import asyncio

from molt.agents import Env, Result, StepEnvRunner

COUNT = 'sleep 0.05; printf %s "$1" | tr -cd 7 | wc -c'


class Sevens(Env):
    async def step(self, state):
        counter = await asyncio.create_subprocess_exec(
            "sh", "-c", COUNT, "molt-chaos-env", state["action"], stdout=asyncio.subprocess.PIPE
        )
        out, _ = await counter.communicate()
        if counter.returncode:
            raise RuntimeError(f"the environment died with code {counter.returncode}")
        return Result(reward=int(out) / 4)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Sevens)
