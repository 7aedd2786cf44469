"""Estimators against a float64 reference written from docs/algorithms.md with plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.advantage import ADVANTAGES, whiten, whitening_sums

GROUP = [name for name, estimator in ADVANTAGES.items() if estimator.level == "group"]


def reference_group(name, rewards, groups):
    out = np.zeros(len(rewards))
    for i, reward in enumerate(rewards):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        n = len(mine)
        mean = sum(mine) / n
        if n == 1:
            continue
        if name == "rloo":
            out[i] = reward - (sum(mine) - reward) / (n - 1)
        elif name == "grpo":
            std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (n - 1))
            out[i] = 0.0 if max(mine) == min(mine) else (reward - mean) / (std + 1e-6)
        else:
            out[i] = reward - mean
    return out


def reference_reinforce(reward, mask, gamma):
    out, follow = np.zeros(len(mask)), None
    for t in reversed(range(len(mask))):
        if mask[t]:
            follow = reward if follow is None else gamma * follow
            out[t] = follow
    return out


def reference_whiten(advantages, masks):
    inside = [a for row, mask in zip(advantages, masks, strict=True) for a, m in zip(row, mask, strict=True) if m]
    mean = sum(inside) / len(inside) if inside else 0.0
    variance = sum((a - mean) ** 2 for a in inside) / len(inside) if inside else 0.0
    return [
        [(a - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for a, m in zip(row, mask, strict=True)]
        for row, mask in zip(advantages, masks, strict=True)
    ]


def run(name, rewards, groups):
    return ADVANTAGES[name].fn(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64))


rows = st.lists(st.tuples(st.integers(-60, 60).map(lambda r: r / 6), st.integers(-3, 9)), min_size=1, max_size=40)


@pytest.mark.parametrize("name", GROUP)
@given(rows)
def test_group_estimators_match_the_reference_on_ragged_interleaved_groups(name, pairs):
    rewards, groups = zip(*pairs, strict=True)
    got = run(name, rewards, groups)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), reference_group(name, rewards, groups), rtol=1e-6, atol=1e-6)


def test_group_estimators_by_hand():
    # Group 7: rewards 1, 0, 0, 3: sum 4, mean 1, deviations 0 -1 -1 2, sum of squares 6, unbiased var 6/3 = 2.
    # Group 2: rewards 5, 1: mean 3, deviations 2 -2, unbiased var 8/1.
    rewards, groups = [1.0, 5.0, 0.0, 0.0, 1.0, 3.0], [7, 2, 7, 7, 2, 7]
    centred = [0, 2, -1, -1, -2, 2]
    assert run("dr_grpo", rewards, groups).tolist() == centred
    assert run("reinforce_baseline", rewards, groups).tolist() == centred
    # rloo: 1 - 3/3 = 0; 5 - 1 = 4; 0 - 4/3; 0 - 4/3; 1 - 5 = -4; 3 - 1/3.
    assert run("rloo", rewards, groups).tolist() == pytest.approx([0, 4, -4 / 3, -4 / 3, -4, 3 - 1 / 3])
    assert run("grpo", rewards, groups).tolist() == pytest.approx(
        [0, 2 / 8**0.5, -1 / 2**0.5, -1 / 2**0.5, -2 / 8**0.5, 2 / 2**0.5], rel=1e-5
    )


@pytest.mark.parametrize("name", GROUP)
def test_no_signal_is_exactly_zero(name):
    # 0.1 summed three times is 0.30000000000000004: a naive mean would leave a residue.
    assert run(name, [0.1, 0.1, 0.1, -0.7], [0, 0, 0, 1]).tolist() == [0, 0, 0, 0]
    assert run(name, [], []).shape == (0,)


@given(st.floats(-10, 10), st.lists(st.booleans(), max_size=30), st.sampled_from([1.0, 0.99, 0.5]))
def test_reinforce_matches_the_reference(reward, mask, gamma):
    got = ADVANTAGES["reinforce"].fn(reward, torch.tensor(mask, dtype=torch.bool), gamma=gamma)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), reference_reinforce(reward, mask, gamma), rtol=1e-6, atol=1e-6)


def test_reinforce_by_hand_sees_through_a_tool_output():
    # prompt, 2 generated, 2 tool tokens, 1 generated: R = 8 at the last, halved once per generated token before it.
    mask = torch.tensor([False, True, True, False, False, True])
    assert ADVANTAGES["reinforce"].fn(8.0, mask, gamma=0.5).tolist() == [0, 2, 4, 0, 0, 8]
    assert ADVANTAGES["reinforce"].fn(8.0, torch.tensor([True]), gamma=0.5).tolist() == [8]
    assert ADVANTAGES["reinforce"].fn(8.0, torch.tensor([False, False]), gamma=0.5).tolist() == [0, 0]


segment = st.lists(st.tuples(st.floats(-20, 20, width=32), st.booleans()), min_size=1, max_size=12)


@given(st.lists(segment, min_size=1, max_size=6))
def test_whitening_from_added_sums_matches_the_reference_over_the_whole_batch(batch):
    advantages = [[a for a, _ in row] for row in batch]
    masks = [[m for _, m in row] for row in batch]
    pairs = [(torch.tensor(a), torch.tensor(m)) for a, m in zip(advantages, masks, strict=True)]
    sums = sum(whitening_sums(a, m) for a, m in pairs)
    assert sums.dtype == torch.float64 and sums.shape == (3,)
    for (a, m), expected in zip(pairs, reference_whiten(advantages, masks), strict=True):
        np.testing.assert_allclose(whiten(a.double(), m, sums).numpy(), expected, rtol=1e-6, atol=1e-6)
        assert whiten(a, m, sums).dtype == torch.float32


def test_whitening_by_hand():
    # Inside the mask 1, 3: mean 2, biased variance 1. The 99 is outside and does not count.
    advantages, mask = torch.tensor([1.0, 99.0, 3.0]), torch.tensor([True, False, True])
    sums = whitening_sums(advantages, mask)
    assert sums.tolist() == [2, 4, 10]
    assert whiten(advantages, mask, sums).tolist() == pytest.approx([-1, 0, 1])


def test_whitening_without_signal_is_zero_and_never_nan():
    one, none = torch.tensor([True]), torch.tensor([False])
    value = torch.tensor([5.0])
    assert whiten(value, one, whitening_sums(value, one)).tolist() == [0]
    assert whiten(value, none, whitening_sums(value, none)).tolist() == [0]


def test_every_estimator_is_a_complete_row():
    assert {name for name, e in ADVANTAGES.items() if e.whiten} == {"reinforce", "reinforce_baseline"}
    assert all(e.formula for e in ADVANTAGES.values())
