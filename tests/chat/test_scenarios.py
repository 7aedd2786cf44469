"""What clients do to a conversation, by the stock SDKs over HTTP: what is recorded is what was sampled, once.

Two tool results in one request are in `test_sdks.py`; clients that misbehave are in `test_server.py`.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from itertools import chain, count
from urllib.parse import urlsplit

import anthropic
import numpy as np
import openai
import pytest
import ray

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.server import ChatServer
from molt.chat.session import Session
from molt.rollout.engine_pool import EnginePool
from molt.rollout.engine_worker import EngineSettings, Sampling, VllmEngine
from tests.chat.scripted import World, ids_of, renderer, scenario, text_of
from tests.tiny import QWEN3, char_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
THOUGHT = "<think>\nhm\n</think>\n\n"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


HI = [user("hi")]


class Chat:
    """One protocol, by its stock SDK. A message of role and text is the same in all three."""

    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

    def __init__(self, world: World, url: str | None = None, **options):
        self.client = self.connect(url or world.url, {"api_key": "x", "max_retries": 0} | options)
        world.clients.append(self.client)

    def connect(self, url: str, options: dict):
        return openai.AsyncOpenAI(base_url=f"{url}/v1", **options)

    async def ask(self, said: list[dict], **more) -> tuple[str, list[dict]]:
        """The answer's text, and the answer as it is sent back: here without its reasoning, as many clients do."""
        reply = await self.client.chat.completions.create(model="m", messages=said, **more)
        return reply.choices[0].message.content, [assistant(reply.choices[0].message.content)]

    async def stream(self, said: list[dict], **more) -> str:
        async with self.client.chat.completions.stream(model="m", messages=said, **more) as events:
            return (await events.get_final_completion()).choices[0].message.content

    async def get(self, said: list[dict], streamed: bool, **more) -> str:
        return await self.stream(said, **more) if streamed else (await self.ask(said, **more))[0]


class Responses(Chat):
    tool = {"type": "function", "name": "f", "parameters": SCHEMA}

    async def ask(self, said, **more):
        reply = await self.client.responses.create(model="m", input=said, **more)
        return reply.output_text, [item.model_dump() for item in reply.output]

    async def stream(self, said, **more):
        async with self.client.responses.stream(model="m", input=said, **more) as events:
            return (await events.get_final_response()).output_text


class Messages(Chat):
    tool = {"name": "f", "input_schema": SCHEMA}

    def connect(self, url, options):
        return anthropic.AsyncAnthropic(base_url=url, **options)

    async def ask(self, said, **more):
        reply = await self.client.messages.create(model="m", max_tokens=1000, messages=said, **more)
        return reply.content[-1].text, [{"role": "assistant", "content": reply.content}]

    async def stream(self, said, **more):
        async with self.client.messages.stream(model="m", max_tokens=1000, messages=said, **more) as events:
            return (await events.get_final_message()).content[-1].text


in_every_protocol = pytest.mark.parametrize("protocol", [Chat, Responses, Messages])
streamed_or_not = pytest.mark.parametrize("streamed", [False, True])


def reasons(world: World) -> list[str]:
    return [node.reason for node in world.session.tree.nodes]


def check(world: World, *samples: list[str]) -> None:
    """`samples`: the texts that are trained in each. Every id that the engine saw and sampled is where it belongs."""
    tree, turns = world.session.tree, world.model.turns
    seen = sorted([*turn.prompt_ids.tolist(), *turn.token_ids.tolist()] for turn in turns)
    assert sorted(tree.ids(node).tolist() for node in tree.nodes) == seen
    assert all(sample.token_ids.tolist() in seen for sample in tree.samples())
    # Every turn of the script is trained whole, and once: no two texts of a script are alike.
    assert sorted(world.sampled) == sorted([f"{text}<|im_end|>" for text in texts] for texts in samples)
    assert sorted(chain.from_iterable(world.sampled)) == sorted(text_of(turn.token_ids) for turn in turns)
    for sample, texts in zip(tree.samples(), world.sampled, strict=True):
        own = [-np.arange(1, len(ids_of(text)) + 1) for text in texts]  # the log-probs of a scripted turn
        assert np.array_equal(sample.logprobs[sample.mask], np.concatenate(own))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


@in_every_protocol
def test_an_edited_echo_is_a_branch(protocol):
    @scenario("one", "two", "three")
    async def run(world):
        ask = protocol(world).ask
        _, first = await ask(HI)
        await ask([*HI, *first, user("and?")])
        await ask([*HI, *first, user("and?"), assistant("tw0"), user("so?")])
        assert reasons(world) == ["root", "", "edit"]
        assert "tw0" in world.model.prompts[2] and "two" not in world.model.prompts[2]
        check(world, ["one", "two"], ["three"])  # the second has `one` as context

    run()


