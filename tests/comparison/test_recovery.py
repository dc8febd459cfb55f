"""Tests of gaps to the control, recovered shares, and the tokens that recover them."""

import random

import numpy as np
import pytest

from ropelens.comparison.recovery import (
    RESAMPLES,
    mean_change,
    measure_recovery,
    recovered_share,
    tokens_to_reach,
)

TOKENS = np.array([0, 100, 200, 400])
DOCUMENTS = np.repeat(np.arange(10), 3)


def changes(gaps: tuple[float, ...], *, noise: float = 0.1) -> np.ndarray:
    """Changes [seed, step, sequence] around the gap of each step, alike at all steps."""
    drawn = np.random.default_rng(0).normal(size=(2, 1, len(DOCUMENTS)))
    drawn -= drawn.mean()
    return np.array(gaps)[None, :, None] * (1 + noise * drawn)


def test_recovered_is_one_minus_the_gap_divided_by_the_first_gap():
    recovery = measure_recovery(changes((0.8, 0.4, 0.2, 0.04)), DOCUMENTS, TOKENS)
    np.testing.assert_allclose(recovery.gap.value, [0.8, 0.4, 0.2, 0.04])
    np.testing.assert_allclose(recovery.recovered.value, [0, 0.5, 0.75, 0.95])


@pytest.mark.parametrize(
    ("recovered", "share", "expected"),
    [
        ([0, 0.25, 0.75, 0.9], 0.5, 150),  # halfway between 100 and 200
        ([0, 0.5, 0.5, 0.5], 0.5, 100),  # reached exactly at an evaluated step
        (
            [0, 0.8, 0.2, 0.9],
            0.9,
            400,
        ),  # the running maximum rises from 0.8, not from 0.2
        ([0, 0.8, 0.2, 1.0], 0.9, 300),
        ([0, -0.5, 0.5, 0.5], 0.25, 150),  # the running maximum stays 0 until 100
        ([0, 0.1, 0.2, 0.4], 0.5, np.inf),
        ([np.nan] * 4, 0.5, np.nan),
    ],
)
def test_tokens_are_interpolated_on_the_running_maximum(recovered, share, expected):
    place = tokens_to_reach(share, np.array([recovered], dtype=float), TOKENS)
    np.testing.assert_allclose(place, [expected])


@pytest.mark.parametrize(("gap", "is_defined"), [(0.019, False), (0.021, True)])
def test_a_small_gap_before_training_has_no_recovered_share(gap, is_defined):
    recovery = measure_recovery(
        changes((gap, 0.01, 0.0, -0.01), noise=0), DOCUMENTS, TOKENS
    )
    assert np.isfinite(recovery.recovered.value).all() == is_defined
    assert np.isfinite(recovery.tokens_to_half.value) == is_defined
    assert recovery.gap.value[-1] == pytest.approx(-0.01)  # reported as such


def test_the_lower_bound_and_not_the_gap_decides():
    spread = changes((0.05, 0.05, 0.05, 0.05), noise=4)
    recovery = measure_recovery(spread, DOCUMENTS, TOKENS)
    assert recovery.gap.low[0] < 0.02 < recovery.gap.value[0]
    assert np.isnan(recovery.recovered.value).all()


def test_equal_losses_have_a_gap_of_exactly_zero():
    recovery = measure_recovery(np.zeros((2, 4, 30)), DOCUMENTS, TOKENS)
    for numbers in (recovery.gap.value, recovery.gap.low, recovery.gap.high):
        assert (numbers == 0).all()


def test_a_share_that_some_resamples_reach_has_an_interval_up_to_not_reached():
    drawn = changes((1.0, 0.9, 0.7, 0.5), noise=0)
    drawn[:, -1] += 0.4 * np.random.default_rng(1).normal(size=len(DOCUMENTS))
    recovery = measure_recovery(drawn, DOCUMENTS, TOKENS)
    assert np.isfinite(recovery.tokens_to_half.low)
    assert recovery.tokens_to_half.high == np.inf


def test_intervals_match_a_slow_bootstrap_of_documents():
    """Draw whole documents again and again, and take all sequences of each one."""
    documents = np.repeat(np.arange(12), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4])
    noise = np.random.default_rng(3).normal(size=(3, 4, len(documents)))
    change = np.array([1.0, 0.7, 0.4, 0.2])[None, :, None] + 0.3 * noise
    recovery = measure_recovery(change, documents, TOKENS)
    generator = random.Random(0)
    gaps = []
    shares = []
    for _ in range(RESAMPLES):
        drawn = [generator.randrange(12) for _ in range(12)]
        losses: list[np.ndarray] = []
        for document in drawn:
            for sequence in np.flatnonzero(documents == document):
                losses.append(change[:, :, sequence].mean(0))
        gap = np.mean(losses, axis=0)
        gaps.append(gap)
        shares.append(1 - gap[-1] / gap[0])
    low, high = np.quantile(gaps, [0.025, 0.975], axis=0)
    width = high - low
    np.testing.assert_allclose(recovery.gap.low, low, atol=0.1 * width.max())
    np.testing.assert_allclose(recovery.gap.high, high, atol=0.1 * width.max())
    low, high = np.quantile(shares, [0.025, 0.975])
    share = recovery.recovered
    assert share.low[-1] == pytest.approx(low, abs=0.1 * (high - low))
    assert share.high[-1] == pytest.approx(high, abs=0.1 * (high - low))


def test_gaps_of_all_steps_are_resampled_together():
    """Documents whose gap shrinks in proportion have a certain recovered share."""
    recovery = measure_recovery(changes((1.0, 0.5, 0.2, 0.1)), DOCUMENTS, TOKENS)
    assert recovery.gap.high[0] - recovery.gap.low[0] > 0.01
    share = recovery.recovered
    np.testing.assert_allclose(share.low, share.value, atol=1e-12)
    np.testing.assert_allclose(share.high, share.value, atol=1e-12)


def test_seeds_are_averaged_within_a_document_before_documents_are_drawn():
    opposite = np.stack([np.ones(30), -np.ones(30)])  # seeds differ, documents do not
    change = mean_change(opposite, DOCUMENTS)
    assert (change.value, change.low, change.high) == (0, 0, 0)


def test_the_share_of_a_single_run_is_a_pure_function():
    gap = np.array([2.0, 1.0, 0.5])
    assert recovered_share(gap, defined=True).tolist() == [0, 0.5, 0.75]
    assert np.isnan(recovered_share(gap, defined=False)).all()
