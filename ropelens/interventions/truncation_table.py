"""What is measured of edits, and a sweep of them as a table: a row an edit, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument

MEASURES = ("loss", "induction", "retrieval", "change", "labels")
"""What `ropelens.evaluate` measures where nothing is asked for."""

EVERY = (*MEASURES, "copying")  # what it can measure, and a sweep does

ENDS_OF_INTERVAL = ("", "_low", "_high")
COLUMNS = (
    *("edit", "kind", "kept", "draw", "band"),
    *("planes_stopped", "planes", "wavelength_low", "wavelength_high"),
    *(
        column
        for name in ("loss", "far_loss", "copy_loss", "repeat_loss", "induction", "retrieval")
        for column in (name, *(f"{name}_change{end}" for end in ENDS_OF_INTERVAL))
    ),
    *(f"labels_changed{share}{end}" for share in ("", "_share") for end in ENDS_OF_INTERVAL),
)
"""The columns of truncation.csv, in order."""

QUARTER = 0.75  # share that rotates in the entry, or the nearest, that speaks of an end
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def wanted_measures(measures: str | Sequence[str]) -> set[str]:
    """The measures asked for; `BadArgument` for those that do not exist."""
    names = [measures] if isinstance(measures, str) else list(measures)
    unknown = [name for name in names if name not in EVERY]
    if unknown or not names:
        raise BadArgument(
            f"There is no measure {unknown[0]!r}." if unknown else "Nothing is to be measured.",
            hint=f"measures: any of {', '.join(EVERY)}",
        )
    return set(names)


def summarize_truncation(truncation: xr.Dataset) -> pd.DataFrame:
    """The columns of truncation.csv, a row an edit; NaN where something was not measured."""
    return changes_of_edits(truncation).reindex(columns=list(COLUMNS))


def changes_of_edits(results: xr.Dataset) -> pd.DataFrame:
    """What edits change, a row an edit: `results` are what `evaluate` or `truncate` gave.

    Changes are from the entry "none", the model as it is, on the same tokens; `_low`, `_high`
    are their 95 % intervals (`paired_interval`) over trials, or of losses of the text over the
    groups of sequences in the coordinate `group` (without it each is one). `loss_beyond` and
    the like say how much more an edit changes than the mean of its controls: groups and draws
    each give an interval, and the squares of their half widths add (crossed factors, whose sum
    errs toward wide: Owen 2007, "The pigeonhole bootstrap"). docs/measures.md defines the rest.
    """
    # Imports scipy, for which a command that refuses a measure does not wait.
    from ropelens.intervals import paired_interval

    of_edits = [name for name, of in results.coords.items() if of.dims == ("edit",)]
    table = pd.DataFrame({name: results[name].values for name in of_edits})
    controls = {edit: table.get("control_of") == edit for edit in table["edit"]}
    for name, values, weight, group in _paired(results):
        table[name] = (values * weight).sum(axis=1) / weight.sum()
        changes = [paired_interval(row - values[0], weight, group) for row in values]
        table[[f"{name}_change{end}" for end in ENDS_OF_INTERVAL]] = changes
        for at, edit in enumerate(table["edit"]):
            if np.any(controls[edit]):
                apart = values[at] - values[controls[edit]]
                mean, low, _ = paired_interval(apart.mean(0), weight, group)
                of_draws = paired_interval((apart * weight).sum(1) / weight.sum())
                half = np.hypot(mean - low, of_draws[0] - of_draws[1])
                ends = [f"{name}_beyond{end}" for end in ENDS_OF_INTERVAL]
                table.loc[at, ends] = mean, mean - half, mean + half
    if "label" in results:
        _add_labels(table, results)
    return table


def class_changes(truncation: xr.Dataset) -> pd.DataFrame:
    """`changes_of_edits` of each `token_class` that the text has, below each other.

    Beside `loss_change` (nats/token) `bits`, how far attention moved, and `labels_changed`
    (heads), where these were measured. Empty without classes.
    """
    tables = []
    for name in truncation["token_class"].values if "class_loss" in truncation else []:
        of = truncation.sel(token_class=name)
        if of["class_tokens"].any():
            losses = {"loss": of["class_loss"], "predicted_tokens": of["class_tokens"]}
            table = changes_of_edits(xr.Dataset(losses)).assign(token_class=name)
            if "class_change" in of:
                table["bits"] = of["class_change"].mean(("layer", "head")).values
            if "class_label" in of:
                _, table["labels_changed"] = _relabelled(of["class_label"].values.astype(str))
            tables.append(table)
    return pd.concat(tables) if tables else pd.DataFrame({"edit": []})


def _paired(
    truncation: xr.Dataset,
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]:
    """What was measured in pairs: its name, values [edit, pair], weights and groups [pair]."""
    group = truncation["group"].values if "group" in truncation.coords else None
    of_tokens = {"loss": "predicted_tokens", "seen_loss": "seen_tokens"}
    for name, tokens in (of_tokens | {"far_loss": "far_tokens"}).items():
        if name in truncation and truncation[tokens].any():
            weight = truncation[tokens].values.astype(float)
            some, there = truncation[name].values[:, weight > 0], weight > 0
            yield name, some, weight[there], None if group is None else group[there]
    losses = [name for name in ("copy_loss", "repeat_loss") if name in truncation]
    farthest = truncation[losses].isel(copy_distance=-1, missing_dims="ignore")
    trials = {name: farthest[name] for name in losses}
    if "trial_induction" in truncation:
        scores = truncation["trial_induction"]
        trials["induction"] = best_head(scores, chosen_in=scores[0]).transpose("edit", "trial")
    if "retrieval_hit" in truncation:
        # A trial's lengths and depths may share their tokens: one mean a trial.
        trials["retrieval"] = truncation["retrieval_hit"].mean(["retrieval_length", "depth"])
    for name, of_trials in trials.items():
        yield name, of_trials.values.astype(float), np.ones(of_trials.shape[1]), None


def _add_labels(table: pd.DataFrame, truncation: xr.Dataset) -> None:
    """How many heads have another label than without an edit, and their share."""
    heads, changed = _relabelled(truncation["label"].values.astype(str))
    again = truncation["labels_changed_resampled"].values
    counts = changed, *np.quantile(again, [0.025, 0.975], axis=1)
    for end, count in zip(ENDS_OF_INTERVAL, counts, strict=True):
        table[f"labels_changed{end}"] = count
        table[f"labels_changed_share{end}"] = count / heads


def _relabelled(label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of [edit] the heads tested, without it too, and those with a new label; NaN: none."""
    tested = ~np.isin(label, ("", "untested"))
    tested &= tested[0]
    heads = np.where(tested.any((1, 2)), tested.sum((1, 2)), np.nan)
    return heads, 0 * heads + (tested & (label != label[0])).sum((1, 2))


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