@pytest.mark.parametrize("names", ["AB", "AA"])
@in_every_protocol
def test_two_sub_agents_that_interleave_are_two_segments(protocol, names):
    @scenario(*"abcdef")
    async def run(world):
        async def agent(name):
            ask, heard = protocol(world).ask, []
            said = [{"role": "system", "content": f"You are {name}."}, user("go")]
            for _ in range(3):
                text, echo = await ask(said, tools=[protocol.tool])
                heard.append(text)
                said = [*said, *echo, user("on")]
            return heard

        heard = await asyncio.gather(*map(agent, names))
        assert "".join(sorted(chain.from_iterable(heard))) == "abcdef"
        check(world, *heard)

    run()


@in_every_protocol
def test_the_same_request_after_a_delivered_reply_is_another_sample(protocol):
    @scenario("one", "two", "three", "four")
    async def run(world):
        client = protocol(world)
        assert [await client.get(HI, streamed) for streamed in (False, True, False)] == ["one", "two", "three"]
        assert reasons(world) == ["root", "again", "again"]
        assert {node.parent for node in world.session.tree.nodes} == {world.session.tree.root}
        check(world, ["one"], ["two"], ["three"])

    run()


@in_every_protocol
def test_equal_requests_at_the_same_time_are_as_many_samples(protocol):
    @scenario("one", "two")
    async def run(world):
        client = protocol(world)
        world.model.gate.clear()
        asked = [asyncio.create_task(client.get(HI, streamed)) for streamed in (False, False)]
        await until(lambda: len(world.model.prompts) == 2)
        world.model.gate.set()
        assert sorted(await asyncio.gather(*asked)) == ["one", "two"]
        check(world, ["one"], ["two"])

    run()


@in_every_protocol
def test_compaction_is_a_branch(protocol):
    summary = "The files were read,\nand the fault is in the second of them."

    @scenario("one", "two", summary, "four", "five")
    async def run(world):
        ask, said = protocol(world).ask, HI
        for more in ("and?", "Sum it up."):
            said = [*said, *(await ask(said))[1], user(more)]
        await ask(said)
        said = [user(f"It goes on from before.\n\n{summary}\n\nGo on.")]
        _, echo = await ask(said)
        await ask([*said, *echo, user("so?")])
        assert reasons(world) == ["root", "", "", "compaction", ""]
        check(world, ["one", "two", summary], ["four", "five"])

    run()


@pytest.mark.parametrize(
    "retention, reason, samples",
    [
        ("all", "", [[f"{THOUGHT}one", f"{THOUGHT}two"]]),
        ("template", "template", [[f"{THOUGHT}one"], [f"{THOUGHT}two"]]),
    ],
)
@in_every_protocol
def test_reasoning_that_the_template_drops_from_history(protocol, retention, reason, samples):
    @scenario(f"{THOUGHT}one", f"{THOUGHT}two")
    async def run(world):
        world.session.renderer = ChatRenderer(char_tokenizer(QWEN3), thinking_retention=retention)
        ask = protocol(world).ask
        _, echo = await ask(HI)
        await ask([*HI, *echo, user("and?")])
        assert reasons(world) == ["root", reason]
        assert ("hm" in world.model.prompts[1]) == (retention == "all")
        check(world, *samples)

    run()


# Clients that go away and ask again ----------------------------------------------------------------------------------


@streamed_or_not
@in_every_protocol
def test_an_sdk_that_does_not_wait_and_retries_is_one_sample(protocol, streamed):
    @scenario("one", "two")
    async def run(world):
        world.model.gate.clear()
        asked = asyncio.create_task(protocol(world, timeout=0.5, max_retries=9).get(HI, streamed))
        await until(lambda: world.model.cancelled)  # sampling for nobody has stopped
        world.model.gate.set()
        assert await asked == "one"
        check(world, ["one"])

    run()


@asynccontextmanager
async def bad_way(world: World, *, swallow: int, answer: bytes = b""):
    """The session's URL behind a proxy that gives `answer` in the place of the first `swallow` replies.

    It does not tell the server when its client goes away.
    """
    at, number, handlers = urlsplit(world.url), count(), []

    async def handle(reader, writer):
        handlers.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-len"))
        server, to_server = await asyncio.open_connection(at.hostname, at.port)
        to_server.write(head[:-2].replace(b"keep-alive", b"close") + b"\r\n" + await reader.readexactly(length))
        reply = await server.read()
        writer.write(answer if next(number) < swallow else reply)
        writer.close()
        to_server.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as proxy:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}{at.path}"
        await asyncio.wait(handlers, timeout=10)


FAILED = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("answer", [FAILED, b""], ids=["500", "lost"])
@streamed_or_not
@in_every_protocol
def test_a_reply_that_a_proxy_made_a_500_or_lost_is_replayed_to_the_sdk(protocol, streamed, answer):
    @scenario("one", "two")
    async def run(world):
        async with bad_way(world, swallow=1, answer=answer) as url:
            assert await protocol(world, url, max_retries=1).get(HI, streamed) == "one"
        assert world.session.counters["replayed"] == 1
        check(world, ["one"])

    run()


