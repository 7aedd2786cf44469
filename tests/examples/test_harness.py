"""Claude Code and opencode, unmodified, against a session whose model is scripted to call their tools.

They come from npm and are no part of the set-up: `npm install -g @anthropic-ai/claude-code opencode-ai`.
"""

import asyncio
import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from molt.agents import ChatAgent, ChatAgentRunner, Result
from molt.agents.step_runner import EpisodeContext
from molt.chat.chat_renderer import ChatRenderer
from molt.types import Prompt
from tests.streams import turn_from
from tests.tiny import ALPHABET, END_ID, QWEN3, char_tokenizer

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("harness_example", ROOT / "examples/python/agents/harness.py")
harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(harness)
# What their system prompts are written in: arrows, boxes and emoji too.
TOKENIZER = char_tokenizer(
    QWEN3, ALPHABET + "\t\r" + "".join(map(chr, [*range(0xA0, 0x3000), *range(0x1F300, 0x1FB00)]))
)
CASES = {"claude": harness.claude_code} | {
    f"opencode {protocol}": partial(harness.opencode, protocol=protocol, context=200_000)
    for protocol in harness.PACKAGES
}


pytestmark = pytest.mark.full  # tests/chat/test_scenarios.py plays what these clients send


def call(tool: str, command: str) -> str:
    arguments = {"command": command, "description": "a step"}
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def scripted(tool: str):
    """Writes the file, reads it, and says so: by how many results the prompt holds."""
    answers = [call(tool, "echo 42 > answer.txt"), call(tool, "cat answer.txt"), "The file holds 42."]
    sampled = []

    async def model(prompt_ids, max_tokens, media=()):
        results = TOKENIZER.decode(prompt_ids).count("</tool_response>")
        ids = [*TOKENIZER.encode(answers[min(results, 2)], add_special_tokens=False), END_ID][:max_tokens]
        sampled.append(ids)
        as_array = np.asarray(ids, np.int32)
        logprobs, versions = -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32)
        return turn_from(np.asarray(prompt_ids, np.int32), as_array, logprobs, versions, "stop")

    return model, sampled


@pytest.mark.parametrize("name", CASES)
def test_a_stock_harness_completes_a_task_in_one_segment(name, tmp_path):
    if shutil.which(name.split()[0]) is None:
        pytest.skip(f"{name.split()[0]} is not installed: npm install -g @anthropic-ai/claude-code opencode-ai")

    class Agent(ChatAgent):
        async def run(self, ctx):
            done = await CASES[name](ctx, "Write 42 to answer.txt, then read it.", tmp_path)
            assert done.returncode == 0 and not done.timed_out, done.stderr[-2000:]
            return Result(reward=float((tmp_path / "answer.txt").read_text().strip() == "42"))

    async def episode(model):
        runner = ChatAgentRunner(Agent)
        prompt = Prompt(0, 0, 0, messages=[{"role": "user", "content": "x"}], text=None)
        chat = ChatRenderer(TOKENIZER, [END_ID])
        try:
            return await runner.run(EpisodeContext(prompt, model, None, 0, 400_000, max_new_tokens=4000, chat=chat))
        finally:
            await (await runner._server).__aexit__()

    model, sampled = scripted("Bash" if name == "claude" else "bash")
    played = asyncio.run(episode(model))
    assert played.outcome.reward == 1.0
    assert len(played.tree.nodes) == len(sampled) >= 3
    (main,) = (sample for sample in played.samples if "The file holds 42." in TOKENIZER.decode(sample.token_ids))
    # One segment from the first call to the last answer, and nothing is trained that was not sampled.
    trained = [token for ids in sampled for token in ids]
    assert main.token_ids[main.mask].tolist() == trained
    assert TOKENIZER.decode(main.token_ids).count("</tool_response>") == 2
