"""One line per step on the console."""

import re
from collections.abc import Mapping

from rich.text import Text

COLUMNS = [
    ("reward", "rollout/reward", ".3f"),
    ("score", "rollout/score", ".3f"),
    ("loss", "train/loss", ".4g"),
    ("grad", "train/grad_norm", ".3g"),
    ("mismatch", "mismatch/abs_max", ".1e"),
    ("ratio", "ratio/mean", ".4f"),
    ("kl", "train/kl", ".2e"),
    ("explained", "train/explained_variance", ".2f"),
    ("filtered", "rollout/filtered", ".1%"),
    ("stale", "staleness/max", ".0f"),
    ("length", "rollout/response_length", ".1f"),
    ("truncated", "rollout/truncated", ".1%"),
    ("lr", "train/lr", ".1e"),
    ("tok/s", "perf/tokens_per_s", ",.0f"),
]
"""Label, metric, format: shown in this order where the metric exists."""


EVALUATED = re.compile(r"eval/(?!.*_(low|high)$)")


def step_line(step: int, total_steps: int | None, metrics: Mapping[str, float]) -> Text:
    """`step 12/300  reward 0.512  loss -0.01  …  3.4 s`; evaluations by name and with their interval; faults if any."""
    head = f"step {step}" if total_steps is None else f"step {step:>{len(str(total_steps))}}/{total_steps}"
    parts = [(label, format(metrics[name], form), "cyan") for label, name, form in COLUMNS if name in metrics]
    parts += [(name, _evaluated(name, metrics), "green") for name in sorted(metrics) if EVALUATED.match(name)]
    if faults := sum(value for name, value in metrics.items() if name.startswith("faults/")):
        parts.append(("faults", format(faults, "g"), "red"))
    line = Text(head, "bold")
    for label, value, style in parts:
        line.append(f"  {label} ", "not bold dim").append(value, f"not bold {style}")
    if "timing/step_s" in metrics:
        line.append(f"  {metrics['timing/step_s']:.1f} s", "not bold dim")
    return line


def _evaluated(name: str, metrics: Mapping[str, float]) -> str:
    interval = [format(metrics[edge], ".3f") for edge in (f"{name}_low", f"{name}_high") if edge in metrics]
    return format(metrics[name], ".3f") + (f" [{', '.join(interval)}]" if interval else "")
