"""The table of a sweep: one row per edit, with changes and their intervals."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from ropelens.interventions.truncation_table import COLUMNS, best_head, summarize_truncation


def test_the_summary_has_a_row_for_each_edit(sweep: xr.Dataset) -> None:
    table = summarize_truncation(sweep)
    assert tuple(table.columns) == COLUMNS
    assert table["edit"].tolist() == sweep["edit"].values.tolist()
    none = table.iloc[0]
    for name in ("loss", "repeat_loss", "retrieval"):
        assert (none[f"{name}_change"], none[f"{name}_change_low"]) == (0, 0)
    loss = np.average(sweep["loss"], axis=1, weights=sweep["predicted_tokens"])
    np.testing.assert_allclose(table["loss"], loss)
    np.testing.assert_allclose(table["loss_change"], table["loss"] - none["loss"], atol=1e-12)
    retrieval = sweep["retrieval"].mean(["retrieval_length", "depth"])
    np.testing.assert_allclose(table["retrieval"], retrieval)
    per_trial = sweep["retrieval_hit"].mean(["retrieval_length", "depth"])
    expected = stats.ttest_1samp((per_trial[8] - per_trial[0]).values, 0).confidence_interval()
    row = table.iloc[8]
    assert row["retrieval_change_low"] == pytest.approx(expected.low)
    assert row["retrieval_change_high"] == pytest.approx(expected.high)


def test_the_summary_counts_labels_and_names_the_head_that_changed(sweep: xr.Dataset) -> None:
    sweep = sweep.copy(deep=True)
    sweep["label"][:] = "sink"
    sweep["label"][2, 0, :3] = "semantic"
    sweep["label"][2, 1, 0] = ""
    sweep["label"][3] = ""
    sweep["attention_change"][2, 4, 5] = 9.0
    sweep["attention_change"][2, 0, 0] = np.nan
    table = summarize_truncation(sweep)
    assert table["labels_changed"].tolist()[:3] == [0, 0, 3]
    assert table["labels_changed_share"][2] == 3 / 39
    assert np.isnan(table["labels_changed"][3])


def test_the_best_head_is_not_measured_in_the_trials_that_chose_it() -> None:
    """If all heads are alike, the chosen head has the same mean score as the others."""
    noise = np.random.default_rng(3).normal(0.5, 0.1, size=(400, 8, 4, 8))
    trials = xr.DataArray(noise, dims=("edit", "trial", "layer", "head"))
    best = best_head(trials)
    assert float(best.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(trials.mean("trial").max(("layer", "head")).mean()) > 0.55
    trials[7, :, 2, 3] += 1
    trials[8, :, 1, 0] = np.nan  # a head that a layer does not have
    chosen = best_head(trials)
    np.testing.assert_array_equal(chosen[7], trials[7, 1::2, 2, 3])
    np.testing.assert_array_equal(best_head(trials, chosen_in=trials[7]), trials[:, 1::2, 2, 3])
    assert chosen[8].notnull().all()


def test_changes_of_heads_have_intervals(sweep: xr.Dataset) -> None:
    sweep = sweep.copy(deep=True)
    resampled = np.arange(sweep.sizes["resample"])
    sweep["labels_changed_resampled"][5] = resampled
    table = summarize_truncation(sweep)
    scores = sweep["trial_induction"].values
    half = scores[0, ::2].mean(0)
    layer, head = np.unravel_index(half.argmax(), half.shape)
    trials = scores[:, 1::2, layer, head]
    expected = stats.ttest_1samp(trials[5] - trials[0], 0).confidence_interval()
    np.testing.assert_allclose(table["induction"], trials.mean(1))
    np.testing.assert_allclose(table["induction_change"], trials.mean(1) - trials[0].mean())
    row = table.iloc[5]
    assert row["induction_change_low"] == pytest.approx(expected.low)
    assert row["induction_change_high"] == pytest.approx(expected.high)
    assert row["labels_changed_low"] == np.quantile(resampled, 0.025)
    share = np.quantile(resampled, 0.975) / sweep["label"][0].size
    assert row["labels_changed_share_high"] == pytest.approx(share)


def test_measures_that_were_not_taken_are_nan(sweep: xr.Dataset) -> None:
    table = summarize_truncation(sweep[["loss", "predicted_tokens"]])
    assert tuple(table.columns) == COLUMNS
    assert table["loss_change"].notna().all()
    for name in ("repeat_loss", "retrieval_change", "labels_changed"):
        assert table[name].isna().all()
