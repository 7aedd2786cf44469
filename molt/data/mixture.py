"""Which rows an epoch has, in which order: a pure function of the seed and the epoch.

Without shares an epoch is one permutation of all rows. With shares p_i (normalised) it is a mixture:

    c_i = floor(N p_i + 1/2)     rows of dataset i, for the largest N such that every c_i <= size_i

so the first dataset that is used up ends the epoch. Epoch e takes the rows e c_i .. (e + 1) c_i of dataset i,
modulo its size, in a permutation that is fixed for the dataset: no row comes twice in an epoch, nor again before
all others of its dataset came. All of them are then permuted together. Nothing is ever saved but an index.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

import numpy as np

from molt.config import comma_list
from molt.errors import DataError
from molt.types import Json

HALF = Fraction(1, 2)


class EpochOrder:
    """`order.rows(epoch)` are the row numbers of an epoch, `len(order)` of them."""

    def __init__(self, sizes: Sequence[int], *, seed: int, shares: str | None = None, flag: str = ""):
        """sizes: rows of each dataset, which lie one after the other; shares: a comma list, one per dataset.

        `flag` is the setting that holds the shares. Raises DataError if an epoch would have no row of a dataset.
        """
        self.sizes = list(sizes)
        self.seed = seed % 2**64  # numpy takes no negative seeds
        self.shares: list[Fraction] | None = None
        self.counts = self.sizes
        """Rows of each dataset in an epoch."""
        if shares is not None:
            self.shares = [Fraction(share) for share in comma_list(shares)]
            self.counts = mixture(self.sizes, self.shares)
            if 0 in self.counts:
                raise DataError(
                    f"`{flag}` (={shares}): an epoch would have {self.counts} of the {self.sizes} usable rows, so one "
                    "dataset is never used. Raise its share, or leave it out."
                )
        self._drawn_epoch: int | None = None
        self._drawn_rows = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def identity(self) -> Json:
        """What must be the same for an index to mean the same row, next to the seed; JSON-able."""
        if self.shares is None:
            return {"rows": len(self)}
        normalised = [str(share) for share in _normalised(self.shares)]
        return {"rows": self.sizes, "shares": normalised}

    def rows(self, epoch: int) -> np.ndarray:
        """int64 [len(self)], the row numbers of `epoch` in order."""
        if self._drawn_epoch != epoch:
            self._drawn_rows = self._draw(epoch)
            self._drawn_epoch = epoch
        return self._drawn_rows

    def _draw(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, epoch])
        if self.shares is None:
            return generator.permutation(len(self))

        drawn = []
        first_row = 0
        for dataset, size in enumerate(self.sizes):
            drawn.append(first_row + self._draw_from(dataset, epoch))
            first_row += size
        return generator.permutation(np.concatenate(drawn))

    def _draw_from(self, dataset: int, epoch: int) -> np.ndarray:
        """int64 [count], the rows of one dataset in `epoch`, counted from its first row."""
        size = self.sizes[dataset]
        count = self.counts[dataset]
        # The third number sets this generator apart from those of the epochs.
        generator = np.random.default_rng([self.seed, dataset, 1])
        walk = generator.permutation(size)
        places = (epoch * count + np.arange(count)) % size
        return walk[places]


def mixture(sizes: Sequence[int], shares: Sequence[Fraction]) -> list[int]:
    """The `c_i` above, exactly: `floor(N p + 1/2) <= size` holds if and only if `N < (size + 1/2) / p`."""
    normalised = _normalised(shares)
    largest = []
    for size, share in zip(sizes, normalised, strict=True):
        bound = (size + HALF) / share
        largest.append(ceil(bound) - 1)

    n = min(largest)
    return [floor(n * share + HALF) for share in normalised]


def _normalised(shares: Sequence[Fraction]) -> list[Fraction]:
    total = sum(shares)
    return [share / total for share in shares]
