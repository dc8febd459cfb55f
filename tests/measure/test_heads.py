"""Labels, confidence and the claim: every rule by hand, every rank by scipy."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from scipy import stats

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.measure.heads import (
    LABELS,
    Thresholds,
    classify_heads,
    label_heads,
    mean_wavelength,
    positional_fraction,
    wavelength_claim,
)

COLUMNS = (
    "layer,head,label,confidence,positional_fraction,total_bits,sink_bits,position_bits,"
    "content_bits,offset,offset_weight,mean_wavelength,previous_token,self_mass,sink_mass,"
    "entropy_bits,induction,duplicate_token"
)


def profile_of(
    bits: list[tuple[float, float, float]],
    *,
    groups: list[tuple[float, list[tuple[float, float, float, float]]]] | None = None,
) -> xr.Dataset:
    """A profile of one layer whose heads have these (sink, position, content) bits.

    `groups` are (rows, [(total, sink, position gain, content gain) of each head]); without
    them there is one, of 10 rows.
    """
    sink, position, content = (np.array(part)[None] for part in zip(*bits, strict=True))
    heads = len(bits)
    total = sink + position + content
    if groups is None:
        gains = [(sum(b), b[0], b[1], -1.0) for b in bits]
        groups = [(10.0, gains)]
    by_group = np.array([values for _, values in groups])[:, None]  # [group, layer, head, 4]
    kernel = np.tile([0.5, 0.3, 0.2, 0.0], (1, heads, 1))
    per_head = {
        "total_bits": total,
        "sink_bits": sink,
        "position_bits": position,
        "content_bits": content,
    }
    copied = ("previous_token", "self_mass", "sink_mass", "entropy_bits", "induction")
    per_head |= {name: np.full((1, heads), 0.25) for name in (*copied, "duplicate_token")}
    variables = {name: (("layer", "head"), values) for name, values in per_head.items()}
    names = ("total_bits", "sink_bits", "position_gain", "content_gain")
    for place, name in enumerate(names):
        variables[f"group_{name}"] = (("group", "layer", "head"), by_group[..., place])
    return xr.Dataset(
        {
            **variables,
            "group_rows": ("group", [rows for rows, _ in groups]),
            "kernel": (("layer", "head", "offset_bin"), kernel),
            "offset_share": (("layer", "offset_bin"), np.array([[1, 1, 0.5, 0.01]])),
            "selectivity": (("layer", "head", "frequency"), np.ones((1, heads, 2))),
        },
        coords={
            "wavelength": (("layer", "frequency"), [[10.0, 1000.0]]),
            "offset_start": ("offset_bin", [0, 1, 2, 5]),
        },
    )


# thresholds

RULES = [  # total, sink, position, content -> label
    ((0.0999, 0.0, 0.0999, 0.0), "diffuse"),
    ((0.1, 0.0, 0.1, 0.0), "positional"),
    ((0.05, 0.05, 0.0, 0.0), "diffuse"),
    ((1.0, 0.901, 0.099, 0.0), "sink"),
    ((1.0, 0.9, 0.1, 0.0), "positional"),
    ((3.0, 0.0, 2.0, 1.0), "positional"),
    ((3.0, 0.0, 1.999, 1.001), "mixed"),
    ((3.0, 0.0, 1.001, 1.999), "mixed"),
    ((3.0, 0.0, 1.0, 2.0), "semantic"),
    ((3.0, 2.4, 0.5, 0.1), "positional"),
    ((3.0, 2.4, 0.1, 0.5), "semantic"),
    ((3.0, 0.0, 0.0, 3.0), "semantic"),
    ((math.nan, math.nan, math.nan, math.nan), ""),  # a head that does not exist
]


@pytest.mark.parametrize(("bits", "label"), RULES)
def test_rules(bits: tuple[float, ...], label: str):
    parts = dict(
        zip(("total", "sink", "position", "content"), map(np.array, bits), strict=True)
    )
    assert label_heads(Thresholds(), **parts).item() == label
    assert label in (*LABELS, "")


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [
        (Thresholds(), "positional"),
        (Thresholds(diffuse=1.5), "diffuse"),
        (Thresholds(sink=0.1), "sink"),
        (Thresholds(positional=0.9), "mixed"),
        (Thresholds(positional=0.9, semantic=0.85), "semantic"),
    ],
)
def test_thresholds_are_arguments_and_stand_in_the_result(
    thresholds: Thresholds, expected: str
):
    profile = profile_of([(0.2, 0.8, 0.2)])
    heads = classify_heads(profile, thresholds=thresholds)
    assert heads["label"].tolist() == [expected]
    assert heads.attrs["thresholds"] == asdict(thresholds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"diffuse": -0.1},
        {"sink": 1.1},
        {"semantic": 0.7},
        {"positional": 1.2},
        {"semantic": -0.1},
        {"diffuse": math.nan},
    ],
)
def test_thresholds_out_of_order_are_refused(wrong: dict[str, float]):
    with pytest.raises(BadArgument, match="0 <= semantic <= positional <= 1") as refused:
        Thresholds(**wrong)
    assert str(next(iter(wrong.values()))) in refused.value.parts["seen"]


# columns


def test_columns_of_one_head():
    profile = profile_of([(0.5, 1.5, 0.5), (0.0, 0.2, 0.8)])
    heads = classify_heads(profile)
    assert ",".join(heads.columns) == COLUMNS
    assert heads["layer"].tolist() == [0, 0]
    assert heads["head"].tolist() == [0, 1]
    assert heads["positional_fraction"].tolist() == [0.75, 0.2]
    assert heads["total_bits"].tolist() == [2.5, 1.0]
    assert str(heads["offset"].dtype) == "Int64"
    assert heads["offset"].tolist() == [0, pd.NA]
    assert heads["offset_weight"][0] == 0.5
    assert np.isnan(heads["offset_weight"][1])
    assert heads["induction"].tolist() == [0.25, 0.25]
    np.testing.assert_allclose(heads["mean_wavelength"], 100)


def test_an_offset_that_few_rows_see_is_no_peak():
    profile = profile_of([(0.0, 1.0, 0.0)])
    profile["kernel"][0, 0] = [0.0, 0.1, 0.2, 0.9]
    heads = classify_heads(profile)
    assert heads["offset"][0] == 2
    assert heads["offset_weight"][0] == 0.2
    profile["offset_share"][0, 3] = 0.05
    assert classify_heads(profile)["offset"][0] == 5


@pytest.mark.parametrize(
    ("position", "content", "expected"),
    [(1.0, 3.0, 0.25), (0.0, 2.0, 0.0), (2.0, 0.0, 1.0), (0.0, 0.0, math.nan)],
)
def test_positional_fraction(position: float, content: float, expected: float):
    found = positional_fraction(np.array([position]), np.array([content]))
    np.testing.assert_equal(found, [expected])


@pytest.mark.parametrize(
    ("selectivity", "expected"),
    [
        ([1.0, 1.0, 5.0], 100.0),
        ([1.0, 0.0, 5.0], 10.0),
        ([3.0, 1.0, 5.0], 10**1.5),
        ([-7.0, 2.0, 5.0], 1000.0),
        ([-1.0, 0.0, 5.0], math.nan),
        ([math.nan, 2.0, 5.0], 1000.0),
    ],
)
def test_mean_wavelength_is_geometric_over_planes_that_turn(
    selectivity: list[float], expected: float
):
    """By the positive part of selectivity; what does not rotate has no wavelength."""
    profile = xr.Dataset(
        {"selectivity": (("layer", "head", "frequency"), [[selectivity]])},
        coords={"wavelength": (("layer", "frequency"), [[10.0, 1000.0, math.inf]])},
    )
    np.testing.assert_allclose(mean_wavelength(profile), [[expected]])


def test_layers_with_fewer_heads_or_planes():
    """Heads that a layer does not have are no rows; NaN planes weigh nothing."""
    profile = profile_of([(0.0, 1.0, 0.2), (0.0, 0.2, 1.0)])
    second = profile.copy(deep=True)
    for name in profile.data_vars:
        if "head" in profile[name].dims:
            second[name] = second[name].where(second["head"] == 0)
    second["wavelength"] = second["wavelength"].where(second["frequency"] == 0)
    second["selectivity"] = second["selectivity"].where(second["frequency"] == 0)
    both = xr.concat([profile, second], dim="layer", data_vars="minimal", join="outer")
    heads = classify_heads(both)
    assert heads[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert heads["label"].tolist() == ["positional", "semantic", "positional"]
    np.testing.assert_allclose(heads["mean_wavelength"], [100, 100, 10])
    assert heads["offset"].tolist() == [0, pd.NA, 0]


# confidence


def test_confidence_of_two_groups_by_hand():
    """Draws of 2 of 2 groups: both the first 1/4, one of each 1/2, both the second 1/4."""
    positional, semantic = (1.0, 0.0, 1.0, -1.0), (1.0, 0.0, 0.0, 1.0)
    groups = [
        (10.0, [positional, positional, positional]),
        (10.0, [semantic, positional, semantic]),
    ]
    groups[1] = (10.0, [semantic, positional, (9.0, 0.0, 0.0, 9.0)])
    profile = profile_of([(0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 0.5, 4.5)], groups=groups)
    heads = classify_heads(profile, resamples=20_000, seed=1)
    assert heads["label"].tolist() == ["mixed", "positional", "semantic"]
    # The third head's content outweighs its position as soon as the second group is drawn.
    np.testing.assert_allclose(heads["confidence"], [0.5, 1.0, 0.75], atol=0.015)


def test_confidence_weighs_groups_by_their_rows():
    """90 rows of position and 10 of content are positional in every draw that has both."""
    positional, semantic = (1.0, 0.0, 1.0, -1.0), (1.0, 0.0, 0.0, 1.0)
    groups = [(90.0, [positional]), (10.0, [semantic])]
    profile = profile_of([(0.0, 0.9, 0.1)], groups=groups)
    heads = classify_heads(profile, resamples=20_000)
    np.testing.assert_allclose(heads["confidence"], [0.75], atol=0.015)


def test_confidence_moves_what_is_redundant_to_content():
    """Each group's gains overlap: all of position is content, in every resample."""
    overlapping = (1.0, 0.0, 0.9, 1.0)
    profile = profile_of([(0.0, 0.0, 1.0)], groups=[(5.0, [overlapping])] * 3)
    heads = classify_heads(profile)
    assert heads["label"].tolist() == ["semantic"]
    assert heads["confidence"].tolist() == [1.0]


