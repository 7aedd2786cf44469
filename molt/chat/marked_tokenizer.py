"""A tokenizer for texts in which the spellings of special tokens must stay text."""

import copy
import re
from functools import cached_property, lru_cache
from typing import Any

from molt.chat.messages import as_unicode

MARK = "moltspecial7f3a"
"""What a mark begins with; a number and `x` follow."""
REMEMBERED_LENGTH = 32
"""Characters up to which a text's ids are remembered: families tokenise the same scraps of markup in every turn."""


class MarkedTokenizer:
    """The tokenizer, as `renderers` uses it, for texts in which `mark` has replaced what spells a special token."""

    def __init__(self, tokenizer: Any):
        """tokenizer: from `transformers`."""
        self._tokenizer = tokenizer
        self._backend = _own_backend(tokenizer)
        self._marks: dict[str, str] = {}
        for number, spelling in enumerate(_special_spellings(tokenizer)):
            self._marks[spelling] = f"{MARK}{number}x"
        self._spellings = {mark: spelling for spelling, mark in self._marks.items()}

        any_special = "|".join(re.escape(spelling) for spelling in self._marks)
        matches_nothing = "(?!)"
        self._special = re.compile(any_special or matches_nothing)
        self._any_mark = re.compile(f"({MARK}[0-9]+x)")
        self._remembered_ids = lru_cache(maxsize=1024)(self._piece_ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # not callable: `renderers` then asks for no offsets and tokenises by `encode`
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def mark(self, value: Any) -> Any:
        """The same JSON value, with a mark for every special token that its texts spell."""
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, str):
            return self._special.sub(self._mark_of, as_unicode(value))
        return value

    def _mark_of(self, special: re.Match[str]) -> str:
        return self._marks[special[0]]

    def encode(self, text: str, **_: Any) -> list[int]:
        """The ids of a marked text, without special tokens around it."""
        ids: list[int] = []
        for piece in self._any_mark.split(text):
            if not piece:
                continue
            if len(piece) <= REMEMBERED_LENGTH:
                ids += self._remembered_ids(piece)
            else:
                ids += self._piece_ids(piece)
        return ids

    def _piece_ids(self, piece: str) -> list[int]:
        spelling = self._spellings.get(piece)
        if spelling is not None:
            return self._splitting(spelling, add_special_tokens=False, split_special_tokens=True).input_ids
        if self._backend is not None:
            return self._backend.encode(piece, add_special_tokens=False).ids
        return self._tokenizer(piece, add_special_tokens=False).input_ids

    def text(self, ids: list[int]) -> str:
        """What the ids spell: special tokens stay, spaces are not cleaned up."""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @cached_property
    def _splitting(self) -> Any:
        """A copy: `split_special_tokens` is a state of a tokenizer, and other threads use the original."""
        return copy.deepcopy(self._tokenizer)


def _own_backend(tokenizer: Any) -> Any:
    """A copy of the fast tokenizer inside, which is quicker to call; None without one.

    A copy, since other users of the tokenizer change its state.
    """
    backend = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
    return backend


def _special_spellings(tokenizer: Any) -> list[str]:
    """The texts of the special tokens, the longest first. Plain words among them may stand in any text."""
    spellings = set()
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and not token.content.isalnum():
            spellings.add(token.content)
    return sorted(spellings, key=len, reverse=True)
