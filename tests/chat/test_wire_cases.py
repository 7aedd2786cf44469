"""Requests of stock clients and harnesses that need more than messages and functions, and what each is answered.

`wire_cases.json` holds the bodies as the clients sent them: 18 cases, each with its requests, what the model says, and
the template of the model.
"""

import asyncio
import base64
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai.types.responses import Response

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.server import ChatServer
from molt.chat.session import Session
from tests.chat.scripted import ScriptedModel, text_of, turn_of
from tests.tiny import QWEN3, char_tokenizer

CASES = json.loads((Path(__file__).parent / "wire_cases.json").read_text())
TURNS = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
GUARD = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}"
) + (TURNS + PROMPT)
ALTERNATE = (
    "{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}{%- for m in turns %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{%- endif %}{%- endfor %}"
) + (TURNS + PROMPT)
TEMPLATES = {None: QWEN3, "guard": GUARD, "alternate": ALTERNATE}


@functools.cache
def renderer_of(template: str | None) -> ChatRenderer:
    return ChatRenderer(char_tokenizer(TEMPLATES[template]))


@dataclass
class Replayed:
    """What a case left."""

    replies: list[httpx.Response]
    session: Session
    model: ScriptedModel
    free: list[dict]
    """The sampling of each call that is not trained."""

    @property
    def statuses(self) -> list[int]:
        return [reply.status_code for reply in self.replies]

    @property
    def bodies(self) -> list[dict]:
        return [reply.json() for reply in self.replies]

    @property
    def ignored(self) -> dict[str, int]:
        counters = self.session.counters.items()
        return {name: count for name, count in counters if count and name.startswith("ignored")}

    @property
    def trained(self) -> list[str]:
        """What each segment trains."""
        return [text_of(sample.token_ids[sample.mask]) for sample in self.session.tree.samples()]


def replay(requests: list[dict], *says: str, template: str | None = None, free: str = "ok", **settings) -> Replayed:
    async def run() -> Replayed:
        model = ScriptedModel(*says)
        calls: list[dict] = []

        async def call_freely(ids, max_tokens, sampling):
            calls.append(sampling)
            return turn_of(free, ids, max_tokens)

        session = Session(renderer_of(template), model, call_freely=call_freely, max_len=8000, **settings)
        async with ChatServer() as server, httpx.AsyncClient(timeout=20) as client:
            url = server.open(session)
            replies = []
            for request in requests:
                path = request["path"]
                for number, reply in enumerate(replies):
                    path = path.replace(f"$ID{number}", reply.json().get("id", ""))
                body = json.dumps(request["body"])
                for number, reply in enumerate(replies):
                    body = body.replace(f"$ID{number}", reply.json().get("id", ""))
                content = None if request["body"] is None else body
                headers = request.get("headers")
                replies.append(await client.request(request["method"], url + path, content=content, headers=headers))
        return Replayed(replies, session, model, calls)

    return asyncio.run(run())


def replay_case(name: str, **settings) -> Replayed:
    case = CASES[name]
    says = case.get("says", ["ok"] * len(case["requests"]))
    return replay(case["requests"], *says, template=case.get("template"), **settings)


def post(path: str, body: dict, **headers: str) -> dict:
    return {"method": "POST", "path": f"/v1/{path}", "headers": headers, "body": body}


HI = [{"role": "user", "content": "hi"}]
F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL_F = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


# 1: structured outputs and forced tools


