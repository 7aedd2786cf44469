"""Chats to ids and back: whole conversations, the next turn after sampled ids, tool calls out of sampled ids.

The `renderers` package does it for the model families it knows. A family is taken by what it renders, not by the
model's name: on probe conversations its ids must be those of the tokenizer's own template, so a fine-tune in a local
directory is recognised and a template of one's own is not mistaken. Any other template is continued by its own
difference: it renders a stand-in turn, once alone and once with the new messages, and what the second adds follows the
sampled ids; its calls are read as Hermes and Qwen write them.

**Untrusted text.** What a message spells stays text: the spelling of a special token is replaced by a mark before
rendering, and the mark is tokenised as the spelling, with `split_special_tokens`, so it cannot open or close a turn.

**Images.** Rendered as the one placeholder that the template has for each; `place` puts in what the model's processor
makes of the image (`chat/images.py`). A model that takes none refuses them.

Not here: other media, settings of templates (the defaults are rendered).
"""

import copy
import json
import marshal
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, Literal

from molt.chat.images import File, ImageReader, load_image_reader
from molt.chat.protocol import ChatError, Message, ToolCall
from molt.chat.render import ANSWER, end_ids, load_tokenizer, render_text, require_template
from molt.errors import UnusableRow
from molt.types import Media

Tools = list[dict[str, Any]] | None
Retention = Literal["all", "tool_cycle", "template"]

MARKUP = 32
"""Characters up to which a text's ids are remembered: families tokenise the same scraps of markup in every turn."""
REASON, THINK, THOUGHT = "moltreason7f3a", "<think>", "</think>"
BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
UNREADABLE = {"unclosed_block", "malformed_structure", "missing_name"}
"""Statuses of `renderers` that leave no call. An unknown tool is one: it is for the client to refuse."""


@dataclass(frozen=True)
class Parsed:
    """What a sampled turn says."""

    content: str
    """Calls that cannot be read stay in it as text, so that the client sees what the model said."""
    reasoning: str | None
    tool_calls: list[ToolCall]
    malformed: list[str]
    """The text of each call that cannot be read."""


