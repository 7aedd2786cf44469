"""Loss masks on the chat formats of six model families, against the family renderers of `renderers`.

The templates in `templates/` are written from the formats; that they are right is a test of its own: their
token ids are those of the family's renderer. Where its sampled tokens differ from ours the difference is
stated. The rule: what the generation prompt holds is not trained, everything after it is.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from renderers import configs, create_renderer, glm45, kimi_k2, nemotron3, qwen3

from molt.errors import DataError
from tests.data.masks import assistant, runs, trained, user
from tests.tiny import bpe_tokenizer

TEMPLATES = Path(__file__).parent / "templates"


def tool(content, i=0):
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": f"functions.add:{i}"}


def call(i=0, **arguments):
    return {"id": f"functions.add:{i}", "type": "function", "function": {"name": "add", "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief."}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]

CHAT = [SYSTEM, user("1 + 1?"), assistant("it is 2"), user("sure?"), assistant("yes."), user("bye"), assistant("bye é")]
CALLS = [
    user("add these"),
    assistant("", tool_calls=[call(0, a="x", b=1), call(1, a="y", b=2)]),
    tool("one"),
    tool("two", 1),
    assistant("done"),
    user("again"),
    assistant("", tool_calls=[call(2, a="z", b=3)]),
    tool("three", 2),
    assistant("done again"),
]
REASONED = [
    SYSTEM,
    user("add"),
    assistant("", reasoning_content="I must call", tool_calls=[call(0, a="x", b=1)]),
    tool("one"),
    assistant("one", reasoning_content="that is it"),
]
CONVERSATIONS = {"chat": (CHAT, None), "calls": (CALLS, TOOLS), "reasoned": (REASONED, TOOLS)}

CHATML = "<|im_end|> <|im_start|> <|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response>"
DEEPSEEK = (
    "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁sep｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
# Family: its renderer's configuration, its special tokens (the first ends a turn, as far as one does), its fixed texts.
FAMILIES = {
    "qwen3": (
        configs.Qwen3RendererConfig,
        CHATML,
        {"tools_header": qwen3._TOOLS_HEADER, "tools_footer": qwen3._TOOLS_FOOTER},
    ),
    "nemotron3": (
        configs.Nemotron3RendererConfig,
        CHATML,
        {
            "tools_header": nemotron3._TOOLS_HEADER,
            "tools_footer": nemotron3._TOOLS_FOOTER + nemotron3._TOOLS_INSTRUCTIONS,
        },
    ),
    "kimi_k2": (
        configs.KimiK2RendererConfig,
        "<|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|>",
        {"default_system": kimi_k2._DEFAULT_SYSTEM},
    ),
    "glm45": (
        configs.GLM45RendererConfig,
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <tool_call> </tool_call> "
        "<arg_key> </arg_key> <arg_value> </arg_value>",
        {"tools_header": glm45._TOOLS_HEADER, "tools_footer": glm45._TOOLS_FOOTER},
    ),
    "gemma4": (
        configs.Gemma4RendererConfig,
        '<turn|> <bos> <eos> <|turn> <|channel> <channel|> <|think|> <|"|> <|image> <|image|> <image|> <|tool> <tool|> '
        "<|tool_call> <tool_call|> <|tool_response> <tool_response|>",
        {},
    ),
    "deepseek_v3": (configs.DeepSeekV3RendererConfig, DEEPSEEK, {}),
}
R1 = (configs.DeepSeekR1RendererConfig, DEEPSEEK, {"r1": True})


@functools.cache
def family(name, **settings):
    """The tokenizer with the family's tokens and template, and the family's renderer."""
    config, specials, texts = (FAMILIES | {"deepseek_r1": R1})[name]
    template = (TEMPLATES / f"{name.replace('r1', 'v3')}.jinja").read_text()
    texts = "".join(f"{{%- set {key} = {json.dumps(value)} -%}}" for key, value in (texts | settings).items())
    tokenizer = bpe_tokenizer(texts + template)
    specials = specials.split()
    tokenizer.add_special_tokens({"additional_special_tokens": specials, "eos_token": specials[0]})
    return tokenizer, create_renderer(tokenizer, config(**settings))


def ours(build, tokenizer, messages, tools, **config):
    (one,), _ = build([{"input": messages, "tools": tools}], tokenizer, tools_key="tools", **config)
    return one


def theirs(renderer, messages, tools):
    """Token ids, and the tokens that the renderer says an assistant sampled."""
    rendered = renderer.render(messages, tools=tools)
    owners = [rendered.message_roles[i] if i >= 0 else "" for i in rendered.message_indices]
    sampled = [on and owner == "assistant" for on, owner in zip(rendered.sampled_mask, owners, strict=True)]
    return np.array(rendered.token_ids), np.array(sampled)


def difference(build, name, conversation, **settings):
    """What only the renderer would train, and what only we train, as texts."""
    tokenizer, renderer = family(name, **settings)
    messages, tools = CONVERSATIONS[conversation]
    one = ours(build, tokenizer, messages, tools)
    (ids, sampled) = theirs(renderer, messages, tools)
    assert one.token_ids.tolist() == ids.tolist()
    return runs(tokenizer, ids, sampled & ~one.mask), runs(tokenizer, ids, one.mask & ~sampled)


THINKING = ("nemotron3", "glm45")
VARIANTS = [(name, {}) for name in FAMILIES] + [(name, {"enable_thinking": False}) for name in THINKING]
IDS = [name + "".join(f"-{key}" for key in settings) for name, settings in VARIANTS]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name, settings", VARIANTS, ids=IDS)
def test_the_template_renders_what_the_renderer_does(name, settings, conversation):
    tokenizer, renderer = family(name, **settings)
    messages, tools = CONVERSATIONS[conversation]
    for end in range(1, len(messages) + 1):
        text = tokenizer.apply_chat_template(messages[:end], tools=tools, tokenize=False)
        assert tokenizer(text, add_special_tokens=False).input_ids == renderer.render_ids(messages[:end], tools=tools)
        if messages[end - 1]["role"] != "assistant":
            prompt = tokenizer.apply_chat_template(
                messages[:end], tools=tools, tokenize=False, add_generation_prompt=True
            )
            ids = renderer.render_ids(messages[:end], tools=tools, add_generation_prompt=True)
            assert tokenizer(prompt, add_special_tokens=False).input_ids == ids


# A prompt that opens a think block asks for reasoning; one that holds an empty block asks for none.
TRAINABLE = {
    *(("nemotron3", False, which) for which in ("chat", "calls")),
    *(("glm45", False, which) for which in ("chat", "calls")),
    *(("glm45", True, which) for which in CONVERSATIONS),
    ("nemotron3", True, "reasoned"),
}
# What only the renderer would train, and what only we train, per assistant turn.
DIFFERENCES = {
    # The prompt holds the opened (thinking) or the empty (no thinking) block: the model is never asked to write it.
    ("nemotron3", True): ("<think>\n", None),
    ("nemotron3", False): ("<think></think>", None),
    ("glm45", False): ("<think></think>", None),
    # The prompt ends with <|assistant|> alone: at inference the model itself must write the newline that follows.
    ("glm45", True): (None, "\n"),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name, settings", VARIANTS, ids=IDS)
def test_the_mask_is_what_the_renderer_says_was_sampled(build, name, settings, conversation):
    thinking = settings.get("enable_thinking", True)
    if name in THINKING and (name, thinking, conversation) not in TRAINABLE:
        with pytest.raises(DataError, match=r"generation prompt is not how it renders a turn .*think block"):
            difference(build, name, conversation, **settings)
        return
    turns = sum(message["role"] == "assistant" for message in CONVERSATIONS[conversation][0])
    expected = DIFFERENCES.get((name, thinking), (None, None))
    assert difference(build, name, conversation, **settings) == tuple(
        [text] * turns if text else [] for text in expected
    )


def test_the_trained_text_of_each_family(build):
    """By hand, without `renderers`: the last two turns of `CALLS`, a tool call and the final answer."""
    expected = {
        "qwen3": (
            '<tool_call>\n{"name": "add", "arguments": {"a": "z", "b": 3}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\ndone again<|im_end|>",
        ),
        "kimi_k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:2<|tool_call_argument_begin|>"
            '{"a": "z", "b": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            "done again<|im_end|>",
        ),
        "glm45": (
            "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>z</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call><|observation|>",
            "\n<think></think>\ndone again",  # nothing follows, so nothing in the rendering ends it
        ),
        "gemma4": ('<|tool_call>call:add{a:<|"|>z<|"|>,b:3}<tool_call|><|tool_response>', "done again<turn|>"),
        "deepseek_v3": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": "z", "b": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "done again<｜end▁of▁sentence｜>",
        ),
    }
    for name, last in expected.items():
        tokenizer, _ = family(name)
        assert tuple(trained(tokenizer, ours(build, tokenizer, CALLS, TOOLS)))[-2:] == last
    tokenizer, _ = family("nemotron3", enable_thinking=False)
    assert trained(tokenizer, ours(build, tokenizer, CALLS, TOOLS))[-2:] == [
        "\n<tool_call>\n<function=add>\n<parameter=a>\nz\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>",
        "done again<|im_end|>",
    ]


@pytest.mark.parametrize("name", ["qwen3", "glm45", "gemma4"])
def test_earlier_reasoning_that_the_template_drops(build, name):
    """The model would be asked to reason there, and must not be taught to answer without."""
    tokenizer, renderer = family(name)
    messages = [user("a"), assistant("A", reasoning_content="because"), user("b"), assistant("B")]
    with pytest.raises(DataError, match=r"renders in another way .*drops reasoning.*data\.train_on_last_turn_only"):
        ours(build, tokenizer, messages, None)
    one = ours(build, tokenizer, messages, None, train_on_last_turn_only=True)
    (_, sampled) = theirs(renderer, messages, None)
    assert trained(tokenizer, one) == runs(tokenizer, one.token_ids, sampled | one.mask)[-1:]
    assert trained(tokenizer, one)[0].split("\n")[-1].startswith("B")


def test_an_earlier_turn_without_reasoning_is_trained_beside_a_last_one_with_it(build):
    tokenizer, _ = family("qwen3")
    messages = [user("a"), assistant("A"), user("b"), assistant("B", reasoning_content="because")]
    one = ours(build, tokenizer, messages, None)
    assert trained(tokenizer, one) == ["A<|im_end|>", "<think>\nbecause\n</think>\n\nB<|im_end|>"]


def test_qwen3_without_thinking_renders_history_without_the_block_of_its_prompt(build):
    """So only a last turn is what its prompt asks for. (The renderer adds it to history, the template does not.)"""
    tokenizer, _ = family("qwen3", enable_thinking=False)
    assert trained(tokenizer, ours(build, tokenizer, CHAT[:3], None)) == ["it is 2<|im_end|>"]
    with pytest.raises(DataError, match="generation prompt is not how it renders a turn"):
        ours(build, tokenizer, CHAT, None)


def test_deepseek_r1_shows_no_reasoning_so_it_cannot_be_trained(build):
    tokenizer, renderer = family("deepseek_r1")
    messages = [user("a"), assistant("<think>\nbecause\n</think>A")]
    for prompt in (False, True):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        ids = renderer.render_ids(messages, add_generation_prompt=prompt)
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
    with pytest.raises(DataError, match=r"generation prompt is not how it renders a turn"):
        ours(build, tokenizer, messages, None)