def test_a_forced_tool_is_ignored_by_name_where_it_is_trained_and_enforced_where_it_is_not():
    answer = '{"name": "final_answer", "arguments": {"answer": "4"}}'
    done = replay_case("tool_choice_required", free=answer)
    assert done.statuses == [200, 200, 200]
    assert done.ignored == {"ignored_constraint": 2, "ignored_tool_choice": 2}
    assert done.trained == ["ok<|im_end|>", "ok<|im_end|>"]
    (call,) = done.bodies[2]["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "final_answer", "arguments": '{"answer": "4"}'}
    assert done.bodies[2]["choices"][0]["finish_reason"] == "tool_calls"
    (sampling,) = done.free
    properties = {
        "name": {"const": "final_answer"},
        "arguments": {"type": "object", "properties": {"answer": {"type": "string"}}},
    }
    (schema,) = sampling["structure"]["json"]["anyOf"]
    assert (schema["properties"], schema["required"]) == (properties, ["name", "arguments"])


def test_a_response_format_stands_in_the_prompt_and_the_answer_is_sampled_as_it_is():
    done = replay_case("response_format")
    assert done.statuses == [200, 200]
    assert done.ignored == {"ignored_constraint": 2, "ignored_response_format": 2}
    assert "Answer with one JSON object, and nothing else.<|im_end|>" in done.model.prompts[0]
    assert 'fits this JSON schema, and nothing else:\n{"type": "object"}<|im_end|>' in done.model.prompts[1]


@pytest.mark.parametrize("name", ["response_format", "tool_choice_required"])
def test_a_strict_session_refuses_what_it_would_ignore(name):
    done = replay_case(name, strict=True)
    assert done.statuses[:2] == [400, 400] and "never constrained" in done.replies[0].text
    assert done.statuses[2:] in ([], [200])  # the untrained call is honoured
    assert sum(done.session.refusals.values()) == 2


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRUCTURES = {
    "chat": ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    "responses": ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    "messages": ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "older messages": ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    "guided": ("chat/completions", {"guided_json": SCHEMA}),
    "vllm": ("chat/completions", {"structured_outputs": {"json": SCHEMA}}),
}


@pytest.mark.parametrize("path, options", STRUCTURES.values(), ids=STRUCTURES)
def test_a_schema_of_any_protocol_is_enforced_in_calls_that_are_not_trained(path, options):
    body = {"messages": HI, "input": "hi", **options}
    trained = post(path, body)
    judged = post(path, body, **{"x-molt-train": "0"})
    done = replay([trained, judged], "ok", free='{"a": 1}')
    assert done.statuses == [200, 200] and '{\\"a\\": 1}' in done.replies[1].text
    assert [sampling["structure"] for sampling in done.free] == [{"json": SCHEMA}]
    assert done.ignored == {"ignored_constraint": 1, "ignored_response_format": 1}
    assert json.dumps(SCHEMA) in done.model.prompts[0]


def test_an_enforced_answer_is_cut_at_a_stop_string_too():
    options = {"guided_regex": "[0-9]+", "stop": ["3"]}
    (body,) = replay(
        [post("chat/completions", {"messages": HI, **options}, **{"x-molt-train": "0"})], free="1234"
    ).bodies
    assert body["choices"][0]["message"]["content"] == "12" and body["usage"]["completion_tokens"] == 3


def test_a_schema_grows_the_system_message_once_so_that_turns_stay_one_segment():
    options = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    said = [{"role": "system", "content": "Be brief."}, *HI]
    more = [*said, {"role": "assistant", "content": "{}"}, {"role": "user", "content": "again"}]
    requests = [post("chat/completions", {"messages": messages, **options}) for messages in (said, more)]
    done = replay(requests, "{}", "{}")
    assert done.trained == ["{}<|im_end|>{}<|im_end|>"]
    assert done.model.prompts[1].count("JSON schema") == 1


@pytest.mark.parametrize(
    "options", [{"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"guided_json": None}]
)
def test_what_asks_for_nothing_is_not_counted(options):
    done = replay(
        [post("chat/completions", {"messages": HI, "tools": [{"type": "function", "function": F}], **options})], "ok"
    )
    assert (done.statuses, done.ignored) == ([200], {})


@pytest.mark.parametrize("options", [{"tool_choice": 17}, {"tool_choice": "sometimes"}, {"response_format": "json"}])
def test_a_choice_that_is_none_is_refused_by_name(options):
    (reply,) = replay([post("chat/completions", {"messages": HI, **options})], "ok").replies
    assert reply.status_code == 400 and str(next(iter(options.values()))) in reply.text


# 2: allowed tools


def test_allowed_tools_filter_what_is_offered():
    done = replay_case("tool_choice_allowed_auto")
    assert (done.statuses, done.ignored) == ([200], {})
    assert "final_answer" in done.model.prompts[0]


def test_tools_that_are_not_allowed_are_not_offered_and_a_required_one_is_counted():
    tools = [F, {**F, "name": "g"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    done = replay([post("responses", {"input": "hi", "tools": tools, "tool_choice": allowed})], "ok")
    assert done.statuses == [200] and '"name": "g"' in done.model.prompts[0]
    assert '"name": "f"' not in done.model.prompts[0]
    assert done.ignored == {"ignored_constraint": 1, "ignored_tool_choice": 1}


# 3: websockets


def test_a_websocket_is_refused_at_once_and_without_a_word_on_the_console(caplog, capfd):
    done = replay_case("websocket")
    assert done.statuses == [426] and done.replies[0].headers["x-should-retry"] == "false"
    assert "WebSocket" not in caplog.text + "".join(capfd.readouterr())


# 4: custom tools, namespaces, additional tools


def test_a_custom_tool_is_a_function_with_one_text_and_its_calls_are_custom_calls():
    done = replay_case("codex_apply_patch")
    assert done.statuses == [200, 200]
    (call,) = done.bodies[0]["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "*** Begin Patch")
    Response.model_validate(done.bodies[0])
    assert "Edit files. FREEFORM." in done.model.prompts[0] and "lark grammar" in done.model.prompts[0]
    assert "<tool_response>ok</tool_response>" in done.model.prompts[1]
    assert len(done.trained) == 1 and done.ignored == {}


def test_a_custom_tool_of_chat_completions_too():
    tool = {"type": "custom", "custom": {"name": "g", "description": "d", "format": {"type": "text"}}}
    first = post("chat/completions", {"messages": HI, "tools": [tool]})
    call = {"id": "c1", "type": "custom", "custom": {"name": "g", "input": "x y"}}
    said = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "done"})
    done = replay(
        [first, post("chat/completions", {"messages": said, "tools": [tool]})],
        '<tool_call>{"name": "g", "arguments": {"input": "x y", "more": 1}}</tool_call>',
        "ok",
    )
    (made,) = done.bodies[0]["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "g", "input": "x y"})
    assert len(done.trained) == 1  # the echo has one argument, the model gave two


def test_arguments_that_hold_no_text_reach_the_client_as_they_are():
    tool = {"type": "custom", "name": "g"}
    said = '<tool_call>{"name": "g", "arguments": {"patch": [1]}}</tool_call>'
    (body,) = replay([post("responses", {"input": "hi", "tools": [tool]})], said).bodies
    assert body["output"][0]["input"] == '{"patch": [1]}'


def test_a_namespace_is_flattened_for_the_model_and_restored_in_its_calls():
    done = replay_case("codex_namespace_tool")
    assert done.statuses == [200] and '"name": "multi_agent_v1__f"' in done.model.prompts[0] and done.ignored == {}


@pytest.mark.parametrize("name", ["n__f", "f"])
def test_the_call_of_a_namespace_comes_back_to_the_same_segment(name):
    tools = [{"type": "namespace", "name": "n", "description": "d", "tools": [F]}]
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": "{}"}
    follow = [*HI, call, output]
    done = replay(
        [post("responses", {"input": said, "tools": tools}) for said in (HI, follow)],
        CALL_F.replace('"f"', f'"{name}"'),
        "ok",
    )
    (made,) = done.bodies[0]["output"]
    assert (made["type"], made["name"], made["namespace"]) == ("function_call", "f", "n")
    assert len(done.trained) == 1


def test_additional_tools_are_offered():
    done = replay_case("codex_additional_tools")
    assert done.statuses == [200] and '"name": "f"' in done.model.prompts[0]


# 5: compaction


def test_a_compaction_trigger_is_answered_with_a_sampled_summary_that_can_be_sent_back():
    done = replay_case("codex_compaction_trigger")
    (item,) = done.bodies[0]["output"]
    assert done.statuses == [200] and item["type"] == "compaction"
    assert base64.b64decode(item["encrypted_content"]) == b"ok"
    assert "Summarise the conversation so far" in done.model.prompts[0]
    after = [item, {"role": "user", "content": "go on"}]
    resumed = replay([post("responses", {"input": after})], "yes")
    assert resumed.statuses == [200]
    assert "user\nSummary of the conversation so far:\nok<|im_end|>" in resumed.model.prompts[0]


def test_the_compact_route_gives_the_same_item():
    done = replay([post("responses/compact", {"input": "hi"})], "short")
    assert done.bodies[0]["object"] == "response.compaction"
    (item,) = done.bodies[0]["output"]
    assert base64.b64decode(item["encrypted_content"]) == b"short" and done.trained == ["short<|im_end|>"]


def test_a_compaction_of_another_server_is_refused_by_name():
    item = {"type": "compaction", "encrypted_content": "gAAAA!"}
    (reply,) = replay([post("responses", {"input": [item, *HI]})], "ok").replies
    assert reply.status_code == 400 and "`input[0]` is a compaction that another server made" in reply.text


# 6: orders that a template refuses


def test_system_messages_at_the_beginning_become_one():
    done = replay_case("two_developer_messages_guard")
    assert done.statuses == [200] and done.session.counters["adapted_messages"] == 1
    assert done.model.prompts == [
        "<|im_start|>system\na\n\nb<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_a_system_message_later_on_becomes_the_users():
    done = replay_case("claude_system_inside_guard")
    assert done.statuses == [200] and done.session.counters["adapted_messages"] == 1
    assert "system\na<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nb<|im_end|>" in done.model.prompts[0]


def test_neighbours_of_one_role_become_one():
    done = replay_case("two_user_messages_alternate")
    assert done.statuses == [200] and done.session.counters["adapted_messages"] == 1
    assert "user\n<environment_context/>\n\nhi<|im_end|>" in done.model.prompts[0]


def test_an_adapted_conversation_stays_one_segment():
    """Two users, answered; then a system message and a user, which the template would refuse as they are."""
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    more = [*said, {"role": "assistant", "content": "one"}]
    more += [{"role": "system", "content": "c"}, {"role": "user", "content": "d"}]
    done = replay(
        [post("chat/completions", {"messages": each}) for each in (said, more)], "one", "two", template="alternate"
    )
    assert done.statuses == [200, 200] and done.trained == ["one<|im_end|>two<|im_end|>"]
    assert done.model.prompts[1].endswith("user\nc\n\nd<|im_end|>\n<|im_start|>assistant\n")


# 7: stop strings


def test_an_echo_with_its_stop_string_is_no_edit():
    done = replay_case("stop_string_given_back")
    assert done.statuses == [200, 200]
    assert done.bodies[0]["choices"][0]["message"]["content"] == "<code>f()\n"
    assert done.trained == ["<code>f()\n</code>ok<|im_end|>"]
    assert [node.reason for node in done.session.tree.nodes] == ["root", ""]


@pytest.mark.parametrize(
    "said, echo, segments",
    [
        ("a STOP b", "a ", 1),  # without it
        ("a STOP b", "a STOP", 1),
        ("a", "aSTOP", 1),  # the model ended by itself, the client puts it there all the same
        ("a STOP b", "a STOP b", 2),  # more than was given
        ("a STOP b", "b STOP", 2),
        ("a STOP b", "a OTHER", 2),  # not a stop string of the request
    ],
)
def test_only_stop_strings_of_the_request_may_come_back(said, echo, segments):
    follow = [*HI, {"role": "assistant", "content": echo}, *HI]
    requests = [post("chat/completions", {"messages": messages, "stop": ["STOP"]}) for messages in (HI, follow)]
    assert len(replay(requests, said, "ok").trained) == segments


# 8: what is translated or refused by name


def test_functions_of_the_oldest_protocol_are_tools():
    done = replay_case("legacy_functions")
    assert done.statuses == [200, 200]
    (choice,) = done.bodies[0]["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert "<tool_response>1</tool_response>" in done.model.prompts[1]


def test_a_conversation_with_functions_is_one_segment():
    functions = CASES["legacy_functions"]["requests"][0]["body"]["functions"]
    follow = CASES["legacy_functions"]["requests"][1]["body"]["messages"]
    requests = [post("chat/completions", {"messages": said, "functions": functions}) for said in (HI, follow)]
    assert len(replay(requests, CALL_F, "ok").trained) == 1


def test_tools_that_anthropics_clients_run_are_offered_with_their_arguments():
    done = replay_case("anthropic_server_side_tool_types")
    assert (done.statuses, done.ignored) == ([200], {})
    for part in ('"name": "bash"', '"restart"', '"name": "str_replace_based_edit_tool"', '"old_str"'):
        assert part in done.model.prompts[0]


def test_tools_that_only_a_server_could_run_are_ignored_by_name():
    tools = [F, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]
    done = replay([post("responses", {"input": "hi", "tools": tools})], "ok")
    assert done.ignored == {"ignored_tools": 3, "ignored_tool_web_search": 2, "ignored_tool_mcp": 1}


def test_a_background_response_is_complete_when_it_is_first_looked_at():
    done = replay_case("background_true")
    assert done.statuses == [200]
    assert (done.bodies[0]["status"], done.bodies[0]["background"]) == ("completed", True)


def test_a_stored_response_can_be_got_and_one_that_is_not_is_refused_by_name():
    done = replay_case("store_true_then_get")
    assert done.statuses == [200, 404] and "resp_x" in done.replies[1].text
    stored = [
        post("responses", {"input": "hi"}),
        {"method": "GET", "path": "/v1/responses/$ID0", "body": None},
        {"method": "GET", "path": "/v1/responses/$ID0/input_items", "body": None},
        {"method": "POST", "path": "/v1/responses/$ID0/cancel", "body": None},
        {"method": "DELETE", "path": "/v1/responses/$ID0", "body": None},
        {"method": "GET", "path": "/v1/responses/$ID0", "body": None},
        post("responses", {"input": "hi", "store": False}),
        {"method": "GET", "path": "/v1/responses/$ID6", "body": None},
    ]
    done = replay(stored, "ok", "ok")
    assert done.statuses == [200, 200, 200, 200, 200, 404, 200, 404]
    assert done.bodies[0] == done.bodies[1] == done.bodies[3]
    assert done.bodies[2]["data"][0]["content"] == "hi" and done.bodies[4]["deleted"] is True


def test_a_previous_response_is_continued_in_the_same_segment():
    done = replay_case("previous_response_id")
    assert done.statuses == [200, 400] and "resp_x" in done.replies[1].text
    requests = [
        post("responses", {"input": "hi", "tools": [F]}),
        post(
            "responses",
            {
                "input": [{"type": "function_call_output", "call_id": "c", "output": "1"}],
                "previous_response_id": "$ID0",
                "tools": [F],
            },
        ),
        post("responses", {"input": "more", "previous_response_id": "$ID1", "tools": [F]}),
    ]
    done = replay(requests, CALL_F, "two", "three")
    assert done.statuses == [200, 200, 200] and len(done.trained) == 1
    assert done.bodies[2]["previous_response_id"] == done.bodies[1]["id"]
    assert done.model.prompts[2].endswith("two<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")


def test_a_reference_to_an_item_is_that_item():
    def refer(item_id):
        return [*HI, {"type": "item_reference", "id": item_id}, {"role": "user", "content": "more"}]

    first = post("responses", {"input": HI})
    done = replay([first, post("responses", {"input": refer("msg_x")})], "ok", "two")
    assert done.statuses == [200, 400] and "Item with id" in done.replies[1].text

    async def run():
        model = ScriptedModel("ok", "two")
        session = Session(renderer_of(None), model, max_len=8000)
        async with ChatServer() as server, httpx.AsyncClient() as client:
            url = server.open(session)
            made = (await client.post(f"{url}/v1/responses", json={"input": HI})).json()
            body = {"input": refer(made["output"][0]["id"])}
            assert (await client.post(f"{url}/v1/responses", json=body)).status_code == 200
        return session.tree.samples()

    assert len(asyncio.run(run())) == 1


@pytest.mark.parametrize("option", [{"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}])
def test_what_only_openai_stores_is_refused_by_name(option):
    (reply,) = replay([post("responses", {"input": "hi", **option})], "ok").replies
    assert reply.status_code == 400 and next(iter(option)) in reply.text


def test_a_result_that_is_an_object_is_its_json_text():
    done = replay_case("tool_message_as_object")
    assert done.statuses == [200] and '<tool_response>{"a": 1}</tool_response>' in done.model.prompts[0]


# Options that change the meaning


def test_logprobs_are_those_of_the_sampled_tokens():
    """`turn_of` gives token i the log-prob -i - 1; "ok" is two tokens, the third ends the turn."""
    expected = [("o", -1.0), ("k", -2.0)]
    done = replay([post("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 3})], "ok")
    listed = done.bodies[0]["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in listed] == expected
    assert listed[0]["bytes"] == [111] and done.ignored == {"ignored_top_logprobs": 1}
    done = replay([post("responses", {"input": "hi", "include": ["message.output_text.logprobs"]})], "ok")
    listed = done.bodies[0]["output"][0]["content"][0]["logprobs"]
    assert [(each["token"], each["logprob"]) for each in listed] == expected
    done = replay([post("chat/completions", {"messages": HI, "logprobs": False})], "ok")
    assert done.bodies[0]["choices"][0]["logprobs"] is None


ONE = 'so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TWO = f"{ONE}{CALL_F}"
ONE_CALL = {
    "chat": ("chat/completions", {"parallel_tool_calls": False}),
    "responses": ("responses", {"parallel_tool_calls": False}),
    "messages": ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
}


@pytest.mark.parametrize("path, options", ONE_CALL.values(), ids=ONE_CALL)
def test_one_call_at_a_time_ends_the_turn_with_the_first_one(path, options):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    done = replay([post(path, {"messages": HI, "input": "hi", "tools": tools, **options})], TWO)
    assert done.trained == [TWO[: TWO.index("</tool_call>") + len("</tool_call>")]] and done.ignored == {}
    assert (
        done.replies[0].text.count('"f"') - done.replies[0].text.count('"input_schema"') in (1, 0)
        or path == "responses"
    )
    both = replay([post(path, {"messages": HI, "input": "hi", "tools": tools})], TWO)
    assert both.trained == [f"{TWO}<|im_end|>"]


def test_options_that_nothing_reads_are_ignored_by_name():
    options = {
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "min_tokens": 5,
        "metadata": {"a": "b"},
        "user": "me",
        "ignore_eos": False,
        "modalities": ["text"],
        "reasoning": {"effort": None},
    }
    done = replay([post("chat/completions", {"messages": HI, **options})], "ok")
    assert done.ignored == {"ignored_reasoning_effort": 1, "ignored_chat_template_kwargs": 1, "ignored_min_tokens": 1}


def test_all_cases_are_replayed():
    source = Path(__file__).read_text()
    assert [name for name in CASES if f'"{name}"' not in source] == []
