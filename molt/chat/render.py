"""Messages to ids, by the model's own chat template.

A conversation grows by appending: what the model generated is never decoded and tokenised again. To
continue after a turn, the template renders a stand-in conversation `[user, assistant(ANSWER),
user(observation)]`, and the text after ANSWER (the closing of the turn, the opener and body of the next
message, the generation prompt) is what follows the generated ids.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from molt.chat.messages import REASONING_KEYS, as_unicode, name_results
from molt.chat.protocol import Message, Tools
from molt.chat.tool_arguments import arguments_as_objects, arguments_as_text
from molt.errors import ConfigError, DataError, UnusableRow, did_you_mean
from molt.hub import only_local
from molt.types import Json, Prompt

# Plain words at both ends, so that a template that strips or splits content leaves them whole.
ANSWER = "moltanswer7f3a"
OBSERVATION = "moltobservation7f3a"
BYTE_ORDER_MARK = "\ufeff"
SHOWN_END = 20
"""Characters of a turn's end that a message shows."""


def load_tokenizer(
    model_name_or_path: str, chat_template: str | None, *, flag: str = "actor.model_name_or_path"
) -> Any:
    """The model's tokenizer; `chat_template` (a file or a text) overrides its template.

    Never runs code that comes with a model. `flag` is the setting that holds the path. Raises ConfigError.
    """
    from transformers import AutoTokenizer

    path = Path(model_name_or_path).expanduser()
    if _is_mistyped(path):
        raise ConfigError(
            f"`{flag}` (={model_name_or_path}): no such directory, so there is no tokenizer to load."
            f"{_did_you_mean_sibling(path)} Give a Hugging Face model directory or a hub name (org/name)."
        )
    name = model_name_or_path
    if path.exists():
        name = str(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=only_local(name))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"`{flag}` (={model_name_or_path}): its tokenizer cannot be loaded ({str(error).splitlines()[0]}), so no "
            "prompt can be tokenised. Give a directory with tokenizer.json, or a hub name that this machine can reach."
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    tokenizer.chat_template = _without_mark(tokenizer.chat_template)
    return tokenizer


def _without_mark(template: Any) -> Any:
    """A template, or named ones, without the mark that some editors begin a file with: it would begin every prompt."""
    if isinstance(template, dict):
        return {name: _without_mark(text) for name, text in template.items()}
    if isinstance(template, str):
        return template.removeprefix(BYTE_ORDER_MARK)
    return template


def _is_mistyped(path: Path) -> bool:
    """Whether the path can name no model: it is missing, and has not the form of a hub name (org/name)."""
    may_be_hub_name = not path.is_absolute() and len(path.parts) == 2 and not path.parent.is_dir()
    return not path.exists() and not may_be_hub_name


def _did_you_mean_sibling(path: Path) -> str:
    """A hint at the nearest name in the path's directory; empty without one."""
    if not path.parent.is_dir():
        return ""
    return did_you_mean(path.name, [sibling.name for sibling in path.parent.iterdir()])


def _template_text(chat_template: str) -> str:
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"`data.chat_template` (={chat_template}): it is neither a file nor Jinja text, so messages cannot be "
            f"rendered.{_did_you_mean_sibling(path)} Give the path of a template, or the template itself."
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"`data.chat_template` (={chat_template}): it is not UTF-8 ({error}), so messages cannot be rendered. Save "
            "it as UTF-8."
        ) from None


def load_renderer(model_name_or_path: str, chat_template: str | None, *, apply_chat_template: bool) -> "Renderer":
    """The renderer of a model, with all end tokens that its generation config names."""
    from molt.models.description import model_embedding_rows

    return Renderer(
        load_tokenizer(model_name_or_path, chat_template),
        apply_chat_template=apply_chat_template,
        eos_ids=end_ids(model_name_or_path),
        embedding_rows=model_embedding_rows(model_name_or_path),
    )


def end_ids(model_name_or_path: str) -> list[int]:
    """The end tokens that a model's generation config names; without one, its configuration."""
    from transformers import GenerationConfig

    from molt.models.description import configured_ends

    try:
        ends = GenerationConfig.from_pretrained(model_name_or_path).eos_token_id
    except OSError:  # a model without a generation config
        ends = configured_ends(model_name_or_path)
    except ValueError as error:
        raise ConfigError(
            f"{model_name_or_path}: its generation_config.json is refused by transformers ({_first_line(error)}), so "
            "the model cannot be loaded. Correct that file."
        ) from error
    if ends is None:
        return []
    if isinstance(ends, list):
        return ends
    return [ends]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


@dataclass(frozen=True)
class TurnEnd:
    """What the chat template writes after an answer."""

    text: str
    token_id: int | None
    """The special token that ends the turn; None: no one token does."""


