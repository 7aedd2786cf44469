"""Admission and batching: when a group may start, and which groups a training batch takes.

B = `rollout.batch_size` groups per batch, Q = `train.async_queue_size`, M = `train.max_staleness` >= Q.
Batch k is trained from the weights of version k and publishes k + 1. A group is open from its start until
the batch that trains it is published, or until it is discarded. All functions are pure.

**No token is trained more than M batches after its weights.** Sort the open groups that are not in
training by start version, v_0 <= v_1 <= ...; in the worst case they are trained in that order, the i-th in
batch k + i // B, where k is the next batch to be taken. Invariant: `v_i + M >= k + i // B` for all i
(`in_time`). Every event keeps it:

* a start: the new group is last, and its version is the published one. At most (1 + Q) * B are open, so
  i // B <= Q <= M. While a batch trains, the published version is one less than the next batch, but the
  batch's B groups are still open, so i // B <= Q - 1.
* a discard: the others only move forward.
* taking a batch: `select_batch` checks it for the rest before it lets a straggler be passed over.

With i < B it says k - v <= M for every group of a batch, and no token is older than its group's start.

**It cannot deadlock.** Taking the B oldest always keeps the invariant (the i-th of the rest was the
(i + B)-th), so the learner waits at most for those B to finish. If fewer than B are open, so are fewer than
(1 + Q) * B, and `may_start` refuses only while others are in flight, which end. A discard makes room for its
replacement at once. When the stream has ended, what is left is the last batch.
"""

from collections.abc import Sequence

from molt.errors import TrainingError
from molt.types import Group


def may_start(open_groups: int, in_flight: int, *, batch_size: int, queue: int, generate_batch_size: int) -> bool:
    """Whether one more group may start: `open < (1 + Q) * B` and `in_flight < generate_batch_size`.

    open_groups: groups that are open, those in training included. in_flight: the running ones among them.
    """
    return open_groups < (1 + queue) * batch_size and in_flight < generate_batch_size


def in_time(groups: Sequence[Group], *, version: int, batch_size: int, max_staleness: int) -> bool:
    """Whether all groups can still be trained in time, from batch `version` on: `v_i + M >= version + i // B`."""
    starts = sorted(group.start_version for group in groups)
    return all(v + max_staleness >= version + i // batch_size for i, v in enumerate(starts))


def select_batch(
    groups: Sequence[Group], *, version: int, batch_size: int, max_staleness: int, exhausted: bool = False
) -> list[Group] | None:
    """The groups of batch `version`, oldest start first, or None to wait for more to finish.

    Takes the B oldest finished groups if all others can then still be trained in time (module docstring).
    groups: all open groups, in any order. version: k, the published version that the batch is trained from.
    exhausted: no group can start any more; fewer than B open groups are then one last batch, once all are finished.
    Raises `TrainingError` when the open groups cannot be trained in time in any order, which no sequence of
    starts, discards and batches under one setting can bring about.
    """
    if not in_time(groups, version=version, batch_size=batch_size, max_staleness=max_staleness):
        oldest = min(group.start_version for group in groups)
        raise TrainingError(
            f"{len(groups)} open groups, the oldest of version {oldest}, cannot be trained within "
            f"`train.max_staleness` (={max_staleness}) of their weights, in batches of {batch_size} from version "
            f"{version} on: waiting would never end. Resume with the settings that the buffer was filled with."
        )
    finished = sorted((g for g in groups if g.finished), key=lambda g: (g.start_version, g.order))
    batch = finished[:batch_size]
    if len(batch) < batch_size:
        return batch if exhausted and batch and len(batch) == len(groups) else None
    taken = {group.order for group in batch}
    rest = [group for group in groups if group.order not in taken]
    can_wait = in_time(rest, version=version + 1, batch_size=batch_size, max_staleness=max_staleness)
    return batch if can_wait else None