class MarkedTokenizer:
    """The tokenizer, as `renderers` uses it, for texts in which `mark` has replaced what spells a special token."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        # A copy, since other users of the tokenizer change its state; called without what `transformers` puts around.
        self._backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._backend:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = False
        specials = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special and not t.content.isalnum()}
        self._marks = {text: f"moltspecial7f3a{i}x" for i, text in enumerate(sorted(specials, key=len, reverse=True))}
        self._spelling = {mark: text for text, mark in self._marks.items()}
        self._special = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._markup = lru_cache(maxsize=1024)(self._encoded)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # not callable: `renderers` then asks for no offsets and tokenises by `encode`
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def mark(self, value: Any) -> Any:
        """The same JSON value, with a mark for every special token that its texts spell."""
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, str):
            return self._special.sub(lambda found: self._marks[found[0]], value)
        return [self.mark(item) for item in value] if isinstance(value, list) else value

    def encode(self, text: str, **_) -> list[int]:
        ids = []
        for piece in re.split("(moltspecial7f3a[0-9]+x)", text):
            if piece:
                ids += self._markup(piece) if len(piece) <= MARKUP else self._encoded(piece)
        return ids

    def _encoded(self, piece: str) -> list[int]:
        if spelling := self._spelling.get(piece):
            return self._splitting(spelling, add_special_tokens=False, split_special_tokens=True).input_ids
        if self._backend:
            return self._backend.encode(piece, add_special_tokens=False).ids
        return self._tokenizer(piece, add_special_tokens=False).input_ids

    def text(self, ids: list[int]) -> str:
        """What the ids spell: special tokens stay, spaces are not cleaned up."""
        if self._backend:
            return self._backend.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @cached_property
    def _splitting(self):
        """A copy: `split_special_tokens` is a state of a tokenizer, and other threads use the original."""
        return copy.deepcopy(self._tokenizer)


class ChatRenderer:
    """Chats to ids and back, for one model. Safe to use from several threads.

    `thinking_retention`: `all` keeps earlier reasoning where it was sampled; `tool_cycle` until the next user message;
    `template` for as long as the template does. Where it is to go, `bridge` answers None.
    """

    def __init__(
        self,
        tokenizer,
        eos_ids: Iterable[int] = (),
        *,
        thinking_retention: Retention = "all",
        images: ImageReader | None = None,
    ):
        """`eos_ids`: further end tokens, as from the model's generation config; `images`: of a model that takes them.

        Raises DataError without a template.
        """
        self.tokenizer, self.thinking_retention = MarkedTokenizer(tokenizer), thinking_retention
        self.images = images
        if (family := self._find_family()) is None:
            require_template(tokenizer)
        self._family = family
        self._stand_in = lru_cache(maxsize=64)(self._stood_in)
        self.family: str | None = family and family.config.name
        """Its name in `renderers`; None: the template's own difference."""
        stops = family.get_stop_token_ids() if family else []
        self.eos_ids: list[int] = sorted({*eos_ids, *stops, tokenizer.eos_token_id} - {None})
        spoken = tokenizer.convert_tokens_to_ids([THINK, THOUGHT, "<tool_call>", "</tool_call>"])
        self._silent = set(tokenizer.all_special_ids) - set(spoken)
        self._think: int | None = tokenizer.get_added_vocab().get(THINK)

    def render(self, messages: list[Message], tools: Tools = None, *, prompt: bool = True) -> list[int]:
        """The whole conversation, with the generation prompt unless `prompt` is False. Raises ChatError."""
        with _refusing():
            messages, tools = self._clean(name_results(messages)), self.tokenizer.mark(tools)
            if self._family:
                return _family_ids(self._family, messages, tools, prompt)
            return self.tokenizer.encode(self._text(messages, tools, prompt))

    def bridge(
        self, ids: list[int], messages: list[Message], tools: Tools = None, *, sampled: int = 1
    ) -> list[int] | None:
        """`ids` and what the new messages and the generation prompt add; None if that cannot be said by appending.

        `ids`: all of the conversation so far; the last `sampled` are the last turn as it was sampled, cut by length or
        not. `messages`: the new ones. Tool results should have names (`name_results`): without, the answer is None
        where the format shows them. Raises ChatError.
        """
        roles = {m["role"] for m in messages}
        if "assistant" in roles or (self.thinking_retention == "tool_cycle" and "user" in roles):
            return None
        with _refusing():
            messages, tools = self._clean(messages), self.tokenizer.mark(tools)
            longer = self._extended(ids, messages, tools, sampled)
            named = [{"name": ANSWER} | m if m["role"] == "tool" else m for m in messages]
            if named != messages and longer != self._extended(ids, named, tools, sampled):
                return None
        return longer

    def place(
        self, ids: list[int], files: Sequence[File], *, start: int = 0, before: Sequence[Media] = ()
    ) -> tuple[list[int], tuple[Media, ...]]:
        """`ids`, rendered or bridged, with the images of their messages in them, and all the images there are.

        `start`: where the ids of the messages begin; `before`: the images up to there. Raises ChatError.
        """
        return (ids, ()) if self.images is None else self.images.place(ids, start, files, before)

    def parse(self, sampled_ids: list[int], tools: Tools = None, prompt_ids: list[int] | None = None) -> Parsed:
        """What was sampled, as a message. Raises nothing, whatever the model says.

        `prompt_ids`: what the engine was given (it may open the reasoning); None: as after a user's message.
        """
        prompt_ids = self.render([_USER]) if prompt_ids is None else prompt_ids
        if self._family is None:
            return self._parsed_text(sampled_ids, prompt_ids)
        try:
            found = self._family.parse_response(sampled_ids, tools=tools, prompt_ids=prompt_ids)
        except Exception:  # another package's parser, a text that may be anything: reported as any unreadable call is
            return Parsed(text := self._spoken(sampled_ids), None, [], [text])
        calls = [None if c.status in UNREADABLE else _call(c.name, c.arguments, c.id) for c in found.tool_calls]
        malformed = [c.raw for c, call in zip(found.tool_calls, calls, strict=True) if call is None]
        content = "\n".join(filter(None, [found.content, *malformed]))
        return Parsed(content, found.reasoning_content, [call for call in calls if call], malformed)

    def unparsed(self, sampled_ids: list[int]) -> str:
        """What was sampled as text, calls as the model spells them; without its reasoning, if that ends."""
        return self._spoken(sampled_ids).rpartition(THOUGHT)[2].strip()

    def _find_family(self):
        from renderers import base, config_from_name, create_renderer

        named, template = base.MODEL_RENDERER_MAP.get(self.tokenizer.name_or_path), self.tokenizer.chat_template
        # By name alone: gpt-oss, as its encoding is downloaded; one without a template, as nothing can be compared.
        others = set(base.MODEL_RENDERER_MAP.values()) - {"gpt-oss"} if template else ()
        kept = {} if self.thinking_retention == "template" else {"thinking_retention": self.thinking_retention}
        for name in [named] if named else sorted(others):
            for settings in {}, {"enable_thinking": False}:
                # Without thinking, families keep the empty block of the prompt in history, which templates drop.
                probes = _PROBES[: 2 if settings else None] if template else []
                probes = [*probes, ([_SHOWN], None)] if template and self.images else probes
                try:
                    family = create_renderer(self.tokenizer, type(config_from_name(name))(**settings, **kept))
                    if all(self._agrees(family, *probe) for probe in probes):
                        return family
                except Exception:  # whatever a family raises about this tokenizer, it is not of that family
                    continue
        return None

    def _agrees(self, family, messages: list[Message], tools: Tools) -> bool:
        text = self._text(messages, tools, True)
        return _family_ids(family, messages, tools, True) == self.tokenizer.encode(text)

    def _clean(self, messages: list[Message]) -> list[Message]:
        """Contents as text or parts, arguments of calls as objects, what spells special tokens marked."""
        shows = self.images is not None
        messages = [m | {"content": _content(m, shows)} for m in _with_arguments(messages, _object)]
        return [{key: self.tokenizer.mark(m[key]) if key != "role" else m[key] for key in m} for m in messages]

    def _text(self, messages: list[Message], tools: Tools, prompt: bool = False) -> str:
        try:
            return render_text(self.tokenizer, messages, tools=tools, add_generation_prompt=prompt)
        except UnusableRow:  # some templates join the arguments of a call as text
            messages = _with_arguments(messages, lambda found: json.dumps(found, ensure_ascii=False))
            return render_text(self.tokenizer, messages, tools=tools, add_generation_prompt=prompt)

    def _extended(self, ids: list[int], messages: list[Message], tools: Tools, sampled: int) -> list[int] | None:
        if self._family:
            start = len(ids) - sampled
            logical = _logical(self._family)
            longer = self._family.bridge_to_next_turn(ids[:start], ids[start:], messages, tools=tools, **logical)
            return longer.token_ids if longer and longer.token_ids[: len(ids)] == ids else None
        try:
            text = self._difference(messages, tools)
        except UnusableRow:
            return None
        new = self.tokenizer.encode(text or "")
        ended = ids[-1:] == new[:1] and new[0] in self.eos_ids  # the template closes the turn, and so did the model
        return ids + new[ended:] if new else None

    def _difference(self, messages: list[Message], tools: Tools) -> str | None:
        """What follows a turn's own text: its closing, the messages, the generation prompt. None if what was there
        changes: something moves before the turn, it is closed in another way, or (`template`) reasoning is dropped."""
        results = [m for m in messages if m["role"] == "tool"]
        before, plain, alone = self._stand_in(marshal.dumps(tools, 2), tuple(m.get("name", "f") for m in results))
        whole = self._text([_USER, _turn(results), *messages], tools, True)
        count, closing = alone.count(ANSWER), plain.rpartition(ANSWER)[2]
        end = alone.rpartition(ANSWER)[2]  # after calls: what ends them, and the closing
        for i, result in enumerate(results):
            end = end.replace(_stand_in_id(i), result.get("tool_call_id", "0"))
        parts = whole.split(ANSWER, count)
        if not count or len(parts) <= count or not whole.startswith(before) or not parts[-1].startswith(end):
            return None
        dropped = self.thinking_retention == "template" and REASON not in whole
        return closing + parts[-1][len(end) :] if end.endswith(closing) and not dropped else None

    def _stood_in(self, tools: bytes, names: tuple[str, ...]) -> tuple[str, str, str]:
        """The stand-in conversation: without a turn, with a plain one, with one that calls functions of these names.

        `tools`: by `marshal`, in a version that writes equal data equally.
        """
        offered = marshal.loads(tools)
        calls = [{"name": name, "tool_call_id": _stand_in_id(i)} for i, name in enumerate(names)]
        before, plain, alone = ([_USER, *turn] for turn in ((), (_turn(),), (_turn(calls),)))
        return self._text(before, offered), self._text(plain, offered), self._text(alone, offered)

    def _spoken(self, ids: list[int]) -> str:
        """The text up to the end token, without special tokens other than those of reasoning and calls."""
        said = takewhile(lambda i: i not in self.eos_ids, ids)
        return self.tokenizer.text([i for i in said if i not in self._silent])

    def _parsed_text(self, sampled_ids: list[int], prompt_ids: list[int]) -> Parsed:
        text, reasoning, end = self._spoken(sampled_ids), None, prompt_ids[-16:]
        maybe = self._think is None or self._think in end
        if maybe and self.tokenizer.text(end).rstrip().endswith(THINK):
            text = THINK + text
        if text.lstrip().startswith(THINK):
            reasoning, _, text = text.lstrip().removeprefix(THINK).partition(THOUGHT)
            reasoning, text = reasoning.strip() or None, text.lstrip("\n")
        blocks = [(found[0], _read_block(*found.groups())) for found in BLOCK.finditer(text)]
        for block, call in blocks:
            text = text.replace(block, "", 1).strip() if call else text
        return Parsed(text, reasoning, [call for _, call in blocks if call], [raw for raw, call in blocks if not call])


