"""Figures of the reach of heads, by what they hold."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.figures.reach import PER_BIN, horizon_words, score_range

FAR = 3000


def measured(name: str, **options) -> xr.Dataset:
    tokens = torch.from_numpy(random_tokens(sequences=8, length=16))
    distances = np.arange(FAR + 1)
    return rl.reach(tiny(name), tokens, rows="all", distances=distances, **options)


@pytest.fixture(scope="module")
def found() -> xr.Dataset:
    return measured("glm")


def test_every_axis_names_its_unit_and_nothing_is_changed(found):
    before = found.copy(deep=True)
    for figure in (rl.plot_reach(found, layer=1, head=2), rl.plot_reach(found)):
        axes = [*figure.select_xaxes(), *figure.select_yaxes()]
        for title in [axis.title.text for axis in axes if axis.title.text != ""]:
            assert re.search(r"\(.+\)$", title), f"{title!r} has no unit"
    xr.testing.assert_identical(found, before)


def test_the_band_holds_every_score_and_the_line_their_mean(found):
    """Against the scores that `reach` gives at every whole distance."""
    for variant in found["variant"].values:
        of_head = found.sel(layer=1, head=3, variant=variant)
        every = of_head["moved_score"].values
        middle, low, mean, high = score_range(of_head)
        assert middle[0] == 0
        assert (np.diff(middle) > 0).all()
        begin = 0
        for place, lowest, average, highest in zip(middle, low, mean, high, strict=True):
            # A bin's middle is the geometric mean of its first and last distance.
            end = begin + 1 if begin == 0 else round(place**2 / begin) + 1
            part = every[begin:end]
            if len(part) <= PER_BIN:
                numbers = (part.min(), part.mean(), part.max())
                np.testing.assert_allclose((lowest, average, highest), numbers, atol=1e-9)
            else:
                ordered = (part.min(), lowest, average, highest, part.max())
                assert (np.diff(ordered) >= -1e-9).all()
                assert average == pytest.approx(part.mean(), abs=0.8 * part.std() + 1e-9)
            begin = end
        assert begin == FAR + 1


def test_panels_are_scores_above_the_others_with_the_horizon_marked(found):
    for layer, head in np.ndindex(found.sizes["layer"], found.sizes["head"]):
        figure = rl.plot_reach(found, layer=layer, head=head)
        words = [note.text for note in figure.layout.annotations]
        assert len(words) == found.sizes["variant"]
        low, high = figure.layout.yaxis.range
        for row, variant in enumerate(found["variant"].values, start=1):
            of_head = found.sel(layer=layer, head=head, variant=variant)
            traces = list(figure.select_traces(row=row, col=1))
            level = float(of_head["others_level"])
            assert traces[2].y[0] == pytest.approx(float(of_head["moved_score"][0]) - level)
            assert traces[4].y[0] == pytest.approx(float(of_head["lowest_score"]) - level)
            assert all(low < y < high for trace in traces for y in trace.y)
            horizon = float(of_head["horizon"])
            marks = [trace for trace in traces if trace.mode == "markers" and len(trace.x)]
            assert len(marks) == (0 < horizon < np.inf)
            assert words[row - 1] == f"<b>{variant}</b>: {horizon_words(of_head)}"
            for mark in marks:
                assert (mark.x[0], mark.y[0]) == (horizon + 1, 0)
                assert mark.error_x.array[0] >= 0
                upper = min(max(float(of_head["horizon_high"]), horizon), FAR)
                assert horizon + mark.error_x.array[0] == pytest.approx(upper)
                lower = min(float(of_head["horizon_low"]), horizon)
                assert horizon - mark.error_x.arrayminus[0] == pytest.approx(lower)


def test_a_horizon_in_words():
    given = {"lowest_score": -1.0, "others_level": 0.0, "horizon_low": 90.0}
    for horizon, high, lowest, words in (
        (151.4, np.nan, -1.0, "horizon 151 tokens"),
        (151.4, 1234.0, -1.0, "horizon 151 tokens (95%: 90 to 1.23k)"),
        (151.4, np.inf, -1.0, "horizon 151 tokens (95%: 90 to beyond 1M)"),
        (np.inf, np.inf, -1.0, "no horizon up to 1M tokens"),
        (np.inf, np.inf, 0.1, "no horizon at any distance"),
        (0.0, np.inf, -1.0, "below the other keys wherever it stands"),
    ):
        given |= {"horizon": horizon, "horizon_high": high, "lowest_score": lowest}
        given["horizon_low"] = np.nan if np.isnan(high) else 90.0
        reach = xr.Dataset(given, coords={"distance": [0, 1_000_000]})
        assert horizon_words(reach) == words


def test_what_was_not_measured_is_refused_in_one_line():
    found = measured("llama_gqa", variants=("own", "nope"), resamples=0, heads="1.*")
    assert len(rl.plot_reach(found, variants=["nope"]).data) == 1, "no band without a bootstrap"
    for options, line in (
        ({}, "The reach of layer 0, head 0 was not measured; try: reach("),
        ({"head": 9}, "There is no layer 0, head 9; seen: layers 0 to 1"),
        ({"variants": ["yarn:4"]}, "There is nothing to draw of this variant; seen: yarn:4"),
    ):
        with pytest.raises(BadArgument) as raised:
            rl.plot_reach(found, **({"layer": 0, "head": 0} | options))
        assert raised.value.line.startswith(line)


def test_each_variant_ends_at_its_share_of_heads_without_a_horizon(found):
    figure = rl.plot_reach(found)
    lines = [trace for trace in figure.data if trace.name]
    assert len(lines) == found.sizes["variant"]
    for line, variant in zip(lines, found["variant"].values, strict=True):
        horizon = found["horizon"].sel(variant=variant).values.ravel()
        share = 100 * np.isinf(horizon).mean()
        assert line.y[-1] == pytest.approx(share)
        assert line.name == f"{variant} ({share:.0f}% left)"
        assert (np.diff(line.y) <= 0).all()
    looks = [(line.line.color, line.line.dash) for line in lines]
    assert len(set(looks)) == len(looks)
