"""Intervals of means, from what was measured in pairs."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95


def paired_interval(
    change: Float[np.ndarray, " pair"], weight: Float[np.ndarray, " pair"] | None = None
) -> tuple[float, float, float]:
    """The weighted mean of paired differences, and the ends of its 95 % interval.

    Student's t with n - 1 degrees of freedom around the ratio estimator sum(w d) / sum(w),
    whose variance is n / (n - 1) sum(w^2 (d - mean)^2) / sum(w)^2 (Cochran 1977, *Sampling
    Techniques*, eq. 6.13, without the finite population correction). With equal weights
    this is `scipy.stats.ttest_1samp`, and without `weight` they are equal. One difference
    has no interval: NaN.
    """
    weight = np.ones(len(change)) if weight is None else weight
    count, whole = len(change), weight.sum()
    mean = float((weight * change).sum() / whole)
    if count < 2:
        return mean, math.nan, math.nan
    spread = (weight**2 * (change - mean) ** 2).sum() * count / (count - 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * np.sqrt(spread) / whole)
    return mean, mean - half, mean + half
