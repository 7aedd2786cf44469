"""The task of `agents.py` with a tool: look a number up, and say what is kept under it.

What is kept under a number is a keyed hash of it: no model can know that, it has to call. Turn 1 is for the call,
turn 2 for the answer. `rows` makes the prompts, `lesson` what a careless teacher does with one.
"""

import hashlib
import random
from typing import Any

from molt.agents import Env, Result, StepEnvRunner

DIGITS = 5
NAME = "look_up"
NOTHING = "?"
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "What is kept under a number.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
OPEN = f'<tool_call>{{"name": "{NAME}", "arguments": {{"key": "'
CLOSE = '"}}</tool_call>'
"""What surrounds the number of a call, in the format of Hermes and Qwen."""


class LookUp(Env):
    """Two turns; whatever the first one says, only the second can be right."""

    async def step(self, state) -> Result:
        if state["turn"] == 0:
            found = [called(call) for call in state["tool_calls"]]
            counts = {"calls": len(found), "malformed": len(state["malformed_calls"])}
            return Result(0.0, found or NOTHING, terminated=False, info=counts)
        return Result(float(state["action"] == state["label"]))


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(LookUp)


def called(call: dict[str, Any]) -> str:
    """The result of a tool call; NOTHING for one that asks for something else."""
    key = call["arguments"].get("key")
    return kept(key) if call["name"] == NAME and isinstance(key, str) and key.isdigit() else NOTHING


def kept(number: str) -> str:
    """The digits that are kept under a number."""
    digest = hashlib.blake2b(number.encode(), key=b"look_up", digest_size=8).digest()
    return f"{int.from_bytes(digest, 'little') % 10**DIGITS:0{DIGITS}d}"


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` prompts, all different."""
    numbers = random.Random(seed).sample(range(10**DIGITS), count)
    keys = [f"{number:0{DIGITS}d}" for number in numbers]
    return [{"input": key, "label": kept(key), "tools": [TOOL], "data_source": NAME} for key in keys]


def lesson(row: dict[str, Any], seed: int, slips: float, unclosed: float) -> list[dict[str, Any]]:
    """What follows the prompt where a careless teacher plays: each digit of the call and of the answer is a random one
    with probability `slips`, and a call is left `unclosed`, which ends the lesson."""
    chance = random.Random(f"{seed}:{row['input']}")

    def said(digits: str) -> str:
        return "".join(str(chance.randrange(10)) if chance.random() < slips else digit for digit in digits)

    key = said(row["input"])
    if chance.random() < unclosed:
        return [{"role": "assistant", "content": OPEN + key}]
    call = {"id": "call", "type": "function", "function": {"name": NAME, "arguments": {"key": key}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": kept(key), "tool_call_id": "call", "name": NAME},
        {"role": "assistant", "content": said(kept(key))},
    ]
