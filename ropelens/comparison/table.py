"""A comparison as a table: a row per variant, with its differences to the baseline in pairs."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.budget.labels import LABELS
from ropelens.errors import BadArgument, public
from ropelens.intervals import paired_interval
from ropelens.interventions.truncation_table import best_head, changes_of_edits

Compared = TypeVar("Compared", xr.Dataset, xr.DataArray)

ALONE = -1
"""The partner of an entry that has no pair."""


def summarize_comparison(comparison: xr.Dataset) -> pd.DataFrame:
    """The table of a comparison that `compare` made: a row for each group, in its order.

    Columns are means over the entries of the group, its seeds; docs/measures.md defines them.
    """
    return pd.DataFrame([_row(comparison, group) for group in group_names(comparison)])


def _row(comparison: xr.Dataset, group: str) -> dict[str, object]:
    entries = entries_of(comparison, group)
    first = entries.isel(entry=0)
    return {
        "group": group,
        "variant": str(first["variant"].item()),
        "size": str(first["size"].item()),
        "entries": entries.sizes["entry"],
        "loss": float(entries["loss"].mean()),
        **_loss_change(comparison, group),
        **_behaviour(comparison, group),
        **_heads(entries),
    }


def _loss_change(comparison: xr.Dataset, group: str) -> dict[str, object]:
    pairs = paired_changes(comparison["loss"], group).values
    over, parts = "groups", comparison.get("group_loss")
    weight, together = comparison.get("group_predicted"), None
    if parts is None:
        over, parts = "sequences", comparison.get("sequence_loss")
        together = comparison.get("sequence_group")
    interval = _change(pairs, parts, group, weight=weight, together=together)
    return {
        **dict(zip(("loss_change", "low", "high"), interval, strict=True)),
        "over": "seeds" if len(pairs) > 1 else over if np.isfinite(interval[1]) else "",
        "pairs": len(pairs),
        "worse": int((pairs > 0).sum()),
    }


def _change(
    pairs: Float[np.ndarray, " pair"],
    parts: xr.DataArray | None,
    group: str,
    *,
    weight: xr.DataArray | None = None,
    together: xr.DataArray | None = None,
) -> tuple[float, float, float]:
    """The mean change of the `pairs`, and the bounds of its interval.

    One pair has an interval over its `parts` [entry, part], if known: sequences, groups of
    them, or trials, the same for both. `weight` is their part in the mean (None: equal);
    parts whose number in `together` is the same are drawn together (None: each alone).
    """
    if not len(pairs):
        return np.nan, np.nan, np.nan
    if len(pairs) > 1 or parts is None:
        return paired_interval(pairs)
    change = paired_changes(parts, group)[0]
    known = change.notnull().values  # models that read less text have fewer parts
    if not known.any():
        return paired_interval(pairs)
    of_parts = (
        None if of is None else of.sel(entry=change["entry"]).values[known]
        for of in (weight, together)
    )
    return paired_interval(change.values[known], *of_parts)


def _behaviour(comparison: xr.Dataset, group: str) -> dict[str, float]:
    """Loss past the trained context, gain of repeats, and retrieval; for runs only."""
    if "position_loss" not in comparison:
        return {}
    # A trial's lengths and depths may share their tokens: one mean a trial.
    hit = comparison["retrieval_hit"].mean(("retrieval_length", "depth"))
    gain = repeat_gain(comparison)
    measured = {
        "loss_past_context": (loss_past_context(comparison, "position_loss"), None),
        "repeat_gain": (gain.mean("trial"), gain),
        "retrieval": (hit.mean("retrieval_trial"), hit),
    }
    columns = {}
    for name, (mean, trials) in measured.items():
        columns[name] = float(entries_of(mean, group).mean())
        interval = _change(paired_changes(mean, group).values, trials, group)
        ends = (f"{name}_{end}" for end in ("change", "low", "high"))
        columns |= zip(ends, interval, strict=True)
    return columns


def loss_past_context(comparison: xr.Dataset, name: str) -> xr.DataArray:
    """Mean loss of the tokens past the trained context, by the bins of variable `name`."""
    beyond = comparison["position_start"] >= int(comparison.attrs["context"])
    past = comparison[name].where(beyond, drop=True)
    return past.weighted(past["position_stop"] - past["position_start"]).mean("position_bin")


def repeat_gain(comparison: xr.Dataset, prefix: str = "") -> xr.DataArray:
    """How much less random tokens cost the second time, nats/token, by trial."""
    return comparison[prefix + "first_loss"] - comparison[prefix + "repeat_loss"]


def _heads(entries: xr.Dataset) -> dict[str, float]:
    """Roles, labels and wavelengths of the heads, means over the entries."""
    count = entries.sizes["entry"]
    previous = entries["previous_token"] >= 0.5  # from which a head is said to look at it
    heads = ("layer", "head")
    wavelengths = {
        f"{label}_wavelength": float(
            entries["mean_wavelength"].where(entries["label"] == label).median(heads).mean()
        )
        for label in ("positional", "semantic")
    }
    return {
        "previous_token_heads": float(previous.sum() / count),
        "previous_token_layer_0": float(previous.isel(layer=0).sum() / count),
        "induction": float(best_head(entries["trial_induction"]).mean()),
        **{label: float((entries["label"] == label).sum() / count) for label in LABELS},
        **wavelengths,
    }


def group_names(comparison: xr.Dataset | xr.DataArray) -> list[str]:
    """The groups of a comparison or of one of its variables, in their order."""
    return list(dict.fromkeys(comparison["group"].values.tolist()))


def entries_of(comparison: Compared, group: str) -> Compared:
    """The entries of one group, of a comparison or of one of its variables."""
    return comparison.isel(entry=np.flatnonzero(comparison["group"].values == group))


@public
def paired_changes(values: xr.Dataset | xr.DataArray, group: str = "") -> Any:
    """Differences in pairs: of edits from the model as it is, or of runs from the baseline.

    Of what `evaluate` or `truncate` gave: a table with a row an edit, of each measure the mean,
    the mean `_change` on the same tokens, and the ends `_low` and `_high` of its 95 % interval
    over documents (or stretches, or trials); of an edit with controls also `_beyond`, how much
    more it changes than they do. docs/measures.md defines them (Truncation).

    Of a variable [entry, ...] of what `compare` gives: that of the entries of `group`, minus
    that of their pairs; over no `entry` for a baseline, and for a group without pairs.
    """
    if isinstance(values, xr.Dataset) and "edit" in values.coords and not group:
        return changes_of_edits(values)
    if isinstance(values, xr.Dataset) or "partner" not in values.coords:
        raise BadArgument(
            "There is nothing in pairs here.",
            hint="what evaluate gave, or a variable of what compare gave, and a group",
        )
    partner = values["partner"].values
    paired = (partner != ALONE) & (partner != np.arange(len(partner)))
    mine = np.flatnonzero((values["group"].values == group) & paired)
    other = values.isel(entry=partner[mine]).assign_coords(entry=values["entry"][mine])
    return values.isel(entry=mine) - other
