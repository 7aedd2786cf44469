"""The one reducer of metrics: `(sum, count)` pairs in, numbers out."""

from collections.abc import Iterable, Mapping

from molt.types import Metric


def is_max(name: str) -> bool:
    """`mismatch/abs_max` is a maximum: it merges by the larger total and is never divided."""
    return name.endswith("max")


def is_count(name: str) -> bool:
    """`faults/timeout`, `rollout/filtered_count`: they are added up and never divided."""
    return name.startswith("faults/") or name.endswith("_count")


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of all parts together. Order of the parts does not matter."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _together(name, merged[name], metric) if name in merged else metric
    return merged


def _together(name: str, a: Metric, b: Metric) -> Metric:
    if is_max(name):
        # `max` would lose a NaN, depending on the order; a NaN must stay visible.
        larger = a.total if a.total >= b.total or a.total != a.total else b.total
        return Metric(larger, a.count + b.count)
    return Metric(a.total + b.total, a.count + b.count)


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """`total / count`; for a maximum, and for what is counted and not averaged, `total`.

    What nothing was counted for has no value and is left out.
    """
    return {
        name: float(metric.total if is_max(name) or is_count(name) else metric.total / metric.count)
        for name, metric in metrics.items()
        if metric.count
    }
