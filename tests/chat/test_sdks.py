"""The stock OpenAI and Anthropic SDKs, unmodified, against the server."""

import asyncio
import json

import anthropic
import openai
import pytest

from tests.chat.scripted import scenario

THOUGHT = "<think>\nhm\n</think>\n\n"
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "sub", "arguments": {"b": [2]}}</tool_call>'
)
SCRIPT = (f"{THOUGHT}I look.\n{CALLS}", "3 and 4")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMES = ("add", "sub")
PROMPT_ENDS = (
    "\n<tool_response>three</tool_response>\n<tool_response>four</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def openai_client(world, sync: bool):
    kind = openai.OpenAI if sync else openai.AsyncOpenAI
    world.clients.append(kind(base_url=f"{world.url}/v1", api_key="x", max_retries=0))
    return world.clients[-1]


def anthropic_client(world, sync: bool):
    kind = anthropic.Anthropic if sync else anthropic.AsyncAnthropic
    world.clients.append(kind(base_url=world.url, api_key="x", max_retries=0))
    return world.clients[-1]


async def ask(open_stream, create, sync: bool, stream: bool, final: str):
    """The reply, by the SDK's own accumulation if streamed."""
    if sync and stream:
        return await asyncio.to_thread(_ask_stream, open_stream, final)
    if sync:
        return await asyncio.to_thread(create)
    if not stream:
        return await create()
    async with open_stream() as events:
        return await getattr(events, final)()


def _ask_stream(open_stream, final: str):
    with open_stream() as events:
        return getattr(events, final)()


async def chat(world, sync, stream, **body):
    api = openai_client(world, sync).chat.completions
    if stream:
        body["stream_options"] = {"include_usage": True}
    return await ask(
        lambda: api.stream(model="m", **body),
        lambda: api.create(model="m", **body),
        sync,
        stream,
        "get_final_completion",
    )


async def responses(world, sync, stream, **body):
    api = openai_client(world, sync).responses
    return await ask(
        lambda: api.stream(model="m", **body), lambda: api.create(model="m", **body), sync, stream, "get_final_response"
    )


async def messages(world, sync, stream, **body):
    api = anthropic_client(world, sync).messages
    body = {"model": "m", "max_tokens": 1000, **body}
    return await ask(lambda: api.stream(**body), lambda: api.create(**body), sync, stream, "get_final_message")


def in_all_modes(test):
    return pytest.mark.parametrize("stream", [False, True])(pytest.mark.parametrize("sync", [True, False])(test))


def check_record(world):
    """One segment: both turns trained as sampled, both results in the second prompt."""
    assert len(world.model.prompts) == 2 and world.model.prompts[1].endswith(PROMPT_ENDS)
    assert world.sampled == [[f"{text}<|im_end|>" for text in SCRIPT]]


def prompt_tokens(world, call: int) -> int:
    # One token per character, specials apart.
    text = world.model.prompts[call]
    return len(text) - sum((len(special) - 1) * text.count(special) for special in ("<|im_start|>", "<|im_end|>"))


@in_all_modes
def test_chat_completions(sync, stream):
    @scenario(*SCRIPT)
    async def run(world):
        tools = [{"type": "function", "function": {"name": n, "strict": True, "parameters": SCHEMA}} for n in NAMES]
        said = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ]
        first = await chat(world, sync, stream, messages=said, tools=tools)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content.strip()) == ("tool_calls", "I look.")
        assert choice.message.reasoning_content == "hm"
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("add", {"a": 1}), ("sub", {"b": [2]})]
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (
            prompt_tokens(world, 0),
            len(SCRIPT[0]) + 1,
        )
        said.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call, result in zip(choice.message.tool_calls, ("three", "four"), strict=True):
            call_id = call.id
            said.append({"role": "tool", "tool_call_id": call_id, "content": result})
        second = await chat(world, sync, stream, messages=said, tools=tools)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("3 and 4", "stop")
        assert second.usage.total_tokens == prompt_tokens(world, 1) + len("3 and 4") + 1
        check_record(world)

    run()


@in_all_modes
def test_responses(sync, stream):
    @scenario(*SCRIPT)
    async def run(world):
        tools = [{"type": "function", "name": n, "parameters": SCHEMA, "strict": True} for n in NAMES]
        tools.append({"type": "web_search"})
        said = [{"role": "user", "content": "hi"}]
        first = await responses(world, sync, stream, instructions="Be brief.", input=said, tools=tools, store=False)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].content[0].text == "hm" and first.output_text.strip() == "I look."
        calls = [(item.name, json.loads(item.arguments)) for item in first.output[2:]]
        assert calls == [("add", {"a": 1}), ("sub", {"b": [2]})]
        assert (first.usage.input_tokens, first.usage.output_tokens) == (prompt_tokens(world, 0), len(SCRIPT[0]) + 1)
        said += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        for call, result in zip(first.output[2:], ("three", "four"), strict=True):
            said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        second = await responses(world, sync, stream, instructions="Be brief.", input=said, tools=tools, store=False)
        assert (second.output_text, second.status) == ("3 and 4", "completed")
        check_record(world)
        assert world.session.counters["ignored_tools"] == 2  # web_search, in both requests

    run()


