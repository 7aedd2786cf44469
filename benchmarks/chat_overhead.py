"""What the chat server adds to a turn over a direct call of the engine, in milliseconds.

    python benchmarks/chat_overhead.py [--sessions 512] [--repeats 7]

The engine is simulated: the same turn after a fixed time, whatever the prompt. A turn of the conversation is a tool
call of the model and its result, about 200 tokens; every request carries the whole history, as the protocols have it.
Clients and server share one process and one event loop, as in a runner.

    one session     Added: time from a request to its reply, less that of a direct call just before. `plain` is a kept
                    connection and a body that is ready, so that is what molt adds. `AsyncOpenAI` is the stock client,
                    as in `examples/python/agents/chat_minimal.py`, with its own building and reading.
    growth          What a turn adds grows with the history, which is sent, read and compared. Linear: a line through
                    the first half of 128 turns foretells the last quarter; were it quadratic, that would be near 2.
                    In CPU time of the process, which other processes disturb less.
    many sessions   All at once. The longest callback of the event loop, in CPU time of its thread; what runs in other
                    threads is not in it, garbage collections in callbacks are.

Last line: `chat_overhead ratio=MS`: the median of what is added, plain, at one session of 32 turns. 3 is asked for.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import numpy as np
from _common import spread, timed_callbacks
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from molt.agents.chat_runner import API_KEY, MODEL
from molt.chat.chat_renderer import ChatRenderer
from molt.chat.protocol import Message
from molt.chat.server import ChatServer
from molt.chat.session import Session
from molt.columns import token_columns
from molt.types import Turn
from tests.tiny import QWEN3, bpe_tokenizer

SHORT = 32
LONG = 128
MANY = 8
"""Turns of one session, of the one that shows growth, of each of many."""
ENGINE_S = 0.005
BUSY_ENGINE_S = 1.0
MAX_LEN = 1 << 20
MAX_ADDED_MS = 3.0
MAX_GROWTH = 1.25
MAX_CALLBACK_MS = 50.0

ARGUMENTS = {"path": "src/module.py", "pattern": "def the_quick_brown_fox", "flags": "word, ignore case"}
SAID = f"I look it up.\n<tool_call>\n{json.dumps({'name': 'search', 'arguments': ARGUMENTS})}\n</tool_call>"
FOUND = "the quick brown fox jumps over the lazy dog\n" * 6
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in ARGUMENTS}, "required": ["path"]}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "Finds lines.", "parameters": SCHEMA}}]
OPENING = [
    {"role": "system", "content": "You search through files. " * 20},
    {"role": "user", "content": "Where does the fox jump? " * 4},
]


class SimulatedEngine:
    """`call_model`: the same turn after `seconds`. Keeps the prompt it was last given."""

    def __init__(self, renderer: ChatRenderer, seconds: float):
        self.seconds = seconds
        self.prompt_ids = [0]
        ids = [*renderer.tokenizer.encode(SAID), renderer.eos_ids[0]]
        self.sampled = token_columns(ids, np.zeros(len(ids)), np.full(len(ids), -0.5))

    async def __call__(self, prompt_ids: list[int], max_tokens: int) -> Turn:
        self.prompt_ids = prompt_ids
        await asyncio.sleep(self.seconds)
        return Turn(np.asarray(prompt_ids, np.int32), self.sampled, "stop")


class Plain:
    """One kept connection, and no more work than HTTP asks for."""

    name = "plain"

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock

    async def connect(self, url: str) -> None:
        place = urlsplit(url)
        self.reader, self.writer = await asyncio.open_connection(place.hostname, place.port)
        self.head = f"POST {place.path}/v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-length: "

    async def ask(self, messages: list[Message]) -> tuple[Message, float]:
        """The reply's message, and the seconds from the first byte of the request to the last of the reply."""
        body = json.dumps({"model": MODEL, "messages": messages, "tools": TOOLS}).encode()
        request = f"{self.head}{len(body)}\r\n\r\n".encode() + body
        began = self.clock()
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        reply = await self.reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        seconds = self.clock() - began
        return json.loads(reply)["choices"][0]["message"], seconds

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


class Stock:
    """The OpenAI client."""

    name = "AsyncOpenAI"

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock

    async def connect(self, url: str) -> None:
        http = DefaultAsyncHttpxClient(verify=False)
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, http_client=http)

    async def ask(self, messages: list[Message]) -> tuple[Message, float]:
        """The reply's message, and the seconds of the call."""
        began = self.clock()
        reply = await self.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        seconds = self.clock() - began
        return reply.choices[0].message.model_dump(exclude_none=True), seconds

    async def close(self) -> None:
        await self.client.close()


