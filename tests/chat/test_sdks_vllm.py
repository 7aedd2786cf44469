"""The stock OpenAI and Anthropic SDKs and the OpenAI Agents SDK, unmodified, against the server with real vLLM.

A random model calls no tools, so one is trained for seconds until it knows two conversations by heart: what vLLM
samples from it is reasoning and two calls, and the answer to their results.
"""

import asyncio
import inspect
import itertools
import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from molt.chat.chat_renderer import ChatRenderer, load_chat_renderer
from molt.chat.images import read_images
from molt.chat.server import ChatServer
from molt.chat.session import Session
from molt.cli.check import static_checks
from molt.config import PromptDataConfig, RolloutConfig
from molt.driver import drive_evaluation
from molt.publish.transfer import ShmSender
from molt.rollout.agent_host import AgentHost, RunnerSettings
from molt.rollout.engine_pool import EnginePool
from molt.rollout.engine_worker import EngineSettings, RolloutEngineWorker, Sampling
from molt.rollout.group_task import GroupTask
from molt.spec import resolve_evaluation
from molt.train.policy_worker import RayEngineClient
from molt.types import Prompt, Turn
from tests.chat.test_sdks import NAMES, SCHEMA, SCRIPT, chat, messages, responses
from tests.runs import settings, write_prompts
from tests.tiny import END_ID, QWEN3, char_tokenizer, save_tiny, tiny_qwen3
from tests.tiny_vlm import data_url, picture, png, save_tiny_vlm, vlm_logprobs, vlm_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

TOKENIZER = char_tokenizer(QWEN3)
RENDERER = ChatRenderer(TOKENIZER)
TEMPERATURE = 0.5
"""Sampling, and still what was learnt: the least likely token has a chance of 0.98 at temperature 1."""
RESULTS = "three", "four"
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def conversation(prompt: list[dict], tools: list[dict], script: tuple[str, str], results: tuple[str, ...]):
    """Ids int64 `[T]` and which of them the model says, bool `[T]`."""
    first = RENDERER.render(prompt, tools)
    said = [*RENDERER.tokenizer.encode(script[0]), END_ID]
    told = [{"role": "tool", "tool_call_id": str(i), "name": "add", "content": text} for i, text in enumerate(results)]
    second = RENDERER.bridge(first + said, told, tools, sampled=len(said))
    ids = torch.tensor([*second, *RENDERER.tokenizer.encode(script[1]), END_ID])
    spoken = torch.zeros(len(ids), dtype=torch.bool)
    spoken[len(first) : len(first) + len(said)] = spoken[len(second) :] = True
    return ids, spoken


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def of_agents_sdk() -> list[dict]:
    """The tools of an agent with `add`, as the Agents SDK sends them; none without it."""
    try:
        from agents import function_tool
    except ImportError:
        return []
    made = function_tool(add)
    described = {"name": made.name, "description": made.description, "parameters": made.params_json_schema}
    return [{"type": "function", "function": described}]


