"""Line charts as inline SVG: numbers in, one `<figure>` out. No dependency, no network."""

import html
import json
import math
from dataclasses import dataclass
from fnmatch import fnmatch

Series = list[tuple[int, float]]
"""(step, value), ascending and finite."""

WIDTH = 400
HEIGHT = 190
LEFT = 46
RIGHT = 10
TOP = 8
BOTTOM = 22
PLOT_RIGHT = WIDTH - RIGHT
PLOT_BOTTOM = HEIGHT - BOTTOM

MAX_POINTS = 300
MARKED_POINTS = 20
"""Series of at most so many points have dots: one point alone would not be seen at all."""
COLORS = 6
"""Colours that page.css defines; a chart with more series repeats them."""
SMOOTHED_POINTS = 12
"""Shorter series are shown as they are."""


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
    """A longer series gets a moving mean on top of the thin line of single steps."""
    note: str = ""


def select(chart: Chart, series: dict[str, Series]) -> dict[str, Series]:
    """The series that the chart draws, in the order of its patterns."""
    chosen: dict[str, Series] = {}
    for pattern in chart.patterns:
        for name in sorted(series):
            if name in chosen or not fnmatch(name, pattern):
                continue
            points = _drawable(chart, series[name])
            if points:
                chosen[name] = points
    return chosen


def _drawable(chart: Chart, points: Series) -> Series:
    if not chart.log:
        return points
    return [(step, value) for step, value in points if value > 0]


def mean(points: Series) -> float:
    return sum(value for _, value in points) / len(points)


