"""`python -m molt.report.page RUN_DIR` writes RUN_DIR/report.html: one page, self-contained.

What a run has not measured is left out: an SFT run has only `train/*`. Everything that a model, an
agent or a dataset wrote is escaped.
"""

import html
import math
import os
import re
import sys
import tomllib
from collections import defaultdict
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from molt.report.charts import Chart, Series, draw, short
from molt.report.rollouts import step_of
from molt.report.sinks import read_jsonl

CHARTS = (
    Chart("Reward", ("rollout/reward", "rollout/shaped_reward")),
    Chart("Score", ("rollout/score", "rollout/unfiltered_score")),
    Chart("Evaluation", ("eval/*/pass*[0-9]", "eval/pass*[0-9]"), noisy=False),
    Chart("Loss", ("train/loss", "eval/loss", "eval/*/loss")),
    Chart(
        "Filtered groups",
        ("rollout/filtered", "rollout/all_pass", "rollout/all_fail"),
        zero=True,
        note="fraction of the finished groups: mean score at the top of the range, or at its bottom",
    ),
    Chart("KL", ("train/kl", "train/kl_coef"), note="to the reference, per token; kl_coef weighs it"),
    Chart("Entropy", ("train/entropy",), note="nats per token"),
    Chart("Value loss", ("train/value_loss",), zero=True),
    Chart("Explained variance", ("train/explained_variance",), note="1: the critic knows the returns; 0: their mean"),
    Chart("Response length", ("rollout/response_length",), zero=True, note="tokens"),
    Chart(
        "Trainer against engine",
        ("mismatch/abs_max", "mismatch/abs_mean"),
        log=True,
        note="difference of log-probs on the probe, at the same weights",
    ),
    Chart("Importance ratio, mean", ("ratio/mean",)),
    Chart(
        "Importance ratio, extreme",
        ("ratio/log_abs_max",),
        log=True,
        note="largest |log ratio| of a token: trainer now, engine when it sampled",
    ),
    Chart(
        "Filtered tokens",
        ("ratio/filtered_fraction",),
        zero=True,
        note="fraction of the trained tokens that the importance correction masked or bounded",
    ),
    Chart("Clipped tokens", ("train/clip_fraction",), zero=True, note="fraction where the policy loss is clipped"),
    Chart("Staleness", ("staleness/max", "staleness/mean"), zero=True, note="training batches"),
    Chart("Gradient norm", ("train/grad_norm",), log=True),
    Chart("Learning rate", ("train/lr",), zero=True, noisy=False),
    Chart("Truncated", ("rollout/truncated",), zero=True, note="fraction of rollouts that ran out of context or turns"),
    Chart("Time per step", ("timing/*",), zero=True, note="seconds"),
    Chart("Throughput", ("perf/tokens_per_s",), zero=True, note="tokens per second"),
    Chart("Faults", ("faults/*",), zero=True, noisy=False),
)
WARNS = re.compile("fail|filtered|lost|tripped|silence|begun_again|dropped|discarded")
"""Kinds of events that stand out."""
LISTED_EVENTS = 12
"""A kind of event with more of them is summarised in one row; those that every step has always are."""
SHOWN_ROLLOUTS = 8
SHOWN_CHARACTERS = 3000
E = html.escape


def load_series(run_dir: Path) -> tuple[dict[str, Series], list[float]]:
    """Every finite metric by step, and the times of all lines. Of two values for a step the later counts."""
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    times = []
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        step = record.pop("step", None)
        times.append(record.pop("time", math.nan))
        for name, value in record.items():
            if isinstance(value, int | float) and step is not None:
                by_name[name][step] = float(value)
    return {name: sorted(points.items()) for name, points in by_name.items()}, [t for t in times if math.isfinite(t)]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _mean(points: Series) -> float:
    return sum(value for _, value in points) / len(points)


def _tile(label: str, value: str, note: str = "") -> str:
    return f'<div class="tile"><span>{E(label)}</span><b>{value}</b><small>{E(note)}</small></div>'


def _change(label: str, first: float, last: float, note: str) -> str:
    return _tile(label, f"{first:.3f}<i>→</i>{last:.3f}", note)