@streamed_or_not
@in_every_protocol
def test_an_sdk_that_retries_while_its_first_request_is_still_worked_on_gets_that_reply(protocol, streamed):
    @scenario("one", "two")
    async def run(world):
        world.model.gate.clear()
        async with bad_way(world, swallow=0) as url:
            asked = asyncio.create_task(protocol(world, url, timeout=0.5, max_retries=9).get(HI, streamed))
            await until(lambda: world.session.counters["replayed"])
            world.model.gate.set()
            assert await asked == "one"
        assert len(world.model.prompts) == 1 and world.model.cancelled == 0
        check(world, ["one"])

    run()


@in_every_protocol
def test_equal_idempotency_keys_are_one_sample_under_way_or_delivered(protocol):
    @scenario("one", "two", "three")
    async def run(world):
        def get(key, said=HI):
            return protocol(world).get(said, False, extra_headers={"idempotency-key": key})

        world.model.gate.clear()
        asked = [asyncio.create_task(get("a")) for _ in range(2)]
        await until(lambda: world.session.counters["replayed"])
        world.model.gate.set()
        assert await asyncio.gather(*asked) == ["one", "one"]
        # Another key is another sample, and a key that comes with another body is no retry.
        assert [await get("a"), await get("b"), await get("a", [user("ho")])] == ["one", "two", "three"]
        check(world, ["one"], ["two"], ["three"])

    run()


async def leave(world: World, streamed: bool, after_s: float) -> None:
    """A client that closes its connection `after_s` after the model has begun to say something."""
    at, body = urlsplit(world.url), json.dumps({"messages": HI, "stream": streamed})
    _, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"POST {at.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    await world.model.called.wait()
    world.model.gate.set()
    await asyncio.sleep(after_s)
    writer.close()


@pytest.mark.parametrize("after_ms", [0, 0.2, 0.5, 1, 2, 5, 20])
@streamed_or_not
def test_whenever_a_client_goes_away_its_retry_is_one_sample(streamed, after_ms):
    """Before the end of sampling, while the reply is read, while it is sent, after it."""

    @scenario("one", "two", server={"ping_s": 0.05})
    async def run(world):
        world.model.gate.clear()
        await leave(world, streamed, after_ms / 1000)
        text = await Chat(world).get(HI, streamed, extra_headers={"x-stainless-retry-count": "1"})
        assert [node.messages[-1]["content"] for node in world.session.tree.nodes] == [text]
        assert len(world.session.tree.samples()) == 1

    run()


class WatchedEngine(VllmEngine):
    """One whose calls can be looked at."""

    def __init__(self, settings: EngineSettings):
        super().__init__(settings)
        self.ended: list[list[int] | None] = []
        """What each call sampled; None if it was stopped."""

    async def generate(self, *args):
        try:
            turn = await super().generate(*args)
        except asyncio.CancelledError:
            self.ended.append(None)
            raise
        self.ended.append(turn.token_ids.tolist())
        return turn

    async def state(self) -> tuple[list[list[int] | None], int]:
        """With the number of requests that vLLM has."""
        return self.ended, self.llm.output_processor.get_num_unfinished_requests()


@pytest.mark.vllm
@pytest.mark.ray
def test_vllm_stops_for_a_client_that_went_away_and_samples_nothing_for_a_replay(ray_session, endless_model_dir):
    engine = ray.remote(max_concurrency=64)(WatchedEngine).options(num_cpus=0)
    engine = engine.remote(EngineSettings(endless_model_dir, "float32", 2048, "cpu"))
    ray.get(engine.start.remote(), timeout=300)
    ray.get(engine.resume.remote(), timeout=60)
    pool = EnginePool([engine], "pool")

    async def call_model(prompt_ids, max_tokens):
        return await pool.generate("rollout", prompt_ids, Sampling(1.0, 1.0, -1, max_tokens, 7, ()), timeout_s=60)

    async def until_engine_has(requests: int) -> list[list[int] | None]:
        while (state := await engine.state.remote())[1] != requests:
            await asyncio.sleep(0.01)
        return state[0]

    async def run():
        async with ChatServer() as server, asyncio.timeout(120):
            session = Session(renderer(), call_model, max_len=2040)
            world = World(server, session, call_model, server.open(session))
            asked = asyncio.create_task(Chat(world).ask(HI))
            await until_engine_has(1)
            asked.cancel()
            assert await until_engine_has(0) == [None]
            async with bad_way(world, swallow=1) as url:
                await Chat(world, url, max_retries=1).ask(HI)
            _, sampled = await until_engine_has(0)
            (sample,) = session.tree.samples()
            assert sample.token_ids[sample.mask].tolist() == sampled and session.counters["replayed"] == 1
            for client in world.clients:
                await client.close()

    try:
        asyncio.run(run())
    finally:
        ray.kill(engine)