@pytest.fixture(scope="module")
def known_dir(tmp_path_factory):
    """A tiny Qwen3 that knows the conversations by heart."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    learnt = [conversation(prompt, FUNCTIONS, SCRIPT, RESULTS)]
    learnt += [conversation(prompt, tools, (CALL, "It is 3"), ("3",)) for tools in [of_agents_sdk()] if tools]
    model, threads = tiny_qwen3(len(TOKENIZER)).train(), torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(400):
        worst = []
        for ids, spoken in learnt:
            logprobs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, ids[1:, None])[:, 0][spoken[1:]]
            (-chosen.mean()).backward()
            worst.append(chosen.min().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if min(worst) > -0.02:
            break
    torch.set_num_threads(threads)
    assert min(worst) > -0.02
    return str(save_tiny(tmp_path_factory.mktemp("known"), model.eval(), TOKENIZER))


def engine_on(directory: str):
    engine = RolloutEngineWorker.options(num_cpus=0).remote(EngineSettings(directory, "float32", 1024, "cpu"))
    ray.get(engine.start.remote(), timeout=300)
    ray.get(engine.resume.remote(), timeout=60)
    return engine


@pytest.fixture(scope="module")
def engine(ray_session, known_dir):
    engine = engine_on(known_dir)
    yield engine
    ray.kill(engine)


@dataclass
class World:
    session: Session
    url: str
    turns: list[Turn]
    """As vLLM gave them."""
    clients: list = field(default_factory=list)


@asynccontextmanager
async def world_of(engine):
    """A server with one session whose calls go to the engine."""
    pool, seeds, turns = EnginePool([engine], "sdk"), itertools.count(), []

    async def call_model(prompt_ids, max_tokens):
        sampling = Sampling(TEMPERATURE, 1.0, -1, max_tokens, next(seeds), (END_ID,))
        turns.append(await pool.generate("r", prompt_ids, sampling, 60))
        return turns[-1]

    async with asyncio.timeout(120), ChatServer() as server:
        session = Session(RENDERER, call_model, max_len=1024)
        world = World(session, server.open(session), turns)
        yield world
        for client in world.clients:
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing


def check_record(world: World, known_dir: str, script: tuple[str, ...]) -> None:
    """One segment: what vLLM sampled, in its place, with log-probs that are the model's."""
    (sample,) = world.session.tree.samples()
    last = world.turns[-1]
    assert sample.token_ids.tolist() == [*last.prompt_ids.tolist(), *last.token_ids.tolist()]
    trained = np.zeros(len(sample.token_ids), bool)
    for turn, text in zip(world.turns, script, strict=True):
        place = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids))
        assert RENDERER.tokenizer.decode(sample.token_ids[place].tolist()) == f"{text}<|im_end|>"
        assert np.array_equal(sample.token_ids[place], turn.token_ids)
        assert np.array_equal(sample.logprobs[place], turn.logprobs)
        trained[place] = True
    assert np.array_equal(sample.versions, np.where(trained, 0, -1))
    model = AutoModelForCausalLM.from_pretrained(known_dir, dtype=torch.float32).eval()
    ids = torch.as_tensor(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        values = (model(ids[None]).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)
    expected = np.concatenate([[0.0], values.gather(1, ids[1:, None])[:, 0].numpy()])
    assert np.abs(sample.logprobs - expected)[trained].max() < 1e-4


async def by_chat(world, stream):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    first = await chat(world, False, stream, messages=said, tools=FUNCTIONS)
    spoken = first.choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in spoken.tool_calls]
    said.append(spoken.model_dump(exclude_none=True, exclude={"parsed"}))
    for call, result in zip(spoken.tool_calls, RESULTS, strict=True):
        said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = await chat(world, False, stream, messages=said, tools=FUNCTIONS)
    usage = [(each.usage.prompt_tokens, each.usage.completion_tokens) for each in (first, second)]
    return spoken.reasoning_content, calls, second.choices[0].message.content, usage


async def by_responses(world, stream):
    tools = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
    said, asked = [{"role": "user", "content": "hi"}], {"instructions": "Be brief.", "tools": tools}
    first = await responses(world, False, stream, input=said, **asked)
    thought, _, *made = first.output
    calls = [(call.name, json.loads(call.arguments)) for call in made]
    said += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    for call, result in zip(made, RESULTS, strict=True):
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    second = await responses(world, False, stream, input=said, **asked)
    usage = [(each.usage.input_tokens, each.usage.output_tokens) for each in (first, second)]
    return thought.content[0].text, calls, second.output_text, usage


