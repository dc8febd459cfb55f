"""What the reach of heads says, in sentences with numbers."""

from __future__ import annotations

import numpy as np
import xarray as xr

from ropelens.figures.reach import check_reach

FAR = 10
"""Distances from a tenth of the farthest on are called far."""


def describe_reach(found: xr.Dataset) -> list[str]:
    """What `ropelens.reach` found, in sentences, the most important first.

    For each variant in how many heads the picked key falls to the level of the others, and
    where; how these horizons lie to the trained context; in what share of rows the picked key
    scores above all others. Raises `BadArgument` for a dataset that is no reach.
    """
    check_reach(found)
    every = found.stack(one=("layer", "head")).dropna("one", how="all", subset=["horizon"])
    variants = [_lost(every.sel(variant=name)) for name in every["variant"].values]
    return [*variants, _near(every), _rows(every)]


def _lost(heads: xr.Dataset) -> str:
    """In how many heads one variant loses the picked key, and at what distances."""
    horizon = heads["horizon"].values
    lost = horizon[np.isfinite(horizon)]
    said = f"Under {heads['variant'].item()} {len(lost)} of {len(horizon)} heads lose the key "
    said += "they picked"
    if len(lost):
        ends = f" in the median ({lost.min():,.0f} to {lost.max():,.0f})"
        said += f", at {np.median(lost):,.0f} tokens{ends if len(lost) > 1 else ''}"
    certain = int((heads["lowest_score"] > heads["others_level"]).sum())
    return f"{said}; {certain} cannot lose it at any distance." if certain else f"{said}."


def _near(every: xr.Dataset) -> str:
    """Where the picked keys stand, and the horizons of the model as it is."""
    own = every.isel(variant=0)
    trained = every.attrs["trained_context"]
    within = int((own["horizon"] <= trained).sum())
    sure = int((own["horizon_high"] < 2 * own["horizon_low"]).sum())
    return (
        f"In the text ({every.attrs['rows']} rows of every sequence) the picked keys stand "
        f"{float(own['picked_distance'].mean()):,.0f} tokens back on average. {within} of "
        f"{every.sizes['one']} horizons under {own['variant'].item()} lie within the context "
        f"that the model was trained on, {trained:,} tokens; {sure} have a 95% interval, over "
        "sequences, with ends less than a factor 2 apart."
    )


def _rows(every: xr.Dataset) -> str:
    """How often the picked key beats all others, where it stands and far away."""
    farthest = int(every["distance"].max())
    far = every["win_share"].sel(distance=slice(farthest / FAR, None)).mean("distance")
    return (
        "A horizon is that of the mean score against the mean of the others. Row by row, the "
        "picked key still scores above every other key, left where it stands: "
        f"{_shares(every['unmoved_win_share'])}; moved {farthest // FAR:,} to {farthest:,} "
        f"tokens back: {_shares(far)}."
    )


def _shares(wins: xr.DataArray) -> str:
    """The mean over heads under every variant."""
    means = wins.mean("one")
    return ", ".join(f"{float(one):.0%} under {one['variant'].item()}" for one in means)
