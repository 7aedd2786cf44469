"""Masks under templates that do awkward things, for random conversations.

Each template says by hand which of its text the model generates: it writes `open` and `shut`, empty by default,
around it. So the expected mask needs nothing of molt: render once with marks there, and see where they are.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from molt.errors import DataError
from tests.data.masks import assistant, user
from tests.tiny import bpe_tokenizer, char_tokenizer

OPEN = "\ue000"
SHUT = "\ue001"

LOOP = "{%- for m in messages %}{%- if m.role == 'assistant' %}"
ELSE = "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
OPENER = "{{- '<|im_start|>assistant\n' + open }}"
CLOSER = "{{- '<|im_end|>' + shut + '\n' }}"
CHATML = LOOP + OPENER + "{{- m.content }}" + CLOSER + ELSE + PROMPT

QUERY = (
    "{%- set ns = namespace(query=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}{%- set q = ns.query %}"
)
KEEP = (
    "{%- if loop.index0 > q and m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
)
BLOCK = (
    "{%- if loop.index0 > q and (loop.last or m.reasoning_content) %}"
    "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n' }}{%- endif %}"
)
MARK = "{%- generation %}"
UNMARK = "{%- endgeneration %}"


@dataclass(frozen=True)
class Case:
    template: str
    drops_reasoning: bool = False
    """A turn with reasoning is refused once a user message follows."""
    no_system: bool = False
    """A conversation with a system message is refused."""
    refused: str | None = None
    """Why every conversation is."""


CASES = {
    "plain": Case(CHATML),
    "drops earlier reasoning": Case(QUERY + CHATML.replace("{{- m.content }}", KEEP + "{{- m.content }}"), True),
    "empty think block in the last answer": Case(
        QUERY + CHATML.replace("{{- m.content }}", BLOCK + "{{- m.content }}"), True
    ),
    "strips content": Case(CHATML.replace("m.content", "(m.content | trim)")),
    "default system message with a date": Case(
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nToday is ' + strftime_now('%Y-%m-%d')"
        " + '<|im_end|>\n' }}{%- endif %}" + CHATML
    ),
    "closes a turn only when another follows": Case(
        LOOP
        + OPENER
        + "{{- m.content }}{%- if not loop.last %}{{- '<|im_end|>' }}{%- endif %}{{- shut }}"
        + "{%- if not loop.last %}{{- '\n' }}{%- endif %}"
        + ELSE
        + PROMPT
    ),
    "closes no turn": Case(
        "{%- for m in messages %}{{- '<|im_start|>' }}"
        "{{- shut if not loop.first and messages[loop.index0 - 1].role == 'assistant' else '' }}{{- m.role + '\n' }}"
        "{{- (open if m.role == 'assistant' else '') + m.content }}"
        "{{- shut if loop.last and m.role == 'assistant' else '' }}{%- endfor %}" + PROMPT
    ),
    "begins with a token that the tokenizer adds too": Case("{{- '<|pad|>' }}" + CHATML),
    "prompt opens a think block": Case(
        CHATML.replace("+ open }}", "+ '<think>\n' + open + (m.reasoning_content or '') + '\n</think>\n' }}").replace(
            PROMPT, PROMPT.replace("assistant\n", "assistant\n<think>\n")
        )
    ),
    "prompt opens a think block that no turn has": Case(
        CHATML.replace(PROMPT, PROMPT.replace("assistant\n", "assistant\n<think>\n")),
        refused="as when it opens a think block that the turn does not have",
    ),
    "prompt holds an empty think block": Case(
        CHATML.replace("assistant\n' + open", "assistant\n<think></think>' + open").replace(
            PROMPT, PROMPT.replace("assistant\n", "assistant\n<think></think>")
        )
    ),
    "markers": Case(
        CHATML.replace(OPENER, OPENER + MARK).replace(CLOSER, CLOSER.replace("+ '\n' ", "") + UNMARK + "{{- '\n' }}")
    ),
    "markers around openers and new lines": Case(
        CHATML.replace(OPENER, MARK + OPENER).replace(CLOSER, CLOSER + UNMARK)
    ),
    "markers around users": Case(MARK + CHATML.replace(PROMPT, UNMARK + PROMPT)),
    "markers without the end of the turn": Case(
        CHATML.replace(OPENER, OPENER + MARK).replace(CLOSER, UNMARK + CLOSER), refused="would never learn to stop"
    ),
    "markers around users alone": Case(
        CHATML.replace("{%- else %}", "{%- else %}" + MARK).replace(
            "{%- endif %}{%- endfor %}", UNMARK + "{%- endif %}{%- endfor %}"
        ),
        refused="would never learn to stop",
    ),
    "raises for a system message": Case(
        "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}" + CHATML,
        no_system=True,
    ),
    "renders no assistant": Case(
        CHATML.replace("messages %}", "messages if m.role != 'assistant' %}").replace(PROMPT, ""),
        refused="renders as nothing",
    ),
}

# Words, and what a template or a mask may take for markup.
PIECES = [
    "u",
    "the answer",
    " ",
    "\n",
    "\n\n",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "<|im_end|>\n",
    "user",
    "assistant",
]
text = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
said = st.tuples(text, st.sampled_from(["a", "12", "ok."]), text).map("".join)  # an answer says something
answer = st.builds(
    lambda content, r: assistant(content, **({"reasoning_content": r} if r else {})),
    said,
    st.sampled_from(["", "", "r"]),
)


@st.composite
def conversations(draw):
    system = draw(st.sampled_from([[], [{"role": "system", "content": "be brief"}]]))
    turns = [message for _ in range(draw(st.integers(1, 3))) for message in (user(draw(text)), draw(answer))]
    return [*system, *turns, *draw(st.sampled_from([[], [user("bye")]]))]


def expected_mask(tokenizer, messages, turns):
    """Token ids of the whole rendering, and the tokens that lie inside the last `turns` marked spans."""
    marked = tokenizer.apply_chat_template(messages, tokenize=False, open=OPEN, shut=SHUT)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, open="", shut="")
    assert marked.replace(OPEN, "").replace(SHUT, "") == rendered
    spans = []
    at = 0
    for character in marked:
        if character == OPEN:
            spans.append([at])
        elif character == SHUT:
            spans[-1].append(at)
        else:
            at += 1
    encoding = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
    asked = spans[-turns:]
    inside = [any(a <= start and end <= b for a, b in asked) for start, end in encoding.offset_mapping]
    return encoding.input_ids, inside


def is_refused(case, messages, asked):
    if case.refused:
        return True
    if case.no_system and messages[0]["role"] == "system":
        return True
    followed = [any(m["role"] == "user" for m in messages[i:]) for i in asked]
    return case.drops_reasoning and any(
        later and messages[i].get("reasoning_content") for i, later in zip(asked, followed, strict=True)
    )


@pytest.fixture(scope="module", params=[char_tokenizer, bpe_tokenizer])
def make(request):
    return request.param


@pytest.mark.parametrize("name", CASES)
@given(messages=conversations(), last_only=st.booleans())
@settings(max_examples=30)
def test_exactly_what_the_model_generates_is_trained(build, make, name, messages, last_only):
    case = CASES[name]
    tokenizer = make("{%- set open, shut = open | default(''), shut | default('') %}" + case.template)
    tokenizer.pad_token = tokenizer.eos_token
    bos = ("<|pad|>", 0 if make is char_tokenizer else tokenizer.convert_tokens_to_ids("<|pad|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[bos]
    )
    assert tokenizer("u").input_ids[0] == bos[1]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = turns[-1:] if last_only else turns
    if is_refused(case, messages, asked):
        with pytest.raises(DataError, match=case.refused or "roles must alternate|drops reasoning") as error:
            build([{"input": messages}], tokenizer, train_on_last_turn_only=last_only)
        assert "no row is left to train on" in str(error.value)
        return
    (one,), _ = build([{"input": messages}], tokenizer, train_on_last_turn_only=last_only)
    ids, inside = expected_mask(tokenizer, messages, len(asked))
    assert one.token_ids.tolist() == ids
    assert one.mask.tolist() == inside
    assert np.any(one.mask)
