"""The table of heads: its columns, confidence and the claim, from profiles made by hand."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from cli_runs import COLUMNS
from oracles.tiny import random_tokens, tiny
from scipy import stats

import ropelens as rl
from ropelens.budget.labels import GAINS, Thresholds, attention_budget
from ropelens.claims.heads import classify_heads
from ropelens.profiles.heads import resample_labels
from ropelens.profiles.measures import columns
from ropelens.report.words import cautions, heads_sentences

Gains = tuple[float, float, float, float, float]
POSITIONAL: Gains = (1.0, 0.0, 1.0, 0.0, 1.0)  # total, S, P, C, B
SEMANTIC: Gains = (1.0, 0.0, 0.0, 1.0, 1.0)


def profile_of(groups: list[tuple[float, list[Gains]]]) -> xr.Dataset:
    """A profile of one layer, from (rows, gains of each head) of every group of sequences."""
    by_group = np.array([gains for _, gains in groups])[:, None]  # [group, layer, head, gain]
    rows = np.array([rows for rows, _ in groups])
    whole = np.einsum("g,glhn->nlh", rows / rows.sum(), by_group)
    per_head = {f"{name}_bits": bits for name, bits in attention_budget(*whole).items()}
    shape = per_head["total_bits"].shape
    for name in columns("score"):
        per_head[name] = np.full(shape, 0.25)
    for name, value in (("offset", 3), ("offset_low", 2), ("offset_high", 5)):
        per_head[name] = np.full(shape, float(value))
    per_head["offset_weight"] = np.full(shape, 0.5)
    variables = {name: (("layer", "head"), values) for name, values in per_head.items()}
    for place, name in enumerate(GAINS):
        variables[f"group_{name}"] = (("group", "layer", "head"), by_group[..., place])
    drawn = np.random.default_rng(0).uniform(size=(2, 41, *shape))
    return xr.Dataset(
        {
            **variables,
            "group_scored": ("group", 100 * rows),
            "selectivity_keys": (("layer", "head", "frequency"), np.ones((*shape, 2))),
            "surrogate_offset_fraction": (("draw", "layer", "head"), drawn[0]),
            "surrogate_log_wavelength": (("draw", "layer", "head"), drawn[1]),
        },
        coords={"wavelength": (("layer", "frequency"), [[10.0, 1000.0]])},
    )


def one_group(*heads: Gains) -> xr.Dataset:
    return profile_of([(10.0, list(heads))])


# columns


def test_columns_of_two_heads():
    profile = one_group((3.0, 0.5, 2.5, 1.0, 2.8), (1.0, 0.0, 0.2, 0.8, 0.9))
    profile["selectivity_keys"][0, 1] = [-1.0, 3.0]
    heads = classify_heads(profile)
    assert ",".join(heads.columns) == COLUMNS
    assert heads["label"].tolist() == ["positional", "semantic"]
    assert heads[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1]]
    np.testing.assert_allclose(heads["total_bits"], [3.0, 1.0])
    np.testing.assert_allclose(heads["sink_bits"], [0.5, 0.0])
    np.testing.assert_allclose(heads["position_bits"], [1.8, 0.1])
    np.testing.assert_allclose(heads["content_bits"], [0.5, 0.8])
    np.testing.assert_allclose(heads["interaction_bits"], [0.2, 0.1])
    np.testing.assert_allclose(heads["positional_fraction"], [0.72, 0.1])
    np.testing.assert_allclose(heads["content_fraction"], [0.2, 0.8])
    np.testing.assert_allclose(heads["interaction_fraction"], [0.08, 0.1])
    for name, of_first in (("offset", 3), ("offset_low", 2), ("offset_high", 5)):
        assert str(heads[name].dtype) == "Int64"
        assert heads[name].tolist() == [of_first, pd.NA]
    np.testing.assert_equal(heads["offset_weight"].to_numpy(), [0.5, math.nan])
    np.testing.assert_allclose(heads["top_wavelength"], [10.0, 1000.0])
    np.testing.assert_allclose(heads["top_share"], [0.5, 1.0])
    np.testing.assert_allclose(heads["mean_wavelength"], [100.0, 1000.0])
    assert heads["planes_to_half"].tolist() == [1, 1]
    assert heads["induction"].tolist() == [0.25, 0.25]


def test_too_few_rows_label_no_head():
    profile = profile_of([(0.5, [POSITIONAL, SEMANTIC]), (0.49, [POSITIONAL, SEMANTIC])])
    heads = classify_heads(profile)
    assert heads["label"].tolist() == ["untested"] * 2
    assert heads[["confidence", "offset"]].isna().all(axis=None)
    assert heads.attrs["claim"]["verdict"] == "not testable"
    assert heads_sentences(heads)[0].startswith("Of 2 heads, 2 are untested. ")
    assert cautions(profile, heads)[0].startswith(
        "Heads are untested: 99 rows of attention are"
    )


def test_an_offset_where_one_stands_out_and_a_band_otherwise():
    profile = one_group(POSITIONAL, POSITIONAL)
    profile["offset_weight"][0] = [0.299, 0.3]
    heads = classify_heads(profile)
    assert heads["offset"].tolist() == [pd.NA, 3]
    assert heads["offset_low"].tolist() == [2, 2]
    assert heads["offset_high"].tolist() == [5, 5]
    assert heads.attrs["thresholds"] == asdict(Thresholds())


def test_shares_of_nothing_are_unknown():
    """All bits are the sink's, or there are none."""
    heads = classify_heads(one_group((2.0, 2.0, 2.0, 2.0, 2.0), (0.0, 0.0, 0.0, 0.0, 0.0)))
    assert heads["label"].tolist() == ["sink", "diffuse"]
    fractions = [f"{part}_fraction" for part in ("positional", "content", "interaction")]
    assert heads[fractions].isna().all(axis=None)


