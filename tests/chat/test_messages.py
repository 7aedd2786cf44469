"""The same conversation, however a user spells it, is one list of messages; and the one that the chat server reads."""

import pytest

from molt.chat.messages import as_unicode, read_messages, require_unicode, trained_weight
from molt.chat.tool_arguments import arguments_as_objects
from molt.chat.wires.chat import read_message
from molt.errors import UnusableRow

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL_AS_TEXT = CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}
ANSWER = {"role": "assistant", "content": "46", "reasoning_content": "the sum is 46"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SPELLINGS = {
    "null content": ({"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLING),
    "no content": ({"role": "assistant", "tool_calls": [CALL]}, CALLING),
    "arguments as text": (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        CALLING,
    ),
    "text parts": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "a\nb"},
    ),
    "developer": ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
    "reasoning": ({"role": "assistant", "content": "46", "reasoning": "the sum is 46"}, ANSWER),
    "as it should be": (ANSWER, ANSWER),
    "fields without a value": (
        {"role": "assistant", "content": "46", "tool_calls": None, "reasoning_content": "the sum is 46"},
        ANSWER,
    ),
    "no calls": ({"role": "assistant", "content": "46", "tool_calls": [], "reasoning": "the sum is 46"}, ANSWER),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_datasets_and_the_chat_server_read_one_conversation(name):
    spelled, expected = SPELLINGS[name]
    of_dataset = arguments_as_objects(read_messages([spelled], "input"))
    of_server = arguments_as_objects([read_message(spelled, "messages[0]")])
    assert of_dataset == of_server == [expected]
    assert read_messages(of_dataset, "input") == of_dataset  # reading again changes nothing


def test_what_only_datasets_have():
    """OpenAI's old form of calls, calls that are the function alone, other keys for reasoning, parts without a type."""
    old = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    (message,) = read_messages([old], "input")
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    (message,) = read_messages([{"role": "function", "name": "add", "content": "2"}], "input")
    assert message == {"role": "tool", "name": "add", "content": "2"}

    bare = {"role": "assistant", "tool_calls": [{"id": "7", "name": "add", "arguments": {}}]}
    (message,) = read_messages([bare], "input")
    call = {"id": "7", "type": "function", "function": {"name": "add", "arguments": {}}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}

    (message,) = read_messages([{"role": "assistant", "content": ["a", {"text": "b"}], "thinking": "t"}], "input")
    assert message == {"role": "assistant", "content": "a\nb", "reasoning_content": "t"}
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]
    (message,) = read_messages([{"role": "assistant", "content": parts}], "input")
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "t"}
    for nothing in (None, ""):
        calling = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": nothing}}]}
        (message,) = read_messages([calling], "input")
        assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {}}}]

    kept = {"role": "user", "content": "x", "name": "bob", "weight": 1, "timestamp": 3}
    assert read_messages([kept], "input") == [kept]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": 3}, "a content that is a int"),
        ({"role": "user", "content": [{"type": "video", "video": "x"}]}, "a part of type video, which is no text"),
        ({"role": "user", "content": [3]}, "a part of type int"),
        ({"role": "assistant", "content": "x", "reasoning": 3}, "a content that is a int"),
        ({"role": "assistant", "tool_calls": ["f"]}, "a tool call that is no object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "without the name of its function"),
        ({"role": "assistant", "tool_calls": "f()"}, "`tool_calls` that are no list"),
    ],
)
def test_what_cannot_be_read_is_named(message, reason):
    with pytest.raises(UnusableRow, match=reason):
        read_messages([message], "input")


@pytest.mark.parametrize("weight", [0, 0.0, False, 1, True])
@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_weights_are_on_or_off(key, weight):
    assert trained_weight({"role": "assistant", "content": "x", key: weight}, "input") == bool(weight)
    assert trained_weight({"role": "assistant", "content": "x"}, "input")


@pytest.mark.parametrize("weight", [0.5, "0", 2, -1])
def test_any_other_weight_is_refused(weight):
    with pytest.raises(UnusableRow, match=r"`weight` .*: a message is trained \(1\) or not \(0\)"):
        trained_weight({"role": "assistant", "content": "x", "weight": weight}, "input")


@pytest.mark.parametrize("half", ["\ud83d", "a \udc4d b"])
def test_half_of_a_surrogate_pair_is_named_wherever_it_is(half):
    for value in (half, [half], {"a": [{half: 1}]}, [{"role": "user", "content": [{"type": "text", "text": half}]}]):
        with pytest.raises(UnusableRow, match=r"`q` has half of a surrogate pair \('\\ud"):
            require_unicode(value, "q")
    require_unicode(["\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "é", None, 1.5, b"x"], "q")


def test_what_a_program_printed_becomes_unicode():
    """U+D83D U+DE00 are the halves of an emoji; alone, each becomes the replacement character."""
    assert as_unicode("plain é 😀") == "plain é 😀"
    assert as_unicode("a\ud83d b\udc4d") == "a\ufffd b\ufffd"
    assert as_unicode("\ud83d\ude00") == "😀"
    assert as_unicode(b"\xff".decode(errors="surrogateescape")) == "\ufffd"
