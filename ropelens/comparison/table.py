"""A comparison as a table: a row a variant, with its differences to the baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.comparison.pairs import entries_of, group_names, paired_changes
from ropelens.measure.truncation_table import best_head
from ropelens.statistics.intervals import paired_interval
from ropelens.statistics.labels import LABELS

LOOKS_AT = 0.5
"""Mean attention from which a head is said to look at the previous token, or to induce."""


@dataclass(frozen=True)
class Measured:
    """A number of every entry, and the numbers that it is the mean of.

    `mean` is over `entry`; `parts`, if known, over `entry` and one more axis, named by `over`:
    sequences, groups of them, or trials, the same for all entries of a pair. `weight` is their
    part in the mean (None: equal), `group` the parts that a bootstrap draws together (None:
    each alone).
    """

    mean: xr.DataArray
    parts: xr.DataArray | None = None
    over: str = ""
    weight: xr.DataArray | None = None
    group: xr.DataArray | None = None


def summarize_comparison(comparison: xr.Dataset) -> pd.DataFrame:
    """The table of a comparison that `compare` made: a row for each group, in its order.

    Columns (means over the entries of the group, its seeds):

    - `loss`, nats per token, and `loss_change`, its difference to the baseline in pairs of one
      size and seed (NaN for the baseline and for other text). `low` and `high` are its 95 %
      interval by Student's t, `over` says over what: "seeds" if there are two or more pairs,
      otherwise "sequences" or "groups" of them, those of one document together. `pairs` counts
      the pairs, `worse` those in which the variant loses.
    - `loss_past_context`: the loss from the trained context to the longest position.
      `repeat_gain`: how much less random tokens cost the second time. `retrieval`: the share
      of keys whose value was found. Each with `_change`, `_low` and `_high`, over trials
      instead of sequences (past the context over seeds only).
    - Heads by label; `previous_token_heads`, which give half of their attention to the previous
      token, and `previous_token_layer_0` of them in the first layer; `induction`, the score of
      the best head, chosen on half of the trials and measured on the others.
    - `positional_wavelength`, `semantic_wavelength`: the median over heads with that label of
      the wavelength they select through (tokens; planes that turn).
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
    """The difference of the group's loss to the baseline's, with its interval."""
    mean = comparison["loss"]
    if "group_loss" in comparison:
        predicted = comparison["group_predicted"]
        loss = Measured(mean, comparison["group_loss"], "groups", weight=predicted)
    else:
        of = comparison.get("sequence_group")
        loss = Measured(mean, comparison.get("sequence_loss"), "sequences", group=of)
    pairs = paired_changes(mean, group).values
    over, (change, low, high) = _change(loss, pairs, group)
    return {
        "loss_change": change,
        "low": low,
        "high": high,
        "over": over,
        "pairs": len(pairs),
        "worse": int((pairs > 0).sum()),
    }


def _change(
    measured: Measured, pairs: Float[np.ndarray, " pair"], group: str
) -> tuple[str, tuple[float, float, float]]:
    """What the interval is over ("": none), the mean change of the `pairs`, and its bounds."""
    if not len(pairs):
        return "", (np.nan, np.nan, np.nan)
    if len(pairs) > 1:
        return "seeds", paired_interval(pairs)
    if measured.parts is None:
        return "", paired_interval(pairs)
    change = paired_changes(measured.parts, group)[0]
    known = change.notnull().values  # models that read less text have fewer parts
    if not known.any():  # or one has none
        return "", paired_interval(pairs)
    weight, together = (
        None if of is None else of.sel(entry=change["entry"]).values[known]
        for of in (measured.weight, measured.group)
    )
    return measured.over, paired_interval(change.values[known], weight, together)


def _behaviour(comparison: xr.Dataset, group: str) -> dict[str, float]:
    """Loss past the trained context, gain of repeats, and retrieval; for runs only."""
    if "position_loss" not in comparison:
        return {}
    columns = {}
    for name, measured in _behaviours(comparison).items():
        columns[name] = float(entries_of(measured.mean, group).mean())
        _, bounds = _change(measured, paired_changes(measured.mean, group).values, group)
        for end, value in zip(("change", "low", "high"), bounds, strict=True):
            columns[f"{name}_{end}"] = value
    return columns


def _behaviours(comparison: xr.Dataset) -> dict[str, Measured]:
    """What runs are measured on, except the loss within the trained context."""
    # A trial's lengths and depths may share their tokens: one mean a trial.
    hit = comparison["retrieval_hit"].mean(("retrieval_length", "depth"))
    gain = repeat_gain(comparison)
    return {
        "loss_past_context": Measured(loss_past_context(comparison, "position_loss")),
        "repeat_gain": Measured(gain.mean("trial"), gain, "trials"),
        "retrieval": Measured(hit.mean("retrieval_trial"), hit, "trials"),
    }


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
    previous = entries["previous_token"] >= LOOKS_AT
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