def turn_end(tokenizer: Any) -> TurnEnd:
    """How a model that learns from this template ends its turn.

    A template that does not close its turns ends them with the opener of the next one. Raises UnusableRow if the
    template rejects a user's message and an answer, or does not show the answer.
    """
    answered = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ANSWER}]
    text = render_text(tokenizer, answered)
    if ANSWER not in text:
        raise UnusableRow("of whose answer the chat template shows nothing")
    closing = _after_answer(text).strip()
    if closing:
        ids = tokenizer(closing, add_special_tokens=False).input_ids
        return _first_special(tokenizer, closing, ids)

    followed = [*answered, {"role": "user", "content": "hi"}]
    opener = _after_answer(render_text(tokenizer, followed)).strip()
    ids = tokenizer(opener, add_special_tokens=False).input_ids
    return _first_special(tokenizer, opener, ids[:1])


def _first_special(tokenizer: Any, text: str, ids: list[int]) -> TurnEnd:
    """The first special token of `ids`, or else the first that was added to the vocabulary."""
    added = [token_id for token_id in ids if token_id in tokenizer.added_tokens_decoder]
    special = [token_id for token_id in added if tokenizer.added_tokens_decoder[token_id].special]
    for token_id in [*special, *added]:
        return TurnEnd(tokenizer.decode([token_id]), token_id)
    return TurnEnd(text[:SHOWN_END], None)


def stop_ids(tokenizer: Any, eos_ids: Iterable[int], *, apply_chat_template: bool) -> list[int]:
    """The tokens that end an answer: those of the tokenizer, of the generation config (`eos_ids`), of the template."""
    ends = {*eos_ids, tokenizer.eos_token_id}
    if apply_chat_template and tokenizer.chat_template:
        with suppress(UnusableRow):  # it wants other messages
            ends.add(turn_end(tokenizer).token_id)
    return sorted(ends - {None})


def for_template(tokenizer: Any, messages: list[Message], tools: Tools) -> list[Message]:
    """The messages as this template reads them: the key of the reasoning, the form of the arguments of calls.

    And with the names of functions in their results, which some templates show.
    """
    key = _reasoning_key(str(tokenizer.chat_template))
    renamed = []
    for message in name_results(messages):
        if "reasoning_content" in message:
            message = dict(message)
            message[key] = message.pop("reasoning_content")
        renamed.append(message)
    return with_fitting_arguments(tokenizer, renamed, tools)


@lru_cache(maxsize=16)
def _reasoning_key(template: str) -> str:
    """The key under which a template looks for the reasoning."""
    for key in REASONING_KEYS:
        if re.search(rf"[.'\"]{key}\b", template):
            return key
    return "reasoning_content"


def with_fitting_arguments(tokenizer: Any, messages: list[Message], tools: Tools) -> list[Message]:
    """The messages with the arguments of calls as objects; as JSON text where the template joins them as text."""
    objects = arguments_as_objects(messages)
    if not _object_arguments(objects):
        return objects
    try:
        text = render_text(tokenizer, objects, tools=tools)
    except UnusableRow:
        return arguments_as_text(objects)
    if spells_python(objects, text):
        return arguments_as_text(objects)
    return objects


def spells_python(messages: list[Message], text: str) -> bool:
    """Whether a rendering has the arguments of a call as Python spells them, not as JSON."""
    return any(str(arguments) in text for arguments in _object_arguments(messages))


def _object_arguments(messages: list[Message]) -> list[Json]:
    """The arguments of all calls that are objects with something in them."""
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            if isinstance(arguments, dict) and arguments:
                found.append(arguments)
    return found


def require_template(tokenizer: Any) -> None:
    """Raise DataError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise DataError(
            f"`data.chat_template` (=None): the tokenizer of {tokenizer.name_or_path or 'the model'!r} has no template "
            "of its own (a base model?), so messages cannot be rendered. Pass `--data.chat_template` FILE."
        )


def render_text(
    tokenizer: Any,
    messages: list[Json],
    *,
    tools: list[Json] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The template's text. Raises UnusableRow if the template rejects the messages."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError) as error:  # TypeError: the template joins a text to a field that is none
        raise UnusableRow(f"rejected by the chat template: {error}") from error


def require_embedded(token_ids: Iterable[int], embedding_rows: int | None) -> None:
    """Raise UnusableRow if the model has no embedding for one of the tokens."""
    if embedding_rows is not None and max(token_ids, default=0) >= embedding_rows:
        raise UnusableRow(
            f"with a token above the last of the model's {embedding_rows:,} embeddings: the tokenizer has tokens that "
            "the model does not; use the tokenizer of the model, or resize its embeddings"
        )


@dataclass(frozen=True)
class ObservationMarkup:
    """The template's text around an observation that follows an answer."""

    before: str
    """The closing of the answer's turn, and the opener of the user's."""
    after: str
    """The closing of the user's turn, and the generation prompt."""
    special_tokens: list[str]
    """Spellings that must not become tokens in an observation."""


