"""The table of heads, from profiles made by hand and from heads built for known purposes."""

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from cli_runs import COLUMNS
from oracles.handmade import DISTINCT, MIXTURES, Expected, Site, handmade
from oracles.tiny import random_tokens, tiny
from small_measurements import old_rule

import ropelens as rl
from ropelens.attention.formulas import FOLLOW, GAINS, attention_budget
from ropelens.budget.labels import Thresholds
from ropelens.claims.classify import classify_heads
from ropelens.profiles.heads import resample_labels
from ropelens.profiles.measures import columns
from ropelens.report.sentences.heads import caution_sentences, heads_sentences

Gains = tuple[float, float, float, float, float]
POSITIONAL: Gains = (1.0, 0.0, 1.0, 0.0, 1.0)  # total, S, P, C, B
SEMANTIC: Gains = (1.0, 0.0, 0.0, 1.0, 1.0)


OF_HEADS = ("layer", "head")
OF_GROUPS = ("group", "layer", "head")
OF_DRAWS = ("draw", "layer", "head")
OF_PLANES = ("layer", "head", "frequency")


def profile_of(groups: list[tuple[float, list[Gains]]]) -> xr.Dataset:
    """A profile of one layer from the rows of each group, and the gains of its heads."""
    rows = np.array([rows for rows, _ in groups])
    gains = np.array([gains for _, gains in groups])
    by_group = gains[:, None]  # [group, layer, head, gain]
    whole = np.einsum("g,glhn->nlh", rows / rows.sum(), by_group)
    shape = whole.shape[1:]
    profile = xr.Dataset()
    for name, bits in attention_budget(*whole).items():
        profile[f"{name}_bits"] = (OF_HEADS, bits)
    for name in (*columns("score"), *columns("follow"), *columns("end")):
        profile[name] = (OF_HEADS, np.full(shape, 0.25))
    profile["offset"] = (OF_HEADS, np.full(shape, 3.0))
    profile["offset_low"] = (OF_HEADS, np.full(shape, 2.0))
    profile["offset_high"] = (OF_HEADS, np.full(shape, 5.0))
    profile["offset_weight"] = (OF_HEADS, np.full(shape, 0.5))
    for index, name in enumerate(GAINS):
        profile[f"group_{name}"] = (OF_GROUPS, by_group[..., index])
    unknown = by_group[..., 0] * np.nan
    for name in FOLLOW:
        profile[f"group_follow_{name}"] = (OF_GROUPS, unknown)
    profile["group_scored"] = ("group", 100 * rows)
    profile["selectivity_keys"] = (OF_PLANES, np.ones((*shape, 2)))
    drawn = np.random.default_rng(0).uniform(size=(2, 41, *shape))
    profile["surrogate_offset_fraction"] = (OF_DRAWS, drawn[0])
    profile["surrogate_log_wavelength"] = (OF_DRAWS, drawn[1])
    wavelength = (("layer", "frequency"), [[10.0, 1000.0]])
    return profile.assign_coords(wavelength=wavelength)


def one_group(*heads: Gains) -> xr.Dataset:
    return profile_of([(10.0, list(heads))])


def test_columns_of_two_heads():
    profile = one_group((3.0, 0.5, 2.5, 1.0, 2.8), (1.0, 0.0, 0.2, 0.8, 0.9))
    profile["selectivity_keys"][0, 1] = [-1.0, 3.0]
    heads = classify_heads(profile)
    added = [
        "planes_to_half",
        *columns("follow"),
        "fraction_low",
        "fraction_high",
        "uncertain",
    ]
    assert [*heads.columns] == [*COLUMNS.split(","), *added, "opposed", "max_score"]
    assert heads["label"].tolist() == ["positional", "semantic"]
    assert heads[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1]]
    numbers = {
        "total_bits": [3.0, 1.0],
        "sink_bits": [0.5, 0.0],
        "position_bits": [1.8, 0.1],
        "content_bits": [0.5, 0.8],
        "interaction_bits": [0.2, 0.1],
        "positional_fraction": [0.72, 0.1],
        "content_fraction": [0.2, 0.8],
        "interaction_fraction": [0.08, 0.1],
        "mean_wavelength": [100.0, 1000.0],
        "top_wavelength": [10.0, 1000.0],
        "top_share": [0.5, 1.0],
    }
    for name, expected in numbers.items():
        np.testing.assert_allclose(heads[name], expected)
    for name, expected in (("offset", 3), ("offset_low", 2), ("offset_high", 5)):
        assert str(heads[name].dtype) == "Int64"
        assert heads[name].tolist() == [expected, pd.NA]
    np.testing.assert_equal(heads["offset_weight"].to_numpy(), [0.5, math.nan])
    assert heads["planes_to_half"].tolist() == [1, 1]
    assert heads["induction"].tolist() == [0.25, 0.25]


