"""Datasets of entries become one dataset over `entry`, and entries become pairs."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from ropelens.comparison.entries import ComparisonEntry
from ropelens.comparison.pairs import NO_PARTNER

# Dimensions whose sizes may differ between entries
DIMS = ("layer", "head", "kv_head", "frequency", "sequence_group")


def join_entries(
    datasets: Sequence[xr.Dataset], entries: Sequence[ComparisonEntry]
) -> xr.Dataset:
    """Concatenate datasets over `entry`, with NaN and "" for missing numbers and labels."""
    names = _texts([entry.name for entry in entries])
    joined = xr.concat(
        [_number_dims(dataset) for dataset in datasets],
        xr.Variable("entry", names),
        join="outer",
        combine_attrs="override",
    )
    joined["label"] = joined["label"].fillna("")
    return joined.assign_coords(
        entry=("entry", names),
        group=("entry", _texts([entry.group for entry in entries])),
        variant=("entry", _texts([entry.variant for entry in entries])),
        size=("entry", _texts([entry.size for entry in entries])),
        seed=("entry", [entry.seed for entry in entries]),
    )


def _number_dims(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset with an index for each of the `DIMS`, by which entries are aligned."""
    sizes = {dim: dataset.sizes[dim] for dim in DIMS if dim in dataset.sizes}
    return dataset.assign_coords({dim: np.arange(size) for dim, size in sizes.items()})


def _texts(values: Sequence[str]) -> np.ndarray:
    return np.array(values, dtype=object)


def partners(
    entries: Sequence[ComparisonEntry], texts: Sequence[str] = ()
) -> list[int]:
    """Index of the baseline entry of the same size and seed, or of the same text if known.

    The baseline, which each size has, is paired with itself. Others have `NO_PARTNER`.
    """
    first = entries[0]
    baselines = {first.group}
    if first.variant:
        baselines = {entry.group for entry in entries if entry.variant == first.variant}
    paired_by: list[object] = list(texts)
    if not paired_by:
        paired_by = [(entry.size, entry.seed) for entry in entries]
    in_baseline = [entry.group in baselines for entry in entries]
    baseline_of: dict[object, int] = {}
    for number, value in enumerate(paired_by):
        if in_baseline[number]:
            baseline_of.setdefault(value, number)
    pairs = []
    for number, value in enumerate(paired_by):
        if in_baseline[number]:
            pairs.append(number)
        else:
            pairs.append(baseline_of.get(value, NO_PARTNER))
    return pairs
