"""The protocols as pure functions: what a body means, and what an answer looks like."""

import json

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from molt.chat.protocol import Answer, ChatError, ChatReply, ChatRequest, TokenLogprob, ToolCall
from molt.chat.server import WIRES, parse_call
from molt.chat.wires import chat, messages, responses

PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": PNG}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}

CONVERSATION = [
    {"role": "system", "content": "sys\nmore"},
    {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
    {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "content": "one", "tool_call_id": "c1"},
    {"role": "tool", "content": "two", "tool_call_id": "c2"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "first"},
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": ""},
]


def test_chat_completions_are_read():
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "sys"}, {"type": "text", "text": "more"}]},
            *CONVERSATION[1:-1],
            {"role": "user", "content": None},
        ],
        "tools": [TOOL, {"type": "web_search", "x": 1}, {"type": "custom", "custom": {"name": "g"}}],
        "max_completion_tokens": 7, "stop": "END", "n": 2, "seed": 5, "temperature": 0, "top_p": None,
        "tool_choice": "auto", "response_format": {"type": "text"}, "store": True, "unknown": {},
    }  # fmt: skip
    text_schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The text."}},
        "required": ["input"],
    }
    custom = {"type": "function", "function": {"name": "g", "parameters": text_schema}}
    assert chat.request(body) == ChatRequest(
        CONVERSATION,
        [TOOL, custom],
        max_tokens=7,
        n=2,
        stop=("END",),
        seed=5,
        sampling={"temperature": 0},
        text_tools=["g"],
        ignored_tools=["web_search"],
    )


def test_responses_are_read():
    def made(call_id):
        return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a": 1}', "id": "fc"}

    body = {
        "instructions": "sys\nmore",
        "input": [
            {"role": "user", "content": [
                {"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": PNG},
            ]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            made("c1"), made("c2"),
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "message", "role": "user", "content": "and?"},
            {"type": "message", "role": "assistant", "content": "first"},
            {"type": "message", "role": "assistant", "content": "second"},
            {"role": "user", "content": ""},
        ],
        "tools": [
            {"type": "function", **TOOL["function"], "strict": True}, {"type": "namespace", "name": "n", "tools": []},
        ],
        "max_output_tokens": 7, "top_p": 0.5, "text": {"format": {"type": "text"}}, "include": ["x"], "store": False,
    }  # fmt: skip
    assert responses.request(body) == ChatRequest(CONVERSATION, [TOOL], max_tokens=7, sampling={"top_p": 0.5})


def test_two_responses_in_a_row_are_two_turns():
    entries = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
    ]
    read = responses.request({"input": entries}).messages
    assert [(said.get("reasoning_content"), said["tool_calls"][0]["id"]) for said in read] == [
        (None, "c1"),
        ("hm", "c2"),
    ]


def test_messages_are_read():
    def use(call_id):
        return {"type": "tool_use", "id": call_id, "name": "f", "input": {"a": 1}}

    body = {
        "system": [
            {"type": "text", "text": "sys", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "more"},
        ],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "look"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "z"},
                {"type": "text", "text": "so"}, use("c1"), use("c2"),
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "and?"},
            ]},
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": [{"type": "text", "text": "second"}]},
            {"role": "user", "content": None},
        ],
        "tools": [
            {"name": "f", "description": "d", "input_schema": SCHEMA, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "max_tokens": 7, "stop_sequences": ["END"], "tool_choice": {"type": "auto"}, "output_config": {"effort": "low"},
        "metadata": {"user_id": "u"}, "context_management": {},
    }  # fmt: skip
    assert messages.request(body) == ChatRequest(
        CONVERSATION,
        [TOOL],
        max_tokens=7,
        stop=("END",),
        ignored=["effort"],
        ignored_tools=["web_search_20250305"],
    )


def test_a_block_that_is_not_known_reaches_the_model_as_it_is():
    block = {"type": "tool_reference", "tool_name": "f"}
    body = {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block]}]}]
    }
    assert json.loads(messages.request(body).messages[0]["content"]) == block


