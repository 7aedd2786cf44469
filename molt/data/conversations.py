"""Conversations with a loss mask, for SFT.

The token ids are those of the whole conversation, rendered and tokenised once. The mask comes from the
template itself: an assistant turn is trained from the end of `render(messages before it, generation
prompt)` to the end of the token that closes it (white space the template puts after it is not trained).
So at inference the model is asked for exactly what it was trained on, and text that merely looks like an
assistant's opener is never trained. `{% generation %}` markers in a template can only take away from that.

A template that does not close its turns (GLM) ends them with the special token that opens the next
message: it is trained. The last turn of such a conversation has no end in the rendering, and learns none.

Not here: truncation (it would train half a turn and no end), and masking by the pad id (some models pad
with the token that ends a turn).
"""

import re
from dataclasses import dataclass

import numpy as np

from molt.chat.render import ANSWER, render_text, require_template
from molt.config_sft import SftDataConfig
from molt.data.prompts import Message, as_messages, as_tools
from molt.data.rows import DropReport, Row, Rows, require_column
from molt.errors import DataError, UnusableRow

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
            require_column(rows, column, f"data.{flag}", everywhere=flag != "tools_key")
    specials = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    conversations, report = [], DropReport(len(rows))
    for i in range(len(rows)):
        try:
            conversations.append(_conversation(rows[i], config, tokenizer, specials))
        except UnusableRow as error:
            report.add(i, error)
    if not conversations:
        raise DataError(
            f"`data.input_key` (={config.input_key}): no row is left to train on: {report.message()} "
            "Or check `data.input_key` and `data.output_key`."
        )
    return conversations, report


def _conversation(row: Row, config: SftDataConfig, tokenizer, specials: set[int]) -> Conversation:
    messages, first = _messages(row, config)
    tools = as_tools(row.get(config.tools_key), config.tools_key) if config.tools_key else None
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not turns:
        raise UnusableRow("without an assistant turn to train on")
    turns = turns[-1:] if config.train_on_last_turn_only else turns
    keys = ("content", "tool_calls", "reasoning_content")
    turns = [i for i in turns if any(str(messages[i].get(key) or "").strip() for key in keys)]
    if not turns:
        raise UnusableRow("whose assistant turns are empty")
    text, spans, closed = _turn_spans(tokenizer, messages, turns, tools)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, chars = np.array(encoding.input_ids, dtype=np.int32), np.array(encoding.offset_mapping).reshape(-1, 2)
    if len(ids) > config.max_len:
        raise UnusableRow(f"longer than `data.max_len` (={config.max_len}); raise it to use them")
    # Some tokenizers leave the space before a word out of the token's characters.
    chars[1:, 0] = np.minimum(chars[1:, 0], chars[:-1, 1])
    marked = _marked(tokenizer, messages, tools, chars)
    mask = np.zeros(len(ids), dtype=bool)
    for span in spans:
        mask |= _trained(span, ids, chars, marked, set() if closed else specials)
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


def _turn_spans(tokenizer, messages: list[Message], turns: list[int], tools) -> tuple[str, list[Span], bool]:
    """The text, the characters of each of `turns`, and whether the template closes a turn that nothing follows."""
    text = render_text(tokenizer, messages, tools=tools)
    spans: list[Span] = []
    for i in turns:
        start = _start(tokenizer, messages, i, tools, text)
        if not spans:
            block, close = _frame(tokenizer, messages[:i], tools, text[:start])
        upto = render_text(tokenizer, messages[: i + 1], tools=tools)
        if not text.startswith(upto) and upto.startswith(text[:start] + block):
            # Only the last answer has the empty think block, and nothing that this turn says is lost without it.
            upto = text[:start] + upto[start + len(block) :]
        if not text.startswith(upto):
            raise UnusableRow(
                "with an earlier assistant turn that the template renders in another way once more messages follow (as "
                "when it drops reasoning): use `data.train_on_last_turn_only` or another `data.chat_template`"
            )
        spans.append((start, len(upto.rstrip() if close.strip() else upto)))
    return text, spans, bool(close.strip())


def _start(tokenizer, messages: list[Message], turn: int, tools, text: str) -> int:
    """Where the model would begin to generate this turn."""
    if turn == 0:
        raise UnusableRow("that start with an assistant message")
    prompt = render_text(tokenizer, messages[:turn], tools=tools, add_generation_prompt=True)
    if not text.startswith(prompt):
        raise UnusableRow(
            "whose conversation does not begin with the prompt of its assistant turn: the template changes earlier "
            "messages, or its generation prompt is not how it renders a turn (as when it opens a think block that the "
            "turn does not have); use another `data.chat_template`"
        )
    return len(prompt)


def _frame(tokenizer, context: list[Message], tools, prompt: str) -> tuple[str, str]:
    r"""What the template puts around a plain last answer: `<think>\n\n</think>\n\n` and `<|im_end|>\n` with Qwen3."""
    messages = [*context, {"role": "assistant", "content": ANSWER}]
    before, _, close = render_text(tokenizer, messages, tools=tools).rpartition(ANSWER)
    return before[len(prompt) :] if before.startswith(prompt) else "", close


def _marked(tokenizer, messages: list[Message], tools, chars: np.ndarray) -> np.ndarray | None:
    """bool `[T]`, the tokens between the template's generation markers; None: it has no markers.

    The spans behind transformers' `return_assistant_tokens_mask`, without its mapping to tokens, which
    marks everything up to the end where a span ends between tokens.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    if not MARKERS.search(template):
        return None
    _, (spans,) = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return np.any([_inside(span, chars) for span in spans] or [np.zeros(len(chars), dtype=bool)], axis=0)


def _inside(span: Span, chars: np.ndarray) -> np.ndarray:
    """bool `[T]`. A token that only partly belongs to a turn is one the model would never sample there."""
    return (span[0] <= chars[:, 0]) & (chars[:, 1] <= span[1])


def _trained(
    span: Span, ids: np.ndarray, chars: np.ndarray, marked: np.ndarray | None, closers: set[int]
) -> np.ndarray:
    """bool `[T]`, the tokens of one turn; `closers` may end it if they follow."""
    turn = _inside(span, chars)
    if not turn.any():
        raise UnusableRow(
            "with an assistant turn that the template renders as nothing: use another `data.chat_template`"
        )
    end = int(np.flatnonzero(turn)[-1])
    if marked is not None:
        turn &= marked
        if not turn[end]:
            raise UnusableRow(
                "whose template leaves the end of an assistant turn out of its generation markers, so that the model "
                "would never learn to stop: put `{% endgeneration %}` after the token that closes a turn"
            )
    elif end + 1 < len(ids) and int(ids[end + 1]) in closers:
        turn[end + 1] = True
    return turn
