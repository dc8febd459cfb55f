"""What the page's script is given on the chosen head beyond its profile."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.reach import distance_bins
from ropelens.figures.truncated_heads import head_steps, kinds_of, shares_of
from ropelens.report.packed import packed


def check_same_heads(profile: xr.Dataset, results: xr.Dataset, kind: str) -> None:
    """Raise `BadArgument` for results of another kind, or of another number of heads."""
    if results.attrs.get("kind") != kind:
        raise BadArgument(
            f"This dataset holds no {kind}.", attempt=f"pass what {kind} measured"
        )
    of_profile, others = (
        tuple(one.sizes.get(name) for name in ("layer", "head")) for one in (profile, results)
    )
    if None not in others and others != of_profile:
        raise BadArgument(
            f"The {kind} and the profile are of other models.",
            seen="{} layers of {} heads, and {} of {}".format(*others, *of_profile),
            attempt="results of the model that was profiled",
        )


def stopped_payload(truncation: xr.Dataset) -> dict[str, Any]:
    """The steps of a sweep by kind, as shares that rotate, and every head's arrays there."""
    return {
        "steps": {kind: shares_of(truncation, kind).tolist() for kind in kinds_of(truncation)},
        "arrays": {
            name: packed(values, dims=("layer", "head"))
            for name, values in head_steps(truncation).items()
        },
    }


OF_REACH = (
    *("horizon", "horizon_low", "horizon_high"),
    *("others_level", "lowest_score", "unmoved_win_share"),
)
"""What the page tells of a head under each variant."""


def reach_payload(reach: xr.Dataset) -> dict[str, Any]:
    """What the script scores a head's picked key with, at the distances of `plot_reach`.

    Frequencies keep every digit: they are multiplied with distances of up to a million.
    """
    distance, begins, _ = distance_bins(reach)
    by_head = ("layer", "head")
    return {
        "variants": reach["variant"].values.tolist(),
        "farthest": int(reach["distance"].max()),
        "distance": packed(distance),
        "begins": [*begins.tolist(), len(distance)],
        **{
            name: np.nan_to_num(reach[f"variant_{name}"].values).tolist()
            for name in ("inv_freq", "gain")
        },
        **{
            name: packed(reach[name].transpose(*by_head, ...).values, dims=by_head)
            for name in ("product_real", "product_imag", "picked_distance", *OF_REACH)
        },
    }
