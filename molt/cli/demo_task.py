"""The demo's task and its agent: say five digits backwards.

This file is what a user writes: an `Env` that judges the model's answer, and the `AgentRunner` that
`--train.agent_path` looks for. `rows` and `careless` make the datasets.
"""

import random

from molt.agents import Env, Result, StepEnvRunner

DIGITS = 5


class ReverseDigits(Env):
    """One turn: right or wrong."""

    async def step(self, state) -> Result:
        is_right = state["action"] == state["label"]
        return Result(reward=float(is_right))


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(ReverseDigits)


def rows(count: int, seed: int, exclude: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """`count` different prompts that are not in `exclude`: `{"input": "12345", "label": "54321"}`."""
    numbers = [f"{number:0{DIGITS}d}" for number in range(10**DIGITS)]
    random.Random(seed).shuffle(numbers)
    usable = [number for number in numbers if number not in exclude]
    return [_row(number) for number in usable[:count]]


def _row(number: str) -> dict[str, str]:
    return {"input": number, "label": number[::-1], "data_source": "reverse"}


def careless(row: dict[str, str], seed: int, slips: float) -> dict[str, str]:
    """The row as a careless teacher answers it: each digit is replaced by a random one with probability `slips`."""
    chance = random.Random(f"{seed}:{row['input']}")
    answer = ""
    for digit in row["label"]:
        if chance.random() < slips:
            digit = str(chance.randrange(10))
        answer += digit
    return {**row, "label": answer}
