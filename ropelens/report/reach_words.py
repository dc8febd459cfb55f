"""What the reach of heads says, in sentences with numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from ropelens.measure.terms import OWN
from ropelens.report.sentences import say

FAR = 10
"""Distances from a tenth of the farthest on are called far."""


def describe_reach(found: xr.Dataset) -> list[str]:
    """What `ropelens.reach` found, in sentences, the most important first.

    For each variant in how many heads the picked key falls to the level of the others, and
    where; how these horizons lie to the trained context; in what share of rows the picked key
    scores above all others.
    """
    every = found.stack(one=("layer", "head")).dropna("one", how="all", subset=["horizon"])
    variants = [_lost(every.sel(variant=name)) for name in every["variant"].values]
    return [
        *(say("reach", "lost", own=OWN, **variant) for variant in variants),
        say("reach", "near", **_near(every)),
        say("reach", "wins", own=OWN, **_wins(every)),
    ]


def _lost(heads: xr.Dataset) -> dict[str, Any]:
    """In how many heads one variant loses the picked key, and at what distances."""
    horizon = heads["horizon"].values
    lost = horizon[np.isfinite(horizon) & (horizon > 0)]
    return {
        "variant": heads["variant"].item(),
        "lost": lost.tolist(),
        "median": np.median(lost) if len(lost) else None,
        "heads": len(horizon),
        "farthest": int(heads["distance"].max()),
        "never": int((horizon == 0).sum()),
        "certain": int((heads["lowest_score"] > heads["others_level"]).sum()),
    }


def _near(every: xr.Dataset) -> dict[str, Any]:
    """Where the picked keys stand, and the horizons of the model as it is."""
    record = {"rows": every.attrs["rows"], "distance": float(every["picked_distance"].mean())}
    if OWN not in every["variant"].values:
        return record | {"own": None}
    own = every.sel(variant=OWN)
    trained = every.attrs["trained_context"]
    measured = not own["horizon_low"].isnull().all()
    sure = int((own["horizon_high"] < 2 * own["horizon_low"]).sum())
    of_own = {
        "heads": every.sizes["one"],
        "within": int(((own["horizon"] > 0) & (own["horizon"] <= trained)).sum()),
        "trained_context": trained,
        "sure": sure if measured else None,
    }
    return record | {"own": of_own}


def _wins(every: xr.Dataset) -> dict[str, Any]:
    """How often the picked key beats all others, where it stands and far away."""
    farthest = int(every["distance"].max())
    far = every["win_share"].sel(distance=slice(farthest / FAR, None))
    variants = every["variant"].values.tolist()
    still = every["unmoved_win_share"].mean("one").values.tolist()
    moved = far.mean("distance").mean("one").values.tolist()
    return {
        "still": dict(zip(variants, still, strict=True)),
        "moved": dict(zip(variants, moved, strict=True)),
        "begin": int(far["distance"][0]),
        "end": farthest,
        "distances": far.sizes["distance"],
    }