class Renderer:
    """Prompts and observations to ids; ids to text.

    **Untrusted text.** An observation may hold the spelling of a special token. Without any, the whole
    suffix is tokenised at once, exactly as the template's rendering would be. With one, the observation
    alone is tokenised apart, with `split_special_tokens`, so that it stays text and cannot open a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool,
        eos_ids: Iterable[int] = (),
        embedding_rows: int | None = None,
    ):
        """`eos_ids`: further end tokens, as from the model's generation config. embedding_rows: of the model.

        Raises DataError with `apply_chat_template` if the template cannot be continued by appending.
        """
        self.tokenizer = tokenizer
        self.eos_ids: list[int] = stop_ids(tokenizer, eos_ids, apply_chat_template=apply_chat_template)
        self.embedding_rows = embedding_rows
        self._markup: ObservationMarkup | None = None
        """None: prompts and observations are plain text."""
        if apply_chat_template:
            require_template(tokenizer)
            self._markup = self._probe()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Chat: the rendering with the generation prompt. Plain: what the tokenizer makes of the text.

        Raises UnusableRow if the template rejects the messages, or the model has no embedding for a token.
        """
        ids = self._prompt_ids(prompt)
        require_embedded(ids, self.embedding_rows)
        return ids

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if self._markup is None:
            assert prompt.text is not None, "a renderer of plain text was given messages"
            return self._plain_ids(prompt.text)
        assert prompt.messages is not None, "a renderer of chats was given a plain-text prompt"
        messages = for_template(self.tokenizer, prompt.messages, prompt.tools)
        text = render_text(self.tokenizer, messages, tools=prompt.tools, add_generation_prompt=True)
        return self._encode(text)

    def _plain_ids(self, text: str) -> list[int]:
        """What the tokenizer makes of a text; but no second token of the beginning, and none of the end."""
        ids = self.tokenizer(text).input_ids
        bare = self._encode(text)
        for start in range(len(ids) - len(bare) + 1):
            if ids[start : start + len(bare)] == bare:
                before = ids[:start]
                begins_twice = bare[:start] == before
                return bare if begins_twice else [*before, *bare]
        return ids

    def continuation_ids(self, generated_ids: list[int], observation: str) -> list[int]:
        """The ids to append to the model's exact turn so that the next user message is `observation`.

        They begin with the tokens that close the turn, as far as the model did not generate them (it did
        not if it was cut by length). Plain: the observation as it is.
        """
        observation = as_unicode(observation)
        if self._markup is None:
            return self._encode(observation)
        ids = self._observation_ids(observation, self._markup)
        closes_the_turn = bool(ids) and ids[0] in self.eos_ids
        if closes_the_turn and list(generated_ids[-1:]) == ids[:1]:  # and so did the model
            return ids[1:]
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _observation_ids(self, observation: str, markup: ObservationMarkup) -> list[int]:
        text = _after_answer(self._stand_in("hi", ANSWER, observation))
        if not any(token in observation for token in markup.special_tokens):
            return self._encode(text)
        body = text.removeprefix(markup.before).removesuffix(markup.after)
        return self._encode(markup.before) + self._encode_as_text(body) + self._encode(markup.after)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _encode_as_text(self, text: str) -> list[int]:
        """Spellings of special tokens are tokenised like any other text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def _stand_in(self, *contents: str) -> str:
        """The rendering of a user's message, an answer, a user's message: as many as there are contents."""
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        model_is_next = len(contents) == len(roles)
        return render_text(self.tokenizer, messages, add_generation_prompt=model_is_next)

    def _probe(self) -> ObservationMarkup:
        """What surrounds an observation. Only the text *after* the answer must be stable: Qwen3 puts an empty
        think block before the last answer, which changes nothing in what follows it."""
        try:
            closed = self._stand_in("hi", ANSWER)
            continued = self._stand_in("hi", ANSWER, OBSERVATION)
        except UnusableRow as error:
            raise self._unfit(f"it does not render user, assistant, user ({error})") from error

        if closed.count(ANSWER) != 1 or continued.count(ANSWER) != 1:
            raise self._unfit("it has no assistant turn that holds the answer as it is, once")
        suffix = _after_answer(continued)
        if not suffix.startswith(_after_answer(closed)):
            raise self._unfit("it closes an assistant turn in another way once a message follows")
        if suffix.count(OBSERVATION) != 1:
            raise self._unfit("it does not hold a user message as it is, once, after the assistant's")

        before, _, after = suffix.partition(OBSERVATION)
        added_tokens = self.tokenizer.added_tokens_decoder.values()
        return ObservationMarkup(
            before=before,
            after=after,
            special_tokens=[token.content for token in added_tokens if token.special],
        )

    def _unfit(self, why: str) -> DataError:
        name = self.tokenizer.name_or_path or "the model"
        return DataError(
            f"`data.chat_template` (=the template of {name!r}): {why}, so an episode cannot be continued by appending "
            "to what was generated. Pass another template with `--data.chat_template`."
        )


def _after_answer(text: str) -> str:
    return text.partition(ANSWER)[2]
