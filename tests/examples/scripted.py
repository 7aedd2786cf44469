"""Episodes of an example agent against a model that answers what it is told."""

import asyncio
from pathlib import Path

import numpy as np

from molt.agents.load import load_runner
from molt.agents.step_runner import Episode, EpisodeContext
from molt.chat.render import Renderer
from molt.types import Prompt, Turn
from tests.streams import turn_from
from tests.tiny import END_ID, char_tokenizer

AGENTS = Path(__file__).parents[2] / "examples" / "python" / "agents"
TOKENIZER = char_tokenizer()


class Script:
    """Answers in order, each closed by the end token where it fits; remembers the prompts as text."""

    def __init__(self, answers: tuple[str, ...]):
        self.answers = list(answers)
        self.prompts: list[str] = []

    async def __call__(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        self.prompts.append(TOKENIZER.decode(prompt_ids))
        ids = [*TOKENIZER(self.answers.pop(0), add_special_tokens=False).input_ids, END_ID][:max_tokens]
        n = len(ids)
        arrays = np.array(prompt_ids, np.int32), np.array(ids, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32)
        return turn_from(*arrays, "stop" if ids[-1] == END_ID else "length")


def play(file: str, question: str, label: object, *answers: str, chat: bool = True, **limits) -> tuple[Episode, Script]:
    """One episode of the agent in `examples/python/agents/FILE`, loaded as a run loads it."""
    script = Script(answers)
    messages = [{"role": "user", "content": question}] if chat else None
    context = EpisodeContext(
        Prompt(0, 0, 0, messages, None if chat else question, label=label),
        script,
        Renderer(TOKENIZER, apply_chat_template=chat),
        seed=0,
        max_len=4096,
        **limits,
    )
    return asyncio.run(load_runner(str(AGENTS / file)).run(context)), script
