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
from ropelens.figures.head import reach_arrays


@pytest.fixture(scope="module")
def found() -> xr.Dataset:
    tokens = torch.from_numpy(random_tokens(sequences=8, length=16))
    options = {"rows": "all", "distances": np.arange(300), "heads": "1.*,0.2"}
    return rl.reach(tiny("llama_gqa"), tokens, **options)


@pytest.mark.parametrize("at", [{}, {"layer": 1, "head": 2}])
def test_a_line_a_variant_with_its_horizon(found: xr.Dataset, at: dict[str, int]) -> None:
    before = found.copy(deep=True)
    figure = rl.plot_reach(found, **at)
    for axis in [*figure.select_xaxes(), *figure.select_yaxes()]:
        assert re.search(r"\(.+\)$", axis.title.text)
    names = found["variant"].values.tolist()
    lines, diamonds = figure.data[::2], figure.data[1::2]
    for line, diamond, name in zip(lines, diamonds, names, strict=True):
        of_variant = found.sel(variant=name)
        if at:
            wins, horizon = (of_variant[n].isel(at) for n in ("win_share", "horizon"))
        else:
            wins, horizon = of_variant["win_share"].mean(("layer", "head")), None
            of_heads = of_variant["horizon"].values
            horizon = np.median(of_heads[~np.isnan(of_heads)])
        assert line.name == name
        np.testing.assert_array_equal(line.x, found["distance"] + 1)
        np.testing.assert_allclose(line.y, wins)
        drawn = float(horizon) + 1 if 0 < float(horizon) < np.inf else np.nan
        np.testing.assert_allclose(diamond.x, [drawn])
    looks = [(line.line.color, line.line.dash) for line in lines]
    assert len(set(looks)) == len(looks)
    xr.testing.assert_identical(found, before)


def test_every_head_has_the_numbers_of_its_figure(found: xr.Dataset) -> None:
    arrays = reach_arrays(found)
    for trace in rl.plot_reach(found, layer=0, head=2).data:
        for axis, name in trace.meta.items():
            np.testing.assert_array_equal(trace[axis], arrays[name][0, 2])


def test_what_was_not_measured_is_refused_in_one_line(found: xr.Dataset) -> None:
    for options, line in (
        ({}, "The reach of layer 0, head 0 was not measured; try: reach("),
        ({"head": 9}, "There is no layer 0, head 9; seen: layers 0 to 1"),
    ):
        with pytest.raises(BadArgument) as raised:
            rl.plot_reach(found, **({"layer": 0, "head": 0} | options))
        assert raised.value.line.startswith(line)
