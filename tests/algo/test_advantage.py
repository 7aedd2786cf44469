"""Estimators against a float64 reference written from docs/algorithms.md with plain loops."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.advantage import ADVANTAGES, GroupContext, discounted_sums, whiten, whitening_sums

GROUP = [name for name, estimator in ADVANTAGES.items() if estimator.level == "group"]
TOKEN = [name for name, estimator in ADVANTAGES.items() if estimator.level == "token"]


def reference_group(name, rewards, groups):
    out = np.zeros(len(rewards))
    for i, reward in enumerate(rewards):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i] or name == "flash_reinforce"]
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


def reference_token(name, reward, mask, kl, values, gamma, lam):
    """By the definition: every sum over what follows is written out, token by token."""
    generated = [t for t in range(len(mask)) if mask[t]]
    r = {t: -kl[t] + (reward if t == generated[-1] else 0.0) for t in generated}
    out = np.zeros(len(mask))
    for i, t in enumerate(generated):
        if name == "on_policy_distill":
            out[t] = -kl[t]
            continue
        for distance, u in enumerate(generated[i:]):
            if name == "reinforce":
                out[t] += gamma**distance * r[u]
                continue
            following = generated[i + distance + 1 :]
            delta = r[u] + (gamma * values[following[0]] if following else 0.0) - values[u]
            out[t] += (gamma * lam) ** distance * delta
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
    rewards = [1.0, 5.0, 0.0, 0.0, 1.0, 3.0]
    groups = [7, 2, 7, 7, 2, 7]
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
    other = 0.1 if name == "flash_reinforce" else -0.7
    assert run(name, [0.1, 0.1, 0.1, other], [0, 0, 0, 1]).tolist() == [0, 0, 0, 0]
    assert run(name, [], []).shape == (0,)


def test_flash_reinforce_by_hand_compares_with_the_whole_batch():
    # Mean of 1, 5, 0, 2 is 2, whatever the groups; a group with fewer rollouts than the other changes nothing.
    assert run("flash_reinforce", [1.0, 5.0, 0.0, 2.0], [0, 0, 0, 9]).tolist() == [-1, 3, -2, 0]
    assert run("flash_reinforce", [3.0], [4]).tolist() == [0]


@pytest.mark.parametrize("name", GROUP)
def test_the_built_in_group_estimators_ignore_the_context(name):
    pair = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1])
    ctx = GroupContext(pair[0] * 7, torch.tensor([1, 90, 3]), torch.tensor([True, False, True]))
    assert ADVANTAGES[name].fn(*pair, ctx).tolist() == ADVANTAGES[name].fn(*pair).tolist()


def token_level(name, reward, mask, kl=None, values=None, gamma=1.0, lam=1.0):
    kl, values = (torch.zeros(len(mask)).double() if x is None else torch.tensor(x).double() for x in (kl, values))
    mask = torch.tensor(mask, dtype=torch.bool)
    return ADVANTAGES[name].fn(reward, mask, kl=kl, values=values, gamma=gamma, lam=lam)


unit = st.floats(-3, 3)
one_segment = st.lists(st.tuples(st.booleans(), unit, unit), max_size=25).map(
    lambda rows: list(zip(*rows, strict=True)) or [()] * 3
)
discount = st.sampled_from([1.0, 0.99, 0.5])


@pytest.mark.parametrize("name", TOKEN)
@given(st.lists(one_segment, min_size=1, max_size=4), st.floats(-10, 10), discount, st.sampled_from([0.0, 0.95, 1.0]))
def test_token_estimators_match_the_reference_on_every_segment_of_a_rollout(name, segments, reward, gamma, lam):
    for mask, kl, values in segments:
        got = token_level(name, reward, mask, kl, values, gamma, lam)
        assert got.dtype == torch.float32 and got.shape == (len(mask),)
        expected = reference_token(name, reward, mask, kl, values, gamma, lam)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_reinforce_by_hand_sees_through_a_tool_output():
    # prompt, 2 generated, 2 tool tokens, 1 generated: R = 8 at the last, halved once per generated token before it.
    mask = [False, True, True, False, False, True]
    assert token_level("reinforce", 8.0, mask, gamma=0.5).tolist() == [0, 2, 4, 0, 0, 8]
    assert token_level("reinforce", 8.0, [True], gamma=0.5).tolist() == [8]
    assert token_level("reinforce", 8.0, [False, False], gamma=0.5).tolist() == [0, 0]


def test_reinforce_with_kl_by_hand():
    # r = -1, -2, 8 - 4 on the generated tokens: 4; -2 + 4/2 = 0; -1 + 0/2 = -1. The KL of the tool token is no one's.
    kl = [0.0, 1.0, 2.0, 100.0, 4.0]
    mask = [False, True, True, False, True]
    assert token_level("reinforce", 8.0, mask, kl, gamma=0.5).tolist() == [0, -1, 0, 0, 4]


def test_gae_by_hand():
    # Generated: V = 1, 2, 4 and r = 0, -1, 8; gamma = lam = 1/2, so gamma lam = 1/4.
    # delta: 0 + 2/2 - 1 = 0; -1 + 4/2 - 2 = -1; 8 + 0 - 4 = 4. A: 4; -1 + 4/4 = 0; 0 + 0/4 = 0.
    mask = [True, False, True, True]
    kl = [0.0, 50.0, 1.0, 0.0]
    values = [1.0, 99.0, 2.0, 4.0]
    assert token_level("gae", 8.0, mask, kl, values, 0.5, 0.5).tolist() == [0, 0, 0, 4]
    # lam = 0 leaves delta; lam = 1 the discounted return less V: 8; -1 + 8/2 = 3; 0 + 3/2 = 1.5 -> 0.5, 1, 4.
    assert token_level("gae", 8.0, mask, kl, values, 0.5, 0.0).tolist() == [0, 0, -1, 4]
    assert token_level("gae", 8.0, mask, kl, values, 0.5, 1.0).tolist() == [0.5, 0, 1, 4]
    assert token_level("gae", 8.0, [True], values=[3.0], gamma=0.5, lam=0.5).tolist() == [5]


def test_on_policy_distill_by_hand_uses_no_reward():
    kl = [9.0, 0.5, -2.0]
    mask = [False, True, True]
    assert token_level("on_policy_distill", 8.0, mask, kl, gamma=0.5).tolist() == [0, -0.5, 2]


@given(one_segment.filter(lambda s: any(s[0])), st.floats(-10, 10), discount)
def test_gae_with_lam_1_is_reinforce_less_the_value(segment, reward, gamma):
    """The returns `A + V` do not depend on the critic then: its target is what really came."""
    mask, kl, values = segment
    returns = token_level("gae", reward, mask, kl, values, gamma, 1.0) + torch.tensor(values) * torch.tensor(mask)
    np.testing.assert_allclose(returns, token_level("reinforce", reward, mask, kl, gamma=gamma), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize("mask", [[], [False], [False] * 5])
def test_a_segment_without_generated_tokens_is_all_zero(name, mask):
    ones = [1.0] * len(mask)
    assert token_level(name, 8.0, mask, ones, ones).tolist() == [0.0] * len(mask)


def test_gae_of_100_000_tokens_matches_the_loop_and_is_fast():
    rng = np.random.default_rng(0)
    n = 100_000
    mask = rng.random(n) < 0.7
    kl = rng.normal(size=n) / 10
    values = rng.normal(size=n)
    expected = np.zeros(n)
    following = (0.0, 0.0, 1.0)
    for t in np.flatnonzero(mask)[::-1]:
        value, advantage, reward = following
        expected[t] = reward - kl[t] + 0.999 * value - values[t] + 0.999 * 0.95 * advantage
        following = values[t], expected[t], 0.0
    began = time.process_time()
    got = token_level("gae", 1.0, mask, kl, values, 0.999, 0.95)
    assert time.process_time() - began < 0.5  # the loop over tensors would take seconds
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7, 8, 9, 1000])
@pytest.mark.parametrize("discount", [0.0, 0.25, 1.0])
def test_discounted_sums_match_the_loop_at_every_length(n, discount):
    x = torch.arange(1.0, n + 1).double()
    expected = []
    after = 0.0
    for value in reversed(x.tolist()):
        after = value + discount * after
        expected.insert(0, after)
    assert discounted_sums(x, discount).tolist() == pytest.approx(expected, rel=1e-12)
    assert x.tolist() == list(range(1, n + 1))  # the input stays


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
    advantages = torch.tensor([1.0, 99.0, 3.0])
    mask = torch.tensor([True, False, True])
    sums = whitening_sums(advantages, mask)
    assert sums.tolist() == [2, 4, 10]
    assert whiten(advantages, mask, sums).tolist() == pytest.approx([-1, 0, 1])


def test_whitening_without_signal_is_zero_and_never_nan():
    one = torch.tensor([True])
    none = torch.tensor([False])
    value = torch.tensor([5.0])
    assert whiten(value, one, whitening_sums(value, one)).tolist() == [0]
    assert whiten(value, none, whitening_sums(value, none)).tolist() == [0]


def test_every_estimator_is_a_complete_row():
    assert {name for name, e in ADVANTAGES.items() if e.whiten} == {"reinforce", "reinforce_baseline", "gae"}
    assert all(e.formula for e in ADVANTAGES.values())
    assert {name: e.needs for name, e in ADVANTAGES.items() if e.needs} == {
        "gae": ("values",),
        "on_policy_distill": ("ref_logprobs", "teacher"),
    }
    baselines = {name: e.baseline for name, e in ADVANTAGES.items() if e.level == "group"}
    assert baselines == {
        "reinforce_baseline": "group",
        "rloo": "group",
        "grpo": "group",
        "dr_grpo": "group",
        "flash_reinforce": "batch",
    }
    assert all(ADVANTAGES[name].baseline == "none" for name in TOKEN)
    assert set(ADVANTAGES) == set(GROUP) | set(TOKEN)