HI = {"messages": [{"role": "user", "content": "hi"}]}
JSON_FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    "wire, body, structure, required",
    [
        (chat, HI | {"tool_choice": "required", "tools": [TOOL]}, None, ["f"]),
        (chat, HI | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, None, []),
        (chat, HI | {"response_format": {"type": "json_object"}}, {"json_object": True}, None),
        (chat, HI | {"response_format": {"type": "structural_tag"}}, {}, None),
        (responses, {"input": "hi", "text": {"format": {"type": "json_schema"}}}, {"json_object": True}, None),
        (responses, {"input": "hi", "tool_choice": {"type": "web_search"}}, None, []),
        (messages, HI | {"tool_choice": {"type": "any"}, "tools": [TOOL, TOOL]}, None, ["f", "f"]),
        (messages, HI | {"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, None, ["f"]),
        (
            messages,
            HI | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"json": SCHEMA},
            None,
        ),
    ],
)
def test_constraints_are_read(wire, body, structure, required):
    read = wire.request(body)
    assert (read.structure, read.required_tools) == (structure, required)


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_a_tool_choice_of_none_offers_no_tools(choice):
    read = chat.request(HI | {"tools": [TOOL], "tool_choice": choice})
    assert (read.tools, read.structure, read.required_tools) == (None, None, None)


