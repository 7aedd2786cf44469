import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.reduce import AGGREGATIONS, token_weights


def test_token_mean_by_hand():
    # 3 + 0 + 1 + 4 = 8 trained tokens: each weighs 1/8, wherever it is.
    assert token_weights([3, 0, 1, 4]) == [0.125, 0, 0.125, 0.125]
    assert token_weights([0, 0]) == [0, 0]
    assert token_weights([1]) == [1]
    assert token_weights([]) == []


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(st.lists(st.integers(0, 5000), max_size=40).filter(any))
def test_all_weights_of_a_step_sum_to_one(mode, trained):
    weights = token_weights(trained, mode=mode)
    assert sum(w * n for w, n in zip(weights, trained, strict=True)) == pytest.approx(1, abs=1e-9)
    assert all((w > 0) == (n > 0) for w, n in zip(weights, trained, strict=True))
