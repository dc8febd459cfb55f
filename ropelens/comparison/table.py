"""Table of a comparison: a row per variant, with paired differences from the baseline."""

from typing import Any, TypeVar

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.arguments import public
from ropelens.budget.labels import LABELS
from ropelens.errors import BadArgument
from ropelens.intervals import paired_interval
from ropelens.interventions.changes import best_head, changes_of_edits

Compared = TypeVar("Compared", xr.Dataset, xr.DataArray)

NO_PARTNER = -1  # index of the partner of an entry without a pair


def summarize_comparison(comparison: xr.Dataset) -> pd.DataFrame:
    """Table of a comparison with a row per group; docs/measures.md defines the columns."""
    rows = []
    for group in group_names(comparison):
        entries = group_entries(comparison, group)
        texts = {name: str(entries[name][0].item()) for name in ("variant", "size")}
        row = {"group": group, **texts, "entries": entries.sizes["entry"]}
        row |= {
            "loss": float(entries["loss"].mean()),
            **_loss_change(comparison, group),
        }
        if "bytes_per_token" in entries.coords:  # comparable if the tokenizers differ
            bits = entries["loss"] / entries["bytes_per_token"] / np.log(2)
            row["bits_per_byte"] = float(bits.mean())
        rows.append(row | _behaviour(comparison, group) | _heads(entries))
    return pd.DataFrame(rows)


def _loss_change(comparison: xr.Dataset, group: str) -> dict[str, object]:
    pairs = paired_changes(comparison["loss"], group).values
    over, parts = "groups", comparison.get("group_loss")
    weight, together = comparison.get("group_predicted"), None
    if parts is None:
        over, parts = "sequences", comparison.get("sequence_loss")
        together = comparison.get("sequence_group")
    interval = _mean_change(pairs, parts, group, weight, together)
    over = "seeds" if len(pairs) > 1 else over if np.isfinite(interval[1]) else ""
    change = dict(zip(("loss_change", "low", "high"), interval, strict=True))
    return change | {"over": over, "pairs": len(pairs), "worse": int((pairs > 0).sum())}


def _mean_change(
    pairs: Float[np.ndarray, " pair"],
    parts: xr.DataArray | None,
    group: str,
    *weights: xr.DataArray | None,
) -> tuple[float, float, float]:
    """Mean change of the `pairs`, and the bounds of its interval.

    The interval of one pair is over its `parts` [entry, part]: sequences, groups or trials.
    `weights` are the weight of each part, and the group with which it is drawn.
    """
    if not len(pairs):
        return np.nan, np.nan, np.nan
    if len(pairs) > 1 or parts is None:
        return paired_interval(pairs)
    change = paired_changes(parts, group)[0]
    known = change.notnull().values  # analyses of less text have fewer parts
    if not known.any():
        return paired_interval(pairs)
    entry = change["entry"]
    of_parts = [
        None if w is None else w.sel(entry=entry).values[known] for w in weights
    ]
    return paired_interval(change.values[known], *of_parts)


def _behaviour(comparison: xr.Dataset, group: str) -> dict[str, float]:
    """Loss past the trained context, gain of repeats, and retrieval, if measured (runs)."""
    if "position_loss" not in comparison:
        return {}
    # The lengths and depths of a trial may share tokens, so take the mean of each trial.
    hit = comparison["retrieval_hit"].mean(("retrieval_length", "depth"))
    gain = repeat_gain(comparison)
    measured = {
        "loss_past_context": (loss_past_context(comparison), None),
        "repeat_gain": (gain.mean("trial"), gain),
        "retrieval": (hit.mean("retrieval_trial"), hit),
    }
    columns = {}
    for name, (mean, trials) in measured.items():
        columns[name] = float(group_entries(mean, group).mean())
        interval = _mean_change(paired_changes(mean, group).values, trials, group)
        ends = (f"{name}_{end}" for end in ("change", "low", "high"))
        columns |= zip(ends, interval, strict=True)
    return columns


def loss_past_context(comparison: xr.Dataset, prefix: str = "") -> xr.DataArray:
    """Mean loss of the tokens past the trained context (nats/token)."""
    beyond = comparison["position_start"] >= int(comparison.attrs["context"])
    past = comparison[prefix + "position_loss"].where(beyond, drop=True)
    return past.weighted(past["position_stop"] - past["position_start"]).mean(
        "position_bin"
    )


def repeat_gain(comparison: xr.Dataset, prefix: str = "") -> xr.DataArray:
    """Loss of random tokens minus their loss the second time (nats/token), by trial."""
    return comparison[prefix + "first_loss"] - comparison[prefix + "repeat_loss"]


def _heads(entries: xr.Dataset) -> dict[str, float]:
    """Number of heads by role and label, and their wavelengths, as means over the entries."""
    count, labels = entries.sizes["entry"], entries["label"]
    previous = entries["previous_token"] >= 0.5  # threshold of a previous-token head
    columns = {
        "previous_token_heads": previous.sum() / count,
        "previous_token_layer_0": previous.isel(layer=0).sum() / count,
        "induction": best_head(entries["trial_induction"]).mean(),
        **{label: (labels == label).sum() / count for label in LABELS},
    }
    for label in ("positional", "semantic"):
        wavelengths = entries["mean_wavelength"].where(labels == label)
        columns[f"{label}_wavelength"] = wavelengths.median(("layer", "head")).mean()
    return {name: float(value) for name, value in columns.items()}


def group_names(comparison: xr.Dataset | xr.DataArray) -> list[str]:
    return list(dict.fromkeys(comparison["group"].values.tolist()))


def group_entries(comparison: Compared, group: str) -> Compared:
    return comparison.isel(entry=np.flatnonzero(comparison["group"].values == group))


@public
def paired_changes(values: xr.Dataset | xr.DataArray, group: str = "") -> Any:
    """Paired differences between edits and the unmodified model, or runs and the baseline.

    For results of `evaluate` or `truncate`: a table with a row per edit. Each measure has its
    mean, the mean `_change` on the same tokens, and the bounds `_low` and `_high` of its 95 %
    interval over documents (or stretches, or trials). An edit with controls also has `_beyond`,
    its change minus the change of the controls. docs/measures.md defines them (Truncation).

    For a variable [entry, ...] of a dataset from `compare`: the values of the entries of
    `group` minus the values of their pairs. The result is empty if `group` has no pairs.
    """
    if isinstance(values, xr.Dataset) and "edit" in values.coords and not group:
        return changes_of_edits(values)
    if isinstance(values, xr.Dataset) or "partner" not in values.coords:
        hint = (
            "results of evaluate or truncate, or a variable of a comparison and a group"
        )
        raise BadArgument("These results have no pairs.", hint=hint)
    partner = values["partner"].values
    paired = (partner != NO_PARTNER) & (partner != np.arange(len(partner)))
    entries = np.flatnonzero((values["group"].values == group) & paired)
    pairs = values.isel(entry=partner[entries]).assign_coords(
        entry=values["entry"][entries]
    )
    return values.isel(entry=entries) - pairs
