"""A whole agent harness, unmodified, as the agent: Claude Code or opencode works in a directory of its own.

    npm install -g @anthropic-ai/claude-code opencode-ai
    molt rl --train.agent_path examples/python/agents/harness.py --data.label_key label --data.apply_chat_template ...

The reward is whether `answer.txt` holds the row's label when the harness has ended. `HARNESS` says which one runs.
"""

import json
import tempfile
from pathlib import Path

from molt.agents import ChatAgent, ChatAgentRunner, ChatContext, Result
from molt.agents.chat_runner import Finished

HARNESS, TIMEOUT_S = "claude", 600.0
CLAUDE_ENV = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_MAX_RETRIES": "2",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a hash per prompt in the system message: every turn would be a branch
}  # fmt: skip
PACKAGES = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}


async def claude_code(ctx: ChatContext, task: str, folder: Path) -> Finished:
    """`claude -p` with Bash alone; `--bare` keeps its first request at some 4 KB."""
    flags = ("-p", task, "--bare", "--allowedTools", "Bash", "--model", ctx.model)
    env = {**CLAUDE_ENV, "HOME": str(folder)}
    return await ctx.harness("claude", *flags, cwd=folder, env=env, timeout_s=TIMEOUT_S)


async def opencode(
    ctx: ChatContext, task: str, folder: Path, protocol: str = "chat", context: int | None = None
) -> Finished:
    """`opencode run` over one of the three protocols. context: in tokens; None: that of the run."""
    if context is None:
        context = ctx.max_len
    limit = {"context": context, "output": context // 8}
    options = {"baseURL": ctx.openai_url, "apiKey": ctx.api_key}
    provider = {"npm": PACKAGES[protocol], "options": options, "models": {ctx.model: {"limit": limit}}}
    (folder / "opencode.json").write_text(json.dumps({"provider": {"molt": provider}, "permission": {"*": "allow"}}))
    flags = ("run", "--title", "task", "-m", f"molt/{ctx.model}", task)
    env = {"HOME": str(folder), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return await ctx.harness("opencode", *flags, cwd=folder, env=env, timeout_s=TIMEOUT_S)


class FileTask(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder, task = Path(name), ctx.prompt[-1]["content"]
            done = await {"claude": claude_code, "opencode": opencode}[HARNESS](ctx, task, folder)
            answer = folder / "answer.txt"
            found = answer.read_text(errors="replace").strip() if answer.is_file() else ""
        if done.returncode and not done.timed_out and not ctx.session.tree.nodes:
            raise RuntimeError(f"it asked the model nothing and ended with {done.returncode}: {done.stderr[-500:]}")
        truncated = "time" if done.timed_out else False
        return Result(reward=float(found == str(ctx.label)), truncated=truncated, info={"exit": done.returncode})


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(FileTask)
