"""The events of a run as a table: faults, publications, evaluations, and when they were."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.report.charts import short
from molt.report.key_numbers import duration
from molt.report.sinks import read_jsonl
from molt.types import Json

CALM = frozenset(
    {
        "publication",
        "checkpoint",
        "evaluation",
        "best",
        "small_batch",
        "resumed",
        "recovered",
        "rejoined",
        "engine_restarted",
    }
)
"""Kinds of events that belong to a healthy run, or end a fault. All others stand out."""
CALM_REASONS = frozenset({"filtered", "too_few_left"})
"""Groups that were discarded for these only belong to a healthy run too."""
SUMMARISED = frozenset({"publication"})
"""Kinds that every step has: one row for all of them."""
LISTED_EVENTS = 12
"""Of another kind, more events than this are one row too."""
DISTINCT_TEXTS = 4
"""A summary lists the texts of a field if they are at most so many."""

Event = Json


@dataclass(frozen=True)
class _TableRow:
    time: float
    kind: str
    text: str
    is_calm: bool


def event_table(run_dir: Path) -> str:
    """A section of the page, or an empty string for a run without events."""
    by_kind: dict[str, list[Event]] = {}
    for event in read_jsonl(run_dir / "events.jsonl"):
        kind = str(event.get("kind", "?"))
        by_kind.setdefault(kind, []).append(event)
    if not by_kind:
        return ""

    rows: list[_TableRow] = []
    for kind, events in by_kind.items():
        rows.extend(_rows_of_kind(kind, events))
    rows.sort(key=_time_of_row)

    start = rows[0].time
    body = "".join(_markup(row, start) for row in rows)
    return f'<h2>Events</h2><div class="card"><table><tr><th>after</th><th>event</th><th></th></tr>{body}</table></div>'


def _time_of_row(row: _TableRow) -> float:
    return row.time


def _rows_of_kind(kind: str, events: list[Event]) -> list[_TableRow]:
    if kind in SUMMARISED or len(events) > LISTED_EVENTS:
        return [_TableRow(_time(events[0]), kind, _summary(events), _is_calm(kind, events))]
    return [_TableRow(_time(event), kind, _fields_text(event), _is_calm(kind, [event])) for event in events]


def _is_calm(kind: str, events: list[Event]) -> bool:
    if kind == "group_discarded":
        return all(event.get("reason") in CALM_REASONS for event in events)
    return kind in CALM


def _markup(row: _TableRow, start: float) -> str:
    tag = "<tr>"
    if not row.is_calm:
        tag = "<tr class=fault>"
    after = duration(row.time - start)
    return f"{tag}<td>+{after}</td><td>{html.escape(row.kind)}</td><td>{html.escape(row.text)}</td></tr>"


def _time(event: Event) -> float:
    return event.get("time", 0.0)


def _fields(event: Event) -> Event:
    """The fields of an event besides its time and kind."""
    return {key: value for key, value in event.items() if key not in ("time", "kind")}


def _fields_text(event: Event) -> str:
    return " · ".join(f"{key} {_show(value)}" for key, value in _fields(event).items())


def _summary(events: list[Event]) -> str:
    """`30 times · version 0 … 29 · seconds mean 0.4, max 1.2`."""
    by_field: dict[str, list[Any]] = {}
    for event in events:
        for key, value in _fields(event).items():
            by_field.setdefault(key, []).append(value)

    parts = [f"{len(events)} times"]
    for key, values in by_field.items():
        text = _summary_of_field(values)
        if text:
            parts.append(f"{key} {text}")
    return " · ".join(parts)


def _summary_of_field(values: list[Any]) -> str:
    """A range, a mean, or the few texts there are; an empty string for many texts."""
    if all(_is_integer(value) for value in values):
        return f"{min(values)} … {max(values)}"
    if all(isinstance(value, int | float) for value in values):
        return f"mean {short(sum(values) / len(values))}, max {short(max(values))}"

    texts = dict.fromkeys(_show(value) for value in values)
    if len(texts) > DISTINCT_TEXTS:
        return ""
    return " | ".join(texts)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_show(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(_show(item) for item in value)
    if isinstance(value, float):
        return short(value)
    return str(value)
