"""Claude Code or opencode, as the row's label says, as the agent of a run; the reward is the share of small token ids.

Anything that a random model can change would do: what matters is that its nonsense goes through the harness.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from molt.agents import ChatAgent, ChatAgentRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python" / "agents"))
import harness

harness.TIMEOUT_S = 90.0
SMALL = 25_000
"""About half of SmolLM2's vocabulary."""


class Reply(ChatAgent):
    async def run(self, ctx):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            play = {"claude": harness.claude_code, "opencode": harness.opencode}[ctx.label]
            done = await play(ctx, ctx.prompt[-1]["content"], Path(name))
        sampled = np.concatenate([node.token_ids for node in ctx.session.tree.nodes])
        return Result(float((sampled < SMALL).mean()), truncated=done.timed_out, info={"exit": done.returncode})


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Reply)
