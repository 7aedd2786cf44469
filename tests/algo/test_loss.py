import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.loss import ppo
from molt.errors import TrainingError


def reference(logprobs, old, advantages, low, high):
    loss, clipped = [], []
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = math.exp(min(max(new - before, -30.0), 30.0))
        bounded = min(max(ratio, 1 - low), 1 + high)
        loss.append(-min(ratio * advantage, bounded * advantage))
        clipped.append(bounded * advantage < ratio * advantage)
    return loss, clipped


token = st.tuples(st.floats(-40, 0), st.floats(-40, 0), st.floats(-5, 5))


@given(st.lists(token, min_size=1, max_size=30), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_ppo_matches_the_reference(tokens, low, high):
    columns = np.array(tokens).T
    loss, clipped = ppo(*torch.tensor(columns), low=low, high=high)
    expected, expected_clipped = reference(*columns, low, high)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert clipped.tolist() == expected_clipped


def test_ppo_by_hand():
    # Ratios 1.5, 0.5, 1.5, 0.5, 1; bounds 0.8 and 1.3; advantages 2, 2, -2, -2, 2.
    # min(3, 2.6) = 2.6 clipped; min(1, 1.6) = 1; min(-3, -2.6) = -3; min(-1, -1.6) = -1.6 clipped; 2.
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0]).log()
    loss, clipped = ppo(logprobs, torch.zeros(5), torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0]), low=0.2, high=0.3)
    assert loss.tolist() == pytest.approx([-2.6, -1.0, 3.0, 1.6, -2.0])
    assert clipped.tolist() == [True, False, False, True, False]


def test_ppo_gradient_matches_finite_differences():
    # Away from the kinks at 0.8, 1.2 and the clamp, clipped and free tokens, both signs, one clamped ratio.
    log_ratio = torch.tensor([0.0, 0.1, 0.5, -0.5, 0.5, -0.5, 31.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.full((7,), -1.5, dtype=torch.float64, requires_grad=True)
    logprobs = (old.detach() + log_ratio).requires_grad_()
    ppo(logprobs, old, advantages, low=0.2, high=0.2)[0].sum().backward()
    assert old.grad is None
    step = 1e-6
    # Tokens do not interact, so one shift of all of them differentiates each.
    above, below = (ppo(logprobs.detach() + s, old, advantages, low=0.2, high=0.2)[0] for s in (step, -step))
    np.testing.assert_allclose(logprobs.grad.numpy(), ((above - below) / (2 * step)).detach().numpy(), atol=1e-6)
    assert logprobs.grad[0] == -1.0  # at ratio 1 the gradient is -A: plain policy gradient


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
def test_a_nan_is_an_error_that_names_its_tensor(name):
    tensors = {key: torch.zeros(3) for key in ("logprobs", "old_logprobs", "advantages")}
    tensors[name] = torch.tensor([0.0, math.nan, 0.0])
    with pytest.raises(TrainingError, match=f"^{name} holds 1 NaN in 3 tokens"):
        ppo(**tensors, low=0.2, high=0.2)


def test_the_difference_of_two_infinities_is_an_error():
    infinite = torch.tensor([-math.inf])
    with pytest.raises(TrainingError, match=r"^log_ratio holds 1 NaN"):
        ppo(infinite, infinite, torch.ones(1), low=0.2, high=0.2)
