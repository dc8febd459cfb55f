"""Groups of entries, and pairs of entries with the entries of the baseline."""

from typing import Any, Literal, TypeVar

import numpy as np
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.interventions.changes import changes_of_edits, changes_of_heads

Compared = TypeVar("Compared", xr.Dataset, xr.DataArray)

NO_PARTNER = -1  # index of the partner of an entry without a pair


def group_names(comparison: xr.Dataset | xr.DataArray) -> list[str]:
    return list(dict.fromkeys(comparison["group"].values.tolist()))


def group_entries(comparison: Compared, group: str) -> Compared:
    return comparison.isel(entry=np.flatnonzero(comparison["group"].values == group))


@public
def paired_changes(
    values: xr.Dataset | xr.DataArray,
    group: str = "",
    *,
    by: Literal["edit", "head"] = "edit",
) -> Any:
    """Paired differences between edits and the unmodified model, or runs and the baseline.

    For results of `evaluate` or `truncate`: a table with a row per edit. Each measure has its
    mean, the mean `_change` on the same tokens, and the bounds `_low` and `_high` of its 95 %
    interval over documents (or stretches, or trials). An edit with controls also has `_beyond`,
    its change minus the change of the controls. docs/measures.md defines them (Truncation).

    With `by="head"`: a table with a row per edit, layer and head. It has the label before and
    after, the number that decides it with its threshold and its `margin`, `attention_change`
    in bits, and `changed`: whether the label changed by more than its uncertainty, or missing
    if this is undecided. docs/measures.md defines them (Changed labels).

    For a variable [entry, ...] of a dataset from `compare`: the values of the entries of
    `group` minus the values of their pairs. The result is empty if `group` has no pairs.
    """
    if isinstance(values, xr.Dataset) and "edit" in values.coords and not group:
        return changes_of_edits(values) if by == "edit" else changes_of_heads(values)
    if isinstance(values, xr.Dataset) or "partner" not in values.coords:
        raise BadArgument(
            "These results have no pairs.",
            hint="results of evaluate or truncate, or a variable of a comparison and a "
            "group",
        )
    partner = values["partner"].values
    has_partner = (partner != NO_PARTNER) & (partner != np.arange(len(partner)))
    in_group = values["group"].values == group
    entries = np.flatnonzero(in_group & has_partner)
    of_group = values.isel(entry=entries)
    of_partners = values.isel(entry=partner[entries])
    return of_group - of_partners.assign_coords(entry=values["entry"][entries])
