"""How far the mean score of an evaluation may be from the true one, at a confidence of 95 %."""

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959964
"""The 97.5 % quantile of the normal distribution."""
RESAMPLES = 2000


def mean_interval(means: Sequence[float], *, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % interval `(low, high)` of the mean over prompts: percentile bootstrap, the prompt as the unit.

    means: the mean score of each prompt. Samples of one prompt resemble each other, so they count once, together.

    Where all means are the same number p (every prompt solved, or none; a single prompt), each resample has the
    mean p too and the bootstrap would claim certainty. There it is Wilson's score interval for n prompts,
    `(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`; for scores in [0, 1] it errs on the wide side, as a score
    of mean p varies at most as much as a coin. Equal means outside of [0, 1] have no interval: None.
    Raises `ValueError` without any prompt. The same means, in any order, give the same interval.

    Source: Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 1979 (resampling whole
    clusters); Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    distinct, counts = np.unique(np.asarray(means, np.float64), return_counts=True)
    n = int(counts.sum())
    if n == 0:
        raise ValueError("no prompt has a score: there is no mean to bound")
    if len(distinct) == 1:
        return _wilson(float(distinct[0]), n)

    # How often each distinct mean is drawn in n draws: the same as drawing n prompts, in much less memory.
    generator = np.random.default_rng(seed)
    times_drawn = generator.multinomial(n, counts / n, size=RESAMPLES)
    resampled_means = times_drawn @ distinct / n
    low, high = np.quantile(resampled_means, [0.025, 0.975])
    return float(low), float(high)


def _wilson(p: float, n: int) -> tuple[float, float] | None:
    """Wilson's score interval of the frequency p among n."""
    if not 0 <= p <= 1:
        return None

    centre = p + Z**2 / (2 * n)
    half_width = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    low = (centre - half_width) / scale
    high = (centre + half_width) / scale

    # Rounding may leave p outside of its interval at the borders.
    low = max(0.0, min(p, low))
    high = min(1.0, max(p, high))
    return low, high
