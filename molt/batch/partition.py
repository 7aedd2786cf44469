"""Which rank takes which sample, and in which forward/backward."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence


def partition(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sample indices per rank with nearly equal sums of tokens: the longest goes to the least loaded rank.

    lengths: [S] tokens per sample. Returns `ranks` lists, longest sample first, every index exactly once;
    ties go to the lower index and rank, so all ranks compute the same answer.
    Source: longest processing time, Graham 1969 (at most 4/3 of the best possible largest sum).
    """
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def micro_batches(
    shares: list[list[int]], lengths: Sequence[int], *, size: int, max_tokens: int | None = None, packed: bool = False
) -> list[list[list[int]]]:
    """Each rank's indices in micro-batches, the same number on every rank: collectives need equal counts.

    shares: indices per rank, as `partition` gives them; lengths: [S] tokens per sample. Without `max_tokens` a
    micro-batch has `size` samples, in the order of the share; with it see `_within`. Returns, per rank, its
    micro-batches; for an empty one, which only stands at the end, a dummy of weight 0 is run.
    """
    if max_tokens is not None:
        return _within(max_tokens, shares, lengths, packed=packed)
    count = max(-(-len(share) // size) for share in shares)
    return [[share[i * size : (i + 1) * size] for i in range(count)] for share in shares]


def _within(budget: int, shares: list[list[int]], lengths: Sequence[int], *, packed: bool) -> list[list[list[int]]]:
    """The fewest micro-batches per rank whose cost is at most `budget` tokens, of nearly equal cost; a longer sample
    runs alone.

    The cost is what a forward computes: packed `sum(lengths)`, padded `samples * longest`. Padded, the number is the
    smallest possible; packed, below 3/2 of it plus 1: where `partition` exceeds the budget in k micro-batches, they
    are all filled above 2/3, or no fit of k has more than two samples in one and then it would have found it.
    Source: longest processing time is optimal for at most two items a bin, Graham 1969.
    """
    split, cost = (partition, sum) if packed else (_runs, _area)
    sizes = [[min(lengths[i], budget) for i in share] for share in shares]

    def fits(count: int) -> bool:
        return all(cost([own[i] for i in part]) <= budget for own in sizes for part in split(own, count))

    low, high = max(-(-sum(own) // budget) for own in sizes), max(map(len, shares))
    # More micro-batches never make the largest one larger, so bisection finds the first number that fits.
    count = low + bisect_left(range(low, high), True, key=fits)
    return [[[share[i] for i in part] for part in split(own, count)] for share, own in zip(shares, sizes, strict=True)]


def _area(lengths: Sequence[int]) -> int:
    """Tokens of a padded micro-batch."""
    return len(lengths) * max(lengths, default=0)


def _runs(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Indices, longest first, in `count` runs of neighbours whose largest padded area is as small as possible."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])

    def cut(area: int) -> list[list[int]]:
        runs, start = [], 0
        while start < len(order):
            runs.append(order[start : start + max(1, area // lengths[order[start]])])
            start += len(runs[-1])
        return runs

    # Cutting greedily from the longest sample gives the fewest runs of an area, and fewer for a larger one.
    runs = cut(bisect_left(range(_area(lengths)), True, key=lambda area: len(cut(area)) <= count))
    return runs + [[] for _ in range(count - len(runs))]
