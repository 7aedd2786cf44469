"""The console of a run: where it prints, and one line per step."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from molt.report.metrics import is_count


@dataclass(frozen=True)
class Column:
    """A metric that the line of a step shows."""

    label: str
    metric: str
    format: str


COLUMNS = (
    Column("reward", "rollout/reward", ".3f"),
    Column("score", "rollout/score", ".3f"),
    Column("mixed", "rollout/mixed_groups", ".0%"),
    Column("loss", "train/loss", ".4g"),
    Column("grad", "train/grad_norm", ".3g"),
    Column("mismatch", "mismatch/abs_max", ".1e"),
    Column("ratio", "ratio/mean", ".4f"),
    Column("kl", "train/kl", ".2e"),
    Column("explained", "train/explained_variance", ".2f"),
    Column("filtered", "rollout/filtered", ".1%"),
    Column("stale", "staleness/max", ".0f"),
    Column("length", "rollout/response_length", ".1f"),
    Column("truncated", "rollout/truncated", ".1%"),
    Column("lr", "train/lr", ".1e"),
    Column("tok/s", "perf/tokens_per_s", ",.0f"),
)
"""Shown in this order where the metric exists."""
NOT_IN_RL = "train/lr"
"""The line of RL is long, and its learning rate is in the report."""
OF_AGENT = "rollout/info/"
OF_CHAT_SERVER = "rollout/info/chat_"
SHOWN_OF_AGENT = 3
"""So many numbers of the agent's `Result.info`, the first in the alphabet."""
LABEL_WIDTH = 16
"""Longer names of them are cut."""
EVALUATED = re.compile(r"eval/(?!.*_(low|high)$)")
"""Metrics of an evaluation; the ends of an interval are shown beside its mean."""


def run_console() -> Console:
    """A console that never breaks a line, and writes escape codes to a terminal only.

    Piped into a file or another program it is plain text, even where FORCE_COLOR would make rich colour it.
    """
    return Console(soft_wrap=True, force_terminal=sys.stdout.isatty())


def step_line(step: int, total_steps: int | None, metrics: Mapping[str, float]) -> Text:
    """`step 12/300  reward 0.512  loss -0.01  …  3.4 s`.

    Then a few numbers of the agent, evaluations by name and with their interval, and faults if there are any.
    """
    line = Text(_step_of_total(step, total_steps), "bold")
    is_rl = "rollout/reward" in metrics
    for column in COLUMNS:
        is_left_out = is_rl and column.metric == NOT_IN_RL
        if column.metric in metrics and not is_left_out:
            _append(line, column.label, format(metrics[column.metric], column.format), "cyan")

    for name in _of_agent(metrics)[:SHOWN_OF_AGENT]:
        label = name.removeprefix(OF_AGENT)[:LABEL_WIDTH]
        _append(line, label, format(metrics[name], ".3g"), "magenta")

    for name in sorted(metrics):
        if EVALUATED.match(name):
            _append(line, name, _with_interval(name, metrics), "green")

    faults = sum(value for name, value in metrics.items() if name.startswith("faults/"))
    if faults:
        _append(line, "faults", format(faults, ",.0f"), "red")

    if "timing/step_s" in metrics:
        line.append(f"  {metrics['timing/step_s']:.1f} s", "not bold dim")
    return line


def _step_of_total(step: int, total_steps: int | None) -> str:
    if total_steps is None:
        return f"step {step}"
    width = len(str(total_steps))
    return f"step {step:>{width}}/{total_steps}"


def _of_agent(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that the agent put into `Result.info`, without what molt counts for a `ChatAgent`."""
    names = []
    for name in sorted(metrics):
        if name.startswith(OF_AGENT) and not name.startswith(OF_CHAT_SERVER):
            names.append(name)
    return names


def _append(line: Text, label: str, value: str, colour: str) -> None:
    line.append(f"  {label} ", "not bold dim")
    line.append(value, f"not bold {colour}")


def _with_interval(name: str, metrics: Mapping[str, float]) -> str:
    """`0.500 [0.400, 0.613]`, or the mean alone; a count as a whole number."""
    if is_count(name):
        return format(metrics[name], ",.0f")
    mean = format(metrics[name], ".3f")
    ends = []
    for end in (f"{name}_low", f"{name}_high"):
        if end in metrics:
            ends.append(format(metrics[end], ".3f"))
    if not ends:
        return mean
    return f"{mean} [{', '.join(ends)}]"
