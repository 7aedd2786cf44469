"""Admission and batching in a discrete-event simulation of the loop, with long-tailed groups."""

import heapq
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.errors import TrainingError
from molt.rollout.admission import Tally, in_time, may_start, select_batch
from molt.types import Group, Prompt, RolloutInfo, Scored

PROMPT = Prompt(epoch=0, position=0, row=0, messages=None, text="")
ROLLOUT = RolloutInfo("0:0", 0, Scored(0.0, 0.0), cut=None, turns=1, samples=())


def group(order, start_step, *, finished=True):
    return Group(PROMPT, order, start_step, rollouts=[ROLLOUT] if finished else [])


@dataclass
class Trace:
    worst: int = 0
    batches: list[list[int]] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    left: int = 0
    most_open: int = 0


def simulate(durations, discards, train_s, *, batch_size, queue, staleness, in_flight):
    """The producer and the learner over a stream of `len(durations)` prompts; ends when no event is left."""
    now, version, tickets, stream = 0.0, 0, count(), iter(range(len(durations)))
    waiting: dict[int, Group] = {}  # open, not in training
    tally = Tally()  # of `waiting`
    training: list[Group] = []
    running, ended, events, trace = 0, not len(durations), [], Trace()
    while True:
        while not ended and may_start(
            len(waiting) + len(training), running, batch_size=batch_size, queue=queue, generate_batch_size=in_flight
        ):
            if (order := next(stream, None)) is None:
                ended = True
                break
            waiting[order] = group(order, version, finished=False)
            tally.add(waiting[order])
            running += 1
            heapq.heappush(events, (now + durations[order], next(tickets), order))
        trace.most_open = max(trace.most_open, len(waiting) + len(training))
        if not training:
            training = (
                select_batch(
                    waiting.values(),
                    tally,
                    step=version,
                    batch_size=batch_size,
                    max_staleness=staleness,
                    exhausted=ended,
                )
                or []
            )
            if training:
                trace.batches.append([g.order for g in training])
                trace.worst = max(trace.worst, *(version - g.start_step for g in training))
                for g in training:
                    tally.remove(waiting.pop(g.order))
                heapq.heappush(events, (now + train_s[version % len(train_s)], next(tickets), None))
        if not events:
            trace.left = len(waiting)
            return trace
        now, _, order = heapq.heappop(events)
        if order is None:  # published
            version, training = version + 1, []
        else:
            running -= 1
            if discards[order]:
                trace.discarded.append(order)
                tally.remove(waiting.pop(order))
            else:
                waiting[order].rollouts = [ROLLOUT]
                tally.finish(waiting[order])
            whole = Tally(waiting.values())
            assert (tally.open, tally.finished) == (whole.open, whole.finished)


