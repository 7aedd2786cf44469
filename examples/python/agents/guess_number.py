"""Guess a number from 1 to 100: after each guess the environment says "higher" or "lower".

    python examples/python/agents/guess_number.py 4000 > guess.jsonl

    molt rl --train.agent_path examples/python/agents/guess_number.py \\
        --actor.model_name_or_path MODEL_DIR \\
        --data.prompt_dataset guess.jsonl --data.label_key label \\
        --data.apply_chat_template --data.max_len 1024 --rollout.max_new_tokens 64 \\
        --algo.advantage.estimator grpo --rollout.batch_size 32 --rollout.n_samples_per_prompt 8

The secret is the label of the row, so the rollouts of a group guess the same number and their rewards
can be compared. Halving the interval needs at most 7 guesses.
"""

import json
import random
import re
import sys

from molt.agents import Env, PolicyFailure, Result, StepEnvRunner

LOW, HIGH, MAX_GUESSES = 1, 100, 8
PROMPT = (
    f"I am thinking of a whole number from {LOW} to {HIGH}. You have {MAX_GUESSES} guesses. After each I say "
    "higher or lower. Answer with a number."
)
GUESS = re.compile(r"(?<!\d)\d{1,3}(?!\d)")


class GuessNumber(Env):
    """Several turns: 1 for the first guess, 0.1 less for every further one, 0 when none of them was right."""

    async def step(self, state) -> Result:
        guesses = GUESS.findall(state["action"])
        if not guesses:
            # The model's own doing: trained with this reward, and counted by its reason.
            raise PolicyFailure(reward=0.0, reason="no guess")
        guess, secret, used = int(guesses[-1]), int(state["label"]), state["turn"] + 1
        if guess == secret:
            return Result(reward=1.0 - 0.1 * state["turn"], score=1.0, info={"guesses": used})
        if used == MAX_GUESSES:  # losing is an end of the game, not a cut: terminated, not truncated
            return Result(reward=0.0, score=0.0, info={"guesses": used})
        return Result(reward=0.0, score=0.0, observation="higher" if guess < secret else "lower", terminated=False)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(GuessNumber)


def rows(count: int, seed: int = 0) -> list[dict]:
    """A dataset: the same question, another secret each time."""
    draw = random.Random(seed)
    return [{"input": PROMPT, "label": draw.randint(LOW, HIGH), "data_source": "guess"} for _ in range(count)]


if __name__ == "__main__":
    for row in rows(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
        print(json.dumps(row))
