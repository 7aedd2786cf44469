"""Orders of messages that templates refuse or drop, and how they are adapted."""

import pytest

from molt.chat.chat_renderer import ChatRenderer
from molt.chat.message_order import OPENING, TAKES_ALL, MessageOrder
from tests.chat.test_wire_cases import ALTERNATE, GUARD, PROMPT, TURNS
from tests.tiny import CHATML, QWEN3, char_tokenizer

NO_SYSTEM = "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
NO_SYSTEM += ALTERNATE
FIRST_SYSTEM_ONLY = (
    "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
) + PROMPT
USER_NEEDED = (
    "{%- if not (messages | selectattr('role', 'equalto', 'user') | list) %}"
    "{{- raise_exception('No user query found in messages.') }}{%- endif %}"
) + (TURNS + PROMPT)
NO_TOOLS = (
    "{%- for m in messages %}{%- if m.role != 'tool' %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
) + PROMPT


def said(conversation: str) -> list[dict]:
    """`s:a u:b` as messages."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = []
    for part in conversation.split():
        role, text = part.split(":")
        messages.append({"role": roles[role], "content": text})
    return messages


def shown(messages: list[dict]) -> str:
    return " ".join(f"{message['role'][0]}:{message['content']}" for message in messages)


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_a_template_that_takes_all_gets_all_as_it_was_sent(template):
    assert ChatRenderer(char_tokenizer(template)).order == TAKES_ALL


@pytest.mark.parametrize(
    "template, sent, rendered, changes",
    [
        (GUARD, "s:a u:b", "s:a u:b", 0),
        (GUARD, "s:a s:b u:c", "s:a\n\nb u:c", 1),
        (GUARD, "s:a u:b s:c u:d", "s:a u:b u:c u:d", 1),
        (ALTERNATE, "s:a u:b a:c u:d", "s:a u:b a:c u:d", 0),
        (ALTERNATE, "u:a u:b u:c", "u:a\n\nb\n\nc", 2),
        (ALTERNATE, "u:a a:b a:c u:d", "u:a a:b\n\nc u:d", 1),
        (ALTERNATE, "s:a s:b u:c s:d", "s:a\n\nb u:c\n\nd", 3),
        (ALTERNATE, "s:a a:b u:c", f"s:a u:{OPENING} a:b u:c", 1),
        (NO_SYSTEM, "s:a u:b a:c u:d", "u:a\n\nb a:c u:d", 2),
        (FIRST_SYSTEM_ONLY, "s:a s:b u:c", "s:a\n\nb u:c", 1),
        (FIRST_SYSTEM_ONLY, "u:a s:b", "u:a u:b", 1),
        (USER_NEEDED, "s:a", "u:a", 1),
        (USER_NEEDED, "s:a s:b", "s:a u:b", 1),
        (NO_TOOLS, "u:a a:b t:c", "u:a a:b u:c", 1),
    ],
)
def test_the_nearest_conversation_that_the_template_takes(template, sent, rendered, changes):
    renderer = ChatRenderer(char_tokenizer(template))
    adapted = renderer.order.adapt(said(sent), begins=True)
    assert (shown(adapted.messages), adapted.changes) == (rendered, changes)
    text = renderer.tokenizer.decode(renderer.render(said(sent)))
    for message in said(sent):  # no text is lost
        assert message["content"] in text


def test_what_follows_does_not_change_how_the_beginning_is_adapted():
    order = ChatRenderer(char_tokenizer(ALTERNATE)).order
    whole = said("s:a s:b u:c u:d a:e s:f u:g a:h u:i")
    cut = 5  # after an answer
    begun = order.adapt(whole[:cut], begins=True).messages
    rest = order.adapt(whole[cut:], begins=False).messages
    assert [*begun, *rest] == order.adapt(whole, begins=True).messages


def test_images_and_calls_of_joined_messages_are_kept():
    order = MessageOrder(joins_neighbours=True)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [image]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "reasoning_content": "r"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    user, assistant = order.adapt(messages, begins=True).messages
    assert user["content"] == [image, {"type": "text", "text": "\n\n"}, {"type": "text", "text": "b"}]
    assert assistant == {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [call]}
