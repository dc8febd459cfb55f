"""Sentences about the heads of compared variants, with intervals over seeds."""

import numpy as np
import xarray as xr

from ropelens.comparison.pairs import group_entries, group_names, paired_changes
from ropelens.figures.formats import number, short_count
from ropelens.intervals import paired_interval

LABELLED = ("positional", "mixed", "semantic")
HEADS = ("layer", "head")


def compared_heads_sentences(comparison: xr.Dataset) -> list[str]:
    """Heads by label, and the wavelengths through which they choose keys."""
    return [*label_sentences(comparison), *wavelength_sentences(comparison)]


def label_sentences(comparison: xr.Dataset) -> list[str]:
    """Numbers of heads with each label, and how they differ from the baseline."""
    heads = comparison.sizes["layer"] * comparison.sizes["head"]
    sentences = []
    for label in LABELLED:
        count = (comparison["label"] == label).sum(HEADS)
        sentences.append(
            f"{label.capitalize()} heads of {heads}, by what they follow when keys exchange "
            f"their contents: {_counts_in_words(count)}."
        )
    return sentences


def _counts_in_words(count: xr.DataArray) -> str:
    """The mean of the baseline, and the paired change of each other group."""
    parts = []
    for group in group_names(count):
        change = paired_changes(count, group).values
        if not len(change):
            mean = float(group_entries(count, group).mean())
            parts.append(f"{group} {number(mean, '.1f')}")
            continue
        mean, low, high = paired_interval(change)
        words = f"{group} {number(mean, '+.1f')}"
        if len(change) > 1:
            words += f" ({number(low, '+.1f')} to {number(high, '+.1f')})"
        parts.append(words)
    return "; ".join(parts)


def wavelength_sentences(comparison: xr.Dataset) -> list[str]:
    """The wavelengths through which heads choose keys, for groups of two seeds or more."""
    sentences = []
    for label in ("positional", "semantic"):
        of_label = comparison["label"] == label
        median = comparison["mean_wavelength"].where(of_label).median(HEADS)
        parts = []
        for group in group_names(median):
            runs = group_entries(median, group).values
            known = runs[np.isfinite(runs)]
            if len(known) > 1:
                mean, low, high = np.exp(paired_interval(np.log(known)))
                interval = f"{short_count(low)} to {short_count(high)}"
                if len(known) < len(runs):
                    interval += f", in {len(known)} of {len(runs)} seeds"
                parts.append(f"{group} {short_count(mean)} ({interval})")
        if parts:
            sentences.append(
                f"Wavelength in tokens through which {label} heads choose keys, the median "
                f"head, geometric mean over seeds with its 95% interval: {', '.join(parts)}."
            )
    return sentences
