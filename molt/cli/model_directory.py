"""A model directory checked against itself, without weights: tokenizer, template, configuration, generation config."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from molt.chat.render import TurnEnd, end_ids, render_text, stop_ids, turn_end
from molt.errors import ConfigError, UnusableRow, described
from molt.hub import only_local

if TYPE_CHECKING:  # `molt check` imports it when it needs it
    from transformers import PreTrainedTokenizerBase

USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class ModelDirectory:
    """What is there, and how a run would use it."""

    flag: str
    """The setting that names it."""
    path: str
    tokenizer: "PreTrainedTokenizerBase"
    chats: bool
    """Prompts are rendered with the chat template."""
    exports: bool
    """The run writes a model."""

    @property
    def setting(self) -> str:
        return f"`{self.flag}` (={self.path})"

    @property
    def end(self) -> TurnEnd | None:
        """How an answer ends; None without chats, or where the template takes no simple one."""
        if not self.chats or not self.tokenizer.chat_template:
            return None
        try:
            return turn_end(self.tokenizer)
        except UnusableRow:
            return None


def require_exportable(directory: ModelDirectory) -> None:
    """Raise ConfigError if what is written beside the weights, after the last step, could not be."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        try:
            directory.tokenizer.save_pretrained(folder)
            config = AutoConfig.from_pretrained(
                directory.path, trust_remote_code=False, local_files_only=only_local(directory.path)
            )
            config.save_pretrained(folder)
        except Exception as error:  # transformers raises anything
            raise ConfigError(
                f"{directory.setting}: its tokenizer or configuration could not be saved ({described(error)}), so the "
                "run would end without a model. Correct them so that `save_pretrained` works."
            ) from error


def without_end(directory: ModelDirectory) -> str | None:
    """That a model which learns from the template could never stop, in words; None if it could."""
    end = directory.end
    if end is None or end.token_id is not None:
        return None
    eos = directory.tokenizer.eos_token
    return (
        f"{directory.setting}: the chat template ends an answer with {end.text!r}, which is no special token of this "
        f"tokenizer, so nothing would stop the model at its end. Use a `data.chat_template` that ends an answer with "
        f"{eos!r}, or a tokenizer and model that have the template's token."
    )


def doubts(directory: ModelDirectory) -> Iterator[str]:
    """What does not fit together, though the run can go on."""
    from molt.models.description import model_embedding_rows

    rows = model_embedding_rows(directory.path)
    if rows is not None:
        yield from _of_vocabulary(directory, rows)
    if directory.chats and directory.tokenizer.chat_template:
        yield from _of_beginning(directory)
    if directory.exports:
        yield from _of_generation_config(directory)


def new_end(directory: ModelDirectory) -> str | None:
    """That the model stops at another token than before, in words; None if it does not. Raises ConfigError."""
    end = directory.end
    known = stop_ids(directory.tokenizer, end_ids(directory.path), apply_chat_template=False)
    if end is None or end.token_id is None or end.token_id in known:
        return None
    text = (
        f"end of an answer: {end.text!r} (id {end.token_id}) of the chat template, beside the end tokens of "
        f"{directory.path}, which are {known}"
    )
    if directory.exports:
        text += "; the exported model stops there too"
    return text


def _of_vocabulary(directory: ModelDirectory, rows: int) -> Iterator[str]:
    largest = max(directory.tokenizer.get_vocab().values())
    if largest >= rows:
        text = directory.tokenizer.convert_ids_to_tokens(largest)
        yield (
            f"{directory.setting}: the tokenizer has tokens up to id {largest} ({text!r}) and the model has {rows:,} "
            "embeddings: rows with a larger id are dropped. Use the tokenizer of the model, or resize its embeddings."
        )


def _of_beginning(directory: ModelDirectory) -> Iterator[str]:
    """Whether a chat begins with what the tokenizer puts before plain text, with which the model was trained."""
    tokenizer = directory.tokenizer
    bare = tokenizer("hi", add_special_tokens=False).input_ids
    whole = tokenizer("hi").input_ids
    before = []
    for token_id in whole:
        if token_id == bare[0]:
            break
        before.append(token_id)
    if not before:
        return
    try:
        chat = tokenizer(render_text(tokenizer, [USER]), add_special_tokens=False).input_ids
    except UnusableRow:
        return
    if chat[: len(before)] != before:
        text = tokenizer.decode(before)
        yield (
            f"{directory.setting}: the tokenizer begins plain text with {text!r}, and the chat template does not, so a "
            "model that was trained with it would not see it. Put {{ bos_token }} at the beginning of the template."
        )


def _of_generation_config(directory: ModelDirectory) -> Iterator[str]:
    from transformers import GenerationConfig

    from molt.models.generation import changes, savable, save_problem

    try:
        config = GenerationConfig.from_pretrained(directory.path)
    except OSError:  # a model without one
        return
    problem = save_problem(config)
    if problem is not None:
        changed = changes(config, savable(config))
        yield (
            f"{directory.setting}: transformers refuses to save its generation config ({problem}), so the exported "
            f"model will have another: {changed}. Correct generation_config.json if you want something else."
        )
