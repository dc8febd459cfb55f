"""Changes under edits compared with the unmodified model, with 95 % intervals."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Bool, Float, Shaped

from ropelens.budget.label_changes import LabelComparison, LabelledHeads
from ropelens.errors import BadArgument
from ropelens.profiles.label_changes import change_table

ENDS_OF_INTERVAL = ("", "_low", "_high")


@dataclass(frozen=True)
class PairedValues:
    """A measure under each edit, on the same pairs: sequences or trials.

    `weight` is the number of tokens of a pair, and pairs of one `group` are drawn together.
    """

    name: str
    values: Float[np.ndarray, "edit pair"]
    weight: Float[np.ndarray, " pair"]
    group: Shaped[np.ndarray, " pair"] | None = None

    @classmethod
    def of_trials(cls, name: str, values: xr.DataArray) -> "PairedValues":
        """Trials [edit, trial] have equal weights, and each is drawn by itself."""
        numbers = values.values.astype(float)
        return cls(name, numbers, np.ones(numbers.shape[1]))


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

    of_edits = [
        name for name, values in results.coords.items() if values.dims == ("edit",)
    ]
    table = pd.DataFrame({name: results[name].values for name in of_edits})
    for measure in _paired_values(results):
        name = measure.name
        total = (measure.values * measure.weight).sum(axis=1)
        table[name] = total / measure.weight.sum()
        unmodified = measure.values[0]
        table[_interval_columns(f"{name}_change")] = [
            paired_interval(values - unmodified, measure.weight, measure.group)
            for values in measure.values
        ]
        for index, edit in enumerate(table["edit"]):
            is_control = np.asarray(table.get("control_of") == edit)
            if is_control.any():
                columns = _interval_columns(f"{name}_beyond")
                table.loc[index, columns] = _beyond_controls(measure, index, is_control)
    if "label" in results:
        _add_new_labels(table, results)
    return table


def _interval_columns(name: str) -> list[str]:
    return [f"{name}{end}" for end in ENDS_OF_INTERVAL]


def _beyond_controls(
    measure: PairedValues, index: int, is_control: Bool[np.ndarray, " edit"]
) -> tuple[float, float, float]:
    """The change of an edit beyond the mean of its controls, and the ends of its interval."""
    from ropelens.intervals import paired_interval

    weight = measure.weight
    difference = measure.values[index] - measure.values[is_control]
    mean, low, _ = paired_interval(difference.mean(0), weight, measure.group)
    of_draws = (difference * weight).sum(1) / weight.sum()
    mean_of_draws, low_of_draws, _ = paired_interval(of_draws)
    half = np.hypot(mean - low, mean_of_draws - low_of_draws)
    return mean, mean - half, mean + half


def _add_new_labels(table: pd.DataFrame, results: xr.Dataset) -> None:
    """Add the number and the share of heads with another label.

    `labels_changed` counts the labels that changed by more than their uncertainty.
    `labels_differ` counts all labels that differ, with the interval of this number.
    """
    relabelled = _relabelled(results, "label")
    table["labels_changed"] = relabelled.changed
    table["labels_changed_share"] = relabelled.changed / relabelled.tested
    resampled = results["labels_changed_resampled"]
    low, high = np.quantile(resampled, [0.025, 0.975], axis=1)
    counts = {"": relabelled.differ, "_low": low, "_high": high}
    for end, count in counts.items():
        table[f"labels_differ{end}"] = count
        table[f"labels_differ_share{end}"] = count / relabelled.tested


def changes_of_heads(results: xr.Dataset) -> pd.DataFrame:
    """The labels of each head under each edit compared with the unmodified model.

    The table has a row for each edit, layer and head. docs/measures.md defines the columns
    (Changed labels).
    """
    if "label" not in results:
        raise BadArgument(
            "These results have no labels.",
            seen=f"the variables {', '.join(map(str, results.data_vars))}",
            hint='evaluate(model, text, edits=..., measures=["labels", "change"])',
        )
    unmodified = _labels_under(results, 0)
    changes = _of_each_head(results, "attention_change")
    confidences = _of_each_head(results, "label_change_confidence")
    tables = []
    for index, edit in enumerate(results["edit"].values[1:], start=1):
        comparison = LabelComparison(
            before=unmodified,
            after=_labels_under(results, index),
            confidence=confidences[index],
        )
        table = change_table(comparison, changes[index])
        table.insert(0, "edit", edit)
        tables.append(table)
    if not tables:
        raise BadArgument(
            "These results have no edits.", hint='evaluate(..., edits={"NAME": "nope"})'
        )
    return pd.concat(tables, ignore_index=True)


def _labels_under(results: xr.Dataset, index: int) -> LabelledHeads:
    """The labels under the edit with this index."""
    return LabelledHeads.of(
        results["label"].values[index],
        total_bits=_of_each_head(results, "total_bits")[index],
        sink_bits=_of_each_head(results, "sink_bits")[index],
        interaction_bits=_of_each_head(results, "interaction_bits")[index],
        positional_fraction=_of_each_head(results, "positional_fraction")[index],
    )


def _of_each_head(
    results: xr.Dataset, name: str
) -> Float[np.ndarray, "edit layer head"]:
    """A variable of the results; NaN if it was not measured."""
    if name not in results:
        return np.full(results["label"].shape, np.nan)
    return results[name].values


def class_changes(truncation: xr.Dataset) -> pd.DataFrame:
    """`changes_of_edits` by `token_class`, with `bits` and changed labels if measured."""
    tables = []
    if "class_loss" in truncation:
        for name in truncation["token_class"].values:
            of_class = truncation.sel(token_class=name)
            if of_class["class_tokens"].any():
                tables.append(_changes_of_class(of_class, name))
    return pd.concat(tables) if tables else pd.DataFrame({"edit": []})


def _changes_of_class(of_class: xr.Dataset, name: str) -> pd.DataFrame:
    losses = xr.Dataset(
        {"loss": of_class["class_loss"], "predicted_tokens": of_class["class_tokens"]}
    )
    table = changes_of_edits(losses).assign(token_class=name)
    if "class_change" in of_class:
        table["bits"] = of_class["class_change"].mean(("layer", "head")).values
    if "class_label" in of_class:
        relabelled = _relabelled(of_class, "class_label")
        table["labels_changed"] = relabelled.changed
        table["labels_differ"] = relabelled.differ
    return table


def _paired_values(results: xr.Dataset) -> Iterator[PairedValues]:
    """The measures of the results that have pairs, in the order of their columns."""
    for name, tokens in (
        ("loss", "predicted_tokens"),
        ("seen_loss", "seen_tokens"),
        ("far_loss", "far_tokens"),
    ):
        if name in results and results[tokens].any():
            yield _paired_losses(results, name, tokens)
    for name in ("copy_loss", "repeat_loss"):
        if name in results:
            farthest = results[name].isel(copy_distance=-1, missing_dims="ignore")
            yield PairedValues.of_trials(name, farthest)
    if "trial_induction" in results:
        yield PairedValues.of_trials("induction", _induction(results))
    if "retrieval_hit" in results:
        # The lengths and depths of a trial may share tokens, so each trial has one mean.
        hits = results["retrieval_hit"].mean(["retrieval_length", "depth"])
        yield PairedValues.of_trials("retrieval", hits)


def _paired_losses(results: xr.Dataset, name: str, tokens: str) -> PairedValues:
    """Losses of the sequences that have such tokens."""
    weight = results[tokens].values.astype(float)
    measured = weight > 0
    group = None
    if "group" in results.coords:
        group = results["group"].values[measured]
    values = results[name].values[:, measured]
    return PairedValues(name, values, weight[measured], group)


def _induction(results: xr.Dataset) -> xr.DataArray:
    """Induction score [edit, trial] of the head that is best in the unmodified model."""
    scores = results["trial_induction"]
    unmodified = scores[0]
    if "silenced" in results:  # the attention of a silenced head has no effect
        scores = scores.where(results["silenced"] == 0, 0.0)
    return best_head(scores, chosen_in=unmodified).transpose("edit", "trial")


@dataclass(frozen=True)
class Relabelled:
    """Numbers of heads with a label with and without each edit; NaN if there are none.

    `differ` of them have another label. The labels of `changed` of them differ by more than
    their uncertainty; NaN if no uncertainty was measured.
    """

    tested: Float[np.ndarray, " edit"]
    differ: Float[np.ndarray, " edit"]
    changed: Float[np.ndarray, " edit"]


def _relabelled(results: xr.Dataset, name: str) -> Relabelled:
    """Heads with another label than under "none"; `name` is "label" or "class_label"."""
    label = results[name].values.astype(str)
    confidence = np.full(label.shape, np.nan)  # in results of earlier versions
    if f"{name}_change_confidence" in results:
        confidence = results[f"{name}_change_confidence"].values
    comparison = LabelComparison(
        before=LabelledHeads(np.broadcast_to(label[0], label.shape), {}),
        after=LabelledHeads(label, {}),
        confidence=confidence,
    )
    tested = comparison.tested
    is_known = (tested & ~np.isnan(confidence)).any((1, 2))
    changed = np.nansum(comparison.changed, axis=(1, 2))
    heads = np.where(tested.any((1, 2)), tested.sum((1, 2)), np.nan)
    differ = np.where(np.isnan(heads), np.nan, comparison.differs.sum((1, 2)))
    return Relabelled(heads, differ, np.where(is_known, changed, np.nan))


def best_head(
    trials: xr.DataArray, *, chosen_in: xr.DataArray | None = None
) -> xr.DataArray:
    """Scores in odd trials of the head with the highest mean score over even trials.

    Such scores are right on average. Each entry has its own best head, or the best
    head of `chosen_in`.
    """
    scores = trials if chosen_in is None else chosen_in
    even = scores.reset_coords(drop=True).isel(trial=slice(0, None, 2))
    # Scores are at least 0, and missing heads have no score.
    best = even.mean("trial").fillna(-1).argmax(("layer", "head"))
    return trials.isel(trial=slice(1, None, 2)).isel(best)