def load_chat_renderer(model_name_or_path: str, chat_template: str | None, **settings) -> ChatRenderer:
    """The chat renderer of a model, with the end tokens of its generation config; `settings`: of ChatRenderer."""
    tokenizer, ends = load_tokenizer(model_name_or_path, chat_template), end_ids(model_name_or_path)
    return ChatRenderer(tokenizer, ends, images=load_image_reader(model_name_or_path), **settings)


def _family_ids(family, messages: list[Message], tools: Tools, prompt: bool) -> list[int]:
    rendered = family.render(messages, tools=tools, add_generation_prompt=prompt, **_logical(family))
    return rendered.token_ids


def _logical(family) -> dict[str, bool]:
    """What makes a family write one placeholder for an image instead of reading it."""
    return {"process_multimodal": False} if getattr(family, "supports_process_multimodal", False) else {}


def name_results(messages: list[Message]) -> list[Message]:
    """The conversation with the name of its function in every tool result, by the call that it answers."""
    names = {c["id"]: {"name": c["function"]["name"]} for m in messages for c in m.get("tool_calls") or ()}
    return [names.get(m.get("tool_call_id"), {}) | m if m["role"] == "tool" else m for m in messages]


def check_round_trip(renderer: ChatRenderer, *, tools: bool = True) -> list[str]:
    """What of a chat would not come back as it went, in words; empty if all does. `tools`: calls and results too."""
    problems, messages, show = [], [_USER], renderer.tokenizer.decode
    for text in "one", "two", "three":
        answer = {"role": "assistant", "content": text}
        problems += _check_bridge(renderer, messages, answer, [_USER], None)
        messages += [answer, _USER]
    if tools:
        call, *results = _CALLS
        prompt, whole = renderer.render([_USER], _TOOLS), renderer.render([_USER, call], _TOOLS, prompt=False)
        start = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        read = [(c.name, _object(c.arguments)) for c in renderer.parse(whole[start:], _TOOLS, whole[:start]).tool_calls]
        if read != [(c["function"]["name"], c["function"]["arguments"]) for c in call["tool_calls"]]:
            problems.append(
                f"tool calls, as the chat template renders them (={show(whole[start:])!r}), are read back as {read}, "
                "so the model's calls would be missed. Use a family that `renderers` knows, or <tool_call> with JSON."
            )
        problems += _check_bridge(renderer, [_USER], call, results, _TOOLS)
    return problems