async def by_messages(world, stream):
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    said, asked = [{"role": "user", "content": "hi"}], {"system": "Be brief.", "tools": tools}
    first = await messages(world, False, stream, messages=said, **asked)
    thought, _, *made = first.content
    said.append({"role": "assistant", "content": first.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": result}
        for block, result in zip(made, RESULTS, strict=True)
    ]
    said.append({"role": "user", "content": results})
    second = await messages(world, False, stream, messages=said, **asked)
    usage = [(each.usage.input_tokens, each.usage.output_tokens) for each in (first, second)]
    return thought.thinking, [(block.name, block.input) for block in made], second.content[0].text, usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("converse", [by_chat, by_responses, by_messages])
def test_reasoning_and_parallel_calls_that_vllm_sampled(engine, known_dir, converse, stream):
    async def run():
        async with world_of(engine) as world:
            reasoning, calls, answer, usage = await converse(world, stream)
            assert reasoning == "hm" and calls == [("add", {"a": 1}), ("sub", {"b": [2]})] and answer == "3 and 4"
            assert usage == [(len(turn.prompt_ids), len(turn.token_ids)) for turn in world.turns]
            check_record(world, known_dir, SCRIPT)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_the_openai_agents_sdk(engine, known_dir, protocol, stream):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[protocol]

    async def run():
        async with world_of(engine) as world:
            agents.set_tracing_disabled(True)
            client = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x")
            world.clients.append(client)
            made = agents.Agent(
                name="adder", instructions="Be brief.", tools=[agents.function_tool(add)], model=kind("policy", client)
            )
            if stream:
                result = agents.Runner.run_streamed(made, "hi")
                seen = [event.type async for event in result.stream_events()]
                assert "run_item_stream_event" in seen
            else:
                result = await agents.Runner.run(made, "hi")
            assert result.final_output == "It is 3"
            called = [item for item in result.new_items if item.type == "tool_call_item"]
            assert [json.loads(item.raw_item.arguments) for item in called] == [{"a": 1, "b": 2}]
            usage = result.context_wrapper.usage
            assert (usage.requests, usage.input_tokens, usage.output_tokens) == (
                2, sum(len(turn.prompt_ids) for turn in world.turns), sum(len(turn.token_ids) for turn in world.turns),
            )  # fmt: skip
            check_record(world, known_dir, (CALL, "It is 3"))

    asyncio.run(run())


SEEING_AGENT = '''
import anthropic
import openai

from molt.agents import ChatAgent, ChatAgentRunner, Result
from tests.tiny_vlm import data_url, picture


class Seeing(ChatAgent):
    """Shows an image, and then another, by the protocol that the label names."""

    async def run(self, ctx):
        usage = await getattr(self, ctx.label)(ctx, [picture(1), picture(2, 50, 20)])
        return Result(1.0, info={f"{name}_{i}": n for i, pair in enumerate(usage) for name, n in zip("pc", pair)})

    async def chat(self, ctx, pictures):
        client, said, usage = openai.AsyncOpenAI(base_url=ctx.openai_url, api_key="x"), [], []
        for image in pictures:
            shown = {"type": "image_url", "image_url": {"url": data_url(image)}}
            said.append({"role": "user", "content": [{"type": "text", "text": "see"}, shown]})
            reply = await client.chat.completions.create(model="m", messages=said, max_completion_tokens=12)
            said.append(reply.choices[0].message.model_dump(exclude_none=True))
            usage.append((reply.usage.prompt_tokens, reply.usage.completion_tokens))
        return usage

    async def responses(self, ctx, pictures):
        client, said, usage = openai.AsyncOpenAI(base_url=ctx.openai_url, api_key="x"), [], []
        for image in pictures:
            shown = {"type": "input_image", "image_url": data_url(image), "detail": "auto"}
            said.append({"role": "user", "content": [{"type": "input_text", "text": "see"}, shown]})
            reply = await client.responses.create(model="m", input=said, max_output_tokens=12)
            said += [item.model_dump() for item in reply.output]
            usage.append((reply.usage.input_tokens, reply.usage.output_tokens))
        return usage

    async def messages(self, ctx, pictures):
        client, said, usage = anthropic.AsyncAnthropic(base_url=ctx.base_url, api_key="x"), [], []
        for image in pictures:
            source = {"type": "base64", "media_type": "image/png", "data": data_url(image).partition(",")[2]}
            shown = {"type": "image", "source": source}
            said.append({"role": "user", "content": [{"type": "text", "text": "see"}, shown]})
            reply = await client.messages.create(model="m", messages=said, max_tokens=12)
            said.append({"role": "assistant", "content": reply.content})
            usage.append((reply.usage.input_tokens, reply.usage.output_tokens))
        return usage


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Seeing)
'''


@pytest.fixture(scope="module")
def vlm_dir(tmp_path_factory):
    return str(save_tiny_vlm(tmp_path_factory.mktemp("vlm")))


@pytest.fixture(scope="module")
def vlm_engine(ray_session, vlm_dir):
    engine = engine_on(vlm_dir)
    yield engine
    ray.kill(engine)


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_images_reach_the_model_and_their_places_are_recorded(vlm_engine, vlm_dir, tmp_path, protocol):
    (tmp_path / "agent.py").write_text(SEEING_AGENT)
    rollout = RolloutConfig(timeout_s=120.0, max_retries=0)
    settings = RunnerSettings(
        str(tmp_path / "agent.py"), vlm_dir, PromptDataConfig(max_len=512, apply_chat_template=True), rollout, seed=1
    )

    async def run():
        host = AgentHost(settings, [vlm_engine], "seeing")
        prompt = Prompt(0, 0, 0, [{"role": "user", "content": "look"}], None, protocol)
        result, samples = await host.run_group(GroupTask(prompt, 1, 1.0, 1.0, -1, None))
        server = await host.runner._server
        await server.__aexit__()
        return result.rollouts[0], samples[0]

    info, (sample,) = asyncio.run(run())
    assert info.reward == 1.0 and info.samples[0].media == 2
    tokenizer = vlm_tokenizer()
    block = tokenizer("<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>")
    pictures = [picture(1), picture(2, 50, 20)]
    assert [each.data for each in sample.media] == [png(image) for image in pictures]
    for each in sample.media:
        place = slice(each.start, each.start + each.length)
        assert sample.token_ids[place].tolist() == block.input_ids and (sample.versions[place] == -1).all()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.mask, [False]]))).reshape(-1, 2)
    usage = {f"{name}_{i}": float(n) for i, (a, b) in enumerate(edges) for name, n in (("p", a), ("c", b - a))}
    assert len(edges) == 2 and usage == {name: n for name, n in info.metrics.items() if name in usage}
    expected = vlm_logprobs(vlm_dir, sample.token_ids, pictures)
    assert np.abs(sample.logprobs - expected)[sample.mask].max() < 1e-4
    swapped = vlm_logprobs(vlm_dir, sample.token_ids, pictures[::-1])
    assert np.abs(sample.logprobs - swapped)[sample.mask].max() > 1e-2  # the pixels matter, and their order