def test_too_few_rows_label_no_head():
    gains = [POSITIONAL, SEMANTIC]
    profile = profile_of([(0.5, gains), (0.49, gains)])
    heads = classify_heads(profile)
    assert heads["label"].tolist() == ["untested"] * 2
    assert heads[["confidence", "offset"]].isna().all(axis=None)
    assert heads.attrs["claim"]["verdict"] == "not testable"
    assert heads_sentences(heads)[0].startswith("Of 2 heads, 2 are untested. ")
    words = "Heads are untested, because 99 rows of attention are"
    assert caution_sentences(profile, heads)[0].startswith(words)


def test_a_head_has_an_offset_only_if_one_offset_stands_out():
    profile = one_group(POSITIONAL, POSITIONAL)
    profile["offset_weight"][0] = [0.299, 0.3]
    heads = classify_heads(profile)
    assert heads["offset"].tolist() == [pd.NA, 3]
    assert heads["offset_low"].tolist() == [2, 2]
    assert heads["offset_high"].tolist() == [5, 5]
    assert heads.attrs["thresholds"] == asdict(Thresholds())
    assert heads["confidence"].isna().all(), "one group has no resamples"


def test_fractions_are_nan_if_sinks_explain_everything():
    profile = one_group((2.0, 2.0, 2.0, 2.0, 2.0), (0.0, 0.0, 0.0, 0.0, 0.0))
    heads = classify_heads(profile)
    assert heads["label"].tolist() == ["sink", "diffuse"]
    fractions = ["positional_fraction", "content_fraction", "interaction_fraction"]
    assert heads[fractions].isna().all(axis=None)


def test_layers_with_fewer_heads_or_planes():
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


def test_confidence_is_the_share_of_other_samples_with_the_same_label():
    random = np.random.default_rng(0)
    content = np.linspace(0.5, 0.85, 40)
    samples = []
    for _ in range(24):
        noise = random.normal(0, 0.15, (16, 40))
        groups = []
        for of_group in (content + noise).clip(0, 1):
            gains: list[Gains] = [(1.0, 0.0, 0.0, c, 1.0) for c in of_group]
            groups.append((10.0, gains))
        heads = classify_heads(profile_of(groups), resamples=300)
        samples.append(heads)
    label = np.array([heads["label"] for heads in samples])
    confidence = np.array([heads["confidence"] for heads in samples])
    others_alike = (label[:, None] == label).sum(1) - 1
    same = others_alike / (len(label) - 1)
    assert confidence.mean() == pytest.approx(same.mean(), abs=0.02)
    doubtful = (confidence > 0.7) & (confidence < 0.97)
    expected = same[doubtful].mean()
    assert confidence[doubtful].mean() == pytest.approx(expected, abs=0.05)


def test_labels_of_a_resample_are_labels_of_the_drawn_groups():
    random = np.random.default_rng(3)
    groups = []
    for _ in range(6):
        rows = float(random.integers(1, 50))
        gains: list[Gains] = [(*random.uniform(-1, 3, size=5),) for _ in range(4)]
        groups.append((rows, gains))
    profile = profile_of(groups)
    labels = resample_labels(profile, resamples=40, seed=7)
    draws = np.random.default_rng(7).multinomial(6, [1 / 6] * 6, size=40)
    for resample, draw in zip(labels, draws, strict=True):
        drawn = []
        for group, times in zip(groups, draw, strict=True):
            for _ in range(times):
                drawn.append(group)
        expected = classify_heads(profile_of(drawn))["label"]
        assert resample[0].tolist() == expected.tolist()
    assert (labels != resample_labels(profile, resamples=40, seed=8)).any()


