"""Rows become prompts, and prompts become one exactly resumable stream.

The state of a `PromptStream` is one integer, the index of the next prompt: the order is a pure function
of seed and epoch (`mixture.py`), so there is nothing else to save.
"""

from dataclasses import replace
from typing import Any

from molt.chat.messages import read_messages, read_tools, require_unicode
from molt.chat.protocol import Message
from molt.config import PromptDataConfig
from molt.data.mixture import EpochOrder
from molt.data.rows import Row, Rows, require_column
from molt.errors import UnusableRow
from molt.types import Prompt


def require_value(row: Row, column: str) -> None:
    """Raise UnusableRow if this row lacks the column."""
    if column not in row:
        raise UnusableRow(f"without `{column}`")


class PromptDataset:
    """Builds the `Prompt` of a row; reads `input_key`, `label_key`, `tools_key` and, where present, `data_source`."""

    def __init__(self, rows: Rows, config: PromptDataConfig):
        """Raises DataError if a column is missing."""
        self.rows = rows
        self.config = config
        require_column(rows, config.input_key, "data.input_key")
        if config.label_key is not None:
            require_column(rows, config.label_key, "data.label_key")
        if config.tools_key is not None:
            require_column(rows, config.tools_key, "data.tools_key", everywhere=False)

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row, at epoch 0 and with its row number as position. Raises UnusableRow."""
        data = self.rows[row]
        config = self.config

        require_value(data, config.input_key)
        value = data[config.input_key]
        require_unicode(value, config.input_key)

        label = None
        if config.label_key is not None:
            require_value(data, config.label_key)
            label = data[config.label_key]
            require_unicode(label, config.label_key)

        messages = None
        text = None
        if config.apply_chat_template:
            messages = self._messages(value)
        else:
            text = self._text(value)

        tools = None
        if config.tools_key is not None:
            require_unicode(data.get(config.tools_key), config.tools_key)
            tools = read_tools(data.get(config.tools_key), config.tools_key)

        require_unicode(data.get("data_source"), "data_source")
        data_source = data.get("data_source") or self.rows.source(row)
        return Prompt(
            epoch=0,
            position=row,
            row=row,
            messages=messages,
            text=text,
            label=label,
            data_source=str(data_source),
            tools=tools,
        )

    def _messages(self, value: Any) -> list[Message]:
        column = self.config.input_key
        if isinstance(value, str):
            value = [{"role": "user", "content": self._text(value)}]
        messages = read_messages(value, column)
        if messages[-1]["role"] == "assistant":
            raise UnusableRow(f"whose `{column}` ends with the assistant's answer; remove it")
        return messages

    def _text(self, value: Any) -> str:
        column = self.config.input_key
        if isinstance(value, list):
            raise UnusableRow(f"whose `{column}` is a list, not text; messages need `data.apply_chat_template`")
        if not isinstance(value, str):
            raise UnusableRow(f"whose `{column}` is a {type(value).__name__}, not text")
        if not value.strip():
            raise UnusableRow(f"whose `{column}` is empty")
        return value


class PromptStream:
    """`num_episodes` epochs of a dataset, each in another order: `stream[i]` is always the same prompt."""

    def __init__(self, dataset: PromptDataset, order: EpochOrder, *, num_episodes: int):
        self.dataset = dataset
        self.order = order
        self.num_episodes = num_episodes

    def __len__(self) -> int:
        return self.num_episodes * len(self.order)

    def __getitem__(self, i: int) -> Prompt:
        """The i-th prompt of the run. Raises UnusableRow (draw the next one) or IndexError (the end)."""
        prompt = self.dataset.prompt(self.row(i))
        epoch, position = divmod(i, len(self.order))
        return replace(prompt, epoch=epoch, position=position)

    def index(self, epoch: int, position: int) -> int:
        """Where in the stream the prompt of that identity is."""
        return epoch * len(self.order) + position

    def row(self, i: int) -> int:
        """The dataset row behind `stream[i]`, whether it can be used or not."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        epoch, position = divmod(i, len(self.order))
        return int(self.order.rows(epoch)[position])