def _check_bridge(renderer: ChatRenderer, messages, answer: Message, new: list[Message], tools: Tools) -> list[str]:
    """The turn `answer`, as the whole conversation renders it if that keeps the prompt, and `new` after it."""
    prompt, whole = renderer.render(messages, tools), renderer.render([*messages, answer, *new], tools)
    start, kept, show = len(prompt), whole[: len(prompt)] == prompt, renderer.tokenizer.decode
    ends = [i + 1 for i in range(start, len(whole)) if kept and whole[i] in renderer.eos_ids]
    grown = whole[: ends[0]] if ends else prompt + renderer.tokenizer.encode(answer["content"])
    longer = renderer.bridge(grown, new, tools, sampled=len(grown) - start)
    what = f"a {new[0]['role']} message after {show(grown[start:])!r}"
    if longer is None and (renderer.thinking_retention == "all" or not kept):
        return [
            f"{what} changes what was there (thinking_retention={renderer.thinking_retention}), so each starts "
            "a branch, a sample of its own. Use a chat template that keeps history, or thinking_retention all."
        ]
    if longer and ends and longer != whole:
        return [
            f"{what} is continued as {show(longer[start:])!r}, but the whole is rendered as {show(whole[start:])!r}, "
            "so the model would see a format that is not its own. Use another chat template."
        ]
    return []


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ChatError:
        raise
    except Exception as error:  # templates and families raise anything about a client's messages and tools
        why = f"{type(error).__name__} {error}".strip()
        message = f"messages or tools cannot be rendered for this model ({why}). Send what its chat template accepts."
        raise ChatError(400, "invalid_request", message) from error


