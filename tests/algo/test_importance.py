import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.importance import MODES, token_correction
from molt.errors import TrainingError


def reference(old, rollout, mask, mode, low, high):
    coefficients, insides = [], []
    for a, b, trained in zip(old, rollout, mask, strict=True):
        w = math.exp(min(max(a - b, -30.0), 30.0))
        inside = w <= high if mode == "trunc" else low <= w <= high
        value = {"mask": w if inside else 0.0, "clip": min(max(w, low), high), "trunc": min(w, high)}[mode]
        coefficients.append(value if trained else 0.0)
        insides.append(inside and trained)
    return coefficients, insides


token = st.tuples(st.floats(-40, 0), st.floats(-40, 0), st.booleans())


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(token, min_size=1, max_size=30), st.floats(0, 0.9), st.floats(1.1, 9))
def test_every_mode_matches_the_reference(mode, tokens, low, high):
    old, rollout, mask = zip(*tokens, strict=True)
    tensors = [torch.tensor(old, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64), torch.tensor(mask)]
    coefficient, inside = token_correction(*tensors, mode=mode, low=low, high=high)
    expected, expected_inside = reference(old, rollout, mask, mode, low, high)
    np.testing.assert_allclose(coefficient.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert inside.tolist() == expected_inside


@pytest.mark.parametrize(
    ("mode", "coefficients", "insides"),
    [
        ("mask", [0, 1, 2, 0, 0], [False, True, True, False, False]),
        ("clip", [0.5, 1, 2, 4, 0], [False, True, True, False, False]),
        ("trunc", [0.25, 1, 2, 4, 0], [True, True, True, False, False]),
    ],
)
def test_every_mode_by_hand(mode, coefficients, insides):
    # w = 1/4, 1, 2, 8 in the band [1/2, 4], and a token that is not trained.
    old = torch.tensor([0.25, 1.0, 2.0, 8.0, 1.0]).log()
    mask = torch.tensor([True, True, True, True, False])
    coefficient, inside = token_correction(old, torch.zeros(5), mask, mode=mode, low=0.5, high=4.0)
    assert coefficient.tolist() == pytest.approx(coefficients)
    assert inside.tolist() == insides


def test_the_coefficient_carries_no_gradient():
    old = torch.zeros(2, requires_grad=True)
    coefficient, _ = token_correction(old, torch.zeros(2), torch.ones(2).bool(), mode="clip", low=0.5, high=2.0)
    assert not coefficient.requires_grad


@pytest.mark.parametrize("position", [0, 1])
def test_a_nan_is_an_error_that_names_its_tensor(position):
    pair = [torch.zeros(2), torch.zeros(2)]
    pair[position] = torch.tensor([math.nan, 0.0])
    name = ("old_logprobs", "rollout_logprobs")[position]
    with pytest.raises(TrainingError, match=f"^{name} holds 1 NaN"):
        token_correction(*pair, torch.ones(2).bool(), mode="mask", low=0.5, high=5.0)
