"""Labels of heads in two profiles of the same text, and how certain their difference is."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.budget.label_changes import LabelComparison, LabelledHeads
from ropelens.errors import BadArgument
from ropelens.profiles.heads import head_values, require_budget, resample_labels
from ropelens.profiles.measures import complete_profile

RESAMPLES = 400  # bootstrap draws in which labels are compared
# With fewer groups of sequences, resamples are too much alike to show the uncertainty
LEAST_GROUPS = 8


def label_changes(
    before: xr.Dataset,
    after: xr.Dataset,
    *,
    attention_change: xr.DataArray | None = None,
) -> pd.DataFrame:
    """Compare the labels in two profiles of the same text, such as of two models.

    The table has a row for each head that attends, with the columns of `change_table`.
    `attention_change` (bits, layer and head) becomes a column.

    Raises `BadArgument` if the profiles have other shapes or other rows.
    """
    before = complete_profile(before)
    after = complete_profile(after)
    _require_same_rows(before, after)
    resampled = ResampledLabels(before).changes(after)
    comparison = LabelComparison(
        before=_labelled_heads(before),
        after=_labelled_heads(after),
        confidence=resampled.confidence,
    )
    change = np.full(comparison.confidence.shape, np.nan)
    if attention_change is not None:
        change = attention_change.transpose("layer", "head").values
    return change_table(comparison, change)


def _labelled_heads(profile: xr.Dataset) -> LabelledHeads:
    """The labels of a profile, and the numbers that decide them."""
    values = head_values(profile)
    return LabelledHeads.of(
        values["label"],
        total_bits=values["total_bits"],
        sink_bits=values["sink_bits"],
        interaction_bits=values["interaction_bits"],
        positional_fraction=values["positional_fraction"],
    )


def change_table(
    comparison: LabelComparison, attention_change: Float[np.ndarray, "layer head"]
) -> pd.DataFrame:
    """A row for each head that attends; see "Changed labels" in docs/measures.md."""
    deciding = comparison.deciding()
    places = np.indices(comparison.confidence.shape)
    columns: dict[str, np.ndarray] = {
        "layer": places[0],
        "head": places[1],
        "label_before": comparison.before.label,
        "label_after": comparison.after.label,
        "decided_by": deciding.name,
        "deciding_before": deciding.before,
        "deciding_after": deciding.after,
        "threshold": deciding.threshold,
        "margin": deciding.margin,
        "attention_change": attention_change,
        "label_change_confidence": comparison.confidence,
        "changed": comparison.changed,
    }
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    attends = (table["label_before"] != "") | (table["label_after"] != "")
    return table[attends].reset_index(drop=True).astype({"changed": "boolean"})


@dataclass(frozen=True)
class ResampledChanges:
    """How often labels differ in resamples of the groups of sequences.

    `count` is the number of heads with another label in each resample; NaN for a single group.
    `confidence` is the share of resamples in which the label of a head differs; NaN for fewer
    than `LEAST_GROUPS` groups.
    """

    count: Float[np.ndarray, " resample"]
    confidence: Float[np.ndarray, "layer head"]


class ResampledLabels:
    """Labels of a profile in resamples, with which other profiles of its rows are compared."""

    def __init__(self, profile: xr.Dataset) -> None:
        self.groups = profile.sizes["group"]
        self.labels = _resampled(profile)

    def changes(self, other: xr.Dataset) -> ResampledChanges:
        """How often the labels of another profile differ in the same resamples."""
        differ = _resampled(other) != self.labels
        count = differ.sum((1, 2)).astype(float)
        confidence = differ.mean(0)
        if self.groups < 2:
            count[:] = np.nan
        if self.groups < LEAST_GROUPS:
            confidence[:] = np.nan
        return ResampledChanges(count, confidence)


def _resampled(profile: xr.Dataset) -> np.ndarray:
    return resample_labels(profile, resamples=RESAMPLES, seed=0)


def _require_same_rows(before: xr.Dataset, after: xr.Dataset) -> None:
    """Raise `BadArgument` unless both profiles have budgets of the same heads and rows."""
    for profile in (before, after):
        require_budget(profile)
    shapes = [profile["total_bits"].shape for profile in (before, after)]
    if shapes[0] != shapes[1]:
        raise BadArgument(
            "The labels of these profiles cannot be compared.",
            seen=f"{shapes[0]} and {shapes[1]} layers and heads",
            hint="profiles of models of the same shape",
        )
    texts = [profile.attrs.get("tokens_sha256") for profile in (before, after)]
    rows = [profile["group_scored"].values for profile in (before, after)]
    if texts[0] != texts[1] or not np.array_equal(rows[0], rows[1]):
        raise BadArgument(
            "The labels of these profiles cannot be compared.",
            seen="profiles of different texts, or different rows of a text",
            hint="profile(model, text) of both models, with the same Text and seed",
        )
