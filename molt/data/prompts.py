"""Rows become prompts, and prompts become one exactly resumable stream.

The state of a `PromptStream` is one integer, the index of the next prompt: the order is a pure function
of seed and epoch (`mixture.py`), so there is nothing else to save.
"""

import json
from dataclasses import replace
from typing import Any

from molt.config import PromptDataConfig
from molt.data.mixture import EpochOrder
from molt.data.rows import Rows, require_column
from molt.errors import UnusableRow
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


def as_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """`value` as tool schemas: a list of objects, or JSON text of one; None if there are none. Raises UnusableRow."""
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


class PromptDataset:
    """Builds the `Prompt` of a row; reads `input_key`, `label_key`, `tools_key` and, where present, `data_source`."""

    def __init__(self, rows: Rows, config: PromptDataConfig):
        """Raises DataError if a column is missing."""
        self.rows, self.config = rows, config
        require_column(rows, config.input_key, "data.input_key")
        if config.label_key is not None:
            require_column(rows, config.label_key, "data.label_key")
        if config.tools_key is not None:
            require_column(rows, config.tools_key, "data.tools_key", everywhere=False)

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
            tools=as_tools(data.get(config.tools_key), config.tools_key) if config.tools_key else None,
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
    """`num_episodes` epochs of a dataset, each in its own order: `stream[i]` is always the same prompt."""

    def __init__(self, dataset: PromptDataset, order: EpochOrder, *, num_episodes: int):
        self.dataset, self.order, self.num_episodes = dataset, order, num_episodes

    def __len__(self) -> int:
        return self.num_episodes * len(self.order)

    def __getitem__(self, i: int) -> Prompt:
        """The i-th prompt of the run. Raises UnusableRow (draw the next one) or IndexError (the end)."""
        epoch, position = divmod(i, len(self.order))
        return replace(self.dataset.prompt(self.row(i)), epoch=epoch, position=position)

    def index(self, epoch: int, position: int) -> int:
        """Where in the stream the prompt of that identity is."""
        return epoch * len(self.order) + position

    def row(self, i: int) -> int:
        """The dataset row behind `stream[i]`, whether it can be used or not."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        epoch, position = divmod(i, len(self.order))
        return int(self.order.rows(epoch)[position])
