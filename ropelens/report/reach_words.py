"""What the reach of heads says, in sentences with numbers."""

from __future__ import annotations

import numpy as np
import xarray as xr

from ropelens.figures.reach import check_reach
from ropelens.measure.terms import OWN

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


def _under(variant: str) -> str:
    return "its own rotation" if variant == OWN else variant


def _lost(heads: xr.Dataset) -> str:
    """In how many heads one variant loses the picked key, and at what distances."""
    horizon = heads["horizon"].values
    lost = horizon[np.isfinite(horizon) & (horizon > 0)]
    said = (
        f"Under {_under(heads['variant'].item())} {len(lost)} of {len(horizon)} heads lose the "
        f"key they picked within {int(heads['distance'].max()):,} tokens"
    )
    if len(lost):
        ends = f" in the median ({lost.min():,.0f} to {lost.max():,.0f})"
        said += f", at {np.median(lost):,.0f} tokens{ends if len(lost) > 1 else ''}"
    never = int((horizon == 0).sum())
    certain = int((heads["lowest_score"] > heads["others_level"]).sum())
    said += f"; {never} do not lead the others at any" if never else ""
    return f"{said}; {certain} cannot lose it at any distance." if certain else f"{said}."


def _near(every: xr.Dataset) -> str:
    """Where the picked keys stand, and the horizons of the model as it is."""
    said = (
        f"In the text ({every.attrs['rows']} rows of every sequence) the picked keys stand "
        f"{float(every['picked_distance'].mean()):,.0f} tokens back on average."
    )
    if OWN not in every["variant"].values:
        return said
    own = every.sel(variant=OWN)
    trained = every.attrs["trained_context"]
    within = int(((own["horizon"] > 0) & (own["horizon"] <= trained)).sum())
    said += (
        f" Of {every.sizes['one']} heads {within} lose theirs, under {_under(OWN)}, within "
        f"the context that the model was trained on, {trained:,} tokens"
    )
    if own["horizon_low"].isnull().all():
        return f"{said}."
    sure = int((own["horizon_high"] < 2 * own["horizon_low"]).sum())
    return f"{said}; {sure} horizons have a 95% interval, over sequences, within a factor 2."


def _rows(every: xr.Dataset) -> str:
    """How often the picked key beats all others, where it stands and far away."""
    farthest = int(every["distance"].max())
    far = every["win_share"].sel(distance=slice(farthest / FAR, None))
    return (
        "A horizon is that of the mean score against the mean of the others. Row by row, the "
        "picked key still scores above every other key, left where it stands: "
        f"{_shares(every['unmoved_win_share'])}; moved {int(far['distance'][0]):,} to "
        f"{farthest:,} tokens back: {_shares(far.mean('distance'))} (distances tried: "
        f"{far.sizes['distance']})."
    )


def _shares(wins: xr.DataArray) -> str:
    """The mean over heads under every variant."""
    means = wins.mean("one")
    return ", ".join(f"{float(one):.0%} under {_under(one['variant'].item())}" for one in means)
