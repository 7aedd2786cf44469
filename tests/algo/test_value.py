"""The value loss and the explained variance against loops, and what a critic that knows nothing gets."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.value import explained_variance, value_loss, variance_sums
from molt.errors import TrainingError


def reference(values, old, returns, clip):
    loss = []
    clipped = []
    for value, before, target in zip(values, old, returns, strict=True):
        near = before + min(max(value - before, -clip), clip)
        free = (value - target) ** 2
        bounded = (near - target) ** 2
        loss.append(0.5 * max(free, bounded))
        clipped.append(bounded > free)
    return loss, clipped


number = st.integers(-80, 80).map(lambda n: n / 8)  # exact: no tie is broken by rounding


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=30), st.sampled_from([0.125, 0.5, 4.0]))
def test_the_loss_matches_the_reference(tokens, clip):
    values, old, returns = np.array(tokens).T
    loss, clipped = value_loss(*map(torch.tensor, (values, old, returns)), clip=clip)
    expected, expected_clipped = reference(values, old, returns, clip)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert clipped.tolist() == expected_clipped


def test_the_loss_by_hand_and_its_gradient():
    # V_old = 0, c = 1/2. V 1/4, ret 1: 9/32 free. V 2, ret 1: (2-1)^2 > (1/2-1)^2: 1/2 free. V 1, ret 1: the bounded
    # 1/2 is the worse: 1/8 clipped. V -2, ret 1: 9 > 9/4: 9/2 free.
    values = torch.tensor([0.25, 2.0, 1.0, -2.0], requires_grad=True)
    old = torch.zeros(4, requires_grad=True)
    returns = torch.ones(4, requires_grad=True)
    loss, clipped = value_loss(values, old, returns, clip=0.5)
    assert loss.tolist() == [9 / 32, 0.5, 0.125, 4.5]
    assert clipped.tolist() == [False, False, True, False]
    loss.sum().backward()
    assert values.grad.tolist() == [-0.75, 1, 0, -3]  # V - ret, and nothing where clipped
    assert old.grad is None and returns.grad is None


@pytest.mark.parametrize("name", ["values", "old_values", "returns"])
def test_a_nan_is_an_error_that_names_its_tensor(name):
    tensors = {key: torch.zeros(3) for key in ("values", "old_values", "returns")}
    tensors[name] = torch.tensor([0.0, math.nan, 0.0])
    with pytest.raises(TrainingError, match=f"^{name} holds 1 NaN in 3 tokens"):
        value_loss(**tensors, clip=0.2)


segment = st.lists(st.tuples(number, number, st.booleans()), min_size=1, max_size=12)


@given(st.lists(segment, min_size=1, max_size=5))
def test_the_variance_from_added_sums_matches_the_reference(batch):
    parts = [[torch.tensor(column) for column in zip(*rows, strict=True)] for rows in batch]
    sums = sum(variance_sums(*part) for part in parts)
    assert sums.dtype == torch.float64 and sums.shape == (5,)
    inside = [(ret, ret - value) for rows in batch for ret, value, m in rows if m]
    targets = [r for r, _ in inside]
    errors = [e for _, e in inside]
    if len(set(targets)) < 2:
        assert explained_variance(sums) == 0.0
        return

    def variance(xs):
        mean = sum(xs) / len(xs)
        return sum((x - mean) ** 2 for x in xs) / len(xs)

    assert explained_variance(sums) == pytest.approx(1 - variance(errors) / variance(targets), rel=1e-6, abs=1e-6)


def explained(returns, values, mask=None):
    returns, values = torch.tensor(returns).double(), torch.tensor(values).double()
    mask = torch.ones(len(returns)).bool() if mask is None else torch.tensor(mask, dtype=torch.bool)
    return explained_variance(variance_sums(returns, values, mask))


def test_the_explained_variance_by_hand():
    assert explained([1.0, 3.0, 8.0], [1.0, 3.0, 8.0]) == 1
    assert explained([1.0, 3.0], [7.0, 7.0]) == 0  # a constant explains nothing, wherever it is
    # ret 0, 4: variance 4. err = 0 - 1, 4 - 3 = -1, 1: variance 1. 1 - 1/4.
    assert explained([0.0, 4.0, 9.0], [1.0, 3.0, math.nan], [True, True, False]) == 0.75
    assert explained([0.0, 4.0], [4.0, 0.0]) == -3  # err -4, 4: variance 16


@pytest.mark.parametrize("n", range(2, 40))
def test_equal_returns_leave_no_rounding_error_to_divide_by(n):
    returns = torch.full((n,), 0.1, dtype=torch.float64)
    assert explained_variance(variance_sums(returns, torch.rand(n), torch.ones(n).bool())) == 0.0


@pytest.mark.parametrize("returns", [[], [5.0], [0.25] * 7, [0.0, 0.0]])
def test_returns_that_do_not_vary_give_0_and_no_nan(returns):
    assert explained(returns, [float(i) for i in range(len(returns))]) == 0.0
    assert explained(returns, [0.0] * len(returns), [False] * len(returns)) == 0.0
