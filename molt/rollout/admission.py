"""Admission and batching: when a group may start, and which groups a training batch takes.

B = `rollout.batch_size` groups per batch, Q = `train.async_queue_size`, M = `train.max_staleness` >= Q.
Batch k is trained at step k, when k batches are, and makes step k + 1. A group is open from its start until
the batch that trains it is published, or until it is discarded. All functions are pure. The producer calls them
after every group that ends, so they look at a `Tally`, not at the groups.

**No token is trained more than M batches after its weights.** Sort the open groups that are not in
training by start step, v_0 <= v_1 <= ...; in the worst case they are trained in that order, the i-th in
batch k + i // B, where k is the next batch to be taken. Invariant: `v_i + M >= k + i // B` for all i
(`in_time`). Every event keeps it:

* a start: the new group is last, and its step is that of the published weights. At most (1 + Q) * B are open, so
  i // B <= Q <= M. While a batch trains, the published step is one less than the next batch, but the
  batch's B groups are still open, so i // B <= Q - 1.
* a discard: the others only move forward.
* taking a batch: `select_batch` checks it for the rest before it lets a straggler be passed over.

With i < B it says k - v <= M for every group of a batch, and no token is older than its group's start.

**It cannot deadlock.** Taking the B oldest always keeps the invariant (the i-th of the rest was the
(i + B)-th), so the learner waits at most for those B to finish. If fewer than B are open, so are fewer than
(1 + Q) * B, and `may_start` refuses only while others generate, which end. A discard makes room for its
replacement at once. When the stream has ended, what is left is the last batch.
"""

from collections import Counter
from collections.abc import Iterable

from molt.errors import TrainingError
from molt.types import Group


class Tally:
    """How many groups of each start step are open, and how many of those are finished. No count is zero.

    An open group is generating, then (with a scorer) scoring, then finished.
    """

    def __init__(self, groups: Iterable[Group] = ()):
        self.open: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()
        self.scoring = 0
        """Groups of which all rollouts are past generation, and some wait for their scores."""
        for group in groups:
            self.add(group)

    @property
    def in_flight(self) -> int:
        """Groups that are not finished."""
        return self.open.total() - self.finished.total()

    @property
    def generating(self) -> int:
        return self.in_flight - self.scoring

    def add(self, group: Group) -> None:
        self.open[group.start_step] += 1
        if group.finished:
            self.finish(group)
        if group.scoring:
            self.scoring += 1

    def finish(self, group: Group) -> None:
        self.finished[group.start_step] += 1

    def remove(self, group: Group) -> None:
        _decrement(self.open, group.start_step)
        if group.finished:
            _decrement(self.finished, group.start_step)
        if group.scoring:
            self.scoring -= 1


def may_start(open_groups: int, generating: int, *, batch_size: int, queue: int, generate_batch_size: int) -> bool:
    """Whether one more group may start: `open < (1 + Q) * B` and `generating < generate_batch_size`.

    open_groups: groups that are open, those in training included. generating: those among them with a rollout that
    generates; a group that waits for scores alone is open and not generating.
    """
    has_slot = open_groups < (1 + queue) * batch_size
    return has_slot and generating < generate_batch_size


def in_time(starts: Counter[int], *, step: int, batch_size: int, max_staleness: int) -> bool:
    """Whether all groups can still be trained in time, from batch `step` on: `v_i + M >= step + i // B`.

    starts: groups by start step, none zero. Of equal steps only the last group is checked: it is trained last.
    """
    last = -1
    for start_step, count in sorted(starts.items()):
        last += count
        batch = step + last // batch_size
        if start_step + max_staleness < batch:
            return False
    return True


def select_batch(
    groups: Iterable[Group], tally: Tally, *, step: int, batch_size: int, max_staleness: int, exhausted: bool = False
) -> list[Group] | None:
    """The groups of batch `step`, oldest start first, or None to wait for more to finish.

    Takes the B oldest finished groups if all others can then still be trained in time (module docstring).
    groups: all open groups, in any order; `tally` is theirs. step: k, the batches trained so far.
    exhausted: no group can start any more; fewer than B open groups are then one last batch, once all are finished.
    Raises `TrainingError` when the open groups cannot be trained in time in any order, which no sequence of
    starts, discards and batches under one setting can bring about.
    """
    if not in_time(tally.open, step=step, batch_size=batch_size, max_staleness=max_staleness):
        raise TrainingError(
            f"{tally.open.total()} open groups, the oldest of step {min(tally.open)}, cannot be trained within "
            f"`train.max_staleness` (={max_staleness}) of their weights, in batches of {batch_size} from step "
            f"{step} on: waiting would never end. Resume with the settings that the buffer was filled with."
        )

    taken = _oldest(tally.finished, batch_size)
    if taken.total() < batch_size:
        is_last_batch = exhausted and taken.total() > 0 and taken == tally.open
        if not is_last_batch:
            return None
    else:
        rest = tally.open - taken
        if not in_time(rest, step=step + 1, batch_size=batch_size, max_staleness=max_staleness):
            return None

    finished = [group for group in groups if group.finished]
    finished.sort(key=_age)
    return finished[:batch_size]


def _decrement(counts: Counter[int], start_step: int) -> None:
    counts[start_step] -= 1
    if counts[start_step] == 0:
        del counts[start_step]


def _oldest(starts: Counter[int], count: int) -> Counter[int]:
    """The start steps of the `count` oldest groups, or of all if they are fewer."""
    taken: Counter[int] = Counter()
    missing = count
    for start_step in sorted(starts):
        if missing == 0:
            break
        taken[start_step] = min(starts[start_step], missing)
        missing -= taken[start_step]
    return taken


def _age(group: Group) -> tuple[int, int]:
    """The oldest start first; of equal ones, the first in the stream."""
    return group.start_step, group.order
