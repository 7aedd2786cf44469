"""The pictures of the README, drawn from a run.

python scripts/figures.py OUTPUT_DIR [--to docs/images]

Writes `curve-light.svg` and `curve-dark.svg` (reward of every step, and pass@1 of the evaluations with its 95 %
interval) from `run/metrics.jsonl`, and `report-light.png` and `report-dark.png`, screenshots of `run/report.html`.
The screenshots need Debian's `chromium`; without it they are left out.
"""

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from molt.report.charts import Series, smooth
from molt.report.page import load_series

ROOT = Path(__file__).resolve().parent.parent
SANS = "system-ui, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
WIDTH = 760
HEIGHT = 300
LEFT = 44
RIGHT = 24
TOP = 40
BOTTOM = 36
"""Margins around the plot, in pixels."""

PAGE_WIDTH = 1180
PAGE_HEIGHT = 3000
"""The window of the screenshot; what is empty below the page is cut off."""
CHARTS_SHOWN = 3
COLORS_IN_PNG = 128


@dataclass(frozen=True)
class Theme:
    """The colours of one picture; those of the report's own page."""

    name: str
    card: str
    line: str
    ink: str
    soft: str
    reward: str
    evaluation: str


THEMES = (
    Theme("light", "#ffffff", "#e3e2dd", "#16150f", "#5d5b53", "#2a78d6", "#d9571f"),
    Theme("dark", "#1c1c1a", "#32312e", "#f3f2ec", "#b5b3a9", "#4f9bf0", "#ee7a45"),
)


@dataclass(frozen=True)
class Evaluation:
    """pass@1 at one step, with its 95 % interval."""

    step: int
    value: float
    low: float
    high: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, help="the --ckpt.output_dir of an RL run with evaluations")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images", help="where the pictures land")
    arguments = parser.parse_args()

    run_dir = arguments.output_dir / "run"
    arguments.to.mkdir(parents=True, exist_ok=True)
    series, _ = load_series(run_dir)
    rewards = series["rollout/reward"]
    evaluations = read_evaluations(series)

    for theme in THEMES:
        curve = arguments.to / f"curve-{theme.name}.svg"
        curve.write_text(draw_curve(theme, rewards, evaluations))
        print(f"{curve}: {curve.stat().st_size:,} bytes")

    chromium = shutil.which("chromium")
    if chromium is None:
        print("chromium is not installed: no screenshots of the report. Install Debian's package `chromium`.")
        return
    for theme in THEMES:
        picture = arguments.to / f"report-{theme.name}.png"
        take_screenshot(chromium, run_dir / "report.html", theme, picture)
        print(f"{picture}: {picture.stat().st_size:,} bytes")


def read_evaluations(series: dict[str, Series]) -> list[Evaluation]:
    """The evaluations of the first data source, in the order of their steps."""
    name = next(name for name in sorted(series) if name.startswith("eval/") and name.endswith("/pass1"))
    lows = dict(series[f"{name}_low"])
    highs = dict(series[f"{name}_high"])
    return [Evaluation(step, value, lows[step], highs[step]) for step, value in series[name]]


def draw_curve(theme: Theme, rewards: Series, evaluations: list[Evaluation]) -> str:
    """The reward of every step (thin), its moving mean (bold) and the evaluations with their intervals, as SVG."""
    last_step = max(rewards[-1][0], evaluations[-1].step)

    def x(step: float) -> float:
        return LEFT + step / last_step * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM)

    def path(points: Series) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{SANS}" font-size="13">',
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" '
        f'fill="{theme.card}" stroke="{theme.line}"/>',
        legend(theme),
    ]
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}" stroke="{theme.line}"/>'
            f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end" fill="{theme.soft}">{level:g}</text>'
        )
    for quarter in range(5):
        step = last_step * quarter // 4
        anchor = "end" if quarter == 4 else "middle"
        label = f"step {step}" if quarter == 4 else str(step)
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - 13}" text-anchor="{anchor}" fill="{theme.soft}">{label}</text>'
        )
    line = f'fill="none" stroke="{theme.reward}" stroke-linejoin="round"'
    parts.append(f'<polyline {line} stroke-width="1" opacity=".35" points="{path(rewards)}"/>')
    parts.append(f'<polyline {line} stroke-width="2.5" points="{path(smooth(rewards))}"/>')
    for evaluation in evaluations:
        parts.append(draw_evaluation(theme, evaluation, x(evaluation.step), y, evaluation is evaluations[-1]))
    parts.append("</svg>\n")
    return "\n".join(parts)


