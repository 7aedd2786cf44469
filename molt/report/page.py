"""`python -m molt.report.page RUN_DIR` writes RUN_DIR/report.html: one page, self-contained.

Every metric of the run is on it: those of `CHARTS` together and explained, the others one by one. Text that
a model, an agent or a dataset wrote is escaped.
"""

import glob
import html
import math
import os
import sys
import tomllib
from pathlib import Path

from molt.report.charts import MAX_POINTS, Chart, Series, draw, select, smoothing_radius
from molt.report.event_table import event_table
from molt.report.key_numbers import key_numbers
from molt.report.rollout_cards import rollout_cards
from molt.report.sinks import read_jsonl
from molt.types import Json

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
    Chart(
        "Mixed groups",
        ("rollout/mixed_groups",),
        zero=True,
        note="fraction of the groups whose rewards are not all equal: a group baseline learns from these alone",
    ),
    Chart(
        "Policy failures",
        ("rollout/policy_failures",),
        zero=True,
        note="fraction of the rollouts that the model made fail: an unusable answer, a rejected call",
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
    Chart("Turns", ("rollout/turns",), zero=True, note="model calls per rollout"),
    Chart("Truncated", ("rollout/truncated",), zero=True, note="fraction of rollouts that were cut before their end"),
    Chart("Time per step", ("timing/*",), zero=True, note="seconds"),
    Chart("Throughput", ("perf/tokens_per_s",), zero=True, note="tokens per second"),
    Chart("Faults", ("faults/*",), zero=True, noisy=False),
)
AGENTS_NUMBERS = "rollout/info/"
"""The numbers that agents put into `Result.info`."""


def load_series(run_dir: Path) -> tuple[dict[str, Series], list[float]]:
    """Every finite metric by step, and the times of all lines. Of two values for a step the later counts."""
    by_name: dict[str, dict[int, float]] = {}
    times = []
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        step = record.pop("step", None)
        time = record.pop("time", math.nan)
        if math.isfinite(time):
            times.append(time)
        if step is None:
            continue
        for name, value in record.items():
            if isinstance(value, int | float):
                by_step = by_name.setdefault(name, {})
                by_step[step] = float(value)

    series = {}
    for name, by_step in by_name.items():
        series[name] = sorted(by_step.items())
    return series, times


def charts_of_others(series: dict[str, Series], charts: tuple[Chart, ...] = CHARTS) -> list[Chart]:
    """One chart for each metric that `charts` do not draw: the agents' numbers first, then by name."""
    drawn: set[str] = set()
    for chart in charts:
        drawn.update(select(chart, series))
    others = sorted(set(series) - drawn, key=_agents_first)
    # Agents choose names, and may write `acc[0]`.
    return [Chart(title=name, patterns=(glob.escape(name),)) for name in others]


def _agents_first(name: str) -> tuple[bool, str]:
    return not name.startswith(AGENTS_NUMBERS), name


def _curves(series: dict[str, Series]) -> str:
    """The charts, and a box that filters them."""
    if not series:
        return "<h2>Curves</h2><p>No metrics yet.</p>"
    main = "".join(draw(chart, series) for chart in CHARTS)
    others = "".join(draw(chart, series) for chart in charts_of_others(series))
    return (
        "<h2>Curves</h2>"
        f'<p class="lead">{html.escape(_about_lines(series))}</p>'
        # page.js shows the box: without scripts it could not filter.
        '<label class="filter" hidden>Filter <input type="search" placeholder="reward, timing, info/…"> '
        "<output></output></label>"
        f"{_grid('', 'charts', main)}"
        f"{_grid('All other metrics', 'other-charts', others)}"
    )


def _grid(heading: str, element_id: str, figures: str) -> str:
    if not figures:
        return ""
    title = ""
    if heading:
        title = f'<h2 data-charts="{element_id}">{heading}</h2>'
    return f'{title}<div class="charts" id="{element_id}">{figures}</div>'


def _about_lines(series: dict[str, Series]) -> str:
    """What a thin and a bold line are, by the length of the run."""
    points = max(len(each) for each in series.values())
    drawn = min(points, MAX_POINTS)
    radius = smoothing_radius(drawn)
    if not radius:
        return "One point per step."

    steps_per_point = points / drawn
    window = round((2 * radius + 1) * steps_per_point)
    thin = "single steps"
    if steps_per_point > 1:
        thin = f"means of about {max(2, round(steps_per_point))} steps"
    return f"Thin: {thin}. Bold: the mean of {window} neighbouring steps."


def _model_and_data(config: Json) -> str:
    """One line about the run: model, dataset, estimator; of SFT the first two."""
    model = config.get("actor", config.get("model", {})).get("model_name_or_path", "")
    data = config.get("data", {})
    dataset = data.get("prompt_dataset", data.get("dataset", ""))
    estimator = config.get("algo", {}).get("advantage", {}).get("estimator", "")
    return " · ".join(str(part) for part in (model, dataset, estimator) if part)


def _formula(run_dir: Path) -> str:
    """What the run printed when it began: the formula in force."""
    path = run_dir / "header.txt"
    if not path.exists():
        return ""
    return f"<h2>The formula in force</h2><pre class=card>{html.escape(path.read_text())}</pre>"


def _name(run_dir: Path) -> str:
    """The name of the output directory, which `run/` is in."""
    folder = run_dir.resolve()
    if folder.name == "run":
        folder = folder.parent
    return html.escape(folder.name)


def build(run_dir: Path) -> str:
    """The page as text."""
    series, times = load_series(run_dir)
    style = Path(__file__).with_suffix(".css").read_text()
    script = Path(__file__).with_suffix(".js").read_text()
    name = _name(run_dir)

    lead = ""
    configuration = ""
    config_file = run_dir / "config.toml"
    if config_file.exists():
        text = config_file.read_text()
        lead = html.escape(_model_and_data(tomllib.loads(text)))
        configuration = (
            "<h2>Configuration</h2>"
            f"<details class=card><summary>config.toml</summary><pre>{html.escape(text)}</pre></details>"
        )

    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · molt</title><style>{style}</style>"
        f'<main><h1>{name}</h1><p class="lead">{lead}</p>'
        f"{key_numbers(series, times)}"
        f"{_formula(run_dir)}"
        f"{_curves(series)}"
        f"{rollout_cards(run_dir)}"
        f"{event_table(run_dir)}"
        f"{configuration}</main>"
        f"<script>{script}</script></html>"
    )


def write_report(run_dir: Path) -> Path:
    """Write RUN_DIR/report.html, atomically."""
    path = run_dir / "report.html"
    aside = path.with_suffix(".html.new")
    aside.write_text(build(run_dir), encoding="utf-8")
    os.replace(aside, path)
    return path


def main() -> int:
    arguments = sys.argv[1:]
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(f"RUN_DIR (={' '.join(arguments)}): there is no run to report. Pass the `run/` of an output directory.")
        return 1
    print(write_report(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
