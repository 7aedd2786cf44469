"""Conversations with a loss mask, for SFT.

The token ids are those of the conversation, rendered and tokenised once. The mask comes from the
template itself: an assistant turn is trained from the end of `render(messages before it, generation
prompt)` to the end of the token that closes it (white space that the template puts after it is not trained).
So at inference the model has to write exactly what it was trained on, and text that merely looks like an
assistant's opener is never trained. `{% generation %}` markers in a template can only take away from that.

A template that does not close its turns (GLM) ends them with the special token that opens the next
message: it is trained. The last turn of such a conversation has no end in the rendering, and learns none.

A turn whose message has `weight` 0 is context. What the template does not show of a conversation is found by
sentinels (`chat/shown.py`): a row whose trained turn would lose what it ends with is dropped.

Not here: truncation (it would train half a turn and no end), and masking by the pad id (some models pad
with the token that ends a turn).
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from molt.chat.messages import REASONING_KEYS, read_messages, read_tools, require_unicode, trained_weight
from molt.chat.protocol import Message, Tools
from molt.chat.render import ANSWER, for_template, render_text, require_embedded, require_template
from molt.chat.shown import THINK_TAGS, Part, hidden_parts, ignored_keys
from molt.config_sft import SftDataConfig
from molt.data.prompts import require_value
from molt.data.rows import DropReport, Row, Rows, require_column
from molt.errors import DataError, UnusableRow

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
TRAINED_FIELDS = ("content", "tool_calls", *REASONING_KEYS)
"""Where an assistant message may have something to learn."""


@dataclass(frozen=True)
class Conversation:
    """One training example of SFT."""

    token_ids: np.ndarray
    """int32 [T]."""
    mask: np.ndarray
    """bool [T], True where the token enters the loss."""


@dataclass(frozen=True)
class _Built:
    """A conversation, and what of its row the template does not show, in words."""

    conversation: Conversation
    hidden: list[str]


class Span(NamedTuple):
    """Characters `start` to `end` (exclusive) of the rendered text."""

    start: int
    end: int


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text, and where the trained turns are in it."""

    text: str
    turns: list[Span]
    closed: bool
    """Whether the template closes a turn that nothing follows."""


@dataclass(frozen=True)
class _Tokens:
    """A conversation as T tokens."""

    ids: np.ndarray
    """int32 [T]."""
    spans: np.ndarray
    """int64 [T, 2], the characters of each token: start, end."""

    def inside(self, span: Span) -> np.ndarray:
        """bool [T]. A token that only partly belongs to a turn is one the model would never sample there."""
        after_start = span.start <= self.spans[:, 0]
        before_end = self.spans[:, 1] <= span.end
        return after_start & before_end


def build_conversations(
    rows: Rows, config: SftDataConfig, tokenizer: Any, embedding_rows: int | None = None
) -> tuple[list[Conversation], DropReport]:
    """Every usable row as a `Conversation`, and the account of the others.

    With `output_key` only the answer is trained; without it every assistant turn of the conversation, or
    the last one (`train_on_last_turn_only`); but no turn with `weight` 0. embedding_rows: of the model; larger ids
    cannot be trained. Raises DataError: no such column, no template, no row left.
    """
    require_template(tokenizer)
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} is slow (no tokenizer.json): it does not say which "
            "characters a token covers, so no loss mask can be built. Save a fast tokenizer with the model."
        )
    require_column(rows, config.input_key, "data.input_key")
    if config.output_key is not None:
        require_column(rows, config.output_key, "data.output_key")
    if config.tools_key is not None:
        require_column(rows, config.tools_key, "data.tools_key", everywhere=False)

    builder = _Builder(config, tokenizer, embedding_rows)
    conversations = []
    report = DropReport(len(rows))
    for i in range(len(rows)):
        try:
            built = builder.build(rows[i])
        except UnusableRow as error:
            report.add(i, error)
            continue
        conversations.append(built.conversation)
        for part in built.hidden:
            report.hide(i, part)

    if not conversations:
        raise DataError(
            f"`data.input_key` (={config.input_key}): no row is left to train on: {report.message()} "
            "Or check `data.input_key` and `data.output_key`."
        )
    return conversations, report


