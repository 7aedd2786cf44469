"""The circuit breaker of a model that learns: when a gradient is a spike, and what is told of a skipped step.

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
"""Norms without which a median says too little for a limit."""

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
        return self.factor * median(self.norms) if len(self.norms) >= FEWEST else inf

    def add(self, norm: float) -> None:
        """Of a step that was taken; those of skipped ones would raise the limit for the next.

        0 is no gradient at all (no group had advantages), and says nothing of what a usual one is.
        """
        if norm > 0:
            self.norms.append(norm)


def merge_evidence(of_ranks: Sequence[Sequence[Evidence]]) -> list[Evidence]:
    """By skipped step, what all ranks tell of it: the same numbers, and each the tensors and groups it has."""
    return [
        steps[0] | {name: sorted({item for step in steps for item in step[name]}) for name in ("tensors", "groups")}
        for steps in zip(*of_ranks, strict=True)
    ]
