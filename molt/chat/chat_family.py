"""Conversations to ids by the model families that the `renderers` package knows.

A family is chosen by what it renders, not by the model's name: on probe conversations its ids must be those of the
tokenizer's own template. So a fine-tune in a local directory is recognised, and a changed template is not mistaken.
"""

from typing import TYPE_CHECKING, Any, Protocol, cast

from molt.chat import probes
from molt.chat.chat_template import template_text
from molt.chat.marked_tokenizer import MarkedTokenizer
from molt.chat.protocol import Message, Retention, Tools
from molt.types import Json

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, RenderedTokens

BY_NAME_ALONE = {"gpt-oss"}
"""Its encoding is downloaded, so it is not tried on every model."""


class Family(Protocol):
    """What molt uses of a renderer of `renderers`, with molt's types of messages and tools."""

    config: Any

    def render(
        self, messages: list[Message], *, tools: Tools, add_generation_prompt: bool, **options: bool
    ) -> "RenderedTokens": ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: Tools,
        **options: bool,
    ) -> "RenderedTokens | None": ...

    def parse_response(self, token_ids: list[int], *, tools: Tools, prompt_ids: list[int]) -> "ParsedResponse": ...

    def get_stop_token_ids(self) -> list[int]: ...


class FamilyFormat:
    """A family, as a `ChatFormat`."""

    def __init__(self, family: Family):
        self._family = family
        self.name: str | None = family.config.name
        self._options: dict[str, bool] = {}
        if getattr(family, "supports_process_multimodal", False):
            self._options["process_multimodal"] = False  # one placeholder for an image, which is not read

    def render(self, messages: list[Message], tools: Tools, *, prompt: bool) -> list[int]:
        """The ids of the conversation."""
        rendered = self._family.render(messages, tools=tools, add_generation_prompt=prompt, **self._options)
        return rendered.token_ids

    def extend(self, ids: list[int], messages: list[Message], tools: Tools, *, sampled: int) -> list[int] | None:
        """`ids` and what the new messages add; None if they cannot be appended."""
        start = len(ids) - sampled
        longer = self._family.bridge_to_next_turn(ids[:start], ids[start:], messages, tools=tools, **self._options)
        if not longer or longer.token_ids[: len(ids)] != ids:
            return None
        return longer.token_ids


def find_family(tokenizer: MarkedTokenizer, thinking_retention: Retention, *, takes_images: bool) -> Family | None:
    """The family that renders as the tokenizer's own template does; None if there is none."""
    for name in _candidate_names(tokenizer):
        for thinks in (True, False):
            family = _matching_family(name, tokenizer, thinking_retention, thinks=thinks, takes_images=takes_images)
            if family is not None:
                return family
    return None


def _candidate_names(tokenizer: MarkedTokenizer) -> list[str]:
    from renderers.base import MODEL_RENDERER_MAP

    named = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    if named is not None:
        return [named]
    if not tokenizer.chat_template:  # nothing to compare with
        return []
    return sorted(set(MODEL_RENDERER_MAP.values()) - BY_NAME_ALONE)


def _matching_family(
    name: str, tokenizer: MarkedTokenizer, thinking_retention: Retention, *, thinks: bool, takes_images: bool
) -> Family | None:
    """The family of this name, if it can be made for the tokenizer and agrees with its template."""
    try:
        family = _create_family(name, tokenizer, thinking_retention, thinks=thinks)
        if tokenizer.chat_template:
            for probe in _probes(thinks=thinks, takes_images=takes_images):
                if not _agrees(family, tokenizer, probe):
                    return None
    except Exception:  # whatever a family raises about this tokenizer, it is not of that family
        return None
    return family


def _create_family(name: str, tokenizer: MarkedTokenizer, thinking_retention: Retention, *, thinks: bool) -> Family:
    from renderers import config_from_name, create_renderer

    settings: Json = {}
    if not thinks:
        settings["enable_thinking"] = False
    if thinking_retention != "template":
        settings["thinking_retention"] = thinking_retention
    config: Any = type(config_from_name(name))
    # The cast: its messages and tools are TypedDicts, molt's are plain dicts of the same shape.
    return cast("Family", create_renderer(tokenizer, config(**settings)))


def _probes(*, thinks: bool, takes_images: bool) -> list[probes.Probe]:
    chosen = [probes.WITHOUT_HISTORY, probes.WITH_CALLS]
    if thinks:  # without thinking, families keep the empty block of the prompt in history, which templates drop
        chosen.append(probes.WITH_HISTORY)
    if takes_images:
        chosen.append(probes.WITH_IMAGE)
    return chosen


def _agrees(family: Family, tokenizer: MarkedTokenizer, probe: probes.Probe) -> bool:
    text = template_text(tokenizer, probe.messages, probe.tools, prompt=True)
    return FamilyFormat(family).render(probe.messages, probe.tools, prompt=True) == tokenizer.encode(text)
