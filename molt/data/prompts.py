"""Rows become prompts, and prompts become one exactly resumable stream.

The state of a `PromptStream` is one integer, the index of the next prompt: the order is a pure function
of seed and epoch, so there is nothing else to save.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from molt.config import PromptDataConfig
from molt.data.rows import Rows, UnusableRow, require_column
from molt.types import Prompt

Message = dict[str, Any]


def as_messages(value: Any, column: str) -> list[Message]:
    """`value` as chat messages: a list of objects with a role and a content. Raises UnusableRow."""
    if not isinstance(value, list):
        raise UnusableRow(f"whose `{column}` is a {type(value).__name__}, not a list of messages")
    if not value:
        raise UnusableRow(f"whose `{column}` has no messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UnusableRow(f"whose `{column}` has a message without a role")
        # An assistant message that only calls tools has no content.
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise UnusableRow(f"whose `{column}` has a message without text or tool calls")
    return value


class PromptDataset:
    """Builds the `Prompt` of a row; reads `input_key`, `label_key` and, where present, `data_source`."""

    def __init__(self, rows: Rows, config: PromptDataConfig):
        """Raises DataError if a column is missing."""
        self.rows, self.config = rows, config
        require_column(rows, config.input_key, "data.input_key")
        if config.label_key is not None:
            require_column(rows, config.label_key, "data.label_key")

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, at epoch 0 and at its own position. Raises UnusableRow."""
        data, config = self.rows[row], self.config
        for key in (config.input_key, config.label_key):
            if key is not None and key not in data:
                raise UnusableRow(f"without `{key}`")
        value, chat = data[config.input_key], config.apply_chat_template
        return Prompt(
            epoch=0,
            position=row,
            row=row,
            messages=self._messages(value) if chat else None,
            text=None if chat else self._text(value),
            label=None if config.label_key is None else data[config.label_key],
            data_source=str(data.get("data_source") or self.rows.source(row)),
        )

    def _messages(self, value: Any) -> list[Message]:
        if isinstance(value, str):
            value = [{"role": "user", "content": self._text(value)}]
        messages = as_messages(value, self.config.input_key)
        if messages[-1]["role"] == "assistant":
            raise UnusableRow(f"whose `{self.config.input_key}` ends with the assistant's answer; remove it")
        return messages

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            hint = "; messages need `data.apply_chat_template`" if isinstance(value, list) else ""
            raise UnusableRow(f"whose `{self.config.input_key}` is a {type(value).__name__}, not text{hint}")
        if not value.strip():
            raise UnusableRow(f"whose `{self.config.input_key}` is empty")
        return value


class PromptStream:
    """`num_episodes` passes over a dataset, each in its own order: `stream[i]` is always the same prompt."""

    def __init__(self, dataset: PromptDataset, *, seed: int, num_episodes: int):
        self.dataset, self.seed, self.num_episodes = dataset, seed, num_episodes
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num_episodes * len(self.dataset)

    def __getitem__(self, i: int) -> Prompt:
        """The i-th prompt of the run. Raises UnusableRow (draw the next one) or IndexError (the end)."""
        epoch, position = divmod(i, len(self.dataset))
        return replace(self.dataset.prompt(self.row(i)), epoch=epoch, position=position)

    def index(self, epoch: int, position: int) -> int:
        """Where in the stream the prompt of that identity is."""
        return epoch * len(self.dataset) + position

    def row(self, i: int) -> int:
        """The dataset row behind `stream[i]`, whether it can be used or not."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        epoch, position = divmod(i, len(self.dataset))
        if self._order is None or self._order[0] != epoch:
            seeds = [self.seed % 2**64, epoch]  # numpy takes no negative seeds
            self._order = epoch, np.random.default_rng(seeds).permutation(len(self.dataset))
        return int(self._order[1][position])
