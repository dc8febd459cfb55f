"""Heads whose purpose is known, through the whole pipeline: model, profile, labels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.handmade import OFFSETS, Expected, handmade

import ropelens as rl
from ropelens.measure.heads import wavelength_claim

CASES = [(seed, head_dim) for head_dim in (32, 64) for seed in range(3)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"seed {case[0]}, {case[1]}")
def built(request: pytest.FixtureRequest) -> tuple[xr.Dataset, pd.DataFrame, list[Expected]]:
    """The profile of a layer of 19 heads, their labels, and what they were built to be."""
    model, tokens, expected = handmade(*request.param)
    profile = rl.profile(model, torch.from_numpy(tokens))
    return profile, rl.classify_heads(profile, resamples=200), expected


def test_every_label_and_every_offset(built):
    _, heads, expected = built
    assert len(heads) == len(expected)
    for (_, head), truth in zip(heads.iterrows(), expected, strict=True):
        assert head["label"] == truth.label, truth
        if truth.offset is None:
            assert pd.isna(head["offset"]), truth
            assert np.isnan(head["offset_weight"]), truth
        else:
            assert abs(head["offset"] - truth.offset) <= truth.tolerance, truth
            narrow = truth.tolerance == 0
            assert (0.3 if narrow else 0.02) < head["offset_weight"] <= 1, truth
        assert head["confidence"] > 0.9, truth


def test_each_head_does_what_its_label_says(built):
    _, heads, expected = built
    for (_, head), truth in zip(heads.iterrows(), expected, strict=True):
        if truth.description == "0 back":
            assert head["self_mass"] > 0.35
        elif truth.description == "1 back":
            assert head["previous_token"] > 0.35
        elif truth.description == "equal tokens":
            assert head["duplicate_token"] > 2 * head["induction"]
        if truth.sink:
            assert abs(head["sink_mass"] - truth.sink) < 0.35, truth
        else:
            assert head["sink_mass"] < 0.2, truth
    parts = heads[["sink_bits", "position_bits", "content_bits"]].sum(axis=1)
    np.testing.assert_allclose(parts, heads["total_bits"])


def test_positional_heads_select_through_short_wavelengths(built):
    """They were built with fast and middle planes, semantic ones with slow ones.

    Heads without a sink, that is: what a head needs for position 0, at whatever distance,
    it can only put into slow planes, and that is selectivity as well.
    """
    _, heads, expected = built
    pure = heads[[truth.sink == 0 for truth in expected]]
    wavelength = pure.groupby("label")["mean_wavelength"]
    assert wavelength.max()["positional"] < 400
    assert wavelength.min()["semantic"] > 1900
    assert heads.attrs["claim"]["heads"] == 16
    claim = wavelength_claim(pure)
    assert claim["heads"] == 8
    assert claim["rank_correlation"] < -0.5


def test_predicted_kernels_peak_where_they_were_built_to(built):
    profile, _, expected = built
    starts = profile["offset_start"].values
    for head, truth in enumerate(expected):
        if truth.offset is not None:
            predicted = profile["predicted_kernel"].values[0, head]
            assert abs(starts[predicted.argmax()] - truth.offset) <= truth.tolerance, truth


def test_selectivity_lies_in_the_planes_that_were_written(built):
    profile, _, expected = built
    wavelength = profile["wavelength"].values[0]
    written = {
        "positional": wavelength < 450,
        "semantic": wavelength > 1900,
        "sink": wavelength == wavelength[-1],
    }
    for head, truth in enumerate(expected):
        if truth.label == "diffuse":
            continue
        planes = written[truth.label].copy()
        planes[-1] |= truth.sink > 0
        share = profile["selectivity"].values[0, head].clip(min=0)
        assert share[planes].sum() > 0.9 * share.sum(), truth


def test_sampled_rows_give_the_same_labels():
    model, tokens, expected = handmade(0, 32)
    profile = rl.profile(model, torch.from_numpy(tokens), rows=24)
    heads = rl.classify_heads(profile, resamples=50)
    assert heads["label"].tolist() == [truth.label for truth in expected]
    offsets = heads["offset"].tolist()
    for found, truth in zip(offsets, expected, strict=True):
        if truth.offset is not None:
            assert abs(found - truth.offset) <= truth.tolerance, truth
    assert set(OFFSETS) <= set(heads["offset"].dropna())
