"""Entries of a comparison, by group and in pairs with the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import xarray as xr

from ropelens.errors import public

Compared = TypeVar("Compared", xr.Dataset, xr.DataArray)

ALONE = -1
"""The partner of an entry that has no pair."""


def partners(
    groups: Sequence[str], alike: Sequence[object], *, baselines: set[str]
) -> list[int]:
    """The entry that each entry is paired with: the one `alike` in one of the `baselines`.

    Entries are alike by size and seed, or by their text. An entry of a baseline is paired
    with itself, one that has no pair with `ALONE`.
    """
    baseline = {
        like: entry
        for entry, (group, like) in reversed(list(enumerate(zip(groups, alike, strict=True))))
        if group in baselines
    }
    return [
        entry if group in baselines else baseline.get(like, ALONE)
        for entry, (group, like) in enumerate(zip(groups, alike, strict=True))
    ]


def group_names(comparison: xr.Dataset | xr.DataArray) -> list[str]:
    """The groups of a comparison or of one of its variables, in their order."""
    return list(dict.fromkeys(comparison["group"].values.tolist()))


def entries_of(comparison: Compared, group: str) -> Compared:
    """The entries of one group, of a comparison or of one of its variables."""
    return comparison.isel(entry=np.flatnonzero(comparison["group"].values == group))


@public
def paired_changes(values: xr.DataArray, group: str) -> xr.DataArray:
    """`values` [entry, ...] of the entries of `group`, minus those of their pairs.

    `values` is a variable of what `compare` gives. The result is over the `entry` of the
    group; it is empty for a baseline, and for a group without pairs.
    """
    partner = values["partner"].values
    paired = (partner != ALONE) & (partner != np.arange(len(partner)))
    mine = np.flatnonzero((values["group"].values == group) & paired)
    other = values.isel(entry=partner[mine]).assign_coords(entry=values["entry"][mine])
    return values.isel(entry=mine) - other
