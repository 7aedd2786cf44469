"""Conversations with a loss mask, for SFT.

The token ids are those of the whole conversation, rendered and tokenised once. The mask comes from the
template itself: an assistant turn is trained from the end of `render(messages before it, generation
prompt)` to the end of the token that closes it (white space the template puts after it is not trained).
So at inference the model is asked for exactly what it was trained on, and text that merely looks like an
assistant's opener is never trained. A template with `{% generation %}` markers says it itself.

Not here: truncation (it would train half a turn and no end), and masking by the pad id (some models pad
with the token that ends a turn).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from molt.chat.render import render_text, require_template
from molt.config_sft import SftDataConfig
from molt.data.prompts import Message, as_messages
from molt.data.rows import DropReport, Row, Rows, UnusableRow, require_column
from molt.errors import DataError

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """One training example of SFT."""

    token_ids: np.ndarray
    """int32 `[T]`."""
    mask: np.ndarray
    """bool `[T]`, True where the token enters the loss."""


def build_conversations(rows: Rows, config: SftDataConfig, tokenizer) -> tuple[list[Conversation], DropReport]:
    """Every usable row as a `Conversation`, and the account of the others.

    With `output_key` only the answer is trained; without it every assistant turn of the conversation, or
    the last one (`train_on_last_turn_only`). Raises DataError: no such column, no template, no row left.
    """
    require_template(tokenizer)
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} is slow (no tokenizer.json): it does not say which "
            "characters a token covers, so no loss mask can be built. Save a fast tokenizer with the model."
        )
    for flag in ("input_key", "output_key", "tools_key"):
        if (column := getattr(config, flag)) is not None:
            require_column(rows, column, f"data.{flag}")
    closers = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {tokenizer.eos_token_id}
    conversations, report = [], DropReport(len(rows))
    for i in range(len(rows)):
        try:
            conversations.append(_conversation(rows[i], config, tokenizer, closers))
        except UnusableRow as error:
            report.add(i, error)
    if not conversations:
        raise DataError(
            f"`data.input_key` (={config.input_key}): no row is left to train on: {report.message()} "
            "Or check `data.input_key` and `data.output_key`."
        )
    return conversations, report


def _conversation(row: Row, config: SftDataConfig, tokenizer, closers: set[int]) -> Conversation:
    messages, first = _messages(row, config)
    tools = _tools(row.get(config.tools_key), config.tools_key) if config.tools_key else None
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant turn to train on")
    turns = turns[-1:] if config.train_on_last_turn_only else turns
    turns = [i for i in turns if any(messages[i].get(key) for key in ("content", "tool_calls", "reasoning_content"))]
    if not turns:
        raise UnusableRow("whose assistant turns are empty")
    marked = bool(MARKERS.search(tokenizer.get_chat_template(tools=tools)))
    spans_of = _marked_spans if marked else _turn_spans
    text, spans = spans_of(tokenizer, messages, turns, tools)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = np.array(encoding.input_ids, dtype=np.int32), np.array(encoding.offset_mapping).reshape(-1, 2)
    if len(ids) > config.max_len:
        raise UnusableRow(f"longer than `data.max_len` (={config.max_len}); raise it to use them")
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        # A token that only partly belongs to the turn is one the model would never sample there.
        inside = np.flatnonzero((start <= offsets[:, 0]) & (offsets[:, 0] < end) & (offsets[:, 1] <= end))
        mask[inside if marked else _until_closed(inside, text[:end], ids, offsets, closers)] = True
    if not mask.any():
        raise UnusableRow("whose assistant turns the template renders as nothing")
    return Conversation(ids, mask)


def _messages(row: Row, config: SftDataConfig) -> tuple[list[Message], int]:
    """The whole conversation, and the index of the first message that may be trained."""
    for key in (config.input_key, config.output_key):
        if key is not None and key not in row:
            raise UnusableRow(f"without `{key}`")
    value = row[config.input_key]
    if config.output_key is None:
        if isinstance(value, str):
            raise UnusableRow(f"whose `{config.input_key}` is text; name the answer with `data.output_key`")
        return as_messages(value, config.input_key), 0
    answer = row[config.output_key]
    prompt = [{"role": "user", "content": value}] if isinstance(value, str) else value
    answer = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    answer = [answer] if isinstance(answer, dict) else answer
    prompt = as_messages(prompt, config.input_key)
    return [*prompt, *as_messages(answer, config.output_key)], len(prompt)


def _tools(value: Any, column: str) -> list[dict] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UnusableRow(f"whose `{column}` is not valid JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UnusableRow(f"whose `{column}` is not a list of tool schemas")
    return value


def _turn_spans(tokenizer, messages: list[Message], turns: list[int], tools) -> tuple[str, list[Span]]:
    """The text, and the characters of each of `turns`."""
    text = render_text(tokenizer, messages, tools=tools)
    spans = []
    for i in turns:
        start = _start(tokenizer, messages, i, tools, text)
        upto = render_text(tokenizer, messages[: i + 1], tools=tools)
        if not text.startswith(upto):
            raise UnusableRow(
                "with an earlier assistant turn that the template renders in another way once more messages follow (as "
                "when it drops reasoning): use `data.train_on_last_turn_only` or another `data.chat_template`"
            )
        spans.append((start, len(upto)))
    return text, spans


def _start(tokenizer, messages: list[Message], turn: int, tools, text: str) -> int:
    """Where the model would begin to generate this turn."""
    if turn == 0:
        raise UnusableRow("that start with an assistant message")
    prompt = render_text(tokenizer, messages[:turn], tools=tools, add_generation_prompt=True)
    if not text.startswith(prompt):
        raise UnusableRow(
            "whose conversation does not begin with the prompt of its assistant turn: the template changes earlier "
            "messages, or its generation prompt is not how it renders a turn; use another `data.chat_template`"
        )
    return len(prompt)


def _marked_spans(tokenizer, messages: list[Message], turns: list[int], tools) -> tuple[str, list[Span]]:
    """The text, and the characters between the template's generation markers, from the first of `turns` on.

    The spans behind transformers' `return_assistant_tokens_mask`, without its mapping to tokens, which
    marks everything up to the end where a span ends between tokens.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    text = render_text(tokenizer, messages, tools=tools)
    _, (spans,) = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    if not any(message["role"] == "assistant" for message in messages[: turns[0]]):
        return text, spans
    start = _start(tokenizer, messages, turns[0], tools, text)
    return text, [(max(a, start), b) for a, b in spans if b > start]


def _until_closed(inside: np.ndarray, text: str, ids: np.ndarray, offsets: np.ndarray, closers: set[int]) -> np.ndarray:
    """Cut the white space that follows the token that closes a turn; a template without one keeps all."""
    closing = [k for k, t in enumerate(inside) if int(ids[t]) in closers]
    if closing and not text[offsets[inside[closing[-1]], 1] :].strip():
        return inside[: closing[-1] + 1]
    return inside
