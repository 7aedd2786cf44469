"""Arrays go to the rank that reads them, whatever the numbers of ranks of two models."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from molt.batch.plan import Place, SampleTask
from molt.train.exchange import NOWHERE, light_and_heavy, routes


def plans_of(ranks: list[list[int]]):
    """A plan per rank, of one step and one micro-batch, from the numbers of its samples."""
    return [[[[SampleTask(Place(n, 0, 0), 0.0, 0.0, 1.0) for n in samples]]] for samples in ranks]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12))
def test_every_reader_gets_the_arrays_of_its_samples_and_no_other(assigned):
    """assigned: for each sample, the rank that scores it and the one that trains it."""
    scored: list[list[int]] = [[] for _ in range(3)]
    trained: list[list[int]] = [[] for _ in range(4)]
    for sample, (scorer, trainer) in enumerate(assigned):
        scored[scorer].append(sample)
        trained[trainer].append(sample)

    received: dict[int, dict] = {}
    for samples, route in zip(scored, routes(plans_of(scored), plans_of(trained)), strict=True):
        arrays = {Place(n, 0, 0): np.array([n]) for n in samples}
        parts = route.split(arrays)
        assert len(parts) == len(route.readers) and all(parts)  # nobody gets an empty part
        for reader, part in zip(route.readers, parts, strict=True):
            received.setdefault(reader, {}).update(part)
    for trainer, samples in enumerate(trained):
        assert sorted(place.group for place in received.get(trainer, {})) == samples


def test_equal_plans_send_one_part_from_each_rank_to_its_like():
    plans = plans_of([[0, 1], [2]])
    assert [route.readers for route in routes(plans, plans)] == [[0], [1]]


def test_what_a_method_returns_is_as_many_values_as_ray_is_told():
    plans = plans_of([[0, 1]])
    (route,) = routes(plans, plans_of([[0], [1]]))
    arrays = {Place(0, 0, 0): np.zeros(1), Place(1, 0, 0): np.ones(1)}
    light, *heavy = light_and_heavy("metrics", arrays, route)
    assert light == "metrics" and [list(part) for part in heavy] == [[Place(0, 0, 0)], [Place(1, 0, 0)]]
    assert light_and_heavy("metrics", arrays, NOWHERE) == "metrics"
