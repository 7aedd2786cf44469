"""Line charts as inline SVG: numbers in, one `<figure>` out. No dependency, no network."""

import html
import json
import math
from dataclasses import dataclass
from fnmatch import fnmatch

Series = list[tuple[int, float]]
"""(step, value), ascending and finite."""

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 22
MAX_POINTS = 300
COLORS = 6
"""Colours that page.css defines; a chart with more series repeats them."""


@dataclass(frozen=True)
class Chart:
    title: str
    patterns: tuple[str, ...]
    """Metric names, or `fnmatch` patterns of them; a chart without any of them is left out."""
    log: bool = False
    """Logarithmic axis; values <= 0 have no place on it."""
    zero: bool = False
    """The axis starts at 0."""
    noisy: bool = True
    """Many points get a moving mean on top of the thin line of single steps."""
    note: str = ""


def select(chart: Chart, series: dict[str, Series]) -> dict[str, Series]:
    """The series that the chart draws, in the order of its patterns."""
    chosen: dict[str, Series] = {}
    for pattern in chart.patterns:
        for name in sorted(series):
            points = [(step, value) for step, value in series[name] if value > 0 or not chart.log]
            if fnmatch(name, pattern) and points:
                chosen.setdefault(name, points)
    return chosen


def thin(points: Series, limit: int = MAX_POINTS) -> Series:
    """At most `limit` points: the mean of equal stretches. The first and the last step stay."""
    if len(points) <= limit:
        return points
    out = []
    for i in range(limit):
        part = points[i * len(points) // limit : (i + 1) * len(points) // limit]
        out.append((part[len(part) // 2][0], sum(value for _, value in part) / len(part)))
    return [(points[0][0], out[0][1]), *out[1:-1], (points[-1][0], out[-1][1])]


def smooth(points: Series) -> Series:
    """Mean over a centred window of 1/12 of all points, cut off at the ends: no lag."""
    half, out = len(points) // 24, []
    for i, (step, _) in enumerate(points):
        window = points[max(0, i - half) : i + half + 1]
        out.append((step, sum(value for _, value in window) / len(window)))
    return out


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover `[low, high]`: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """`12,300` as `12.3k`, `0.00001` as `1e-05`; at most four significant digits."""
    size = abs(value)
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            return f"{value / (1e3 if suffix == 'k' else factor):.4g}{suffix}"
    return f"{value:.4g}" if size >= 1e-3 or size == 0 else f"{value:.1e}"


def _y_ticks(chart: Chart, numbers: list[float]) -> list[float]:
    if chart.log:
        low, high = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
        high = max(high, low + 1)
        return [10.0**i for i in range(low, high + 1, max(1, (high - low) // 4))]
    low, high = (min(0.0, *numbers) if chart.zero else min(numbers)), max(numbers)
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low if chart.zero else low - pad), high + pad
    return ticks(low, high)


def draw(chart: Chart, series: dict[str, Series]) -> str:
    """The chart as `<figure>`, or an empty string where the run has none of its metrics."""
    chosen = {name: thin(points) for name, points in select(chart, series).items()}
    if not chosen:
        return ""
    steps = [step for points in chosen.values() for step, _ in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    levels = _y_ticks(chart, [value for points in chosen.values() for _, value in points])
    scale = math.log10 if chart.log else float
    low, high = scale(levels[0]), max(scale(levels[-1]), *(scale(v) for p in chosen.values() for _, v in p))

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    body = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y(v) + 3.5:.1f}" text-anchor="end">{short(v)}</text>'
        for v in levels
    ]
    middle = (first + last) // 2
    body += [
        f'<text class="tick" x="{x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step}</text>'
        for step, anchor in ((first, "start"), (middle, "middle"), (last, "end"))
        if anchor != "middle" or first < step < last
    ]
    for i, points in enumerate(chosen.values()):
        lines = [points, smooth(points)] if chart.noisy and len(points) > 40 else [points]
        for line in lines:
            raw = len(lines) > 1 and line is points
            body.append(_line([(x(step), y(value)) for step, value in line], f"c{i % COLORS}", raw))
    hover = {"first": first, "last": last, "series": list(chosen.items())}
    return _figure(chart, chosen, "".join(body), hover)


def _line(points: list[tuple[float, float]], color: str, raw: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    line = f'<polyline class="{color}{" raw" if raw else ""}" points="{path}"/>'
    # Few points, such as evaluations, are marked; one alone would not be seen at all.
    dots = "".join(f'<circle class="{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
    return line + (dots if len(points) <= 20 else "")


def _figure(chart: Chart, chosen: dict[str, Series], body: str, hover: dict) -> str:
    names = list(chosen)
    # Metrics of one family are told apart by what follows the family's name.
    family = names[0].split("/")[0] + "/"
    label = {name: name.removeprefix(family) if all(n.startswith(family) for n in names) else name for name in names}
    legend = "".join(
        f'<span class="key"><i class="b{i % COLORS}"></i>{html.escape(label[name])} '
        f'<b data-now="{short(chosen[name][-1][1])}">{short(chosen[name][-1][1])}</b></span>'
        for i, name in enumerate(names)
    )
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    title = html.escape(chart.title) + (" <small>log scale</small>" if chart.log else "")
    return (
        f'<figure data-hover="{html.escape(json.dumps(hover))}"><h3>{title}<output></output></h3>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">{body}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
        f"<figcaption>{legend}</figcaption>{note}</figure>"
    )
