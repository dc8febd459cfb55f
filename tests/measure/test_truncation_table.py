"""What a sweep comes to: a row an edit, its changes, and how sure they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.measure.truncation_table import COLUMNS
from ropelens.statistics.intervals import paired_interval


@pytest.mark.parametrize("weight", [1.0, 511.0])
def test_the_interval_for_equal_weights_is_the_paired_t_test(weight: float) -> None:
    change = np.random.default_rng(0).normal(0.02, 0.1, size=13)
    mean, low, high = paired_interval(change, np.full(13, weight))
    theirs = stats.ttest_1samp(change, 0.0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert mean == pytest.approx(change.mean())


def test_intervals_of_unequal_sequences_hold_the_truth_as_often_as_they_say() -> None:
    """The truth: the change of a token drawn from all tokens, sequences of any length."""
    rng = np.random.default_rng(1)
    weight = rng.integers(20, 500, size=(2000, 24)).astype(float)
    change = 0.3 + rng.normal(size=weight.shape) * (0.1 + 5 / np.sqrt(weight))
    inside = [
        low <= 0.3 <= high
        for _, low, high in map(paired_interval, change, weight)
    ]  # fmt: skip
    assert 0.93 < np.mean(inside) < 0.97


def test_one_sequence_has_no_interval() -> None:
    assert paired_interval(np.array([0.5]), np.array([9.0]))[0] == 0.5
    assert np.isnan(paired_interval(np.array([0.5]), np.array([9.0]))[1:]).all()


@pytest.fixture(scope="module")
def sweep() -> xr.Dataset:
    return synthetic_truncation()


def test_the_summary_has_a_row_an_edit(sweep: xr.Dataset) -> None:
    table = rl.summarize_truncation(sweep)
    assert tuple(table.columns) == COLUMNS
    assert table["edit"].tolist() == sweep["edit"].values.tolist()
    none = table.iloc[0]
    for name in ("loss", "repeat_loss", "retrieval"):
        assert (none[f"{name}_change"], none[f"{name}_change_low"]) == (0, 0)
    weight = sweep["predicted_tokens"].values
    np.testing.assert_allclose(
        table["loss"], np.average(sweep["loss"].values, axis=1, weights=weight)
    )
    np.testing.assert_allclose(table["loss_change"], table["loss"] - none["loss"], atol=1e-12)
    np.testing.assert_allclose(
        table["retrieval"], sweep["retrieval"].mean(["retrieval_length", "depth"])
    )
    per_trial = sweep["retrieval_hit"].mean(["retrieval_length", "depth"])
    theirs = stats.ttest_1samp((per_trial[8] - per_trial[0]).values, 0).confidence_interval()
    row = table.iloc[8]
    assert row["retrieval_change_low"] == pytest.approx(theirs.low)
    assert row["retrieval_change_high"] == pytest.approx(theirs.high)


def test_the_summary_counts_labels_and_names_the_head_that_changed(sweep: xr.Dataset) -> None:
    sweep = sweep.copy(deep=True)
    sweep["label"][:] = "sink"
    sweep["label"][2, 0, :3] = "semantic"
    sweep["label"][2, 1, 0] = ""
    sweep["label"][3] = ""
    sweep["attention_change"][2, 4, 5] = 9.0
    sweep["attention_change"][2, 0, 0] = np.nan
    table = rl.summarize_truncation(sweep)
    assert table["labels_changed"].tolist()[:3] == [0, 0, 3]
    assert table["labels_changed_share"][2] == 3 / 39
    assert np.isnan(table["labels_changed"][3])
    assert (table["changed_most"][2], table["largest_attention_change"][2]) == ("L4 H5", 9.0)
    assert table["changed_most"][0] == ""
    scores = sweep["induction"].values.reshape(sweep.sizes["edit"], -1)
    of_best = scores[:, scores[0].argmax()]
    np.testing.assert_allclose(table["induction_change"], of_best - of_best[0])


def test_changes_of_heads_have_intervals(sweep: xr.Dataset) -> None:
    table = rl.summarize_truncation(sweep)
    scores = sweep["induction"].values[0]
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    trials = sweep["trial_induction"].values[:, :, layer, head]
    theirs = stats.ttest_1samp(trials[5] - trials[0], 0).confidence_interval()
    row = table.iloc[5]
    assert row["induction_change_low"] == pytest.approx(theirs.low)
    assert row["induction_change_high"] == pytest.approx(theirs.high)
    again = sweep["labels_changed_resampled"].values[5]
    assert row["labels_changed_low"] == np.quantile(again, 0.025)
    share = np.quantile(again, 0.975) / sweep["label"][0].size
    assert row["labels_changed_share_high"] == pytest.approx(share)


def test_what_was_not_measured_is_unknown(sweep: xr.Dataset) -> None:
    some = sweep[["loss", "predicted_tokens"]]
    table = rl.summarize_truncation(some)
    assert tuple(table.columns) == COLUMNS
    assert table["loss_change"].notna().all()
    for name in ("repeat_loss", "retrieval_change", "labels_changed", "changed_most"):
        assert table[name].isna().all()


def test_other_datasets_are_no_sweep(sweep: xr.Dataset) -> None:
    for other, seen in (
        (sweep.drop_vars("kept"), "no coordinate kept"),
        (sweep.isel(edit=slice(1, None)), "its first entry is 'slow'"),
    ):
        with pytest.raises(BadArgument) as raised:
            rl.summarize_truncation(other)
        assert raised.value.line.startswith(f"This is no truncation sweep; seen: {seen}")


def test_a_sweep_is_saved_and_opened(sweep: xr.Dataset, tmp_path) -> None:
    path = rl.save_results(sweep, tmp_path / "truncation.nc")
    xr.testing.assert_identical(rl.open_truncation(path), sweep)
    pd.testing.assert_frame_equal(
        rl.summarize_truncation(rl.open_truncation(path)), rl.summarize_truncation(sweep)
    )
    rl.save_results(sweep.assign_attrs(kind="profile"), path)
    with pytest.raises(BadArgument, match="it says that it is of kind profile"):
        rl.open_truncation(path)
    with pytest.raises(BadArgument, match="There is no truncation sweep at"):
        rl.open_truncation(tmp_path / "missing.nc")