@pytest.mark.parametrize("path", WIRES)
@pytest.mark.parametrize(
    "change, says",
    [
        ({"messages": [], "input": []}, "nothing to answer"),
        ({"messages": "hi", "input": {"role": "user"}}, "must be a list of objects"),
        ({"messages": ["hi"], "input": ["hi"]}, "must be a list of objects"),
        ({"messages": [{"role": "wizard", "content": "x"}], "input": [{"role": "wizard", "content": "x"}]}, "'wizard'"),
        ({"messages": [{"role": ["user"]}], "input": [{"role": ["user"]}]}, "role|protocol"),
        ({"messages": [{"role": "user", "content": 5}], "input": [{"role": "user", "content": 5}]}, "is a int"),
        ({key: [{"role": "user", "content": [{"type": "input_audio"}]}] for key in ("messages", "input")}, "be shown"),
        ({"tools": [{"type": "function", "name": "", "function": {}}]}, "the name"),
        ({"tools": [{"name": "f", "parameters": [1]}]}, "JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "JSON schema"),
        ({"tools": [{"name": "f", "input_schema": {"properties": []}}]}, "JSON schema"),
        ({"tools": {"f": 1}}, "`tools` must be a list"),
        ({"max_tokens": 0}, "`max_tokens` is 0"),
        ({"max_tokens": "many"}, "`max_tokens` is 'many'"),
        ({"n": -1}, "`n` is -1"),
        ({"n": True}, "`n` is True"),
        ({"stop": [""]}, "stop strings"),
        ({"stop": 5}, "stop strings"),
        *(({"seed": value}, "'seed'") for value in ("x", 5.0, True, {}, 1 << 64, -(1 << 63) - 1)),
        *(({"top_k": value}, "'top_k'") for value in (True, 1.0, {}, 1 << 70)),
        *(({"temperature": value}, "'temperature'") for value in ([1], True, {}, float("nan"), float("inf"), 10**400)),
        *(({"top_p": value}, "'top_p'") for value in ("1", False, {})),
        ({"logit_bias": 5}, "'logit_bias'"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_in_words(path, change, says):
    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi"} | change
    with pytest.raises(ChatError, match=says) as caught:
        parse_call(WIRES[path], json.dumps(body).encode(), {}, True)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


def test_sampling_parameters_of_the_right_type_are_read():
    given = {"temperature": 1, "top_p": 0.5, "top_k": -1, "logit_bias": {"5": 1}}
    read = chat.request(HI | given | {"seed": (1 << 64) - 1})
    assert read.sampling == given and read.seed == (1 << 64) - 1


@pytest.mark.parametrize("options", [17, "x", [1], True])
def test_stream_options_that_are_no_object_are_refused(options):
    with pytest.raises(ChatError, match="`stream_options` is"):
        chat.request(HI | {"stream_options": options})


@pytest.mark.parametrize("thought", [17, {"a": 1}, ["x"]])
def test_reasoning_that_is_no_text_is_refused(thought):
    said = [{"role": "assistant", "content": "x", "reasoning_content": thought}]
    for wire, key in ((chat, "messages"), (responses, "input")):
        with pytest.raises(ChatError, match="must be text"):
            wire.request({key: said})


def test_keys_are_equal_for_equal_requests_streamed_or_not_and_for_no_others():
    def key(body, hints=None, train=True):
        return parse_call(chat, json.dumps(body).encode(), hints or {}, train).key

    streamed = HI | {"stream": True, "stream_options": {"include_usage": True}}
    assert key(HI) == key(streamed) == key(HI, {"x-stainless-retry-count": "1"})
    others = [key(HI | {"seed": 1}), key(HI, {"idempotency-key": "a"}), key(HI, train=False), key(HI | {"n": 2})]
    assert len({key(HI), *others}) == 5
    # Of equal bodies one may hold the same object twice, the other two equal ones.
    shared = {"messages": [dict(HI["messages"][0])] * 2}
    one, two = (json.loads(json.dumps(shared), object_pairs_hook=hook) for hook in (dict, lambda pairs: dict(pairs)))
    assert key(one) == key(two)


def test_what_is_not_stored_is_refused():
    for body in ({"previous_response_id": "resp_1"}, {"input": [{"type": "item_reference", "id": "msg_1"}]}):
        with pytest.raises(ChatError, match="not found"):
            parse_call(responses, json.dumps({"input": "hi"} | body).encode(), {}, True)
    for kind in ("web_search_call", "local_shell_call"):
        with pytest.raises(ChatError, match="keeps"):
            responses.request({"input": [{"type": kind}]})


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 200_000, b'"x"', b"1" * 5000])
@pytest.mark.parametrize("path", WIRES)
def test_bytes_that_are_no_request_are_refused(path, raw):
    with pytest.raises(ChatError) as caught:
        parse_call(WIRES[path], raw, {}, True)
    assert caught.value.status == 400


KEYS = [
    "role", "content", "type", "text", "messages", "input", "system", "tools", "tool_choice", "tool_calls", "function",
    "name", "arguments", "parameters", "source", "image_url", "url", "stop", "n", "max_tokens", "response_format",
    "seed", "output_config", "format", "thinking", "summary", "instructions", "call_id",
]  # fmt: skip
WORDS = [
    "user", "assistant", "tool", "system", "text", "image", "image_url", "tool_use", "tool_result", "function_call",
    "reasoning",
]  # fmt: skip
KEYS, WORDS = st.sampled_from(KEYS), st.sampled_from(WORDS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | WORDS | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


@given(body=st.dictionaries(KEYS, VALUES, max_size=6), path=st.sampled_from(list(WIRES)))
def test_any_json_is_read_or_refused(body, path):
    try:
        read = parse_call(WIRES[path], json.dumps(body).encode(), {}, True).request
    except ChatError as error:
        assert error.status == 400
        return
    for said in read.messages:
        assert said["role"] in ("system", "user", "assistant", "tool") and isinstance(said["content"], str | list)


REPLY = ChatReply(
    "r1",
    (Answer("so", "hm", (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "f", "{}")), "tool_calls", 12),),
    prompt_tokens=30,
)
TYPES = {
    "/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/responses": (Response, ResponseStreamEvent),
    "/messages": (AnthropicMessage, RawMessageStreamEvent),
}


@pytest.mark.parametrize("path", WIRES)
def test_replies_and_events_are_what_the_sdk_types_demand(path):
    """Validated strictly, where the SDKs themselves are lenient: a required field that is missing fails here."""
    whole, event = TYPES[path]
    full = WIRES[path].reply(REPLY, {"model": "m"})
    whole.model_validate(full)
    events = list(WIRES[path].events(full, {}))
    for name, data in events:
        assert data == "[DONE]" or TypeAdapter(event).validate_python(data)
        assert name is None or name == data["type"]
    assert json.loads(json.dumps(full)) == full


FREE_TEXT = ToolCall("c1", "n__g", '{"input": "x"}', namespace="n", text="x")
OTHER_REPLIES = {
    "custom": ("/responses", Answer("", None, (FREE_TEXT,), "tool_calls", 3), {}),
    "custom in chat": ("/chat/completions", Answer("", None, (FREE_TEXT,), "tool_calls", 3), {}),
    "function": (
        "/chat/completions",
        Answer("", None, (ToolCall("c1", "f", "{}"),), "tool_calls", 3),
        {"functions": [{"name": "f"}]},
    ),
    "summary": ("/responses", Answer("so", None, (), "stop", 3), {"input": [{"type": "compaction_trigger"}]}),
    "log-probs": ("/chat/completions", Answer("so", None, (), "stop", 3, logprobs=(TokenLogprob("so", -1.0),)), {}),
}


@pytest.mark.parametrize("path, answer, body", OTHER_REPLIES.values(), ids=OTHER_REPLIES)
def test_other_replies_are_what_the_sdk_types_demand(path, answer, body):
    whole, event = TYPES[path]
    full = WIRES[path].reply(ChatReply("r1", (answer,), prompt_tokens=30), {"model": "m", **body})
    whole.model_validate(full)
    if path == "/chat/completions" and answer.tool_calls and answer.tool_calls[0].text:
        return  # the SDK's type of chunks has no custom calls
    for _, data in WIRES[path].events(full, body):
        assert data == "[DONE]" or TypeAdapter(event).validate_python(data)


def test_chat_usage_comes_apart_if_asked_for_else_with_the_last_choice():
    full = chat.reply(REPLY, {})
    apart = [data for _, data in chat.events(full, {"stream_options": {"include_usage": True}})][:-1]
    assert apart[-1]["choices"] == [] and apart[-1]["usage"]["total_tokens"] == 42
    assert {chunk["usage"] is None for chunk in apart[:-1]} == {True}
    together = [data for _, data in chat.events(full, {})][:-1]
    assert together[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert together[-1]["usage"] == full["usage"]


def test_a_stream_of_messages_starts_with_the_prompt_and_ends_with_the_sampled_tokens():
    events = dict(messages.events(messages.reply(REPLY, {}), {}))
    usages = events["message_start"]["message"]["usage"], events["message_delta"]["usage"]
    assert [(usage["input_tokens"], usage["output_tokens"]) for usage in usages] == [(30, 0), (30, 12)]


def test_an_empty_answer_is_still_a_message():
    reply = ChatReply("r", (Answer("", None, (), "stop", 1),), 3)
    assert chat.reply(reply, {})["choices"][0]["message"]["content"] == ""
    assert [item["type"] for item in responses.reply(reply, {})["output"]] == ["message"]
    assert messages.reply(reply, {})["content"] == [{"type": "text", "text": "", "citations": None}]


@pytest.mark.parametrize(
    "status, kind",
    [
        (400, "invalid_request_error"), (404, "not_found_error"), (413, "request_too_large"), (429, "rate_limit_error"),
        (503, "api_error"),
    ],
)  # fmt: skip
def test_errors_of_the_messages_protocol(status, kind):
    shaped = messages.error(ChatError(status, "x", "words"))
    assert shaped["type"] == "error" and shaped["error"] == {"type": kind, "message": "words"}