def key_numbers(series: dict[str, Series], times: list[float]) -> str:
    """Evaluation, reward, loss, steps, tokens, wall time: those that exist."""
    tiles = []
    for name in sorted(series):
        if name.startswith("eval/") and name.endswith("/pass1"):
            (first, a), (last, b) = series[name][0], series[name][-1]
            tiles.append(_change(name.removeprefix("eval/"), a, b, f"evaluated at step {first} and {last}"))
    for label, name in (("reward", "rollout/reward"), ("loss", "train/loss")):
        points = series.get(name, [])
        n = min(5, max(1, len(points) // 2))
        if points and not (label == "loss" and "rollout/reward" in series):
            tiles.append(_change(label, _mean(points[:n]), _mean(points[-n:]), f"mean of the first and last {n} steps"))
    steps = [points[-1][0] for name, points in series.items() if not name.startswith("eval/")]
    tiles.append(_tile("steps", f"{max(steps, default=0):,}"))
    speed, seconds = dict(series.get("perf/tokens_per_s", [])), dict(series.get("timing/step_s", []))
    if tokens := sum(value * seconds[step] for step, value in speed.items() if step in seconds):
        tiles.append(_tile("tokens", short(tokens), f"{short(_mean(series['perf/tokens_per_s']))} per second"))
    if times:
        # The first line is written at the end of its step.
        first_step = series.get("timing/step_s", [(0, 0.0)])[0][1]
        started = datetime.fromtimestamp(times[0] - first_step)
        tiles.append(_tile("wall time", _duration(times[-1] - times[0] + first_step), f"from {started:%Y-%m-%d %H:%M}"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_show(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(_show(item) for item in value)
    return short(value) if isinstance(value, float) else str(value)


def _fields(event: dict[str, Any]) -> str:
    return " · ".join(f"{key} {_show(value)}" for key, value in event.items() if key not in ("time", "kind"))


def _summary(events: list[dict[str, Any]]) -> str:
    """`30 times · version 0 … 29 · seconds mean 0.4, max 1.2`."""
    parts = [f"{len(events)} times"]
    for key in dict.fromkeys(key for event in events for key in event if key not in ("time", "kind")):
        found = [event[key] for event in events if key in event]
        if all(isinstance(value, int) and not isinstance(value, bool) for value in found):
            parts.append(f"{key} {min(found)} … {max(found)}")
        elif all(isinstance(value, int | float) for value in found):
            parts.append(f"{key} mean {short(sum(found) / len(found))}, max {short(max(found))}")
        elif len(set(map(_show, found))) <= 4:
            parts.append(f"{key} {' | '.join(dict.fromkeys(map(_show, found)))}")
    return " · ".join(parts)


def events_table(run_dir: Path) -> str:
    by_kind = defaultdict(list)
    for event in read_jsonl(run_dir / "events.jsonl"):
        by_kind[str(event.get("kind", "?"))].append(event)
    if not by_kind:
        return ""
    start = min(events[0].get("time", 0.0) for events in by_kind.values())
    rows = []
    for kind, events in by_kind.items():
        if kind == "publication" or len(events) > LISTED_EVENTS:
            rows.append((events[0].get("time", 0.0), kind, _summary(events)))
        else:
            rows += [(event.get("time", 0.0), kind, _fields(event)) for event in events]
    body = "".join(
        f"<tr{' class=fault' if WARNS.search(kind) else ''}><td>+{_duration(when - start)}</td>"
        f"<td>{E(kind)}</td><td>{E(text)}</td></tr>"
        for when, kind, text in sorted(rows, key=lambda row: row[0])
    )
    return f'<h2>Events</h2><div class="card"><table><tr><th>after</th><th>event</th><th></th></tr>{body}</table></div>'


def _clip(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"


def _rollout(row: dict[str, Any]) -> str:
    versions = row["versions"] or []
    body = "".join(
        f'<mark title="sampled by version {version}">{E(_clip(text))}</mark>' if version >= 0 else E(_clip(text))
        for (version, _), text in zip(groupby(versions), row["runs"], strict=True)
    )
    sampled = [version for version in versions if version >= 0]
    oldest, newest = min(sampled, default=-1), max(sampled, default=-1)
    facts = {
        "group": row["group_id"],
        "rollout": row["rollout"],
        "segment": row["segment"] or None,
        "tokens": f"{len(sampled)} generated of {len(versions)}",
        "sampled by version": str(newest) if oldest == newest else f"{oldest} … {newest}",
        "trained at version": row["version_trained"],
        "truncated": "yes" if row["truncated"] else None,
        "outcome": None if row["outcome"] == "scored" else row["outcome"],
    }
    numbers = "".join(
        f"<span>{name} <b{_tone(name, row[name])}>{short(round(row[name], 4))}</b></span>"
        for name in ("reward", "advantage")
        if row[name] is not None
    )
    rest = "".join(f"<span>{key} {E(str(value))}</span>" for key, value in facts.items() if value is not None)
    return f'<div class="card rollout"><header>{numbers}{rest}</header><pre>{body}</pre></div>'


def _tone(name: str, value: float) -> str:
    if name != "advantage" or value == 0:
        return ""
    return ' class="good"' if value > 0 else ' class="bad"'


def rollout_cards(run_dir: Path) -> str:
    """Rollouts of the last stored step, from the best to the worst."""
    files = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    rows = pq.read_table(files[-1]).to_pylist() if files else []
    if not rows:
        return ""
    rows.sort(key=lambda row: -(row["reward"] or 0.0))
    n = min(SHOWN_ROLLOUTS, len(rows))
    cards = "".join(_rollout(rows[i * (len(rows) - 1) // max(1, n - 1)]) for i in range(n))
    return (
        f'<h2>Rollouts of step {step_of(files[-1])}</h2><p class="lead">{n} of {len(rows)} stored samples, from the '
        f"best to the worst. <mark>Marked</mark> is what the policy generated, the rest is context.</p>{cards}"
    )


def _config(run_dir: Path) -> tuple[str, str]:
    """One line of what the run was, and the whole configuration."""
    path = run_dir / "config.toml"
    if not path.exists():
        return "", ""
    text = path.read_text()
    config = tomllib.loads(text)
    model = config.get("actor", config.get("model", {})).get("model_name_or_path", "")
    data = config.get("data", {})
    advantage = config.get("algo", {}).get("advantage", {}).get("estimator", "")
    lead = " · ".join(str(part) for part in (model, data.get("prompt_dataset", data.get("dataset")), advantage) if part)
    return (
        lead,
        f"<h2>Configuration</h2><details class=card><summary>config.toml</summary><pre>{E(text)}</pre></details>",
    )


def _header(run_dir: Path) -> str:
    """What the run said of itself when it began: the formula in force."""
    path = run_dir / "header.txt"
    return f"<h2>The formula in force</h2><pre class=card>{E(path.read_text())}</pre>" if path.exists() else ""


def build(run_dir: Path) -> str:
    """The page as text."""
    series, times = load_series(run_dir)
    here = Path(__file__)
    lead, config = _config(run_dir)
    name = run_dir.resolve().parent.name if run_dir.resolve().name == "run" else run_dir.resolve().name
    charts = "".join(draw(chart, series) for chart in CHARTS) or "No metrics yet."
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{E(name)} · molt</title><style>{here.with_suffix('.css').read_text()}</style>"
        f'<main><h1>{E(name)}</h1><p class="lead">{E(lead)}</p>{key_numbers(series, times)}'
        f"{_header(run_dir)}"
        f'<h2>Curves</h2><p class="lead">Thin: single steps. Bold: their moving mean.</p>'
        f'<div class="charts">{charts}</div>'
        f"{rollout_cards(run_dir)}{events_table(run_dir)}{config}</main>"
        f"<script>{here.with_suffix('.js').read_text()}</script></html>"
    )


def write_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html, atomically."""
    path = run_dir / "report.html"
    aside = path.with_suffix(".html.new")
    aside.write_text(build(run_dir), encoding="utf-8")
    os.replace(aside, path)
    return path


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(
            f"RUN_DIR (={' '.join(sys.argv[1:])}): there is no run to report. Pass the `run/` of an output directory."
        )
        return 1
    print(write_report(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
