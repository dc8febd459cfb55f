"""A truncation sweep as a table: one row an edit, each change with its interval."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.statistics.intervals import paired_interval
from ropelens.statistics.variables import SWEEP

ENDS_OF_INTERVAL = ("", "_low", "_high")
COLUMNS = (
    *("edit", "kind", "kept", "draw", "band"),
    *("planes_stopped", "planes", "wavelength_low", "wavelength_high"),
    *(
        column
        for name in ("loss", "repeat_loss", "induction", "retrieval")
        for column in (name, *(f"{name}_change{end}" for end in ENDS_OF_INTERVAL))
    ),
    *(f"labels_changed{share}{end}" for share in ("", "_share") for end in ENDS_OF_INTERVAL),
    *("largest_attention_change", "changed_most"),
)
"""The columns of truncation.csv, in order."""

COORDINATES = [row.name for row in SWEEP if row.name != "edit"]
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def summarize_truncation(truncation: xr.Dataset) -> pd.DataFrame:
    """The columns of truncation.csv, a row an edit; NaN where something was not measured.

    `truncation` is what `ropelens.truncate` gives. Changes are from the entry "none", the
    model as it is, on the same tokens: `loss_change` and `repeat_loss_change` in
    nats/token (the mean over predicted tokens; over trials), `retrieval_change` in share of
    right answers, `induction_change` of the score of the head that is best in the model as it
    is, chosen on half of the trials and measured on the others. `_low` and `_high` are their
    95 % intervals (`paired_interval`) over trials, or of the loss over the groups of sequences
    that the coordinate `group` tells (without it each sequence is one). `labels_changed` counts
    the heads whose label differs, `labels_changed_share` is their share of the heads that have
    one both times; their intervals are the middle 95 % of what they are with groups of
    sequences drawn again.
    `largest_attention_change` (bits) is that of the head in `changed_most`, such as "L0 H3".
    """
    check_truncation(truncation)
    table = pd.DataFrame({"edit": truncation["edit"].values.astype(str)})
    for name in COORDINATES:
        table[name] = truncation[name].values
    _add_changes(table, truncation)
    _add_heads(table, truncation)
    return table.reindex(columns=list(COLUMNS))


def check_truncation(truncation: xr.Dataset) -> None:
    """Raise `BadArgument` for a dataset that is no truncation sweep."""
    missing = [name for name in ("edit", *COORDINATES) if name not in truncation.coords]
    first = not missing and str(truncation["kind"].values[0])
    if missing or first != "none":
        raise BadArgument(
            "This is no truncation sweep.",
            seen=f"no coordinate {missing[0]}" if missing else f"its first entry is {first!r}",
            attempt="pass what ropelens.truncate(model, tokens) gives",
        )


def _add_changes(table: pd.DataFrame, truncation: xr.Dataset) -> None:
    """Means of what has pairs, their changes and the intervals of those."""
    for name, values, weight, group in _paired(truncation):
        table[name] = (values * weight).sum(axis=1) / weight.sum()
        found = [paired_interval(row - values[0], weight, group) for row in values]
        for column, parts in zip(ENDS_OF_INTERVAL, zip(*found, strict=True), strict=True):
            table[f"{name}_change{column}"] = parts


def _paired(
    truncation: xr.Dataset,
) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]:
    """What was measured in pairs: its name, values [edit, pair], weights and groups [pair]."""
    found: list[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]] = []
    if "loss" in truncation:
        loss = truncation["loss"].transpose("edit", "sequence").values
        group = truncation["group"].values if "group" in truncation.coords else None
        weight = truncation["predicted_tokens"].values.astype(float)
        found.append(("loss", loss, weight, group))
    if "repeat_loss" in truncation:
        repeat = truncation["repeat_loss"].transpose("edit", "trial").values
        found.append(("repeat_loss", repeat, np.ones(repeat.shape[1]), None))
    if "retrieval_hit" in truncation:
        # A trial's lengths and depths may share their tokens: one mean a trial.
        hit = truncation["retrieval_hit"].mean(["retrieval_length", "depth"])
        (trial,) = (dim for dim in hit.dims if dim != "edit")
        hits = hit.transpose("edit", trial).values.astype(float)
        found.append(("retrieval", hits, np.ones(hits.shape[1]), None))
    return found


def _add_heads(table: pd.DataFrame, truncation: xr.Dataset) -> None:
    """What became of the heads: induction, labels, attention."""
    if "trial_induction" in truncation:
        _add_induction(table, truncation["trial_induction"])
    if "label" in truncation:
        label = truncation["label"].transpose("edit", "layer", "head").values.astype(str)
        known = (label != "") & (label[0] != "")
        changed = (known & (label != label[0])).sum(axis=(1, 2)).astype(float)
        heads = known.sum(axis=(1, 2))
        table["labels_changed"] = np.where(heads > 0, changed, np.nan)
        if "labels_changed_resampled" in truncation:
            again = truncation["labels_changed_resampled"].transpose("edit", ...).values
            low, high = np.quantile(again, [0.025, 0.975], axis=1)
            table["labels_changed_low"], table["labels_changed_high"] = low, high
        for end in ENDS_OF_INTERVAL:
            if f"labels_changed{end}" in table:
                count = table[f"labels_changed{end}"]
                table[f"labels_changed_share{end}"] = count / np.where(heads > 0, heads, np.nan)
    if "attention_change" in truncation:
        change = truncation["attention_change"].transpose("edit", "layer", "head").values
        flat = np.nan_to_num(change.reshape(len(change), -1), nan=-1.0)
        most = flat.argmax(axis=1)
        table["largest_attention_change"] = flat.max(axis=1)
        layers, heads = np.unravel_index(most, change.shape[1:])
        named = [f"L{layer} H{head}" for layer, head in zip(layers, heads, strict=True)]
        largest = table["largest_attention_change"]
        table["changed_most"] = [
            name if bits > 0 else "" for name, bits in zip(named, largest, strict=True)
        ]


def _add_induction(table: pd.DataFrame, trials: xr.DataArray) -> None:
    """The score of the model's best head, in every entry, and its paired change over trials."""
    scores = best_head(trials, chosen_in=trials.isel(edit=0)).transpose("edit", "trial").values
    table["induction"] = scores.mean(axis=1)
    found = [paired_interval(row - scores[0]) for row in scores]
    for column, parts in zip(ENDS_OF_INTERVAL, zip(*found, strict=True), strict=True):
        table[f"induction_change{column}"] = parts


def best_head(trials: xr.DataArray, *, chosen_in: xr.DataArray | None = None) -> xr.DataArray:
    """The odd trials of the head that has the highest mean score over the even ones.

    `trials` is over trial, layer, head and more, such as entries: each then has its own best
    head, or that of `chosen_in`. The highest of many noisy scores is too high; in trials that
    it was not chosen by, it is right on average. NaN without any score.
    """
    by = (trials if chosen_in is None else chosen_in).reset_coords(drop=True)
    # A score is no share below 0, and a head that is missing or hidden has none.
    best = by.isel(trial=EVEN).mean("trial").fillna(-1).argmax(("layer", "head"))
    return trials.isel(trial=ODD).isel(best)
