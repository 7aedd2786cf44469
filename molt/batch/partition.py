"""Which rank takes which sample, and in which forward/backward."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Indices = list[int]
"""Places in `lengths`, the samples of an optimizer step."""


def partition(lengths: Sequence[int], ranks: int) -> list[Indices]:
    """Sample indices per rank with nearly equal sums of tokens: the longest goes to the least loaded rank.

    lengths: [S] tokens per sample. Returns `ranks` lists, longest sample first, every index exactly once;
    ties go to the lower index and rank, so all ranks compute the same answer.
    Source: longest processing time, Graham 1969 (at most 4/3 of the best possible largest sum).
    """
    shares: list[Indices] = [[] for _ in range(ranks)]
    tokens_and_rank = [(0, rank) for rank in range(ranks)]  # a heap: the least loaded rank is first
    for index in _longest_first(lengths):
        tokens, rank = tokens_and_rank[0]
        shares[rank].append(index)
        heapq.heapreplace(tokens_and_rank, (tokens + lengths[index], rank))
    return shares


def micro_batches(
    shares: list[Indices],
    lengths: Sequence[int],
    *,
    size: int,
    max_tokens: int | None = None,
    packed: bool = False,
) -> list[list[Indices]]:
    """Each rank's indices in micro-batches, the same number on every rank: collectives need equal counts.

    shares: indices per rank, as `partition` returns them; lengths: [S] tokens per sample. Without `max_tokens` a
    micro-batch has `size` samples, in the order of the share; with it see `_within_budget`. Returns, per rank, its
    micro-batches; empty ones stand at the end, and a rank runs a dummy of weight 0 for each.
    """
    if max_tokens is None:
        return _of_size(shares, size)
    layout = PACKED if packed else PADDED
    return _within_budget(shares, lengths, max_tokens, layout)


def _of_size(shares: list[Indices], size: int) -> list[list[Indices]]:
    largest = max(len(share) for share in shares)
    count = _ceil_div(largest, size)

    batches = []
    for share in shares:
        starts = range(0, count * size, size)
        batches.append([share[start : start + size] for start in starts])
    return batches


@dataclass(frozen=True)
class Layout:
    """How samples lie in a micro-batch: the cost of a forward over them, and how to split them at equal cost."""

    cost: Callable[[Sequence[int]], int]
    """Tokens that a forward over samples of these lengths computes."""
    split: Callable[[Sequence[int], int], list[Indices]]
    """`(lengths, count)` to the indices of `count` micro-batches."""


def _within_budget(
    shares: list[Indices],
    lengths: Sequence[int],
    budget: int,
    layout: Layout,
) -> list[list[Indices]]:
    """The fewest micro-batches within the token budget, of nearly equal cost; a longer sample runs alone.

    Padded, their number is the smallest possible. Packed, it is below 3/2 of that plus 1: where `partition` exceeds the
    budget in k micro-batches, either all of them are filled above 2/3, or no fit of k has more than two samples in one,
    and then `partition` would have found it.
    Source: longest processing time is optimal for at most two items a bin, Graham 1969.
    """
    # A sample longer than the budget counts as one that fills it, so that it can be placed, alone.
    lengths_of_share = []
    for share in shares:
        lengths_of_share.append([min(lengths[index], budget) for index in share])

    def fits(count: int) -> bool:
        return all(_split_fits(share_lengths, count, budget, layout) for share_lengths in lengths_of_share)

    # More micro-batches never make the largest one larger: bisection finds the first number that fits.
    fewest = max(_ceil_div(sum(share_lengths), budget) for share_lengths in lengths_of_share)
    most = max(len(share) for share in shares)
    count = _first_that_fits(fewest, most, fits)

    batches = []
    for share, share_lengths in zip(shares, lengths_of_share, strict=True):
        parts = layout.split(share_lengths, count)
        batches.append([_chosen(share, part) for part in parts])
    return batches


def _split_fits(lengths: Sequence[int], count: int, budget: int, layout: Layout) -> bool:
    """Whether each of `count` micro-batches stays within the budget."""
    costs = []
    for part in layout.split(lengths, count):
        costs.append(layout.cost(_chosen(lengths, part)))
    return max(costs, default=0) <= budget


def _padded_cost(lengths: Sequence[int]) -> int:
    """Tokens of a padded micro-batch: every sample is as long as the longest."""
    return len(lengths) * max(lengths, default=0)


def _padded_split(lengths: Sequence[int], count: int) -> list[Indices]:
    """Indices, longest first, in `count` runs of neighbours whose largest padded cost is as small as possible."""
    order = _longest_first(lengths)

    def fits(cost: int) -> bool:
        return len(_cut(order, lengths, cost)) <= count

    # Cutting greedily from the longest sample gives the fewest runs of a cost, and fewer for a larger one.
    smallest_cost = _first_that_fits(0, _padded_cost(lengths), fits)
    runs = _cut(order, lengths, smallest_cost)

    dummies: list[Indices] = [[] for _ in range(count - len(runs))]
    return runs + dummies


def _cut(order: Indices, lengths: Sequence[int], cost: int) -> list[Indices]:
    """`order` in runs of at most this padded cost each; a longer sample is a run by itself."""
    runs = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        size = max(1, cost // longest)
        runs.append(order[start : start + size])
        start += size
    return runs


def _chosen(values: Sequence[int], indices: Indices) -> list[int]:
    return [values[index] for index in indices]


def _longest_first(lengths: Sequence[int]) -> Indices:
    """Indices by falling length; equal lengths keep their order, with `reverse` too."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _first_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest number in [low, high] that fits. `high` fits, and so does all above a number that does."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _ceil_div(total: int, size: int) -> int:
    return -(-total // size)


PACKED = Layout(cost=sum, split=partition)
"""Samples end to end in one row."""
PADDED = Layout(cost=_padded_cost, split=_padded_split)
"""One row per sample, each as long as the longest."""