class _Builder:
    """Rows to conversations, with one tokenizer and its template."""

    def __init__(self, config: SftDataConfig, tokenizer: Any, embedding_rows: int | None):
        self.config = config
        self.tokenizer = tokenizer
        self.embedding_rows = embedding_rows
        self.special_ids = set()
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self.special_ids.add(token_id)

    def build(self, row: Row) -> _Built:
        """Raises UnusableRow."""
        messages, first = _messages(row, self.config)
        tools = None
        if self.config.tools_key is not None:
            require_unicode(row.get(self.config.tools_key), self.config.tools_key)
            tools = read_tools(row.get(self.config.tools_key), self.config.tools_key)
        messages = for_template(self.tokenizer, messages, tools)

        turns = self._trained_turns(messages, first)
        rendered = self._render(messages, turns, tools)
        tokens = self._tokenise(rendered.text)
        if len(tokens.ids) > self.config.max_len:
            raise UnusableRow(f"longer than `data.max_len` (={self.config.max_len}); raise it to use them")
        require_embedded(tokens.ids.tolist(), self.embedding_rows)

        marked = self._marked(messages, tools, tokens)
        mask = np.zeros(len(tokens.ids), dtype=bool)
        for turn in rendered.turns:
            if marked is not None:
                mask |= _trained_and_marked(turn, tokens, marked)
            elif rendered.closed:
                mask |= _inside_turn(turn, tokens)
            else:
                mask |= self._trained_with_next_opener(turn, tokens)
        hidden = self._hidden(messages, turns, tools, rendered.text)
        return _Built(Conversation(tokens.ids, mask), hidden)

    def _hidden(self, messages: list[Message], turns: list[int], tools: Tools, text: str) -> list[str]:
        """What the template leaves out, in words. Raises UnusableRow if a trained turn would say less than its row.

        Reasoning of other turns is not counted: templates drop it once it is history.
        """
        hidden = hidden_parts(self.tokenizer, messages, tools)
        parts = []
        for each in hidden:
            is_trained = each.index in turns
            if is_trained:
                _require_end_shown(messages[each.index or 0], each.part)
            if is_trained or each.part is not Part.REASONING:
                parts.append(str(each))
        parts += [f"the key `{key}` of messages" for key in ignored_keys(self.tokenizer, messages, tools, text=text)]
        return list(dict.fromkeys(parts))

    def _trained_turns(self, messages: list[Message], first: int) -> list[int]:
        """Indices of the assistant messages to train, from message `first` on."""
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns:
            raise UnusableRow("without an assistant turn to train on")
        if self.config.train_on_last_turn_only:
            turns = turns[-1:]

        turns = [i for i in turns if _says_something(messages[i])]
        if not turns:
            raise UnusableRow("whose assistant turns are empty")
        turns = [i for i in turns if trained_weight(messages[i], self.config.input_key)]
        if not turns:
            raise UnusableRow("whose assistant turns have weight 0")
        return turns

    def _render(self, messages: list[Message], turns: list[int], tools: Tools) -> _Rendered:
        text = render_text(self.tokenizer, messages, tools=tools)

        first_start = self._start(messages, turns[0], tools, text)
        frame = self._frame(messages[: turns[0]], tools, text[:first_start])
        closed = bool(frame.close.strip())

        spans = []
        for turn in turns:
            start = self._start(messages, turn, tools, text)
            through_turn = self._render_through(messages, turn, tools, text, start, frame)
            if closed:
                through_turn = through_turn.rstrip()
            spans.append(Span(start, len(through_turn)))
        return _Rendered(text, spans, closed)

    def _start(self, messages: list[Message], turn: int, tools: Tools, text: str) -> int:
        """Where the model would begin to generate this turn."""
        if turn == 0:
            raise UnusableRow("that start with an assistant message")
        prompt = render_text(self.tokenizer, messages[:turn], tools=tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise UnusableRow(
                "whose conversation does not begin with the prompt of its assistant turn: the template changes earlier "
                "messages, or its generation prompt is not how it renders a turn (as when it opens a think block that "
                "the turn does not have); use another `data.chat_template`"
            )
        return len(prompt)

    def _render_through(
        self,
        messages: list[Message],
        turn: int,
        tools: Tools,
        text: str,
        start: int,
        frame: "_Frame",
    ) -> str:
        """The beginning of `text`, through the end of this turn."""
        through_turn = render_text(self.tokenizer, messages[: turn + 1], tools=tools)
        before = text[:start]
        if not text.startswith(through_turn) and through_turn.startswith(before + frame.opening):
            # Only a last answer has the empty think block: this turn loses nothing of its content without it.
            through_turn = before + through_turn[start + len(frame.opening) :]
        if not text.startswith(through_turn):
            raise UnusableRow(
                "with an earlier assistant turn that the template renders in another way once more messages follow (as "
                "when it drops reasoning): use `data.train_on_last_turn_only` or another `data.chat_template`"
            )
        return through_turn

    def _frame(self, context: list[Message], tools: Tools, prompt: str) -> "_Frame":
        """prompt: the rendering of the context, with the generation prompt."""
        messages = [*context, {"role": "assistant", "content": ANSWER}]
        before, _, close = render_text(self.tokenizer, messages, tools=tools).rpartition(ANSWER)
        opening = ""
        if before.startswith(prompt):
            opening = before[len(prompt) :]
        return _Frame(opening, close)

    def _tokenise(self, text: str) -> _Tokens:
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoding.input_ids, dtype=np.int32)
        spans = np.array(encoding.offset_mapping).reshape(-1, 2)
        # Some tokenizers leave the space before a word out of the token's characters.
        spans[1:, 0] = np.minimum(spans[1:, 0], spans[:-1, 1])
        return _Tokens(ids, spans)

    def _marked(self, messages: list[Message], tools: Tools, tokens: _Tokens) -> np.ndarray | None:
        """bool [T], the tokens between the template's generation markers; None: it has no markers.

        The spans behind transformers' `return_assistant_tokens_mask`, without its mapping to tokens, which
        marks everything up to the end where a span ends between tokens.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(tools=tools)
        if not MARKERS.search(template):
            return None

        _, spans_of_conversations = render_jinja_template(
            [messages],
            tools=tools,  # pyright: ignore[reportArgumentType]  (a list of dicts or functions: lists are invariant)
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        marked = np.zeros(len(tokens.ids), dtype=bool)
        for start, end in spans_of_conversations[0]:
            marked |= tokens.inside(Span(int(start), int(end)))
        return marked

    def _trained_with_next_opener(self, turn: Span, tokens: _Tokens) -> np.ndarray:
        """bool [T], the tokens of a turn and, if a special token follows, that one: it ends the turn."""
        trained = _inside_turn(turn, tokens)
        following = int(np.flatnonzero(trained)[-1]) + 1
        if following < len(tokens.ids) and int(tokens.ids[following]) in self.special_ids:
            trained[following] = True
        return trained


class _Frame(NamedTuple):
    r"""The text that the template puts around a plain last answer.

    With Qwen3: `<think>\n\n</think>\n\n` and `<|im_end|>\n`.
    """

    opening: str
    """After the generation prompt."""
    close: str


def _says_something(message: Message) -> bool:
    return any(str(message.get(field) or "").strip() for field in TRAINED_FIELDS)


def _require_end_shown(message: Message, hidden: Part) -> None:
    """Raise UnusableRow if the last part of the turn is hidden: the model would learn to end its turn before."""
    answer = THINK_TAGS.split(message["content"])[-1]  # a content may hold reasoning too
    last = Part.REASONING
    if message.get("tool_calls"):
        last = Part.CALLS
    elif answer.strip():
        last = Part.CONTENT
    if hidden is last:
        raise UnusableRow(
            f"with an assistant turn of which the chat template does not show {hidden.value}, so that the model would "
            "learn to end its turn there: use another `data.chat_template`"
        )


def _messages(row: Row, config: SftDataConfig) -> tuple[list[Message], int]:
    """The messages of the conversation, and the index of the first that may be trained."""
    require_value(row, config.input_key)
    value = row[config.input_key]
    require_unicode(value, config.input_key)
    if config.output_key is None:
        if isinstance(value, str):
            raise UnusableRow(f"whose `{config.input_key}` is text; name the answer with `data.output_key`")
        return _texts(value, config.input_key), 0

    require_value(row, config.output_key)
    require_unicode(row[config.output_key], config.output_key)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    prompt = _texts(value, config.input_key)
    answer = _texts(_answer(row[config.output_key]), config.output_key)
    return [*prompt, *answer], len(prompt)


def _texts(value: Any, column: str) -> list[Message]:
    """Messages of text alone."""
    messages = read_messages(value, column)
    if any(isinstance(message["content"], list) for message in messages):
        raise UnusableRow(f"whose `{column}` has images, which cannot be trained on yet")
    return messages


def _answer(value: Any) -> Any:
    """Text, one message, or messages: the last as they are."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, dict):
        return [value]
    return value


def _inside_turn(turn: Span, tokens: _Tokens) -> np.ndarray:
    """bool [T], the tokens of one turn. Raises UnusableRow if there are none."""
    inside = tokens.inside(turn)
    if not inside.any():
        raise UnusableRow(
            "with an assistant turn that the template renders as nothing: use another `data.chat_template`"
        )
    return inside


def _trained_and_marked(turn: Span, tokens: _Tokens, marked: np.ndarray) -> np.ndarray:
    """bool [T], the tokens of one turn that the template marks; the last one must be among them."""
    inside = _inside_turn(turn, tokens)
    end = int(np.flatnonzero(inside)[-1])
    if not marked[end]:
        raise UnusableRow(
            "whose template leaves the end of an assistant turn out of its generation markers, so that the model "
            "would never learn to stop: put `{% endgeneration %}` after the token that closes a turn"
        )
    return inside & marked