def test_a_vision_language_model_is_evaluated(ray_session, vlm_dir, tmp_path, capsys):
    (tmp_path / "agent.py").write_text(SEEING_AGENT)
    dataset = write_prompts(tmp_path / "p.jsonl", 2, {0: "chat", 1: "messages"})
    config = settings(
        vlm_dir, tmp_path / "out", "", "--train.agent_path", str(tmp_path / "agent.py"), "--eval.dataset", dataset,
        "--eval.eval_only", "--data.max_len", "512", "--eval.n_samples_per_prompt", "1",
    )  # fmt: skip
    assert static_checks(config).errors == []
    answers, _ = asyncio.run(drive_evaluation(resolve_evaluation(config)))
    assert [rollout.samples[0].media for (rollout,) in answers["p"]] == [2, 2]


def test_after_a_publication_the_new_weights_read_the_same_image(vlm_engine, vlm_dir, tmp_path):
    """What the old weights made of an image is in three caches of vLLM."""
    renderer, image = load_chat_renderer(vlm_dir, None), picture(1)
    said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(image)}}]}]
    ids, media = renderer.place(renderer.render(said), read_images(said))
    sampling = Sampling(1.0, 1.0, -1, 12, 0, ())

    def sampled_from(directory: str) -> Turn:
        turn = ray.get(vlm_engine.generate.remote(f"in {directory}", ids, sampling, media), timeout=60)
        assert turn.prompt_ids.tolist() == ids
        expected = vlm_logprobs(directory, np.concatenate([turn.prompt_ids, turn.token_ids]), [image])
        assert np.abs(turn.logprobs - expected[len(ids) :]).max() < 1e-4
        return turn

    before = sampled_from(vlm_dir)
    shutil.copytree(vlm_dir, tmp_path / "new")
    tensors = load_file(f"{vlm_dir}/model.safetensors")
    tensors = {name: tensor * (1.5 if "vision" in name else 1.0) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    client = RayEngineClient([vlm_engine], timeout_s=60)
    client.init_weight_transfer_engine({})
    sender = ShmSender(client, lambda: list(tensors.items()), is_writer=False)  # a writer would initialise it again
    sender.is_writer = True
    sender.send()
    ray.get(vlm_engine.commit.remote(1), timeout=60)
    ray.get(vlm_engine.resume.remote(), timeout=60)
    after = sampled_from(str(tmp_path / "new"))
    assert set(before.versions) == {0} and set(after.versions) == {1}