def test_the_claim_depends_only_on_profile_and_seed():
    tokens = random_tokens(sequences=6, length=20)
    profile = rl.profile(tiny("llama_gqa"), tokens, surrogates=40)
    assert profile.sizes["draw"] == 41
    heads = classify_heads(profile, resamples=99, seed=5)
    same = classify_heads(profile, resamples=99, seed=5)
    pd.testing.assert_frame_equal(heads, same)
    assert heads["confidence"].between(0, 1).all()
    claim = heads.attrs["claim"]
    assert claim == same.attrs["claim"]
    assert claim["null_draws"] in range(41)
    assert list(claim) == [
        "rank_correlation",
        "low",
        "high",
        "heads",
        "null_median",
        "null_low",
        "null_high",
        "null_draws",
        "p_value",
        "verdict",
        "why",
    ]


OTHERS = [(1, 32), (2, 32), (0, 64), (1, 64), (2, 64)]  # seed, head_dim
CASES = [(0, 32), *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"seed {case[0]}, {case[1]}"
)
def built(request: pytest.FixtureRequest):
    model, tokens, expected = handmade(*request.param)
    profile = rl.profile(model, torch.from_numpy(tokens), surrogates=0)
    heads = rl.classify_heads(profile, resamples=200)
    return profile, heads, expected


def assert_offset(head: pd.Series, truth: Expected) -> None:
    low = head["offset_low"]
    high = head["offset_high"]
    if truth.offset is None:
        names = ["offset", "offset_low", "offset_high", "offset_weight"]
        assert head[names].isna().all()
        return
    assert low <= truth.offset <= high, truth
    if truth.tolerance:  # a band
        assert pd.isna(head["offset"]), truth
        assert high - low < 12, truth
    else:
        assert head["offset"] == truth.offset, truth
        assert 0.3 <= head["offset_weight"] <= 1, truth


def test_every_label_and_every_offset(built):
    _, heads, expected = built
    assert len(heads) == len(expected)
    for (_, head), truth in zip(heads.iterrows(), expected, strict=True):
        assert head["label"] == truth.label, truth
        assert_offset(head, truth)
        assert head["confidence"] > 0.9, truth
        if truth.label == "positional":
            assert head["positional_fraction"] > 0.8, truth
        if truth.label == "semantic":
            assert head["content_fraction"] > 0.8, truth


def test_positional_heads_select_through_short_wavelengths(built):
    """Heads with a sink use slow planes for position 0, which is not a key."""
    _, heads, expected = built
    with_label = [truth.label in ("positional", "semantic") for truth in expected]
    named = heads[with_label]
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
            peak = starts[predicted.argmax()]
            assert abs(peak - truth.offset) <= truth.tolerance, truth


def test_selectivity_is_in_the_planes_with_weights(built):
    profile, _, expected = built
    wavelength = profile["wavelength"].values[0]
    of_sink = wavelength == wavelength[-1]
    written = {
        "positional": wavelength < 450,
        "semantic": wavelength > 1900,
        "sink": of_sink,
    }
    for head, truth in enumerate(expected):
        if truth.label == "diffuse":
            continue
        total = profile["selectivity"].values[0, head].clip(min=0)
        keys = profile["selectivity_keys"].values[0, head].clip(min=0)
        sink = profile["selectivity_sink"].values[0, head].clip(min=0)
        planes = written[truth.label]
        with_sink = planes | of_sink if truth.sink > 0 else planes
        assert total[with_sink].sum() > 0.9 * total.sum(), truth
        if truth.label != "sink":
            assert keys[planes].sum() > 0.9 * keys.sum(), truth
        if truth.sink:
            assert sink[of_sink].sum() > 0.8 * sink.sum(), truth


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_diagonal_heads_have_the_label_of_what_they_follow(seed: int):
    model, tokens, expected = handmade(seed, DISTINCT, Site.diagonals)
    profile = rl.profile(model, torch.from_numpy(tokens), surrogates=0)
    heads = rl.classify_heads(profile, resamples=200)
    old, content = old_rule(profile)
    score = profile["follow_score"].values[0]
    faint = [truth.description == "offset 1.0, match 0.05" for truth in expected]
    for head, truth in enumerate(expected):
        assert profile["self_mass"][0, head] > (0.4 if truth.sink else 0.98), truth
        if truth.label != "mixed":
            assert heads["label"][head] == truth.label, truth
            follows = 1 if truth.label == "positional" else -1
            assert abs(score[head] - follows) < 0.05
    words = "without the exchange, the match takes the bits"
    assert (old[0, faint] == "semantic").all(), words
    assert (content[0, faint] > 0.85).all()
    mixtures = score[: len(MIXTURES)]
    assert (np.diff(mixtures) >= 0).all(), mixtures
    assert mixtures[0] < -0.95
    assert mixtures[-1] > 0.95
