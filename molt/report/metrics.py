"""The one reducer of metrics: `(sum, count)` pairs in, numbers out."""

import math
from collections.abc import Iterable, Mapping

from molt.types import Metric

OF_AGENTS = "rollout/info/"
"""The keys after it are of agents and scorers, and all are means: `softmax` and `call_count` say nothing of molt."""
FAULTS = "faults/"
"""The reasons after it may be an agent's, and all are counts."""


def is_max(name: str) -> bool:
    """`mismatch/abs_max` is a maximum: it merges by the larger total and is never divided."""
    if name.startswith((OF_AGENTS, FAULTS)):
        return False
    return name.endswith("max")


def is_count(name: str) -> bool:
    """`faults/timeout`, `rollout/filtered_count`, `eval/SOURCE/failures`: they are added up and never divided."""
    if name.startswith(OF_AGENTS):
        return False
    return name.startswith(FAULTS) or name.endswith(("_count", "/failures"))


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of all parts together. Order of the parts does not matter."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged:
                metric = _merge_two(name, merged[name], metric)
            merged[name] = metric
    return merged


def _merge_two(name: str, a: Metric, b: Metric) -> Metric:
    count = a.count + b.count
    if is_max(name):
        return Metric(_larger(a.total, b.total), count)
    return Metric(a.total + b.total, count)


def _larger(a: float, b: float) -> float:
    """`max` would lose a NaN, depending on the order; a NaN must stay visible."""
    if math.isnan(a) or a >= b:
        return a
    return b


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """`total / count`; for a maximum and for a count, `total`.

    A metric with a count of 0 has no value and is left out.
    """
    numbers = {}
    for name, metric in metrics.items():
        if not metric.count:
            continue
        if is_max(name) or is_count(name):
            number = metric.total
        else:
            number = metric.total / metric.count
        numbers[name] = float(number)
    return numbers
