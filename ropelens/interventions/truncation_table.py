"""Tables of results: changes under edits with intervals, losses by position, top planes."""

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument

DEFAULT_MEASURES = (
    "loss",
    "induction",
    "retrieval",
    "change",
    "labels",
)  # of `evaluate`
ALL_MEASURES = (*DEFAULT_MEASURES, "copying")  # default of a sweep
ENDS_OF_INTERVAL = ("", "_low", "_high")
COLUMNS = (  # columns of truncation.csv
    *("edit", "layers", "kind", "kept", "draw", "band"),
    *("planes_stopped", "planes", "wavelength_low", "wavelength_high"),
    *(
        column
        for name in (
            "loss",
            "far_loss",
            "copy_loss",
            "repeat_loss",
            "induction",
            "retrieval",
        )
        for column in (name, *(f"{name}_change{end}" for end in ENDS_OF_INTERVAL))
    ),
    *(
        f"labels_changed{share}{end}"
        for share in ("", "_share")
        for end in ENDS_OF_INTERVAL
    ),
)
QUARTER = (
    0.75  # sentences about one end use the edit that keeps about this share of planes
)


def wanted_measures(measures: str | Sequence[str]) -> set[str]:
    """The set of `measures`. Raises `BadArgument` for a name that does not exist."""
    names = [measures] if isinstance(measures, str) else list(measures)
    unknown = [name for name in names if name not in ALL_MEASURES]
    if unknown or not names:
        what = (
            f"There is no measure {unknown[0]!r}."
            if unknown
            else "No measure was given."
        )
        raise BadArgument(what, hint=f"measures: any of {', '.join(ALL_MEASURES)}")
    return set(names)


def summarize_truncation(truncation: xr.Dataset) -> pd.DataFrame:
    """The columns of truncation.csv, one row for each edit; NaN if it was not measured."""
    return changes_of_edits(truncation).reindex(columns=list(COLUMNS))


def sweeps_by_kind(truncation: xr.Dataset) -> dict[str, xr.Dataset]:
    """The sweep of each kind of layers; only "all" if one sweep covers all layers."""
    groups, layers = swept_layers(truncation), truncation.get("layers")
    if len(groups) < 2 or layers is None:
        return {"all": truncation}
    sweeps = {}
    for name, numbers in groups.items():
        entries = np.flatnonzero((layers == name) | (truncation["kind"] == "none"))
        facts = {"layers": json.dumps({name: numbers}), "heads": f"{name}.*"}
        sweeps[name] = truncation.isel(edit=entries).assign_attrs(facts)
    return sweeps


def swept_layers(truncation: xr.Dataset) -> dict[str, list[int]]:
    """The layers whose planes stop in each sweep of `truncation`."""
    everywhere = {"all": list(range(truncation.sizes["layer"]))}
    return json.loads(truncation.attrs.get("layers", "{}")) or everywhere


def changes_of_edits(results: xr.Dataset) -> pd.DataFrame:
    """Changes under each edit in the `results` of `evaluate` or `truncate`, one row per edit.

    Changes are differences from the entry "none", the unmodified model, on equal tokens.
    `_low` and `_high` are the ends of their 95 % intervals (`paired_interval`): over trials, or
    for losses of the text over the coordinate `group` of the sequences (else over sequences).
    A silenced head counts with an induction score of 0.

    Columns such as `loss_beyond` are the change minus the mean change of the controls of the
    edit. The squares of the half widths of intervals over groups and draws add up, which is
    rather too wide (Owen 2007, "The pigeonhole bootstrap"). docs/measures.md defines the rest.
    """
    # Imported here because it imports scipy, and an unknown measure is refused before that.
    from ropelens.intervals import paired_interval

    names = [
        name for name, values in results.coords.items() if values.dims == ("edit",)
    ]
    table = pd.DataFrame({name: results[name].values for name in names})
    controls = {edit: table.get("control_of") == edit for edit in table["edit"]}
    for name, values, weight, group in _paired(results):
        table[name] = (values * weight).sum(axis=1) / weight.sum()
        changes = [paired_interval(row - values[0], weight, group) for row in values]
        table[[f"{name}_change{end}" for end in ENDS_OF_INTERVAL]] = changes
        for index, edit in enumerate(table["edit"]):
            if np.any(controls[edit]):
                difference = values[index] - values[controls[edit]]
                mean, low, _ = paired_interval(difference.mean(0), weight, group)
                by_draw = paired_interval((difference * weight).sum(1) / weight.sum())
                half = np.hypot(mean - low, by_draw[0] - by_draw[1])
                ends = [f"{name}_beyond{end}" for end in ENDS_OF_INTERVAL]
                table.loc[index, ends] = mean, mean - half, mean + half
    if "label" in results:
        heads, changed = _relabelled(results["label"].values.astype(str))
        resampled = np.quantile(
            results["labels_changed_resampled"], [0.025, 0.975], axis=1
        )
        for end, count in zip(ENDS_OF_INTERVAL, (changed, *resampled), strict=True):
            table[f"labels_changed{end}"] = count
            table[f"labels_changed_share{end}"] = count / heads
    return table