def legend(theme: Theme) -> str:
    """One line above the plot."""
    return (
        f'<line x1="{LEFT}" x2="{LEFT + 22}" y1="21" y2="21" stroke="{theme.reward}" stroke-width="2.5"/>'
        f'<text x="{LEFT + 30}" y="25" fill="{theme.ink}">reward of the training rollouts</text>'
        f'<circle cx="{LEFT + 258}" cy="21" r="4.5" fill="{theme.evaluation}"/>'
        f'<text x="{LEFT + 270}" y="25" fill="{theme.ink}">pass@1 on held-out prompts, 95 % interval</text>'
    )


def draw_evaluation(theme: Theme, evaluation: Evaluation, x: float, y: Callable[[float], float], is_last: bool) -> str:
    """A dot, its interval, and its value, beside the dot and clear of the line."""
    label_x = x - 12 if is_last else x + 10
    anchor = "end" if is_last else "start"
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(evaluation.low):.1f}" y2="{y(evaluation.high):.1f}" '
        f'stroke="{theme.evaluation}" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y(evaluation.value):.1f}" r="4.5" fill="{theme.evaluation}"/>'
        f'<text x="{label_x:.1f}" y="{y(evaluation.value) + 26:.1f}" text-anchor="{anchor}" font-weight="600" '
        f'fill="{theme.ink}">{evaluation.value:.2f}</text>'
    )


def take_screenshot(chromium: str, report: Path, theme: Theme, picture: Path) -> None:
    """The top of the report in one theme. Raises `CalledProcessError` if chromium cannot draw it."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(shortened(report.read_text(), report, theme))
        raw = Path(folder) / "report.png"
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--window-size={PAGE_WIDTH},{PAGE_HEIGHT}",
            f"--screenshot={raw}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(raw).convert("RGB")
        cropped = image.crop((0, 0, PAGE_WIDTH, last_row(image)))
        cropped.quantize(COLORS_IN_PNG, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            picture, optimize=True
        )


def shortened(html: str, report: Path, theme: Theme) -> str:
    """The page in one theme, with a few charts, the best and the worst rollout, and paths relative to the run."""
    is_dark = theme.name == "dark"
    html = html.replace("(prefers-color-scheme: dark)", "all" if is_dark else "not all")
    for folder in (report.resolve().parents[2], ROOT):
        html = html.replace(f"{folder}/", "")
    style = (
        f".charts > :nth-child(n+{CHARTS_SHOWN + 1}) {{ display: none }}"
        f" main {{ padding-bottom: 28px }} :root {{ color-scheme: {theme.name} }}"
    )
    script = (
        "const rollouts = [...document.querySelectorAll('.rollout')];"
        "rollouts.slice(1, -1).forEach(rollout => rollout.remove());"
        "const titles = [...document.querySelectorAll('h2')];"
        "const left_out = /^(All other metrics|Events|Configuration)/;"
        "for (const title of titles.filter(title => left_out.test(title.textContent))) {"
        "  title.nextElementSibling.remove(); title.remove(); }"
    )
    return html.replace("</html>", f"<style>{style}</style><script>{script}</script></html>")


def last_row(image: Image.Image) -> int:
    """The row below the page: where rows that are all background begin, and a margin."""
    background = image.getpixel((2, image.height - 2))
    for row in range(image.height - 1, 0, -4):
        colors = image.crop((0, row, image.width, row + 1)).getcolors()
        if colors is None or len(colors) > 1 or colors[0][1] != background:
            return min(image.height, row + 28)
    return image.height


if __name__ == "__main__":
    main()
