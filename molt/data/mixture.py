"""Which rows an epoch has, in which order: a pure function of the seed and the epoch.

Without shares an epoch is one permutation of all rows. With shares p_i (normalised) it is a mixture:

    c_i = floor(N p_i + 1/2)     rows of dataset i, for the largest N such that every c_i <= size_i

so the first dataset that is used up ends the epoch. Epoch e takes the rows e c_i .. (e + 1) c_i of dataset i,
modulo its size, in a fixed permutation of its own: no row comes twice in an epoch, nor again before all others
of its dataset came. All of them are then permuted together. Nothing is ever saved but an index.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np

from molt.config import comma_list
from molt.errors import DataError

HALF = Fraction(1, 2)


class EpochOrder:
    """`order.rows(epoch)` are the row numbers of an epoch, `len(order)` of them."""

    def __init__(self, sizes: Sequence[int], *, seed: int, shares: str | None = None, flag: str = ""):
        """sizes: rows of each dataset, which lie one after the other; shares: a comma list, one per dataset.

        `flag` is the setting that holds the shares. Raises DataError if an epoch would have no row of a dataset.
        """
        self.sizes, self.seed = list(sizes), seed % 2**64  # numpy takes no negative seeds
        self.shares = None if shares is None else [Fraction(share) for share in comma_list(shares)]
        self.counts = self.sizes if self.shares is None else mixture(self.sizes, self.shares)
        if self.shares is not None and 0 in self.counts:
            raise DataError(
                f"`{flag}` (={shares}): an epoch would have {self.counts} of the {self.sizes} usable rows, so one "
                "dataset is never used. Raise its share, or leave it out."
            )
        self._drawn: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for an index to mean the same row, next to the seed; JSON-able."""
        if self.shares is None:
            return {"rows": len(self)}
        return {"rows": self.sizes, "shares": [str(share / sum(self.shares)) for share in self.shares]}

    def rows(self, epoch: int) -> np.ndarray:
        """int64 `[len(self)]`, the row numbers of `epoch` in order."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(epoch)
        return self._drawn[1]

    def _draw(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        if self.shares is None:
            return rng.permutation(len(self))
        drawn, first = [], 0
        for i, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            # The third number sets it apart from the generators of the epochs.
            walk = np.random.default_rng([self.seed, i, 1]).permutation(size)
            drawn.append(first + walk[(epoch * count + np.arange(count)) % size])
            first += size
        return rng.permutation(np.concatenate(drawn))


def mixture(sizes: Sequence[int], shares: Sequence[Fraction]) -> list[int]:
    """The `c_i` above, exactly: `floor(N p + 1/2) <= size` holds if and only if `N < (size + 1/2) / p`."""
    normalised = [share / sum(shares) for share in shares]
    n = min(ceil((size + HALF) / p) - 1 for size, p in zip(sizes, normalised, strict=True))
    return [floor(n * p + HALF) for p in normalised]