def class_changes(truncation: xr.Dataset) -> pd.DataFrame:
    """`changes_of_edits` by `token_class`, with `bits` and `labels_changed` if measured."""
    tables = []
    for name in truncation["token_class"].values if "class_loss" in truncation else []:
        part = truncation.sel(token_class=name)
        if part["class_tokens"].any():
            losses = {
                "loss": part["class_loss"],
                "predicted_tokens": part["class_tokens"],
            }
            table = changes_of_edits(xr.Dataset(losses)).assign(token_class=name)
            if "class_change" in part:
                table["bits"] = part["class_change"].mean(("layer", "head")).values
            if "class_label" in part:
                _, table["labels_changed"] = _relabelled(
                    part["class_label"].values.astype(str)
                )
            tables.append(table)
    return pd.concat(tables) if tables else pd.DataFrame({"edit": []})


def _paired(
    truncation: xr.Dataset,
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Paired measurements: the name, values [edit, pair], weights [pair] and groups [pair]."""
    group = truncation["group"].values if "group" in truncation.coords else None
    for name, kind in (
        ("loss", "predicted"),
        ("seen_loss", "seen"),
        ("far_loss", "far"),
    ):
        if name in truncation and truncation[f"{kind}_tokens"].any():
            weight = truncation[f"{kind}_tokens"].values.astype(float)
            known = weight > 0
            values = truncation[name].values[:, known]
            yield name, values, weight[known], None if group is None else group[known]
    repeated = [name for name in ("copy_loss", "repeat_loss") if name in truncation]
    farthest = truncation[repeated].isel(copy_distance=-1, missing_dims="ignore")
    trials = {name: farthest[name] for name in repeated}
    if "trial_induction" in truncation:
        scores, unedited = (
            truncation["trial_induction"],
            truncation["trial_induction"][0],
        )
        if "silenced" in truncation:  # the attention of a silenced head has no effect
            scores = scores.where(truncation["silenced"] == 0, 0.0)
        trials["induction"] = best_head(scores, chosen_in=unedited).transpose(
            "edit", "trial"
        )
    if "retrieval_hit" in truncation:
        # The lengths and depths of a trial may share tokens, so each trial has one mean.
        trials["retrieval"] = truncation["retrieval_hit"].mean(
            ["retrieval_length", "depth"]
        )
    for name, by_trial in trials.items():
        yield name, by_trial.values.astype(float), np.ones(by_trial.shape[1]), None


def _relabelled(label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Heads tested with and without each edit, and heads with a new label; NaN if none."""
    tested = ~np.isin(label, ("", "untested"))
    tested &= tested[0]
    heads = np.where(tested.any((1, 2)), tested.sum((1, 2)), np.nan)
    return heads, 0 * heads + (tested & (label != label[0])).sum((1, 2))


def best_head(
    trials: xr.DataArray, *, chosen_in: xr.DataArray | None = None
) -> xr.DataArray:
    """Scores in odd trials of the head with the highest mean score over even trials.

    Such scores are right on average. Each entry has its own best head, or the best
    head of `chosen_in`.
    """
    scores = (trials if chosen_in is None else chosen_in).reset_coords(drop=True)
    # Scores are at least 0, and missing heads have no score.
    even, odd = slice(0, None, 2), slice(1, None, 2)
    best = scores.isel(trial=even).mean("trial").fillna(-1).argmax(("layer", "head"))
    return trials.isel(trial=odd).isel(best)


@public
def position_losses(results: xr.Dataset) -> pd.DataFrame:
    """Table of the loss by position, from a result of `evaluate` or `truncate`.

    A row is an edit and a bin of positions, from `position_start` up to `position_stop`. The
    columns `loss` and `loss_se` (nats/token) are the mean loss and its standard error, and
    `change` is the difference from the unmodified model. Raises `BadArgument` without "loss".
    """
    if "position_loss" not in results or "edit" not in results["position_loss"].dims:
        hint = 'evaluate(model, text, measures="loss")'
        raise BadArgument("These results have no loss by position.", hint=hint)
    loss, error = results["position_loss"], results["position_loss_se"]
    values = {
        "loss": loss,
        "loss_se": error,
        "change": loss - loss.isel(edit=0, drop=True),
    }
    ends = {name: results[name] for name in ("position_start", "position_stop")}
    table = (
        xr.Dataset(ends | values).to_dataframe(["edit", "position_bin"]).reset_index()
    )
    return table[["edit", *ends, *values]]


@public
def top_planes(attribution: xr.Dataset, count: Positive = 12) -> pd.DataFrame:
    """Table of the planes with the largest absolute attribution, the largest first.

    Columns are `head` ("2.3"), `plane` (0 rotates fastest; the last one is the part that RoPE
    does not rotate), `wavelength` (tokens), and the variables `attribution`, and `dropped` and
    `patched` if they were measured, of the result of `attribute_planes`.
    """
    measured = ("wavelength", "attribution", "dropped", "patched")
    names = [name for name in measured if name in attribution.variables]
    columns = attribution.reset_coords()[names].to_dataframe(
        ["layer", "head", "frequency"]
    )
    columns = columns[names].dropna(subset="attribution")
    order = (
        columns["attribution"].abs().sort_values(ascending=False, kind="stable").index
    )
    table = columns.loc[order[:count]].reset_index()
    heads = table["layer"].astype(str) + "." + table["head"].astype(str)
    table = table.drop(columns="layer").assign(head=heads)
    return table.rename(columns={"frequency": "plane"})