def check(trace, n, *, batch_size, queue, staleness, discards):
    trained = [order for batch in trace.batches for order in batch]
    assert trace.left == 0, "deadlock: open groups are left and nothing can happen"
    assert sorted(trained + trace.discarded) == list(range(n)), "every prompt trained or discarded exactly once"
    assert all(discards[order] for order in trace.discarded)
    assert trace.worst <= staleness
    assert trace.most_open <= (1 + queue) * batch_size
    assert all(len(batch) == batch_size for batch in trace.batches[:-1])
    assert len(trace.batches) == -(-len(trained) // batch_size)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(0, 70),
    batch_size=st.integers(1, 8),
    queue=st.integers(0, 4),
    slack=st.sampled_from([0, 0, 1, 5]),
    in_flight=st.integers(1, 40),
    law=st.sampled_from(["constant", "lognormal", "pareto"]),
    filtering=st.sampled_from(["none", "fifth", "first wave", "all"]),
)
def test_every_schedule_keeps_the_promises(seed, n, batch_size, queue, slack, in_flight, law, filtering):
    rng = np.random.default_rng(seed)
    durations = {"constant": np.ones(n), "lognormal": rng.lognormal(0, 2, n), "pareto": rng.pareto(0.7, n)}[law]
    discards = {
        "none": np.zeros(n, bool),
        "fifth": rng.random(n) < 0.2,
        # Every group of a full admission window is filtered once, then its replacement is kept.
        "first wave": (np.arange(n) // ((1 + queue) * batch_size)) % 2 == 0,
        "all": np.ones(n, bool),
    }[filtering]
    setting = {"batch_size": batch_size, "queue": queue, "staleness": queue + slack}
    trace = simulate(durations, discards, rng.lognormal(0, 1, 16), **setting, in_flight=in_flight)
    check(trace, n, **setting, discards=discards)


@pytest.mark.parametrize("queue", range(5))
def test_the_worst_staleness_of_a_long_tailed_sweep_is_the_bound(queue):
    worst = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        n, batch_size = 160, 1 + seed % 8
        durations, discards = rng.lognormal(0, 2, n), rng.random(n) < 0.2
        setting = {"batch_size": batch_size, "queue": queue, "staleness": queue}
        trace = simulate(durations, discards, rng.lognormal(0, 1, 16), **setting, in_flight=(1 + queue) * batch_size)
        check(trace, n, **setting, discards=discards)
        worst = max(worst, trace.worst)
    assert worst == queue


def test_more_staleness_than_queue_waits_less_for_the_longest_rollout():
    # One group takes 7 s and the others none, training takes 1 s. B = 2, Q = 1: 4 open.
    durations, discards = [7.0] + [0.0] * 19, [False] * 20
    places = {}
    for staleness in (1, 4):
        trace = simulate(durations, discards, [1.0], batch_size=2, queue=1, staleness=staleness, in_flight=4)
        check(trace, 20, batch_size=2, queue=1, staleness=staleness, discards=discards)
        places[staleness] = next(k for k, batch in enumerate(trace.batches) if 0 in batch)
    assert places == {1: 1, 4: 4}


def test_may_start_by_hand():
    bounds = {"batch_size": 4, "queue": 1, "generate_batch_size": 3}
    assert may_start(7, 2, **bounds)
    assert not may_start(8, 2, **bounds)  # (1 + 1) * 4 are open
    assert not may_start(7, 3, **bounds)  # 3 in flight


def select(groups, version, *, size=2, staleness=1, exhausted=False):
    batch = select_batch(
        groups, Tally(groups), step=version, batch_size=size, max_staleness=staleness, exhausted=exhausted
    )
    return None if batch is None else [g.order for g in batch]


def test_a_batch_takes_the_oldest_finished_groups():
    assert select([group(3, 1), group(1, 0), group(2, 1)], 1) == [1, 2]
    # A group restarted after a resume keeps its order but has newer tokens: version goes before order.
    assert select([group(1, 1), group(2, 0), group(3, 0)], 1) == [2, 3]


def test_a_straggler_is_passed_over_only_while_it_can_be_trained_in_time():
    # Version 0, M = 1: the straggler of version 0 may still be in batch 1.
    assert select([group(0, 0, finished=False), group(1, 0), group(2, 0)], 0) == [1, 2]
    # At version 1 it may not: 0 + 1 < 1 + 1.
    assert select([group(0, 0, finished=False), group(1, 1), group(2, 1)], 1) is None
    assert select([group(0, 0, finished=False), group(1, 1), group(2, 1)], 1, staleness=2) == [1, 2]
    # Two could be in batch 1, the third (i = 2) would have to be in batch 2: 0 + 1 < 1 + 2 // 2.
    stragglers = [group(i, 0, finished=False) for i in range(3)]
    assert select([*stragglers[:2], group(3, 0), group(4, 0)], 0) == [3, 4]
    with pytest.raises(TrainingError):  # five groups of version 0 never fit in batches 0 and 1
        select([*stragglers, group(3, 0), group(4, 0)], 0)


def test_on_policy_waits_for_all():
    assert select([group(0, 5), group(1, 5, finished=False)], 5, staleness=0) is None
    assert select([group(0, 5), group(1, 5)], 5, staleness=0) == [0, 1]


def test_the_last_batch_may_be_smaller():
    assert select([group(0, 0)], 0) is None
    assert select([group(0, 0)], 0, exhausted=True) == [0]
    assert select([group(0, 0), group(1, 0, finished=False)], 0, exhausted=True) is None
    # Two finished of three open: a full batch now, the straggler alone in the next.
    assert select([group(0, 0), group(1, 0, finished=False), group(2, 0)], 0, exhausted=True) == [0, 2]
    assert select([], 0, exhausted=True) is None


def test_a_buffer_of_other_settings_is_an_error_not_a_wait():
    stale = [group(0, 0), group(1, 3)]
    assert not in_time(Tally(stale).open, step=3, batch_size=2, max_staleness=1)
    with pytest.raises(TrainingError, match=r"2 open groups, the oldest of step 0.*`train.max_staleness` \(=1\)"):
        select(stale, 3)
