"""Per-token arrays from the ranks of one model to those of another: each goes to the rank that reads it.

Reference and critic plan a batch for their own number of ranks, so a sample that rank 0 of theirs has may be trained by
rank 1 of the policy. The driver knows all plans, and tells a rank which part of its arrays goes where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from molt.batch.plan import Place, RankPlan
from molt.train.inference import TokenArrays, tasks_of


@dataclass(frozen=True)
class Route:
    """Where the arrays of one data-parallel rank go."""

    reader: Mapping[Place, int]
    """The data-parallel rank that reads each sample's array."""

    @property
    def readers(self) -> list[int]:
        """Those that read anything, in the order of what `split` returns."""
        return sorted(set(self.reader.values()))

    def split(self, arrays: TokenArrays) -> list[TokenArrays]:
        """The arrays of each of `readers`."""
        parts: dict[int, TokenArrays] = {reader: {} for reader in self.readers}
        for place, array in arrays.items():
            parts[self.reader[place]][place] = array
        return list(parts.values())


NOWHERE = Route({})
"""Nobody reads the arrays."""


def routes(plans: Sequence[RankPlan], readers: Sequence[RankPlan]) -> list[Route]:
    """For each of `plans`, by which of `readers` its samples are trained. Both plan the same samples."""
    reader_of: dict[Place, int] = {}
    for rank, plan in enumerate(readers):
        for task in tasks_of(plan):
            reader_of[task.at] = rank
    return [Route({task.at: reader_of[task.at] for task in tasks_of(plan)}) for plan in plans]


def light_and_heavy(light: object, arrays: TokenArrays, route: Route) -> Any:
    """What a method of a rank returns: `light`, and as further values the arrays of each reader, if there are any.

    Ray gives each of several values a reference of its own, and takes a single one as it is.
    """
    if not route.readers:
        return light
    return (light, *route.split(arrays))
