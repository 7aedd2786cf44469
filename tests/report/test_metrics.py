import math

import pytest

from molt.report.metrics import merge, values
from molt.types import Metric


def test_sums_and_counts_add_up():
    parts = [{"train/loss": Metric(3.0, 2.0)}, {"train/loss": Metric(1.0, 6.0), "rollout/reward": Metric(0.5)}]
    # (3 + 1) / (2 + 6); the mean of the two means would be (1.5 + 0.167) / 2
    assert values(merge(parts)) == {"train/loss": 0.5, "rollout/reward": 0.5}


def test_a_maximum_merges_by_the_larger_total_and_is_not_divided():
    parts = [{"mismatch/abs_max": Metric(0.25, 10.0)}, {"mismatch/abs_max": Metric(0.75, 30.0)}]
    assert values(merge(parts)) == {"mismatch/abs_max": 0.75}
    assert merge(parts)["mismatch/abs_max"].count == 40.0


def test_a_maximum_below_zero_stays_below_zero():
    assert values(merge([{"a_max": Metric(-3.0)}, {"a_max": Metric(-2.0)}])) == {"a_max": -2.0}


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_never_hides_a_nan(order):
    assert math.isnan(values(merge([{"a_max": Metric(total)} for total in order]))["a_max"])


def test_what_nothing_was_counted_for_has_no_value():
    assert values({"rollout/reward": Metric(0.0, 0.0)}) == {}


def test_merging_does_not_touch_its_parts():
    part = {"train/loss": Metric(1.0)}
    merge([part, part])
    assert part == {"train/loss": Metric(1.0)}


def test_faults_are_counted_and_not_averaged():
    assert values(merge([{"faults/timeout": Metric(1.0)}] * 3)) == {"faults/timeout": 3.0}


@pytest.mark.parametrize("key", ["softmax", "climax", "max", "call_count", "_count", "tests/failures", "faults/x"])
def test_an_agents_own_key_is_a_mean_whatever_its_name(key):
    name = f"rollout/info/{key}"
    assert values(merge([{name: Metric(1.0)}, {name: Metric(4.0)}])) == {name: 2.5}


@pytest.mark.parametrize("reason", ["timeout", "softmax", "over_the_max"])
def test_a_fault_is_counted_whatever_its_reason(reason):
    assert values(merge([{f"faults/{reason}": Metric(1.0)}] * 3)) == {f"faults/{reason}": 3.0}
