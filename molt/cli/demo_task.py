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
        return Result(reward=float(state["action"] == state["label"]))


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(ReverseDigits)


def rows(count: int, seed: int, exclude: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """`count` different prompts that are not in `exclude`: `{"input": "12345", "label": "54321"}`."""
    numbers = [f"{n:0{DIGITS}d}" for n in range(10**DIGITS)]
    random.Random(seed).shuffle(numbers)
    chosen = [number for number in numbers if number not in exclude][:count]
    return [{"input": number, "label": number[::-1], "data_source": "reverse"} for number in chosen]


def careless(row: dict[str, str], seed: int, slips: float) -> dict[str, str]:
    """The row as a careless teacher answers it: each digit is replaced by a random one with probability `slips`."""
    chance = random.Random(f"{seed}:{row['input']}")
    answer = [str(chance.randrange(10)) if chance.random() < slips else digit for digit in row["label"]]
    return row | {"label": "".join(answer)}
