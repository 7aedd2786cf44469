"""Conversations to ids: whole ones, and the next turn after sampled ids.

A family of the `renderers` package renders the models that it fits (`chat/chat_family.py`), the tokenizer's own
template all others (`chat/chat_template.py`). `chat/chat_parser.py` reads what was sampled.

**Untrusted text.** What a message spells stays text: the spelling of a special token is replaced by a mark before
rendering, and the mark is tokenised as the spelling, with `split_special_tokens`, so it cannot open or close a turn.

**Images.** Rendered as the one placeholder that the template has for each; `place` puts in what the model's processor
makes of the image (`chat/images.py`). A model that takes none refuses them.

Not here: other media, settings of templates (the defaults are rendered).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from molt.chat.chat_family import FamilyFormat, find_family
from molt.chat.chat_parser import ChatParser, Parsed
from molt.chat.chat_template import TemplateFormat
from molt.chat.images import File, ImageReader, load_image_reader
from molt.chat.marked_tokenizer import MarkedTokenizer
from molt.chat.message_order import find_order
from molt.chat.messages import name_results
from molt.chat.probes import USER
from molt.chat.protocol import ChatError, Message, Retention, Tools
from molt.chat.render import ANSWER, end_ids, load_tokenizer, require_template, stop_ids
from molt.chat.tool_arguments import arguments_as_objects
from molt.types import Media


class ChatFormat(Protocol):
    """How a model's conversations are written."""

    name: str | None
    """The family's name in `renderers`; None: the template's own."""

    def render(self, messages: list[Message], tools: Tools, *, prompt: bool) -> list[int]: ...

    def extend(self, ids: list[int], messages: list[Message], tools: Tools, *, sampled: int) -> list[int] | None: ...


class ChatRenderer:
    """Chats to ids and back, for one model. Safe to use from several threads.

    `thinking_retention`: `all` keeps earlier reasoning where it was sampled; `tool_cycle` until the next user message;
    `template` for as long as the template does. Where reasoning has to go, `bridge` returns None.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Iterable[int] = (),
        *,
        thinking_retention: Retention = "all",
        images: ImageReader | None = None,
    ):
        """`eos_ids`: further end tokens, as from the model's generation config; `images`: of a model that takes them.

        Raises DataError without a template.
        """
        self.tokenizer = MarkedTokenizer(tokenizer)
        self.thinking_retention = thinking_retention
        self.images = images

        family = find_family(self.tokenizer, thinking_retention, takes_images=images is not None)
        if family is None:
            require_template(tokenizer)
            ends = stop_ids(tokenizer, eos_ids, apply_chat_template=True)
        else:
            ends = stop_ids(tokenizer, [*eos_ids, *family.get_stop_token_ids()], apply_chat_template=False)
        self.eos_ids: list[int] = ends

        self._format: ChatFormat
        if family is None:
            self._format = TemplateFormat(self.tokenizer, self.eos_ids, thinking_retention)
        else:
            self._format = FamilyFormat(family)
        self._parser = ChatParser(self.tokenizer, self.eos_ids, family)
        self.order = find_order(self._text)

    @property
    def family(self) -> str | None:
        """Its name in `renderers`; None: the template's own difference."""
        return self._format.name

    def render(self, messages: list[Message], tools: Tools = None, *, prompt: bool = True) -> list[int]:
        """The whole conversation, with the generation prompt unless `prompt` is False. Raises ChatError."""
        with _refusing_unrenderable():
            adapted = self.order.adapt(name_results(messages), begins=True).messages
            cleaned = self._clean(adapted)
            return self._format.render(cleaned, self.tokenizer.mark(tools), prompt=prompt)

    def bridge(
        self, ids: list[int], messages: list[Message], tools: Tools = None, *, sampled: int = 1
    ) -> list[int] | None:
        """`ids` and what the new messages and the generation prompt add; None if they cannot be appended.

        `ids`: all of the conversation so far; the last `sampled` are the last turn as it was sampled, cut by length or
        not. `messages`: the new ones. Tool results should have names (`name_results`): without, the result is None
        where the format shows them. Raises ChatError.
        """
        messages = self.order.adapt(messages, begins=False).messages
        roles = {message["role"] for message in messages}
        if "assistant" in roles or (self.thinking_retention == "tool_cycle" and "user" in roles):
            return None

        with _refusing_unrenderable():
            cleaned = self._clean(messages)
            marked_tools = self.tokenizer.mark(tools)
            longer = self._format.extend(ids, cleaned, marked_tools, sampled=sampled)
            named = [_with_any_name(message) for message in cleaned]
            if named == cleaned:
                return longer
            if longer != self._format.extend(ids, named, marked_tools, sampled=sampled):
                return None
            return longer

    def place(
        self, ids: list[int], files: Sequence[File], *, start: int = 0, before: Sequence[Media] = ()
    ) -> tuple[list[int], tuple[Media, ...]]:
        """`ids`, rendered or bridged, with the images of their messages in them, and all the images there are.

        `start`: where the ids of the messages begin; `before`: the images up to there. Raises ChatError.
        """
        if self.images is None:
            return ids, ()
        return self.images.place(ids, start, files, before)

    def parse(self, sampled_ids: list[int], tools: Tools = None, prompt_ids: list[int] | None = None) -> Parsed:
        """What was sampled, as a message. Raises nothing, whatever the model says.

        `prompt_ids`: what the engine was given (it may open the reasoning); None: as after a user's message.
        """
        if prompt_ids is None:
            prompt_ids = self.render([USER])
        return self._parser.parse(sampled_ids, tools, prompt_ids)

    def spoken(self, sampled_ids: list[int]) -> str:
        """What was sampled as text, up to its end token."""
        return self._parser.spoken(sampled_ids)

    def unparsed(self, sampled_ids: list[int]) -> str:
        """What was sampled as text, calls as the model spells them; without its reasoning, if that ends."""
        return self._parser.unparsed(sampled_ids)

    def _text(self, messages: list[Message], tools: Tools) -> str:
        """The text of a conversation as it stands, with the generation prompt."""
        return self.tokenizer.text(self._format.render(self._clean(messages), tools, prompt=True))

    def _clean(self, messages: list[Message]) -> list[Message]:
        """Contents as text or parts, arguments of calls as objects, marks for what spells special tokens."""
        takes_images = self.images is not None
        cleaned = []
        for message in arguments_as_objects(messages):
            message = message | {"content": _clean_content(message, takes_images=takes_images)}
            marked = {key: self.tokenizer.mark(value) for key, value in message.items()}
            cleaned.append(marked | {"role": message["role"]})
        return cleaned


