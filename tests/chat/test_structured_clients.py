"""Stock clients that ask for structured outputs, unmodified: they end with their object, and every token is trained.

They are not among molt's dependencies. `pip install smolagents pydantic-ai-slim langchain-openai instructor` runs them.
"""

import asyncio
import json

import numpy as np
import pytest
from pydantic import BaseModel

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.server import ChatServer
from molt.chat.session import Session
from tests.streams import turn_from
from tests.tiny import ALPHABET, END_ID, QWEN3, char_tokenizer

pytestmark = pytest.mark.full

RENDERER = ChatRenderer(char_tokenizer(QWEN3, ALPHABET + "’‘“”–—…é✅❌→•\t×💡🤖"))
QUESTION = "What is 6 * 7?"


class Out(BaseModel):
    """The answer."""

    answer: int


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def smolagents_code(url: str):
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(model_id="policy", api_base=f"{url}/v1", api_key="x")
    return smolagents.CodeAgent(tools=[], model=model, verbosity_level=0).run(QUESTION)


def smolagents_tools(url: str):
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(model_id="policy", api_base=f"{url}/v1", api_key="x")
    return smolagents.ToolCallingAgent(tools=[], model=model, verbosity_level=0).run(QUESTION)


def pydantic_ai_chat(url: str):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel("policy", provider=providers.OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    return pydantic_ai.Agent(model, output_type=Out).run_sync(QUESTION).output.answer


def pydantic_ai_messages(url: str):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.anthropic")
    providers = pytest.importorskip("pydantic_ai.providers.anthropic")
    model = models.AnthropicModel("claude-x", provider=providers.AnthropicProvider(base_url=url, api_key="x"))
    return pydantic_ai.Agent(model, output_type=Out).run_sync(QUESTION).output.answer


def langchain_tools(url: str):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="policy", base_url=f"{url}/v1", api_key="x")
    return model.with_structured_output(Out, method="function_calling").invoke(QUESTION).answer


def langchain_schema(url: str):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="policy", base_url=f"{url}/v1", api_key="x")
    return model.with_structured_output(Out).invoke(QUESTION).answer


def instructor_tools(url: str):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="x"))
    said = [{"role": "user", "content": QUESTION}]
    made = client.chat.completions.create(model="policy", response_model=Out, messages=said, max_retries=2)
    return made.answer


CODE = ["I multiply.\n<code>\nx = 6 * 7\nprint(x)\n</code>", "Done.\n<code>\nfinal_answer(x)\n</code>"]
TWICE = [call("final_result", answer="x"), call("final_result", answer=42)]
CLIENTS = {
    "smolagents, code": (smolagents_code, CODE, 2),  # it adds a line on its call to each reply: a branch
    "smolagents, tools": (smolagents_tools, [call("final_answer", answer=42)], 1),
    "pydantic-ai, chat": (pydantic_ai_chat, TWICE, 1),
    "pydantic-ai, messages": (pydantic_ai_messages, ["it is 42", TWICE[1]], 1),
    "langchain, tools": (langchain_tools, [call("Out", answer=42)], 1),
    "langchain, schema": (langchain_schema, ['{"answer": 42}'], 1),
    "instructor, tools": (instructor_tools, [call("Out", answer="x"), call("Out", answer=42)], 1),
}


@pytest.mark.parametrize("ask, says, segments", CLIENTS.values(), ids=CLIENTS)
def test_a_client_ends_with_its_object_and_every_sampled_token_is_trained_once(ask, says, segments):
    script = list(says)

    async def call_model(prompt_ids, max_tokens):
        ids = [*RENDERER.tokenizer.encode(script.pop(0)), END_ID]
        return turn_from(
            prompt_ids=np.array(prompt_ids, np.int32),
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
        )

    async def run():
        session = Session(RENDERER, call_model, max_len=100_000)
        async with ChatServer() as server:
            answer = await asyncio.wait_for(asyncio.to_thread(ask, server.open(session)), 60)
        return answer, session.tree.samples()

    answer, samples = asyncio.run(run())
    assert int(answer) == 42 and script == [] and len(samples) == segments
    trained = sorted(RENDERER.tokenizer.decode(sample.token_ids[sample.mask].tolist()) for sample in samples)
    cut_at_stop = [text if "</code>" in text else f"{text}<|im_end|>" for text in says]
    assert trained == sorted(cut_at_stop if segments > 1 else ["".join(cut_at_stop)])
