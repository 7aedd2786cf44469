"""`tests/sevens.py` with a tool: half the reward is for a call in the first turn, half for the sevens of the second."""

from molt.agents import Env, Result, StepEnvRunner

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class ToolSevens(Env):
    async def step(self, state):
        if state["turn"] == 1:
            return Result(reward=state["action"].count("7") / 8)
        calls, malformed = len(state["tool_calls"]), len(state["malformed_calls"])
        info = {"calls": calls, "malformed": malformed}
        return Result(0.5 * bool(calls), ["4"] * calls or "9", terminated=False, info=info)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(ToolSevens)