def load_chat_renderer(
    model_name_or_path: str, chat_template: str | None, *, thinking_retention: Retention = "all"
) -> ChatRenderer:
    """The chat renderer of a model, with the end tokens of its generation config. Raises ConfigError, DataError."""
    return ChatRenderer(
        load_tokenizer(model_name_or_path, chat_template),
        end_ids(model_name_or_path),
        thinking_retention=thinking_retention,
        images=load_image_reader(model_name_or_path),
    )


def _with_any_name(message: Message) -> Message:
    """The message; a tool result without a name gets one, which tells whether the format shows it."""
    if message["role"] != "tool":
        return message
    return {"name": ANSWER} | message


@contextmanager
def _refusing_unrenderable() -> Iterator[None]:
    """Turn what templates and families raise about a client's messages and tools into a ChatError."""
    try:
        yield
    except ChatError:
        raise
    except Exception as error:  # templates and families raise anything
        why = f"{type(error).__name__} {error}".strip()
        message = f"messages or tools cannot be rendered for this model ({why}). Send what its chat template accepts."
        raise ChatError(400, "invalid_request", message) from error


def _clean_content(message: Message, *, takes_images: bool) -> str | list[dict[str, str]]:
    """Text as a string; with images among it, if the model takes them, parts as templates have them."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content

    kinds = {part["type"] for part in content}
    accepted = {"text"}
    if takes_images:
        accepted.add("image_url")
    unknown = sorted(kinds - accepted)
    if unknown:
        why = f"a {message['role']} message has a part of type {unknown[0]}, but only text is rendered for this model."
        raise ChatError(400, "invalid_request", f"{why} Send text parts.")

    if kinds <= {"text"}:
        return "".join(part["text"] for part in content)
    parts = []
    for part in content:
        if part["type"] != "text":
            part = {"type": "image"}
        parts.append(part)
    return parts
