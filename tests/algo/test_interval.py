"""The interval covers what it says, counts prompts and not samples, and is honest where nothing varies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.algo.interval import mean_interval


def coverage(draw, truth: float, repeats: int = 600) -> float:
    """How often the interval of `draw(rng)` holds the truth."""
    rng = np.random.default_rng(1)
    intervals = [mean_interval(draw(rng)) for _ in range(repeats)]
    return np.mean([low <= truth <= high for low, high in intervals])


@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.8])
def test_it_covers_the_truth_of_one_sample_per_prompt(n, p):
    assert 0.92 < coverage(lambda rng: rng.random(n) < p, p) < 0.98


@pytest.mark.parametrize("n", [50, 200])
def test_it_covers_the_truth_of_prompts_of_different_difficulty(n):
    """8 samples of each; the difficulty is Beta(1/2, 1/2), of mean 1/2: most prompts are easy or hard."""

    def draw(rng):
        return rng.binomial(8, rng.beta(0.5, 0.5, n)) / 8

    assert 0.92 < coverage(draw, 0.5) < 0.98


def test_eight_samples_of_a_prompt_are_not_eight_prompts():
    prompts = [0.0, 1.0] * 25
    low, high = mean_interval(prompts)
    # sd of a mean of 50 coins: 1/(2 sqrt 50) = 0.0707, times 1.96 = 0.1386; of 400: 0.049. Means are multiples of 0.02.
    assert high - low == pytest.approx(2 * 0.1386, abs=0.02)
    wrong_low, wrong_high = mean_interval(prompts * 8)
    assert wrong_high - wrong_low == pytest.approx(2 * 0.049, abs=0.01)


def test_it_is_the_quantiles_of_resampled_prompts():
    """Against the definition: draw n prompts with replacement, take the mean, many times."""
    means = np.array([0.0, 0.125, 0.5, 0.5, 0.875, 1.0, 1.0, 1.0, -2.0, 7.5])
    rng = np.random.default_rng(3)
    resampled = means[rng.integers(0, 10, (20_000, 10))].mean(axis=1)
    assert mean_interval(means) == pytest.approx(
        np.quantile(resampled, [0.025, 0.975]), abs=0.1
    )  # sd of the mean: 0.75


# z² = 3.841459
@pytest.mark.parametrize(("means", "low", "high"), [
    ([1.0] * 50, 50 / (50 + 3.841459), 1.0),  # all right: n / (n + z²) = 0.929
    ([0.0] * 50, 0.0, 3.841459 / (50 + 3.841459)),  # all wrong: z² / (n + z²) = 0.071
    ([1.0], 1 / 4.841459, 1.0),  # one prompt says little: 0.207
    ([0.5] * 4, 0.5 - 0.34996, 0.5 + 0.34996),  # half = z sqrt(1/16 + z²/64) / (1 + z²/4) = 0.68605 / 1.96036
])  # fmt: skip
def test_where_no_prompt_differs_it_is_wilsons(means, low, high):
    assert mean_interval(means) == pytest.approx((low, high), abs=1e-4)


def test_a_score_outside_of_0_and_1_that_never_varies_has_no_interval():
    assert mean_interval([7.5] * 20) is None
    assert mean_interval([-1.0]) is None
    low, high = mean_interval([7.5, -1.0] * 10)
    assert -1.0 < low < 3.25 < high < 7.5


def test_no_prompt_is_an_error():
    with pytest.raises(ValueError, match="no prompt"):
        mean_interval([])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.randoms())
def test_it_stays_among_the_scores_and_their_order_does_not_matter(means, random):
    low, high = mean_interval(means)
    assert 0 <= low <= high <= 1
    if len(set(means)) > 1:
        assert min(means) - 1e-9 <= low and high <= max(means) + 1e-9
    shuffled = list(means)
    random.shuffle(shuffled)
    assert mean_interval(shuffled) == (low, high)
