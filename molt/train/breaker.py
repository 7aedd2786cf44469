"""The circuit breaker of a model that learns: when a gradient is a spike, and the evidence of a skipped step.

It owns no process and makes no collective: a norm is the same number on every rank, so every rank decides alike.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any

WINDOW = 64
"""Steps that the running median looks back."""
FEWEST = 8
"""With fewer norms a median is no limit yet."""

Evidence = dict[str, Any]
"""Of one skipped step, as JSON takes it: `optimizer_step` (from 0), `reason` (nonfinite, spike), `loss` and `norm`
(None: not finite), `limit` (None: there was none), `tensors` whose gradient is not finite, `groups` by index in the
batch."""


class Breaker:
    """The gradient norms of the last steps that were taken, oldest first."""

    def __init__(self, factor: float):
        self.factor = factor
        self.norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def limit(self) -> float:
        """`factor * median(norms)`, infinite before there are `FEWEST`; a norm above it is a spike."""
        if len(self.norms) < FEWEST:
            return inf
        return self.factor * median(self.norms)

    def add(self, norm: float) -> None:
        """Remember the norm of a step that was taken; norms of skipped steps would raise the limit for the next.

        A norm of 0 means that there was no gradient (no group had advantages): it does not count.
        """
        if norm > 0:
            self.norms.append(norm)


def merge_evidence(of_ranks: Sequence[Sequence[Evidence]]) -> list[Evidence]:
    """The evidence of all ranks, by skipped step: the same numbers, and the tensors and groups of each rank."""
    merged = []
    for of_step in zip(*of_ranks, strict=True):
        evidence = dict(of_step[0])
        evidence["tensors"] = _union(of_step, "tensors")
        evidence["groups"] = _union(of_step, "groups")
        merged.append(evidence)
    return merged


def _union(of_ranks: Sequence[Evidence], name: str) -> list[Any]:
    """The items that any rank has under a name, sorted."""
    items = set()
    for evidence in of_ranks:
        items.update(evidence[name])
    return sorted(items)
