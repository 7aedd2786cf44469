"""What a run says once on the console, where the number alone would be overlooked in `metrics.jsonl`."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LONG_LAG_S = 1.0
"""Of a runner's event loop: in this time every other rollout of the runner could have gone on."""


Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Notice:
    """A metric that deserves a sentence."""

    metric: re.Pattern[str]
    """Matches the metric's name; its group, if it has one, is the `last` of the text."""
    is_due: Callable[[float, Metrics], bool]
    """Called with the metric's value and all metrics of the step."""
    text: str
    """`str.format` text of `name` (the metric), `last` (a part of the name) and `value`."""


def _is_long(seconds: float, metrics: Metrics) -> bool:
    return seconds > LONG_LAG_S


def _is_long_without_a_block(seconds: float, metrics: Metrics) -> bool:
    return seconds > LONG_LAG_S and metrics.get("perf/runner_blocked_max", 0.0) <= LONG_LAG_S


def _occurs(count: float, metrics: Metrics) -> bool:
    return count > 0


NOTICES = (
    Notice(
        metric=re.compile("perf/runner_blocked_max"),
        is_due=_is_long,
        text="the agent's code blocked a runner for {value:.1f} s (`{name}`), and all its other rollouts waited. A "
        "block of 5 s is printed with its line; docs/agents.md, 'What must not happen in an agent', says how to find "
        "shorter ones.",
    ),
    Notice(
        metric=re.compile("perf/runner_lag_max"),
        is_due=_is_long_without_a_block,
        text="a runner's event loop was {value:.1f} s late (`{name}`), because the machine was busy: its thread waited "
        "for a core, and the agent did not block it. Run less beside the run, or fewer processes than cores.",
    ),
    Notice(
        metric=re.compile("rollout/no_model_call"),
        is_due=_occurs,
        text="{value:.0%} of the rollouts ended without a model call (`{name}`): they have a reward, but nothing of "
        "them is trained. If that is no choice of your agent, its client does not reach the session: use "
        "ctx.openai_url or ctx.base_url, and let its errors pass.",
    ),
    Notice(
        metric=re.compile(r"rollout/info/chat_ignored_(\w+)"),
        is_due=_occurs,
        text="the agent's client asks for {last} of its own (`{name}`), which is ignored: the run's sampling is "
        "trained. docs/chat_agents.md, 'What the server does', says why.",
    ),
)


class Notices:
    """Remembers which notices were shown."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print every notice that the metrics of a step call for, each metric once a run."""
        for name, value in metrics.items():
            if name in self._shown:
                continue
            for notice in NOTICES:
                match = notice.metric.fullmatch(name)
                if match is not None and notice.is_due(value, metrics):
                    self._shown.add(name)
                    text = notice.text.format(name=name, last=match[match.lastindex or 0], value=value)
                    print(f"step {step}: {text}", file=sys.stderr)
