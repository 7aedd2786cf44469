"""Rollouts of the last stored step, each as a card: text that the policy generated is marked."""

import html
from pathlib import Path

import pyarrow.parquet as pq

from molt.report.charts import short
from molt.report.rollouts import runs_of_versions, step_of
from molt.types import Json

SHOWN_ROLLOUTS = 8
SHOWN_CHARACTERS = 3000

StoredSample = Json
"""A row of the rollout store: the columns of `rollouts.schema`."""


def rollout_cards(run_dir: Path) -> str:
    """A section of the page, from the best rollout to the worst; an empty string if none is stored."""
    files = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    if not files:
        return ""
    rows: list[StoredSample] = pq.read_table(files[-1]).to_pylist()
    if not rows:
        return ""

    rows.sort(key=_reward, reverse=True)
    shown = _evenly_spaced(rows, SHOWN_ROLLOUTS)
    cards = "".join(_card(row) for row in shown)
    return (
        f"<h2>Rollouts of step {step_of(files[-1])}</h2>"
        f'<p class="lead">{len(shown)} of {len(rows)} stored samples, from the best to the worst. '
        f"The policy generated the <mark>marked</mark> text; the rest is context.</p>{cards}"
    )


def _reward(row: StoredSample) -> float:
    return row["reward"] or 0.0


def _evenly_spaced(rows: list[StoredSample], limit: int) -> list[StoredSample]:
    """At most `limit` rows, the first and the last among them."""
    if len(rows) <= limit:
        return rows
    return [rows[i * (len(rows) - 1) // (limit - 1)] for i in range(limit)]


def _card(row: StoredSample) -> str:
    facts = []
    for name in ("reward", "advantage"):
        if row[name] is not None:
            facts.append(_number(name, row[name]))
    for name, value in _facts(row).items():
        facts.append(f"<span>{name} {html.escape(value)}</span>")
    return f'<div class="card rollout"><header>{"".join(facts)}</header><pre>{_text(row)}</pre></div>'


def _number(name: str, value: float) -> str:
    tone = ""
    if name == "advantage" and value > 0:
        tone = ' class="good"'
    if name == "advantage" and value < 0:
        tone = ' class="bad"'
    return f"<span>{name} <b{tone}>{short(round(value, 4))}</b></span>"


def _facts(row: StoredSample) -> dict[str, str]:
    versions = row["versions"] or []
    sampled = [version for version in versions if version >= 0]
    facts = {
        "group": str(row["group_id"]),
        "rollout": str(row["rollout"]),
    }
    if row["segment"]:
        facts["segment"] = str(row["segment"])
    facts["tokens"] = f"{len(sampled)} generated of {len(versions)}"
    facts["sampled by version"] = _range(sampled)
    if row["version_trained"] is not None:
        facts["trained at version"] = str(row["version_trained"])
    if row["truncated"]:
        facts["truncated"] = row.get("cut") or "yes"  # older files do not say why
    if row["outcome"] not in (None, "scored"):
        facts["outcome"] = str(row["outcome"])
    return facts


def _range(versions: list[int]) -> str:
    if not versions:
        return "none"
    oldest = min(versions)
    newest = max(versions)
    if oldest == newest:
        return str(newest)
    return f"{oldest} … {newest}"


def _text(row: StoredSample) -> str:
    parts = []
    runs = runs_of_versions(row["versions"] or [])
    for (version, _), text in zip(runs, row["runs"], strict=True):
        escaped = html.escape(_clip(text))
        if version >= 0:
            escaped = f'<mark title="sampled by version {version}">{escaped}</mark>'
        parts.append(escaped)
    return "".join(parts)


def _clip(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n… {left_out:,} characters …\n{text[-half:]}"
