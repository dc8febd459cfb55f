"""Means and intervals of numbers that were measured in clusters, such as documents."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped
from scipy import special  # scipy.stats takes half a second

LEVEL = 0.95

ROUNDING_ERROR = 1e-6  # of float32 losses

ENOUGH_DOCUMENTS = 8  # with fewer documents, a result holds only for this text


class Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


NO_INTERVAL = Interval(math.nan, math.nan)


def mean_and_error(
    values: Float[np.ndarray, " unit"],
    weight: Float[np.ndarray, " unit"] | None = None,
    group: Shaped[np.ndarray, " unit"] | None = None,
) -> tuple[float, float, int]:
    """The weighted mean of `values`, the standard error, and the number of clusters.

    Units of one `group` are a cluster; without groups each unit is a cluster. The mean is the
    ratio estimator sum(w x) / sum(w). If r is the sum over a cluster of w (x - mean), the
    variance is n / (n - 1) sum(r^2) / sum(w)^2 for n clusters (Cochran 1977, *Sampling
    Techniques*, eqs. 6.13 and 9A.2, without the finite population correction). NaN if n is 1.
    """
    if weight is None:
        weight = np.ones(len(values))
    mean = float((weight * values).sum() / weight.sum())
    residual = weight * (values - mean)
    if group is not None:
        _, cluster = np.unique(group, return_inverse=True)
        residual = np.bincount(cluster, weights=residual).astype(np.float64)
    count = len(residual)
    if count < 2:
        return mean, math.nan, count
    error = np.sqrt((residual**2).sum() * count / (count - 1)) / weight.sum()
    return mean, float(error), count


def jackknife_half(
    without: Float[np.ndarray, " unit *shape"],
) -> Float[np.ndarray, "*shape"]:
    """Half of a 95 % interval by the jackknife. `without` has the number without each unit.

    Efron and Tibshirani 1993, *An Introduction to the Bootstrap*, eq. 11.5, with Student's t.
    """
    count = len(without)
    error = np.sqrt((count - 1) * without.var(0))
    return np.asarray(_errors_in_half(count) * error)


def paired_interval(
    change: Float[np.ndarray, " pair"],
    weight: Float[np.ndarray, " pair"] | None = None,
    group: Shaped[np.ndarray, " pair"] | None = None,
) -> tuple[float, float, float]:
    """The weighted mean of paired differences, and the ends of its 95 % interval.

    The interval uses Student's t with one degree of freedom fewer than clusters, and is NaN for
    one cluster. It equals `scipy.stats.ttest_1samp` if pairs are clusters with equal weights.
    """
    mean, error, count = mean_and_error(change, weight, group)
    half = math.nan
    if count > 1:
        half = _errors_in_half(count) * error
    return mean, mean - half, mean + half


def _errors_in_half(count: int) -> float:
    """Half of a 95 % interval in standard errors: Student's t for `count` clusters."""
    return float(special.stdtrit(count - 1, (1 + LEVEL) / 2))
