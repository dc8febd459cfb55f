"""Intervals of means, against scipy, a textbook's ratio estimator, and repeated draws."""

import numpy as np
import pytest
from scipy import stats

from ropelens.intervals import mean_and_error, paired_interval


def test_for_clusters_of_one_size_it_is_the_t_test_of_means():
    change = np.random.default_rng(0).normal(0.02, 0.1, size=(9, 4))
    group = np.repeat([f"book {n}" for n in range(9)], 4)
    shuffled = np.random.default_rng(1).permutation(36)
    found = paired_interval(change.ravel()[shuffled], group=group[shuffled])
    theirs = stats.ttest_1samp(change.mean(1), 0.0).confidence_interval(0.95)
    assert found == pytest.approx((change.mean(), theirs.low, theirs.high), rel=1e-12)
    alone = paired_interval(change.ravel())
    assert paired_interval(change.ravel(), group=np.arange(36)) == pytest.approx(alone)


def test_for_clusters_of_any_size_it_is_the_textbooks_ratio():
    """R = sum y / sum m has the variance s^2 / (n mean(m)^2), s^2 the variance of y - R m."""
    random = np.random.default_rng(2)
    group = random.integers(0, 7, size=40)
    weight = random.integers(20, 500, size=40).astype(float)
    change = random.normal(size=40)
    y = [
        sum(weight[n] * change[n] for n in np.flatnonzero(group == g)) for g in range(7)
    ]
    m = [sum(weight[n] for n in np.flatnonzero(group == g)) for g in range(7)]
    ratio = sum(y) / sum(m)
    s2 = sum((a - ratio * b) ** 2 for a, b in zip(y, m, strict=True)) / 6
    error = (s2 / 7) ** 0.5 / (sum(m) / 7)
    assert mean_and_error(change, weight, group) == pytest.approx((ratio, error, 7))
    half = stats.t(6).ppf(0.975) * error
    found = paired_interval(change, weight, group)
    assert found == pytest.approx((ratio, ratio - half, ratio + half))


@pytest.mark.parametrize("documents", [8, 24])
def test_sequences_of_one_document_are_drawn_together(documents: int):
    """Intervals over documents hold the truth in 95 % of draws, but not over sequences."""
    rng = np.random.default_rng(documents)
    shape = (2000, documents, 6)
    alike = 0.4
    change = alike**0.5 * rng.normal(size=(*shape[:2], 1))
    change = change + (1 - alike) ** 0.5 * rng.normal(size=shape)
    group = np.repeat(np.arange(documents), 6)

    def covered(group: np.ndarray | None) -> float:
        bounds = [paired_interval(each.ravel(), group=group)[1:] for each in change]
        return float(np.mean([low <= 0 <= high for low, high in bounds]))

    assert 0.935 < covered(group) < 0.965
    assert covered(None) < 0.8


def test_one_cluster_has_no_interval():
    for values, group in (
        (np.array([0.5]), None),
        (np.array([0.3, 0.7]), np.array([4, 4])),
    ):
        mean, low, high = paired_interval(values, group=group)
        assert mean == 0.5
        assert np.isnan([low, high]).all()
