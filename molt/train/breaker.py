"""The circuit breaker of a model that learns: when a gradient is a spike, and the evidence of a skipped step.

It owns no process and makes no collective: a norm is the same number on every rank, so every rank decides alike.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, inf, isfinite
from statistics import median
from typing import Any

WINDOW = 64
"""Steps that the running median looks back."""
FEWEST = 8
"""With fewer norms a median is no limit yet."""
AGREEING = 2
"""So many spikes in a row may change the limit. With `train.max_trips` 3, the default, one more would stop the run."""
SIMILAR = 4.0
"""Spikes agree if none is above this many times another one."""

Evidence = dict[str, Any]
"""Of one skipped step, as JSON takes it: `optimizer_step` (from 0), `reason` (nonfinite, spike), `loss` and `norm`
(None: not finite), `limit` (None: there was none), `tensors` whose gradient is not finite, `groups` by index in the
batch."""


class Breaker:
    """The gradient norms of the last steps that were taken, and of the spikes that came after them, oldest first.

    A skipped step moves no weight. So if spikes of different batches agree, the norm at these weights is what it is:
    skipping more of them could not change it. The next one that agrees is taken, and the median starts again from them.
    Norms that grow do not agree.
    """

    def __init__(self, factor: float):
        self.factor = factor
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.spikes: deque[float] = deque(maxlen=AGREEING)
        """The last ones since a step with a signal was taken."""

    @property
    def limit(self) -> float:
        """A norm above it is a spike: `factor * median(norms)`, or where the spikes agree what agrees with them.

        Infinite before there are `FEWEST` norms.
        """
        if len(self.norms) < FEWEST:
            return inf
        limit = self._limit_of_norms
        if self._spikes_agree:
            return max(limit, SIMILAR * min(self.spikes))
        return limit

    def take(self, norm: float, *, has_signal: bool) -> None:
        """Remember the norm of a step that was taken.

        has_signal: whether the step learned from rewards. The norm of regularisers alone (entropy, KL, load balance)
        is far smaller: a median of such norms would make spikes of all others. Nor does a norm of 0 count.
        """
        if not has_signal or norm <= 0:
            return
        has_limit = len(self.norms) >= FEWEST
        if has_limit and norm > self._limit_of_norms:
            self._start_again([*self.spikes, norm])
        else:
            self.norms.append(norm)
        self.spikes.clear()

    def skip(self, norm: float) -> None:
        """Remember the norm of a step that was skipped; one that is not finite agrees with nothing."""
        if isfinite(norm):
            self.spikes.append(norm)
        else:
            self.spikes.clear()

    @property
    def _limit_of_norms(self) -> float:
        return self.factor * median(self.norms)

    @property
    def _spikes_agree(self) -> bool:
        return len(self.spikes) == AGREEING and max(self.spikes) <= SIMILAR * min(self.spikes)

    def _start_again(self, norms: list[float]) -> None:
        """The median is of these norms from now on. Repeated up to `FEWEST`, they are a limit at once."""
        repeats = ceil(FEWEST / len(norms))
        self.norms.clear()
        self.norms.extend(norms * repeats)


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