async def converse(server: ChatServer, session: Session, client: Plain | Stock, turns: int) -> AsyncIterator[float]:
    """Plays the conversation; yields the seconds of each turn."""
    url = server.open(session)
    messages = list(OPENING)
    await client.connect(url)
    for _ in range(turns):
        said, seconds = await client.ask(messages)
        yield seconds
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": FOUND}]
    await client.close()
    server.close(url)
    assert len(session.tree.leaves()) == 1, "a turn was no continuation of the one before"


async def one_session(
    renderer: ChatRenderer, make: type[Plain | Stock], turns: int, repeats: int, clock: Callable[[], float]
) -> np.ndarray:
    """`[repeats, turns]`, milliseconds of `clock` added to each turn. A session before them warms up."""
    engine = SimulatedEngine(renderer, ENGINE_S)
    added = []

    async def direct() -> float:
        began = clock()
        await engine(engine.prompt_ids, 1)
        return clock() - began

    async with ChatServer() as server:
        for _ in range(repeats + 1):
            alone = await direct()
            spent = []
            async for seconds in converse(server, Session(renderer, engine, max_len=MAX_LEN), make(clock), turns):
                spent.append(seconds - alone)
                alone = await direct()
            added.append(spent)
    return 1e3 * np.asarray(added[1:])


async def many_sessions(renderer: ChatRenderer, make: type[Plain | Stock], count: int) -> tuple[list[float], float]:
    """Milliseconds of every callback of the event loop, and of the whole process, while `count` sessions play."""
    engine = SimulatedEngine(renderer, BUSY_ENGINE_S)

    async def play() -> None:
        async for _ in converse(server, Session(renderer, engine, max_len=MAX_LEN), make(), MANY):
            pass

    async with ChatServer() as server:
        await play()  # warms up
        began = time.process_time()
        with timed_callbacks() as callbacks:
            await asyncio.gather(*(play() for _ in range(count)))
        return callbacks, 1e3 * (time.process_time() - began)


def show_one(name: str, added: np.ndarray) -> None:
    early = spread(added[:, :8].ravel())
    late = spread(added[:, -8:].ravel())
    print(f"  {name:12} {spread(added.ravel())}; turns 1 to 8 {early}, {SHORT - 7} to {SHORT} {late}")


def show_growth(added: np.ndarray) -> None:
    turns = np.arange(LONG)
    medians = np.median(added, axis=0)
    half = LONG // 2
    last = slice(-LONG // 4, None)
    slope, start = np.polyfit(turns[:half], medians[:half], 1)
    ratio = float(medians[last].mean() / (start + slope * turns[last]).mean())
    quarters = ", ".join(f"{quarter.mean():.2f}" for quarter in np.split(medians, 4))
    print(f"  means of its quarters {quarters}; a line through the first half: {start:.2f} + {slope:.4f} a turn")
    print(f"  the last quarter over that line {ratio:.2f}{' (not linear)' * (ratio > MAX_GROWTH)}")


def show_many(name: str, callbacks: list[float], cpu: float, turns: int) -> None:
    longest = max(callbacks)
    rare = np.quantile(callbacks, 0.999)
    print(
        f"  {name:12} longest callback {longest:.1f} ms{' (too long)' * (longest > MAX_CALLBACK_MS)}, 99.9 % below "
        f"{rare:.1f}; CPU per turn {cpu / turns:.2f} ms, of which the event loop {sum(callbacks) / turns:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    renderer = ChatRenderer(bpe_tokenizer(QWEN3))
    print(f"one session of {SHORT} turns, {options.repeats} times, ms added: median (smallest to largest)")
    stock, cpu, added = (
        asyncio.run(one_session(renderer, make, SHORT, options.repeats, clock))
        for make, clock in ((Stock, time.perf_counter), (Plain, time.process_time), (Plain, time.perf_counter))
    )
    for name, milliseconds in ((Stock.name, stock), (Plain.name, added), ("plain, CPU", cpu)):
        show_one(name, milliseconds)
    print(f"growth, plain, a session of {LONG} turns, {options.repeats} times, ms of CPU added: medians of each turn")
    show_growth(asyncio.run(one_session(renderer, Plain, LONG, options.repeats, time.process_time)))
    print(f"{options.sessions} sessions of {MANY} turns at once")
    for make in Plain, Stock:
        show_many(make.name, *asyncio.run(many_sessions(renderer, make, options.sessions)), options.sessions * MANY)
    ratio = statistics.median(added.ravel())
    if ratio > MAX_ADDED_MS:
        print(f"more than the {MAX_ADDED_MS:g} ms that are asked for")
    print(f"chat_overhead ratio={ratio:.2f}")


if __name__ == "__main__":
    main()
