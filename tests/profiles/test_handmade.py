"""Profiles and labels of heads that were built for known purposes."""

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from measured import old_rule
from oracles.handmade import DISTINCT, MIXTURES, Expected, Site, handmade

import ropelens as rl

OTHERS = [(seed, head_dim) for head_dim in (32, 64) for seed in range(3)][1:]
CASES = [(0, 32), *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"seed {case[0]}, {case[1]}")
def built(request: pytest.FixtureRequest) -> tuple[xr.Dataset, pd.DataFrame, list[Expected]]:
    model, tokens, expected = handmade(*request.param)
    profile = rl.profile(model, torch.from_numpy(tokens), surrogates=0)
    return profile, rl.classify_heads(profile, resamples=200), expected


def test_every_label_and_every_offset(built):
    _, heads, expected = built
    assert len(heads) == len(expected)
    for (_, head), truth in zip(heads.iterrows(), expected, strict=True):
        assert head["label"] == truth.label, truth
        if truth.offset is None:
            assert head[["offset", "offset_low", "offset_high", "offset_weight"]].isna().all()
        elif truth.tolerance:  # a band
            assert pd.isna(head["offset"]), truth
            assert head["offset_low"] <= truth.offset <= head["offset_high"], truth
            assert head["offset_high"] - head["offset_low"] < 12, truth
        else:
            assert head["offset"] == truth.offset, truth
            assert head["offset_low"] <= truth.offset <= head["offset_high"], truth
            assert 0.3 <= head["offset_weight"] <= 1, truth
        assert head["confidence"] > 0.9, truth
        right = {"positional": "positional", "semantic": "content"}.get(truth.label)
        if right:
            assert head[f"{right}_fraction"] > 0.8, truth


def test_positional_heads_select_through_short_wavelengths(built):
    """They were built with fast and middle planes, and semantic heads with slow planes.

    Heads that also have a sink use slow planes for position 0, which the selectivity on keys
    leaves out.
    """
    _, heads, expected = built
    named = heads[[truth.label in ("positional", "semantic") for truth in expected]]
    for column in ("mean_wavelength", "top_wavelength"):
        wavelength = named.groupby("label")[column]
        assert wavelength.max()["positional"] < 450
        assert wavelength.min()["semantic"] > 1900
    assert (named["planes_to_half"] >= 1).all()
    assert heads.attrs["claim"]["heads"] == 16
    assert heads.attrs["claim"]["rank_correlation"] < -0.5


def test_predicted_kernels_peak_at_the_built_offset(built):
    profile, _, expected = built
    starts = profile["offset_start"].values
    for head, truth in enumerate(expected):
        if truth.offset is not None:
            predicted = profile["predicted_kernel"].values[0, head]
            assert abs(starts[predicted.argmax()] - truth.offset) <= truth.tolerance, truth


def test_selectivity_is_in_the_planes_with_weights(built):
    profile, _, expected = built
    wavelength = profile["wavelength"].values[0]
    of_sink = wavelength == wavelength[-1]
    written = {"positional": wavelength < 450, "semantic": wavelength > 1900, "sink": of_sink}
    for head, truth in enumerate(expected):
        if truth.label == "diffuse":
            continue
        names = ("selectivity", "selectivity_keys", "selectivity_sink")
        total, keys, sink = (profile[name].values[0, head].clip(min=0) for name in names)
        planes = written[truth.label]
        assert total[planes | (of_sink & (truth.sink > 0))].sum() > 0.9 * total.sum(), truth
        if truth.label != "sink":
            assert keys[planes].sum() > 0.9 * keys.sum(), truth
        if truth.sink:
            assert sink[of_sink].sum() > 0.8 * sink.sum(), truth


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_diagonal_heads_have_the_label_of_what_they_follow(seed: int):
    """All have the same attention, on their own token, on a text without repeated tokens."""
    model, tokens, expected = handmade(seed, DISTINCT, Site.diagonals)
    profile = rl.profile(model, torch.from_numpy(tokens), surrogates=0)
    heads = rl.classify_heads(profile, resamples=200)
    old, content = (x[0] for x in old_rule(profile))
    score = profile["follow_score"].values[0]
    faint = [truth.description == "offset 1.0, match 0.05" for truth in expected]
    for head, truth in enumerate(expected):
        assert profile["self_mass"][0, head] > (0.4 if truth.sink else 0.98), truth
        if truth.label != "mixed":
            assert heads["label"][head] == truth.label, truth
            assert abs(score[head] - (1 if truth.label == "positional" else -1)) < 0.05
    assert (old[faint] == "semantic").all(), "without the exchange, the match takes the bits"
    assert (content[faint] > 0.85).all()
    mixtures = score[: len(MIXTURES)]
    assert (np.diff(mixtures) >= 0).all(), mixtures
    assert mixtures[0] < -0.95
    assert mixtures[-1] > 0.95