def _content(message: Message, shows: bool) -> str | list[dict[str, str]]:
    """Text as a string; with images among it, if the model is shown any, parts as templates have them."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    media = {part["type"] for part in content} - {"text"}
    if unknown := sorted(media - ({"image_url"} if shows else set())):
        why = f"a {message['role']} message has a part of type {unknown[0]}, but only text is rendered for this model."
        raise ChatError(400, "invalid_request", f"{why} Send text parts.")
    if media:
        return [part if part["type"] == "text" else {"type": "image"} for part in content]
    return "".join(part["text"] for part in content)


def _with_arguments(messages: list[Message], convert: Callable[[Any], Any]) -> list[Message]:
    def converted(call):
        return call | {"function": call["function"] | {"arguments": convert(call["function"]["arguments"])}}

    return [m | {"tool_calls": [converted(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


def _object(arguments: Any) -> Any:
    """Arguments parsed, if they are JSON text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _read_block(body: str, closed: str) -> ToolCall | None:
    block = _object(body) if closed else None
    return _call(block.get("name"), block.get("arguments", {})) if isinstance(block, dict) else None


def _call(name: Any, arguments: Any, call_id: str | None = None) -> ToolCall | None:
    """The call, if it is one: a name, and arguments that are a JSON object or the text of one."""
    arguments = _object(arguments)
    if not (name and isinstance(name, str) and isinstance(arguments, dict)):
        return None
    try:
        text = _as_json(arguments)
        (name + text).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return ToolCall(call_id or secrets.token_hex(5)[:9], name, text)  # nine characters, as Mistral's templates ask


def _made_call(call_id: str, name: str, **arguments) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _stand_in_id(index: int) -> str:
    return f"moltid{index:03}"  # nine letters and digits, as some templates ask


def _turn(results: Iterable[Message] = ()) -> Message:
    """An answer that stands for any; with calls that `results` answer."""
    calls = [_made_call(m.get("tool_call_id", "0"), m.get("name", "f"), a=ANSWER) for m in results]
    turn = {"role": "assistant", "content": ANSWER, "reasoning_content": REASON}
    return turn | {"tool_calls": calls} if calls else turn


_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_USER: Message = {"role": "user", "content": "hi"}
_SHOWN: Message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}
_A_B = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
_TOOLS: Tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _A_B}}]
_IDS = "functions.add:0", "functions.add:1"
_CALLS: list[Message] = [
    {"role": "assistant", "content": "", "tool_calls": [_made_call(i, "add", a=i[-1], b=1) for i in _IDS]},
    *({"role": "tool", "content": f"got {i[-1]}", "tool_call_id": i, "name": "add"} for i in _IDS),
]
_PROBES: list[tuple[list[Message], Tools]] = [
    ([{"role": "system", "content": "Be brief."}, _USER], None),
    ([_USER, _CALLS[0] | {"reasoning_content": "so"}, *_CALLS[1:]], _TOOLS),
    ([_USER, {"role": "assistant", "content": "one", "reasoning_content": "so"}, _USER], None),
]
