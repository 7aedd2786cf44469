"""The tiles on top of the page: evaluation, reward, loss, steps, tokens, wall time."""

import html
from datetime import datetime

from molt.report.charts import Series, mean, short

COMPARED_STEPS = 5
"""The first and the last so many steps are compared, or half of the run where it is shorter."""


def duration(seconds: float) -> str:
    """`1.5 s`, `2 min 5 s`, `1 h 20 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min"


def key_numbers(series: dict[str, Series], times: list[float]) -> str:
    """The tiles of a run; a number that it has not measured has none.

    times: seconds since 1970, one per line of `metrics.jsonl`.
    """
    tiles = []
    for name in sorted(series):
        if name.startswith("eval/") and name.endswith("/pass1"):
            tiles.append(_evaluation(name, series[name]))

    if "rollout/reward" in series:
        tiles.append(_beginning_and_end("reward", series["rollout/reward"]))
    elif "train/loss" in series:
        tiles.append(_beginning_and_end("loss", series["train/loss"]))

    tiles.append(_tile("steps", f"{_last_step(series):,}"))
    tiles.append(_tokens(series))
    tiles.append(_wall_time(series, times))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(label: str, value: str, note: str = "") -> str:
    """value: markup; the others are text."""
    return f'<div class="tile"><span>{html.escape(label)}</span><b>{value}</b><small>{html.escape(note)}</small></div>'


def _change(label: str, before: float, after: float, note: str) -> str:
    return _tile(label, f"{before:.3f}<i>→</i>{after:.3f}", note)


def _evaluation(name: str, points: Series) -> str:
    first_step, before = points[0]
    last_step, after = points[-1]
    note = f"evaluated at step {first_step} and {last_step}"
    return _change(name.removeprefix("eval/"), before, after, note)


def _beginning_and_end(label: str, points: Series) -> str:
    count = min(COMPARED_STEPS, max(1, len(points) // 2))
    before = mean(points[:count])
    after = mean(points[-count:])
    return _change(label, before, after, f"mean of the first and last {count} steps")


def _last_step(series: dict[str, Series]) -> int:
    last = 0
    for name, points in series.items():
        if not name.startswith("eval/"):
            step, _ = points[-1]
            last = max(last, step)
    return last


def _tokens(series: dict[str, Series]) -> str:
    """Tokens of the run, or an empty string where its speed was not measured."""
    speed = series.get("perf/tokens_per_s", [])
    seconds = dict(series.get("timing/step_s", []))
    tokens = 0.0
    for step, per_second in speed:
        tokens += per_second * seconds.get(step, 0.0)
    if not tokens:
        return ""
    return _tile("tokens", short(tokens), f"{short(mean(speed))} per second")


def _wall_time(series: dict[str, Series], times: list[float]) -> str:
    if not times:
        return ""
    # The first line is written at the end of its step.
    first_step_s = 0.0
    if "timing/step_s" in series:
        _, first_step_s = series["timing/step_s"][0]
    started = times[0] - first_step_s
    note = f"from {datetime.fromtimestamp(started):%Y-%m-%d %H:%M}"
    return _tile("wall time", duration(times[-1] - started), note)