def thin(points: Series, limit: int = MAX_POINTS) -> Series:
    """At most `limit` points: the mean of equal stretches. The first and the last step stay."""
    if len(points) <= limit:
        return points

    means: Series = []
    for i in range(limit):
        start = i * len(points) // limit
        stop = (i + 1) * len(points) // limit
        stretch = points[start:stop]
        middle_step, _ = stretch[len(stretch) // 2]
        means.append((middle_step, mean(stretch)))

    first_step, _ = points[0]
    last_step, _ = points[-1]
    _, first_mean = means[0]
    _, last_mean = means[-1]
    return [(first_step, first_mean), *means[1:-1], (last_step, last_mean)]


def smoothing_radius(count: int) -> int:
    """How many neighbours on each side a moving mean over `count` points takes; 0: too few points for one.

    A twelfth of the series together, and never fewer than 5 points.
    """
    if count < SMOOTHED_POINTS:
        return 0
    return max(2, count // 24)


def smooth(points: Series) -> Series:
    """Mean over a centred window of `smoothing_radius` points on each side, cut off at the ends: no lag."""
    radius = smoothing_radius(len(points))
    smoothed = []
    for i, (step, _) in enumerate(points):
        start = max(0, i - radius)
        window = points[start : i + radius + 1]
        smoothed.append((step, mean(window)))
    return smoothed


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover `[low, high]`: steps of 1, 2 or 5 times a power of ten."""
    step = _round_step((high - low) / count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _round_step(at_least: float) -> float:
    power = 10 ** math.floor(math.log10(at_least))
    for factor in (1, 2, 5):
        if power * factor >= at_least * (1 - 1e-9):
            return power * factor
    return power * 10


def short(value: float) -> str:
    """`12,300` as `12.3k`, `0.00001` as `1e-05`; at most four significant digits."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g}G"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size >= 1e-3 or size == 0:
        return f"{value:.4g}"
    return f"{value:.1e}"


def _y_ticks(chart: Chart, numbers: list[float]) -> list[float]:
    low = min(numbers)
    high = max(numbers)
    if chart.log:
        return _powers_of_ten(low, high)

    if chart.zero:
        low = min(0.0, low)
    is_flat = high - low < 1e-9 * max(1.0, abs(high))
    if is_flat:
        pad = abs(high) * 0.1 or 1.0
        high += pad
        if not chart.zero:
            low -= pad
    return ticks(low, high)


def _powers_of_ten(low: float, high: float) -> list[float]:
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)
    stride = max(1, (last - first) // 4)
    return [10.0**power for power in range(first, last + 1, stride)]


class _Axes:
    """Where steps and values are on the plot."""

    def __init__(self, chart: Chart, drawn: dict[str, Series]):
        steps: list[int] = []
        values: list[float] = []
        for points in drawn.values():
            steps.extend(step for step, _ in points)
            values.extend(value for _, value in points)

        self.first = min(steps)
        self.last = max(max(steps), self.first + 1)
        self.levels = _y_ticks(chart, values)
        self._log = chart.log
        self._low = self._scaled(self.levels[0])
        self._high = max(self._scaled(self.levels[-1]), self._scaled(max(values)))

    def _scaled(self, value: float) -> float:
        if self._log:
            return math.log10(value)
        return value

    def x(self, step: float) -> float:
        part = (step - self.first) / (self.last - self.first)
        return LEFT + part * (PLOT_RIGHT - LEFT)

    def y(self, value: float) -> float:
        part = (self._scaled(value) - self._low) / (self._high - self._low)
        return PLOT_BOTTOM - part * (PLOT_BOTTOM - TOP)

    def svg(self) -> str:
        """Lines and labels of the levels, and the steps below."""
        parts = []
        for level in self.levels:
            y = self.y(level)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{PLOT_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{short(level)}</text>',
            )
        parts.append(self._step_label(self.first, "start"))
        middle = (self.first + self.last) // 2
        if self.first < middle < self.last:
            parts.append(self._step_label(middle, "middle"))
        parts.append(self._step_label(self.last, "end"))
        return "".join(parts)

    def _step_label(self, step: int, anchor: str) -> str:
        return f'<text class="tick" x="{self.x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step}</text>'


def draw(chart: Chart, series: dict[str, Series]) -> str:
    """The chart as `<figure>`, or an empty string where the run has none of its metrics."""
    drawn = {name: thin(points) for name, points in select(chart, series).items()}
    if not drawn:
        return ""

    axes = _Axes(chart, drawn)
    svg = [axes.svg()]
    for i, points in enumerate(drawn.values()):
        color = f"c{i % COLORS}"
        if chart.noisy and smoothing_radius(len(points)):
            svg.append(_line(axes, points, f"{color} raw"))
            svg.append(_line(axes, smooth(points), color))
        else:
            svg.append(_line(axes, points, color))
        if len(points) <= MARKED_POINTS:
            svg.append(_dots(axes, points, color))
    return _figure(chart, drawn, axes, "".join(svg))


def _line(axes: _Axes, points: Series, css_class: str) -> str:
    path = " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in points)
    return f'<polyline class="{css_class}" points="{path}"/>'


def _dots(axes: _Axes, points: Series, color: str) -> str:
    dots = []
    for step, value in points:
        dots.append(f'<circle class="{color}" cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="2.5"/>')
    return "".join(dots)


def _figure(chart: Chart, drawn: dict[str, Series], axes: _Axes, svg: str) -> str:
    """page.js reads `data-hover` (the values under the pointer) and `data-names` (the text that a filter searches)."""
    hover = {
        "first": axes.first,
        "last": axes.last,
        "left": LEFT,
        "right": PLOT_RIGHT,
        "width": WIDTH,
        "series": list(drawn.items()),
    }
    names = " ".join([chart.title, *drawn])
    title = html.escape(chart.title)
    scale = ""
    if chart.log:
        scale = " <small>log scale</small>"
    note = ""
    if chart.note:
        note = f'<p class="note">{html.escape(chart.note)}</p>'
    return (
        f'<figure data-names="{html.escape(names)}" data-hover="{html.escape(json.dumps(hover))}">'
        f"<h3>{title}{scale}<output></output></h3>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{svg}'
        f'<line class="cursor" y1="{TOP}" y2="{PLOT_BOTTOM}" visibility="hidden"/></svg>'
        f"<figcaption>{_legend(drawn)}</figcaption>{note}</figure>"
    )


def _legend(drawn: dict[str, Series]) -> str:
    """Every series with its colour, its name and its last value."""
    family = _common_family(list(drawn))
    keys = []
    for i, (name, points) in enumerate(drawn.items()):
        label = html.escape(name.removeprefix(family))
        _, last_value = points[-1]
        now = short(last_value)
        keys.append(
            f'<span class="key"><i class="b{i % COLORS}"></i>{label} <b data-now="{now}">{now}</b></span>',
        )
    return "".join(keys)


def _common_family(names: list[str]) -> str:
    """`train/` of `train/loss` and `train/kl`, which have it in common; '' of names of several families."""
    family, slash, _ = names[0].partition("/")
    prefix = family + slash
    if all(name.startswith(prefix) for name in names):
        return prefix
    return ""
