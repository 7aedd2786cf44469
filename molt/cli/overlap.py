"""Prompts that are trained and evaluated: a score on them says little about new ones."""

import json
import time
from typing import Any

from molt.cli.findings import Findings
from molt.data.rows import Rows
from molt.errors import plural

LOOK_S = 15.0
"""Seconds for looking; a million short rows take about 10."""
LOOK_ROWS = 1_000
"""Rows between two looks at the clock."""


def check_overlap(found: Findings, trained: Rows, held_out: Rows, label: str, column: str) -> None:
    """Add a warning about prompts of `held_out`, which `label` names, that are trained on too; all rows are read."""
    deadline = time.monotonic() + LOOK_S
    numbers: dict[str, list[int]] = {}
    for number in range(len(held_out)):
        prompt = comparable(held_out[number].get(column))
        if prompt is not None:
            numbers.setdefault(prompt, []).append(number)

    both: set[int] = set()
    looked_at = 0
    while looked_at < len(trained) and time.monotonic() < deadline:
        for number in range(looked_at, min(looked_at + LOOK_ROWS, len(trained))):
            prompt = comparable(trained[number].get(column))
            if prompt is not None:
                both.update(numbers.get(prompt, ()))
        looked_at = min(looked_at + LOOK_ROWS, len(trained))

    among = ""
    if looked_at < len(trained):
        among = f" (looked for in the first {plural(looked_at, 'row')} of {len(trained):,})"
    if both:
        found.add(
            "warning",
            f"{label}: {len(both):,} of {len(held_out):,} prompts are trained on too (first: row {min(both)}), so it "
            f"says little about new ones. Remove them from one side.{among}",
        )
    elif among:
        found.add("ok", f"{label}: no prompt of it is trained on{among}")


def comparable(prompt: Any) -> str | None:
    """The same text for prompts that mean the same: a string, or a conversation of one user message with that text."""
    if prompt is None:
        return None
    if isinstance(prompt, list):
        messages = [_comparable_message(message) for message in prompt]
        if len(messages) == 1 and messages[0][0] == "user":
            return messages[0][1]
        return json.dumps(messages, ensure_ascii=False)
    return _text(prompt)


def _comparable_message(message: Any) -> tuple[str, str]:
    """Role, and content with what else there is of meaning."""
    if not isinstance(message, dict):
        return "", _text(message)
    role = str(message.get("role", message.get("from", "")))
    text = _text(message.get("content", message.get("value")))
    calls = message.get("tool_calls")
    if calls:
        text += json.dumps(calls, sort_keys=True, default=str)
    return {"human": "user", "gpt": "assistant"}.get(role, role), text


def _text(content: Any) -> str:
    """Content as text: of text parts their texts; white space at the ends does not count."""
    if isinstance(content, str):
        return content.strip()
    is_text_parts = isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content)
    if is_text_parts:
        return "".join(str(part["text"]) for part in content).strip()
    return json.dumps(content, sort_keys=True, default=str)