def test_layers_with_fewer_heads_or_planes():
    """Heads that a layer does not have are no rows; NaN planes weigh nothing."""
    profile = one_group(POSITIONAL, SEMANTIC)
    second = profile.copy(deep=True)
    for name in profile.data_vars:
        if "head" in profile[name].dims:
            second[name] = second[name].where(second["head"] == 0)
    for name in ("wavelength", "selectivity_keys"):
        second[name] = second[name].where(second["frequency"] == 0)
    both = xr.concat([profile, second], dim="layer", data_vars="minimal", join="outer")
    heads = classify_heads(both)
    assert heads[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert heads["label"].tolist() == ["positional", "semantic", "positional"]
    np.testing.assert_allclose(heads["mean_wavelength"], [100, 100, 10])
    assert heads["offset"].tolist() == [3, pd.NA, 3]
    assert heads["planes_to_half"].tolist() == [1, 1, 1]


# confidence


def test_confidence_of_two_groups_by_hand():
    """Draws of 2 of 2 groups: both the first 1/4, one of each 1/2, both the second 1/4."""
    much: Gains = (9.0, 0.0, 0.0, 9.0, 9.0)
    groups = [
        (10.0, [POSITIONAL, POSITIONAL, POSITIONAL]),
        (10.0, [SEMANTIC, POSITIONAL, much]),
    ]
    heads = classify_heads(profile_of(groups), resamples=20_000, seed=1)
    # Of both groups: P 0.5, C 0.5, B 1 -> position 0.5 and content 0.5 of 1 bit.
    assert heads["label"].tolist() == ["mixed", "positional", "semantic"]
    # The third head's content outweighs its position as soon as the second group is drawn.
    np.testing.assert_allclose(heads["confidence"], [0.5, 1.0, 0.75], atol=0.015)


def test_labels_are_kept_in_other_samples_as_often_as_confidence_says():
    """40 heads around the threshold of content, in 24 samples of 16 groups each."""
    random = np.random.default_rng(0)
    content = np.linspace(0.5, 0.85, 40)
    samples = []
    for _ in range(24):
        gains = (content + random.normal(0, 0.15, (16, 40))).clip(0, 1)
        groups = [(10.0, [(1.0, 0.0, 0.0, c, 1.0) for c in of_group]) for of_group in gains]
        samples.append(classify_heads(profile_of(groups), resamples=300))
    label = np.array([heads["label"] for heads in samples])
    said = np.array([heads["confidence"] for heads in samples])
    kept = ((label[:, None] == label).sum(1) - 1) / (len(label) - 1)
    assert said.mean() == pytest.approx(kept.mean(), abs=0.02)
    doubtful = (said > 0.7) & (said < 0.97)
    assert said[doubtful].mean() == pytest.approx(kept[doubtful].mean(), abs=0.05)


def test_resamples_are_tables_of_the_groups_that_are_drawn():
    """The same groups drawn by hand, weighed by rows and added before losses count as none."""
    random = np.random.default_rng(3)
    groups = [
        (
            float(random.integers(1, 50)),
            [tuple(random.uniform(-1, 3, size=5)) for _ in range(4)],
        )
        for _ in range(6)
    ]
    profile = profile_of(groups)
    labels = resample_labels(profile, resamples=40, seed=7)
    draws = np.random.default_rng(7).multinomial(6, [1 / 6] * 6, size=40)
    for own, draw in zip(labels, draws, strict=True):
        drawn = [group for group, times in zip(groups, draw, strict=True) for _ in range(times)]
        again = classify_heads(profile_of(drawn))
        assert own[0].tolist() == again["label"].tolist()
    other = resample_labels(profile, resamples=40, seed=8)
    assert (labels != other).any()


def test_confidence_of_one_sequence_is_unknown():
    heads = classify_heads(one_group(POSITIONAL, SEMANTIC))
    assert heads["confidence"].isna().all()


# the claim


def test_the_claim_depends_on_profile_and_seed_alone():
    tokens = random_tokens(sequences=6, length=20)
    profile = rl.profile(tiny("llama_gqa"), tokens, surrogates=40)
    assert profile.sizes["draw"] == 41
    one, same = (classify_heads(profile, resamples=99, seed=5) for _ in range(2))
    pd.testing.assert_frame_equal(one, same)
    assert one["confidence"].between(0, 1).all()
    claim = one.attrs["claim"]
    assert claim == same.attrs["claim"]
    assert claim["null_draws"] in range(41)
    names = "rank_correlation low high heads null_median null_low null_high null_draws p_value"
    assert list(claim) == [*names.split(), "verdict", "why"]
    fraction = profile["surrogate_offset_fraction"][0].values.ravel()
    wavelength = profile["surrogate_log_wavelength"][0].values.ravel()
    counts = np.isfinite(fraction) & np.isfinite(wavelength)
    assert claim["heads"] == counts.sum()
    rho = stats.spearmanr(fraction[counts], wavelength[counts]).statistic
    assert claim["rank_correlation"] == pytest.approx(rho)
