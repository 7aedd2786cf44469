"""Which rank takes which sample, and in which forward/backward."""

import heapq
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


def micro_batches(shares: list[list[int]], size: int) -> list[list[list[int]]]:
    """Each rank's indices in runs of `size`, the same number of runs on every rank.

    shares: indices per rank, as `partition` gives them. Returns, per rank, its micro-batches; a rank that has fewer
    gets empty lists at its end, for which a dummy of weight 0 is run: collectives need equal counts.
    """
    count = max(-(-len(share) // size) for share in shares)
    return [[share[i * size : (i + 1) * size] for i in range(count)] for share in shares]
