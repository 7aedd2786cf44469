"""Conversations to ids by the tokenizer's own chat template, for models that no family of `renderers` fits.

A conversation grows by the template's own difference. A *stand-in conversation* of a user's message and an answer is
rendered, once alone and once with the new messages after it. What the second text adds follows the sampled ids.
"""

import marshal
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from molt.chat.marked_tokenizer import MarkedTokenizer
from molt.chat.probes import USER, object_call
from molt.chat.protocol import Message, Retention, Tools
from molt.chat.render import ANSWER, render_text, spells_python
from molt.chat.tool_arguments import arguments_as_text
from molt.errors import UnusableRow

REASON = "moltreason7f3a"
"""The reasoning of the stand-in answer."""
STABLE_FORMAT = 2
"""The version of `marshal` that writes equal data equally."""


@dataclass(frozen=True)
class StandIn:
    """Texts of the stand-in conversation."""

    before: str
    """Without an answer."""
    plain: str
    """With an answer that calls nothing."""
    calling: str
    """With an answer that calls the functions of the new results, if there are any."""


class TemplateFormat:
    """A model's own chat template, as a `ChatFormat`. Safe to use from several threads."""

    name: str | None = None
    """It is no family."""

    def __init__(self, tokenizer: MarkedTokenizer, eos_ids: list[int], thinking_retention: Retention):
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._thinking_retention = thinking_retention
        self._stand_in = lru_cache(maxsize=64)(self._render_stand_in)

    def render(self, messages: list[Message], tools: Tools, *, prompt: bool) -> list[int]:
        """The ids of the conversation. Raises UnusableRow if the template rejects it."""
        return self._tokenizer.encode(template_text(self._tokenizer, messages, tools, prompt=prompt))

    def extend(self, ids: list[int], messages: list[Message], tools: Tools, *, sampled: int) -> list[int] | None:
        """`ids` and what the new messages add; None if they cannot be appended."""
        try:
            text = self._added_text(messages, tools)
        except UnusableRow:
            return None
        added = self._tokenizer.encode(text or "")
        if not added:
            return None
        template_closes_the_turn = added[0] in self._eos_ids
        if template_closes_the_turn and ids[-1:] == added[:1]:  # and so did the model
            added = added[1:]
        return ids + added

    def _added_text(self, messages: list[Message], tools: Tools) -> str | None:
        """What follows the text of an answer: its closing, the messages, the generation prompt.

        None if the messages change what stands before them: something moves before the answer, the answer is closed
        in another way, or (retention `template`) its reasoning is dropped.
        """
        results = [message for message in messages if message["role"] == "tool"]
        names = tuple(result.get("name", "f") for result in results)
        stand_in = self._stand_in(marshal.dumps(tools, STABLE_FORMAT), names)
        continued = template_text(self._tokenizer, [USER, _stand_in_answer(results), *messages], tools, prompt=True)

        answers = stand_in.calling.count(ANSWER)
        after_answers = _text_after_occurrence(continued, answers)
        if after_answers is None or not continued.startswith(stand_in.before):
            return None

        closing = stand_in.plain.rpartition(ANSWER)[2]
        end_of_turn = stand_in.calling.rpartition(ANSWER)[2]  # after calls: what ends them, and the closing
        for number, result in enumerate(results):
            end_of_turn = end_of_turn.replace(_stand_in_id(number), result.get("tool_call_id", "0"))
        if not after_answers.startswith(end_of_turn) or not end_of_turn.endswith(closing):
            return None
        if self._thinking_retention == "template" and REASON not in continued:
            return None
        return closing + after_answers[len(end_of_turn) :]

    def _render_stand_in(self, marshalled_tools: bytes, names: tuple[str, ...]) -> StandIn:
        """The stand-in conversation, with calls of functions of these names."""
        tools = marshal.loads(marshalled_tools)
        results = [{"name": name, "tool_call_id": _stand_in_id(number)} for number, name in enumerate(names)]
        return StandIn(
            before=template_text(self._tokenizer, [USER], tools, prompt=False),
            plain=template_text(self._tokenizer, [USER, _stand_in_answer()], tools, prompt=False),
            calling=template_text(self._tokenizer, [USER, _stand_in_answer(results)], tools, prompt=False),
        )


def template_text(tokenizer: MarkedTokenizer, messages: list[Message], tools: Tools, *, prompt: bool) -> str:
    """The template's text, with the generation prompt if `prompt`. Raises UnusableRow if the template rejects it."""
    try:
        text = render_text(tokenizer, messages, tools=tools, add_generation_prompt=prompt)
    except UnusableRow:  # some templates join the arguments of a call as text
        text = None
    if text is not None and not spells_python(messages, text):
        return text
    with_text = arguments_as_text(messages)
    return render_text(tokenizer, with_text, tools=tools, add_generation_prompt=prompt)


def _text_after_occurrence(text: str, number: int) -> str | None:
    """What follows the `number`-th ANSWER in the text; None without so many, or if `number` is 0."""
    parts = text.split(ANSWER, number)
    if number == 0 or len(parts) <= number:
        return None
    return parts[-1]


def _stand_in_answer(results: Iterable[Message] = ()) -> Message:
    """An answer that stands for any; with calls that `results` answer."""
    answer: Message = {"role": "assistant", "content": ANSWER, "reasoning_content": REASON}
    calls = []
    for result in results:
        call_id = result.get("tool_call_id", "0")
        name = result.get("name", "f")
        calls.append(object_call(call_id, name, {"a": ANSWER}))
    if calls:
        answer["tool_calls"] = calls
    return answer


def _stand_in_id(number: int) -> str:
    return f"moltid{number:03}"  # nine letters and digits, as some templates ask
