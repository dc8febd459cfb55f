"""Intervals of means, against scipy, a textbook's ratio estimator, and repeated draws."""

import numpy as np
import pytest
from scipy import stats

from ropelens.intervals import mean_and_error, paired_interval


def test_for_clusters_of_one_size_it_is_the_t_test_of_means():
    change = np.random.default_rng(0).normal(0.02, 0.1, size=(9, 4))
    group = np.repeat([f"book {n}" for n in range(9)], 4)
    shuffled = np.random.default_rng(1).permutation(36)
    interval = paired_interval(change.ravel()[shuffled], group=group[shuffled])
    of_means = stats.ttest_1samp(change.mean(1), 0.0).confidence_interval(0.95)
    expected = (change.mean(), of_means.low, of_means.high)
    assert interval == pytest.approx(expected, rel=1e-12)


def test_clusters_of_one_value_change_nothing():
    change = np.random.default_rng(0).normal(0.02, 0.1, size=36)
    expected = paired_interval(change)
    interval = paired_interval(change, group=np.arange(36))
    assert interval == pytest.approx(expected)


def test_for_clusters_of_any_size_it_is_the_textbooks_ratio():
    """R = sum y / sum m has the variance s^2 / (n mean(m)^2), s^2 the variance of y - R m."""
    random = np.random.default_rng(2)
    group = random.integers(0, 7, size=40)
    weight = random.integers(20, 500, size=40).astype(float)
    change = random.normal(size=40)
    y = np.zeros(7)
    m = np.zeros(7)
    for value in range(40):
        y[group[value]] += weight[value] * change[value]
        m[group[value]] += weight[value]
    ratio = y.sum() / m.sum()
    variance = ((y - ratio * m) ** 2).sum() / 6
    error = (variance / 7) ** 0.5 / m.mean()
    half = stats.t(6).ppf(0.975) * error
    expected = (ratio, ratio - half, ratio + half)
    assert mean_and_error(change, weight, group) == pytest.approx((ratio, error, 7))
    assert paired_interval(change, weight, group) == pytest.approx(expected)


@pytest.mark.parametrize("documents", [8, 24])
def test_sequences_of_one_document_are_drawn_together(documents: int):
    """Intervals over documents hold the truth in 95 % of draws, but not over sequences."""
    rng = np.random.default_rng(documents)
    shape = (2000, documents, 6)
    alike = 0.4
    change = alike**0.5 * rng.normal(size=(*shape[:2], 1))
    change = change + (1 - alike) ** 0.5 * rng.normal(size=shape)
    group = np.repeat(np.arange(documents), 6)

    def share_with_truth(group: np.ndarray | None) -> float:
        """Share of the draws whose interval holds the true change, 0."""
        covered = []
        for drawn in change:
            _, low, high = paired_interval(drawn.ravel(), group=group)
            covered.append(low <= 0 <= high)
        return float(np.mean(covered))

    assert 0.935 < share_with_truth(group) < 0.965
    assert share_with_truth(None) < 0.8


ONE_CLUSTER = {
    "one value": ([0.5], None),
    "two values of one cluster": ([0.3, 0.7], [4, 4]),
}


@pytest.mark.parametrize(
    ("values", "group"), ONE_CLUSTER.values(), ids=ONE_CLUSTER.keys()
)
def test_one_cluster_has_no_interval(values: list[float], group: list[int] | None):
    clusters = None if group is None else np.array(group)
    mean, low, high = paired_interval(np.array(values), group=clusters)
    assert mean == 0.5
    assert np.isnan(low)
    assert np.isnan(high)
