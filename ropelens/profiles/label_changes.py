"""Labels of heads in two profiles of the same text, and how certain their difference is."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.budget.label_changes import LabelComparison, LabelledHeads
from ropelens.errors import BadArgument
from ropelens.profiles.heads import head_values, require_budget, resample_labels
from ropelens.profiles.measures import complete_profile

RESAMPLES = 400  # bootstrap draws in which labels are compared


def label_changes(
    before: xr.Dataset,
    after: xr.Dataset,
    *,
    attention_change: xr.DataArray | None = None,
) -> pd.DataFrame:
    """Compare the labels in two profiles of the same text, such as of two models.

    The table has a row for each head that attends, with the columns of `change_table`.
    `attention_change` (bits, layer and head) becomes a column.

    Raises `BadArgument` for profiles of other shapes or of other rows.
    """
    before = complete_profile(before)
    after = complete_profile(after)
    _require_same_rows(before, after)
    differ = ResampledLabels(before).differ(after)
    comparison = LabelComparison(
        before=labelled_heads(head_values(before)),
        after=labelled_heads(head_values(after)),
        confidence=differ.mean(0),
    )
    change = np.full(comparison.confidence.shape, np.nan)
    if attention_change is not None:
        change = attention_change.transpose("layer", "head").values
    return change_table(comparison, change)


def labelled_heads(values: Mapping[str, Any]) -> LabelledHeads:
    """The labels and the deciding numbers among `values`, the columns of heads.csv by name."""
    return LabelledHeads.of(
        np.asarray(values["label"]),
        total_bits=np.asarray(values["total_bits"]),
        sink_bits=np.asarray(values["sink_bits"]),
        interaction_bits=np.asarray(values["interaction_bits"]),
        positional_fraction=np.asarray(values["positional_fraction"]),
    )


def change_table(
    comparison: LabelComparison, attention_change: Float[np.ndarray, "layer head"]
) -> pd.DataFrame:
    """A row for each head that attends; docs/measures.md defines the columns (Labels)."""
    deciding = comparison.deciding()
    layer, head = np.indices(comparison.confidence.shape)
    columns = {
        "layer": layer,
        "head": head,
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


class ResampledLabels:
    """Labels of a profile in resamples, with which other profiles of its rows are compared."""

    def __init__(self, profile: xr.Dataset) -> None:
        self.groups = profile.sizes["group"]
        self.labels = _resampled(profile)

    def differ(self, other: xr.Dataset) -> Float[np.ndarray, "resample layer head"]:
        """1 if the labels differ in the same resample, 0 if not; NaN for a single group."""
        if self.groups < 2:
            return np.full(self.labels.shape, np.nan)
        return (_resampled(other) != self.labels).astype(float)


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
    if texts[0] != texts[1] or not np.array_equal(*rows):
        raise BadArgument(
            "The labels of these profiles cannot be compared.",
            seen="profiles of different texts, or of different rows of a text",
            hint="profile(model, text) of both models, with the same Text and seed",
        )