def test_confidence_of_one_sequence_is_unknown():
    heads = classify_heads(profile_of([(0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]))
    assert heads["confidence"].isna().all()
    profile = rl.profile(
        tiny("llama_gqa"), torch.from_numpy(random_tokens(sequences=1, length=9))
    )
    assert classify_heads(profile)["confidence"].isna().all()


def test_confidence_depends_on_the_seed_alone():
    tokens = torch.from_numpy(random_tokens(sequences=6, length=20))
    profile = rl.profile(tiny("llama_gqa"), tokens)
    one, same = (classify_heads(profile, resamples=99, seed=5) for _ in range(2))
    pd.testing.assert_frame_equal(one, same)
    assert one["confidence"].between(0, 1).all()


# the claim


def heads_table(fraction: list[float], wavelength: list[float], label: str = "mixed"):
    return pd.DataFrame(
        {"label": label, "positional_fraction": fraction, "mean_wavelength": wavelength}
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_claim_is_spearmans_rank_correlation(seed: int, ties: bool):
    random = np.random.default_rng(seed)
    x = random.uniform(size=25)
    y = 10 ** (-x + random.normal(size=25))
    if ties:
        x, y = x.round(1), y.round(1) + 1
    claim = wavelength_claim(heads_table(x, y), seed=seed)
    expected = stats.spearmanr(x, np.log(y)).statistic
    np.testing.assert_allclose(claim["rank_correlation"], expected)
    assert claim["low"] < claim["rank_correlation"] < claim["high"]
    assert claim["heads"] == 25
    resampled = [
        stats.spearmanr(x[draw], y[draw]).statistic
        for draw in random.integers(25, size=(2000, 25))
    ]
    expected = np.nanpercentile(resampled, [2.5, 97.5])
    np.testing.assert_allclose([claim["low"], claim["high"]], expected, atol=0.06)


def test_the_claim_leaves_out_diffuse_heads_and_sinks():
    table = heads_table([0.1, 0.4, 0.6, 0.9, 0.5], [900, 500, 60, 9, 50])
    noise = [heads_table([1.0, 0.0], [1e4, 1.0], label) for label in ("diffuse", "sink")]
    unknown = heads_table([0.3, math.nan], [math.nan, 30.0])
    claim = wavelength_claim(pd.concat([table, *noise, unknown]))
    assert claim["rank_correlation"] == pytest.approx(-0.9)
    assert claim["heads"] == 5


@pytest.mark.parametrize(
    ("fraction", "wavelength"),
    [
        ([], []),
        ([0.1, 0.5, 0.9], [9.0, 5.0, 1.0]),
        ([0.5, 0.5, 0.5, 0.5, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [7.0, 7.0, 7.0, 7.0, 7.0]),
    ],
    ids=["none", "three", "one fraction", "one wavelength"],
)
def test_the_claim_is_unknown_where_heads_are_few_or_alike(
    fraction: list[float], wavelength: list[float]
):
    claim = wavelength_claim(heads_table(fraction, wavelength))
    for name in ("rank_correlation", "low", "high"):
        assert math.isnan(claim[name])
    assert claim["heads"] == len(fraction)


def test_a_resample_of_heads_that_are_alike_is_no_correlation():
    """Four heads, three alike: some resamples are constant, and count as 0."""
    claim = wavelength_claim(heads_table([0.1, 0.1, 0.1, 0.9], [9.0, 9.0, 9.0, 1.0]))
    assert claim["rank_correlation"] == pytest.approx(-1)
    assert (claim["low"], claim["high"]) == (pytest.approx(-1), 0)


def test_the_claim_stands_in_the_table():
    tokens = torch.from_numpy(random_tokens(sequences=6, length=30))
    heads = classify_heads(rl.profile(tiny("llama_gqa"), tokens))
    assert heads.attrs["claim"] == wavelength_claim(heads)
