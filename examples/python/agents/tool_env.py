"""An `Env` whose model may run Python in the sandbox; the reward is whether its last line is the label.

    molt rl --train.agent_path examples/python/agents/tool_env.py --data.tools_key tools --rollout.max_turns 4 ...

Rows need a column of tools, such as `[TOOL]`, with the schema below.
"""

import sys
from pathlib import Path

from molt.agents import Env, Result, StepEnvRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from python_sandbox import run_python

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python and see what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class PythonTool(Env):
    async def step(self, state) -> Result:
        if state["tool_calls"]:
            return Result(0.0, [await self.run(call) for call in state["tool_calls"]], terminated=False)
        if state["malformed_calls"]:  # the model's own doing: it is told, and may try again
            return Result(0.0, "That call is not valid JSON. Try again.", terminated=False)
        last = state["content"].strip().rpartition("\n")[2]
        return Result(float(last == str(state["label"])), info={"turns": state["turn"] + 1})

    async def run(self, call) -> str:
        code = call["arguments"].get("code") if call["name"] == "python" else None
        if not isinstance(code, str):
            return "There is one tool, `python`, with the argument `code`."
        done = await run_python(code)  # a sandbox that cannot be built is an InfraFailure, not a reward of 0
        return (done.stdout + done.stderr or "(nothing was printed)") + (
            f"\nended: {done.killed}" if done.killed else ""
        )


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(PythonTool)
