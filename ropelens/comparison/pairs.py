"""Entries of a comparison, by group and in pairs with the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import xarray as xr

Compared = TypeVar("Compared", xr.Dataset, xr.DataArray)

ALONE = -1
"""The partner of an entry that the baseline has no like of."""


def partners(
    groups: Sequence[str], alike: Sequence[object], *, baselines: set[str]
) -> list[int]:
    """For each entry the index of the baseline's that it is paired with: its like.

    `alike` are equal for entries that make a pair (size and seed, or the text). An entry of
    one of the `baselines` is paired with itself, one without a like with `ALONE`.
    """
    found = []
    for entry, (group, kind) in enumerate(zip(groups, alike, strict=True)):
        if group in baselines:
            found.append(entry)
            continue
        like = [
            other
            for other, (name, same) in enumerate(zip(groups, alike, strict=True))
            if name in baselines and same == kind
        ]
        found.append(like[0] if like else ALONE)
    return found


def group_names(comparison: xr.Dataset | xr.DataArray) -> list[str]:
    """The groups of a comparison, or of one of its variables, in its order."""
    return list(dict.fromkeys(comparison["group"].values.tolist()))


def entries_of(comparison: Compared, group: str) -> Compared:
    """The entries of one group, of a comparison or of one of its variables."""
    return comparison.isel(entry=np.flatnonzero(comparison["group"].values == group))


def paired_changes(values: xr.DataArray, group: str) -> xr.DataArray:
    """A variable's values of the entries of `group`, less those that they are paired with.

    Over `entry`: none for a group that is a baseline, or that has no pairs.
    """
    partner = values["partner"].values
    paired = (partner != ALONE) & (partner != np.arange(len(partner)))
    mine = np.flatnonzero((values["group"].values == group) & paired)
    other = values.isel(entry=partner[mine]).assign_coords(entry=values["entry"][mine])
    return values.isel(entry=mine) - other
