"""The table of heads: the columns of heads.csv in their order, and how sure the labels are."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from ropelens.budget.labels import DOUBTS, Thresholds
from ropelens.profiles.heads import (
    FRACTIONS,
    fractions,
    head_values,
    resample_budget,
    resample_labels,
)
from ropelens.profiles.kinds import KIND_COORDINATES
from ropelens.profiles.measures import columns

DECIDED = ("positional", "mixed", "semantic")  # labels of fractions
# Two samples of a text differ more than a sample and the text, by this factor.
SPREAD = 2**0.5

KERNEL_AND_PLANES = (
    "offset",
    "offset_low",
    "offset_high",
    "top_wavelength",
    "top_share",
    "offset_weight",
    "mean_wavelength",
)
INTEGERS = ("offset", "offset_low", "offset_high", "planes_to_half")


@dataclass(frozen=True)
class Resampled:
    """How sure the labels are, from bootstrap resamples; NaN if nothing can be resampled.

    `fraction_low` to `fraction_high` is the 95% interval of the larger one of
    `positional_fraction` and `content_fraction`.
    """

    confidence: Float[np.ndarray, "layer head"]
    fraction_low: Float[np.ndarray, "layer head"]
    fraction_high: Float[np.ndarray, "layer head"]

    def is_uncertain(self, label: np.ndarray) -> Float[np.ndarray, "layer head"]:
        """1 if the interval contains the bound between labels, else 0; NaN if unknown."""
        decided = np.isin(label, DECIDED)
        begins_below = self.fraction_low < Thresholds.named
        ends_above = self.fraction_high >= Thresholds.named
        unknown = decided & np.isnan(self.fraction_low)
        return np.where(unknown, np.nan, decided & begins_below & ends_above)


def head_table(profile: xr.Dataset, *, resamples: int, seed: int) -> pd.DataFrame:
    """A row for each head that attends; `classify_heads` describes the columns."""
    values = head_values(profile)
    label = values["label"]
    resampled = resample_heads(profile, values, resamples=resamples, seed=seed)
    table = {"layer": values["layer"], "head": values["head"], "label": label}
    table["confidence"] = resampled.confidence
    for name in (*FRACTIONS, *columns("budget"), *KERNEL_AND_PLANES):
        table[name] = values[name]
    for name in columns("score"):
        table[name] = profile[name].values
    table["planes_to_half"] = values["planes_to_half"]
    for name in columns("follow"):
        table[name] = profile[name].values
    table["fraction_low"] = resampled.fraction_low
    table["fraction_high"] = resampled.fraction_high
    table["uncertain"] = resampled.is_uncertain(label)
    table["opposed"] = is_opposed(label, profile["follow_score"].values)
    if "reach" in profile.coords:
        for name in KIND_COORDINATES:
            table[name] = profile[name].values[values["layer"]]
    for name in columns("end"):
        table[name] = profile[name].values
    table.update(columns_of_requested(profile))
    heads = pd.DataFrame({name: array.ravel() for name, array in table.items()})
    heads = heads[heads["total_bits"].notna()].reset_index(drop=True)
    heads = heads.astype(dict.fromkeys(INTEGERS, "Int64"))
    heads = heads.astype(dict.fromkeys(DOUBTS, "boolean"))
    heads.attrs["thresholds"] = asdict(Thresholds())
    return heads


def resample_heads(
    profile: xr.Dataset, values: Mapping[str, np.ndarray], *, resamples: int, seed: int
) -> Resampled:
    """Resample the groups of sequences; `values` are the `head_values` of the whole text."""
    label = values["label"]
    if profile.sizes["group"] < 2 or not resamples:
        unknown = np.full(label.shape, np.nan)
        return Resampled(unknown, unknown, unknown)
    labels = resample_labels(profile, resamples=resamples, seed=seed, spread=SPREAD)
    same = (labels == label).mean(0)
    budget = resample_budget(profile, resamples=resamples, seed=seed)
    shares = fractions(budget.assigned_bits)
    larger = np.where(
        values["positional_fraction"] >= values["content_fraction"],
        shares["positional_fraction"],
        shares["content_fraction"],
    )
    low, high = np.quantile(larger, [0.025, 0.975], axis=0)
    confidence = np.where(label != "untested", same, np.nan)
    return Resampled(confidence, fraction_low=low, fraction_high=high)


def is_opposed(
    label: np.ndarray, follow_score: Float[np.ndarray, "layer head"]
) -> Float[np.ndarray, "layer head"]:
    """1 if exchanged keys speak against the label, else 0; NaN without a score."""
    follows_content = (label == "positional") & (follow_score < 0)
    follows_position = (label == "semantic") & (follow_score > 0)
    opposed = follows_content | follows_position
    return np.where(np.isnan(follow_score), np.nan, opposed)


def columns_of_requested(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """Columns of the statistics that were added to the profile, one for each distance bin."""
    added = {}
    requested = profile.filter_by_attrs(column=lambda column: column is not None)
    for name, array in requested.items():
        if "distance_bin" in array.dims:
            for index, start in enumerate(profile["distance_start"].values):
                added[f"{name}_{start}"] = array.values[..., index]
        else:
            added[str(name)] = array.values
    return added