@in_all_modes
def test_messages(sync, stream):
    @scenario(*SCRIPT)
    async def run(world):
        tools = [{"name": n, "input_schema": SCHEMA} for n in NAMES]
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        said = [{"role": "user", "content": "hi"}]
        first = await messages(world, sync, stream, system=system, messages=said, tools=tools)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.content[0].thinking == "hm" and first.content[0].signature and first.stop_reason == "tool_use"
        assert [(block.name, block.input) for block in first.content[2:]] == [("add", {"a": 1}), ("sub", {"b": [2]})]
        assert (first.usage.input_tokens, first.usage.output_tokens) == (prompt_tokens(world, 0), len(SCRIPT[0]) + 1)
        said.append({"role": "assistant", "content": first.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": result}
            for block, result in zip(first.content[2:], ([{"type": "text", "text": "three"}], "four"), strict=True)
        ]
        said.append({"role": "user", "content": results})
        second = await messages(world, sync, stream, system=system, messages=said, tools=tools)
        assert (second.content[0].text, second.stop_reason) == ("3 and 4", "end_turn")
        check_record(world)

    run()


@scenario("yes")
async def test_count_tokens_is_what_the_answer_reports(world):
    api, said = anthropic_client(world, False).messages, [{"role": "user", "content": "hi"}]
    counted = await api.count_tokens(model="m", messages=said, system="Be brief.")
    answered = await api.create(model="m", messages=said, system="Be brief.", max_tokens=9)
    assert counted.input_tokens == answered.usage.input_tokens == prompt_tokens(world, 0)
    assert len(world.session.tree.nodes) == 1  # counting records nothing


@scenario("one", "two")
async def test_n_answers_are_two_samples(world):
    reply = await chat(world, False, True, messages=[{"role": "user", "content": "hi"}], n=2)
    assert [choice.message.content for choice in reply.choices] == ["one", "two"]
    assert reply.usage.completion_tokens == 4 + 4
    assert world.sampled == [["one<|im_end|>"], ["two<|im_end|>"]]


@scenario("one. two. three")
async def test_a_stop_sequence_is_reported_and_the_rest_is_not_recorded(world):
    said = [{"role": "user", "content": "hi"}]
    reply = await messages(world, False, True, messages=said, stop_sequences=["three", ". t"])
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("one", "stop_sequence", ". t")
    assert reply.usage.output_tokens == len("one. t")
    assert world.sampled == [["one. t"]]


@scenario("a long answer", "a long answer", "a long answer")
async def test_max_tokens_cut_in_every_protocol(world):
    said = [{"role": "user", "content": "hi"}]
    # Unstreamed: of a stream, the SDK's own accumulation raises for a reply that was cut.
    chatted = await chat(world, False, False, messages=said, max_completion_tokens=6)
    assert (chatted.choices[0].finish_reason, chatted.choices[0].message.content) == ("length", "a long")
    responded = await responses(world, False, False, input="hi", max_output_tokens=6)
    assert (responded.status, responded.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (await messages(world, False, True, messages=said, max_tokens=6)).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_is_a_400_in_the_words_of_the_protocol(stream):
    @scenario(max_len=100)
    async def run(world):
        said = [{"role": "user", "content": "x" * 100}]
        for ask_openai in (chat(world, False, stream, messages=said), responses(world, False, stream, input="x" * 100)):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask_openai
            assert caught.value.code == "context_length_exceeded" and "maximum context length" in str(caught.value)
        with pytest.raises(anthropic.BadRequestError) as caught:
            await messages(world, False, stream, messages=said)
        error = caught.value.body["error"]
        # user, newline, 100 x, newline; the two specials of the message and the one of the prompt; assistant, newline
        tokens = (1 + 5 + 100 + 1 + 1) + (1 + 10)
        assert error == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {tokens} tokens > 100 maximum",
        }
        assert world.model.prompts == [] and world.session.failure is None

    run()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_is_not_retried_by_the_sdks(stream):
    @scenario(RuntimeError("the engine is gone"))
    async def run(world):
        client = openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="x")  # retries twice by default
        world.clients.append(client)
        answer, asked = world.session.answer, []
        world.session.answer = lambda request: asked.append(request) or answer(request)
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await client.responses.create(model="m", input="hi", stream=stream)
        assert len(asked) == len(world.model.prompts) == 1

    run()
