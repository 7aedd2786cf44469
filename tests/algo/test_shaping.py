"""Reward shaping: each rule by hand, the order of the rules, and both against a reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.shaping import Shaping, shape_reward


def shape(reward, peak=10, truncated=False, max_len=100, clip_range=(-10.0, 10.0), **penalty):
    return shape_reward(reward, Shaping(max_len, clip_range, **penalty), peak=peak, truncated=truncated)


def test_a_reward_is_clipped_to_its_range():
    assert [shape(r, clip_range=(-1.0, 2.0)) for r in (-7.0, -1.0, 0.5, 2.0, 9.0)] == [-1, -1, 0.5, 2, 2]


# The buffer is the last 20 of 100 tokens, the factor 3: no penalty up to 80, then 3 * (peak - 80) / 20, 3 from 100 on.
@pytest.mark.parametrize(("peak", "shaped"), [(1, 1), (80, 1), (81, 0.85), (90, -0.5), (100, -2), (130, -2)])
def test_overlong_by_hand(peak, shaped):
    assert shape(1.0, peak, overlong_buffer_len=20, overlong_penalty_factor=3.0) == pytest.approx(shaped)


def test_the_overlong_penalty_is_1_if_nothing_else_is_said():
    assert shape(1.0, 90, overlong_buffer_len=20) == 0.5


@pytest.mark.parametrize(("reward", "coef", "shaped"), [
    (4.0, 0.5, 2.0), (4.0, 0.0, 0.0), (-4.0, 0.5, -2.0), (4.0, 1.0, 4.0),  # R * coef
    (4.0, -0.5, -0.5), (-4.0, -0.5, -0.5),  # coef itself
])  # fmt: skip
def test_stop_properly_by_hand(reward, coef, shaped):
    assert shape(reward, truncated=True, stop_properly_penalty_coef=coef) == shaped
    assert shape(reward, truncated=False, stop_properly_penalty_coef=coef) == reward
    assert shape(reward, truncated=True) == reward


def test_the_clip_comes_last():
    # 9 - 3 = 6, clipped to 5; clipping first would give 5 - 3 = 2. And 0.5 * 8 = 4 is inside.
    settings = {"overlong_buffer_len": 20, "overlong_penalty_factor": 3.0}
    assert shape(9.0, 100, clip_range=(-5.0, 5.0), **settings) == 5
    assert shape(-4.0, 100, clip_range=(-5.0, 5.0), **settings) == -5
    assert shape(8.0, truncated=True, clip_range=(-5.0, 5.0), stop_properly_penalty_coef=0.5) == 4


def reference(reward, peak, truncated, max_len, clip_range, length, factor, coef):
    if length is not None:
        into_buffer = peak - (max_len - length)
        if into_buffer > 0:
            reward = reward - factor * min(into_buffer, length) / length
    elif coef is not None and truncated:
        if coef < 0:
            reward = coef
        else:
            reward = reward * coef
    if reward < clip_range[0]:
        return clip_range[0]
    return clip_range[1] if reward > clip_range[1] else reward


@given(
    st.floats(-20, 20),
    st.integers(0, 300),
    st.booleans(),
    st.none() | st.integers(1, 200),
    st.floats(0, 5),
    st.none() | st.floats(-2, 1),
)
def test_it_matches_the_reference(reward, peak, truncated, length, factor, coef):
    got = shape(
        reward,
        peak,
        truncated,
        200,
        overlong_buffer_len=length,
        overlong_penalty_factor=factor,
        stop_properly_penalty_coef=coef,
    )
    expected = reference(reward, peak, truncated, 200, (-10.0, 10.0), length, factor, coef)
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
