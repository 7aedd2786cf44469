"""A chat server whose model says what the test wrote down.

@scenario("<think>\\nhm\\n</think>\\n\\nyes", "no")
async def test_it(world):
    ... a stock client against world.url; world.model.prompts holds what the engine was given
"""

import asyncio
import functools
import inspect
from dataclasses import dataclass, field

import numpy as np

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.server import ChatServer
from molt.chat.session import Session
from molt.types import Turn
from tests.streams import turn_from
from tests.tiny import END_ID, QWEN3, char_tokenizer

VERSION = 3


@functools.cache
def renderer() -> ChatRenderer:
    return ChatRenderer(char_tokenizer(QWEN3))


def ids_of(text: str) -> list[int]:
    return renderer().tokenizer.encode(text)


def text_of(ids) -> str:
    return renderer().tokenizer.decode([int(i) for i in ids])


def turn_of(text: str, prompt_ids=(), max_tokens: int = 10_000) -> Turn:
    """`text` and the end token, cut at max_tokens; the log-prob of token i is -i - 1."""
    ids = [*ids_of(text), END_ID][:max_tokens]
    return turn_from(
        prompt_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(ids, np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        versions=np.full(len(ids), VERSION, np.int32),
        finish_reason="stop" if ids[-1] == END_ID else "length",
    )


class ScriptedModel:
    """`call_model`: the next text of the script, or the exception in its place, once `gate` is open."""

    def __init__(self, *script: str | Exception):
        self.script, self.prompts, self.cancelled = list(script), [], 0
        self.turns: list[Turn] = []
        """What it sampled, and from what ids."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()

    async def __call__(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        self.prompts.append(text_of(prompt_ids))
        self.called.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        self.turns.append(turn_of(said, prompt_ids, max_tokens))
        return self.turns[-1]


@dataclass
class World:
    server: ChatServer
    session: Session
    model: ScriptedModel
    url: str
    clients: list = field(default_factory=list)
    """To be closed at the end."""

    @property
    def sampled(self) -> list[str]:
        """The trained stretches of every sample, as text."""
        found = []
        for sample in self.session.tree.samples():
            edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.mask, [False]])))
            found.append([text_of(sample.token_ids[a:b]) for a, b in edges.reshape(-1, 2)])
        return found


def scenario(*script: str | Exception, server: dict | None = None, **settings):
    """Runs an async test with a server, and a session at `world.url`; `settings`: of the session."""

    def decorate(test):
        def run():
            async def main():
                async with ChatServer(**(server or {})) as running:
                    model = ScriptedModel(*script)
                    session = Session(renderer(), model, **{"max_len": 8000, **settings})
                    world = World(running, session, model, running.open(session))
                    async with asyncio.timeout(60):
                        await test(world)
                    for client in world.clients:
                        closing = client.close()
                        if inspect.isawaitable(closing):
                            await closing

            asyncio.run(main())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
