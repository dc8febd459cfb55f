"""The best induction head: chosen on half of the trials, measured on the others."""

from __future__ import annotations

import xarray as xr

EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def best_head(trials: xr.DataArray, *, chosen_in: xr.DataArray | None = None) -> xr.DataArray:
    """The odd trials of the head that has the highest mean score over the even ones.

    `trials` is over trial, layer, head and what else there is, such as entries: each then has
    its own best head, or that of `chosen_in`. The highest of many noisy scores is too high;
    in trials that it was not chosen by, it is right on average. NaN without any score.
    """
    by = (trials if chosen_in is None else chosen_in).reset_coords(drop=True)
    # A score is no share below 0, and a head that is missing or hidden has none.
    best = by.isel(trial=EVEN).mean("trial").fillna(-1).argmax(("layer", "head"))
    return trials.isel(trial=ODD).isel(best)
