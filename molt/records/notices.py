"""What a run says once on the console, where the number alone would be overlooked in `metrics.jsonl`."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LONG_LAG_S = 1.0
"""Of a runner's event loop: in this time every other rollout of the runner could have gone on."""
SAMPLING_NAMES = "temperature|top_p|top_k|min_p|seed|logit_bias|frequency_penalty|presence_penalty|repetition_penalty"
"""Settings of sampling that a client may send."""
NOT_NAMES = "constraint|tools|response_format"
"""Totals, and what has a notice of its own."""

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
        metric=re.compile(r"rollout/info/chat_ignored_(response_format|tool_choice)"),
        is_due=_occurs,
        text="the agent's client asks for a {last} (`{name}`), which no trained answer is made to have: the model is "
        "trained on what it says by itself. docs/chat_agents.md, 'What the server does', says how to enforce or refuse "
        "it.",
    ),
    Notice(
        metric=re.compile(r"rollout/info/chat_ignored_tool_(?!choice$)(\w+)"),
        is_due=_occurs,
        text="the agent's client offers the tool {last} (`{name}`), which only its provider's servers could run: the "
        "model is not told of it.",
    ),
    Notice(
        metric=re.compile(rf"rollout/info/chat_ignored_({SAMPLING_NAMES})"),
        is_due=_occurs,
        text="the agent's client asks for {last} of its own (`{name}`), which is ignored: the run's sampling is "
        "trained. docs/chat_agents.md, 'What the server does', says why.",
    ),
    Notice(
        metric=re.compile(rf"rollout/info/chat_ignored_(?!tool_|(?:{NOT_NAMES}|{SAMPLING_NAMES})$)(\w+)"),
        is_due=_occurs,
        text="the agent's client sends the option {last} (`{name}`), which is ignored: nothing here reads it. Set it "
        "in the run instead, or leave it out.",
    ),
    Notice(
        metric=re.compile("rollout/info/chat_adapted_messages"),
        is_due=_occurs,
        text="the agent's client sends messages in an order that the model's chat template refuses (`{name}`): they "
        "are joined, or shown as the user's. docs/chat_agents.md, 'What the server does', says how.",
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
