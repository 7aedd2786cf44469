"""What a template does not show is found, whatever the template; what it shows is never reported."""

import pytest

from molt.chat.messages import read_messages
from molt.chat.render import for_template, render_text
from molt.chat.shown import hidden_parts, ignored_keys
from tests.tiny import CHATML, MARKED, QWEN3, char_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "hi"}
FULL = {"role": "assistant", "content": "so", "reasoning_content": "why", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}
LISTING = "{%- for m in messages %}{{- m.role + ':' + m.content + '<|im_end|>' }}{%- endfor %}"


def hidden(template, messages, tools=None):
    tokenizer = char_tokenizer(template)
    messages = for_template(tokenizer, read_messages(messages, "input"), tools)
    return [str(each) for each in hidden_parts(tokenizer, messages, tools)]


REASONING = "the reasoning of an assistant message"
CALLS = "the tool calls of an assistant message"
WITHOUT_THOUGHT = LISTING.replace("m.content", "m.content.split('</think>')[-1]")
NAMES_ALONE = LISTING.replace("m.content", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '')")
LOOKS_AT_START = LISTING.replace("m.content", "(m.content if m.content.startswith('<result>') else '')")


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "expected"),
    [
        (CHATML, [USER, FULL], TOOLS, [REASONING, CALLS]),
        (QWEN3, [SYSTEM, USER, FULL, RESULT], TOOLS, []),
        (MARKED, [USER, assistant("a")], TOOLS, ["the tools"]),
        (LISTING, [SYSTEM, USER, RESULT], None, []),
        (LISTING.replace("messages", "messages[1:]"), [SYSTEM, USER], None, ["the content of a system message"]),
        (LISTING.replace("messages", "messages[-1:]"), [USER, RESULT], None, ["the content of a user message"]),
        (LISTING.replace("m.content", "(m.content | trim)"), [{"role": "user", "content": " x "}], None, []),
        (WITHOUT_THOUGHT, [assistant("<think>r</think>a")], None, [REASONING]),
        (WITHOUT_THOUGHT, [assistant("r</think>a")], None, [REASONING]),
        (WITHOUT_THOUGHT, [assistant("a")], None, []),
        (LISTING, [assistant("<think>r</think>a"), {"role": "user", "content": ""}], None, []),
        (NAMES_ALONE, [FULL], None, [REASONING, CALLS]),
        (LOOKS_AT_START, [{"role": "user", "content": "<result>2</result>"}], None, []),
    ],
)
def test_hidden_parts(template, messages, tools, expected):
    assert hidden(template, messages, tools) == expected


def test_a_template_that_rejects_the_sentinels_says_nothing():
    picky = "{%- if messages[0].content != 'hi' %}{{- raise_exception('no') }}{%- endif %}" + LISTING
    assert hidden(picky, [USER]) == []


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_comes_under_the_key_of_the_template(key):
    template = LISTING.replace("m.content", f"(m.{key} or '') + m.content")
    for spelled in ("reasoning_content", "reasoning", "thinking"):
        answer = {"role": "assistant", "content": "46", spelled: "because"}
        assert hidden(template, [USER, answer]) == []


def test_keys_that_nobody_reads():
    messages = [USER | {"timestamp": 3, "mood": "glad", "name": "bob", "weight": 1}]
    tokenizer = char_tokenizer(LISTING.replace("m.content", "m.content + (m.mood or '')"))
    text = render_text(tokenizer, messages)
    assert text == "user:higlad<|im_end|>"
    assert ignored_keys(tokenizer, messages, None, text=text) == ["timestamp"]


def test_results_come_with_the_names_of_their_functions():
    """Found by the ids of calls; a name that is there stays."""
    tokenizer = char_tokenizer(LISTING.replace("m.content", "(m.name or '') + '=' + m.content"))
    calling = assistant("") | {"tool_calls": [CALL]}
    messages = for_template(
        tokenizer, [calling, RESULT, RESULT | {"name": "sum"}, {"role": "tool", "content": "3"}], None
    )
    assert render_text(tokenizer, messages[1:]) == "tool:add=2<|im_end|>tool:sum=2<|im_end|>tool:=3<|im_end|>"


JOINED = LISTING.replace("m.content", "m.content + (m.tool_calls[0].function.arguments if m.tool_calls else '')")
PRINTED = JOINED.replace("arguments if m.tool_calls", "arguments | string if m.tool_calls")
DUMPED = JOINED.replace("arguments if m.tool_calls", "arguments | tojson if m.tool_calls")


@pytest.mark.parametrize("template", [JOINED, PRINTED, DUMPED])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_are_json_once_whatever_the_template_takes(template, arguments):
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}],
    }
    tokenizer = char_tokenizer(template)
    assert render_text(tokenizer, for_template(tokenizer, [calling], None)) == 'assistant:{"a": 1}<|im_end|>'
