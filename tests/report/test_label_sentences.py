"""Sentences about the heads of compared variants have intervals over seeds."""

import math

import numpy as np
import xarray as xr
from scipy import stats

from ropelens.report.sentences.compared_heads import (
    label_sentences,
    wavelength_sentences,
)


def two_seeds(**variables: object) -> xr.Dataset:
    """A comparison of rope and nope with seeds 0 and 1; variables [entry, layer, head]."""
    dims = ("entry", "layer", "head")
    dataset = xr.Dataset({name: (dims, values) for name, values in variables.items()})
    return dataset.assign_coords(
        entry=["rope seed 0", "rope seed 1", "nope seed 0", "nope seed 1"],
        group=("entry", ["rope", "rope", "nope", "nope"]),
        partner=("entry", [0, 1, 0, 1]),
    )


def test_heads_by_label_have_intervals_over_seeds():
    labels = np.full((4, 1, 6), "mixed", dtype=object)
    labels[0, 0, :4] = "positional"
    labels[1, 0, :4] = "positional"
    labels[2, 0, :1] = "positional"
    labels[3, 0, :3] = "positional"
    sentence = label_sentences(two_seeds(label=labels))[0]
    half = stats.t.ppf(
        0.975, 1
    )  # the changes are -3 and -1, with a standard error of 1
    interval = f"(−{2 + half:.1f} to +{half - 2:.1f})"
    assert sentence.startswith("Positional heads of 6,")
    assert sentence.endswith(f": rope 4.0; nope −2.0 {interval}.")


def test_wavelengths_of_heads_are_geometric_means_over_seeds():
    wavelength = np.zeros((4, 1, 3))
    wavelength[0] = [10, 20, 40]
    wavelength[1] = [20, 40, 80]
    wavelength[2:] = np.inf
    labels = np.full((4, 1, 3), "positional", dtype=object)
    compared = two_seeds(label=labels, mean_wavelength=wavelength)
    (sentence,) = wavelength_sentences(compared)
    half = stats.t.ppf(0.975, 1) * math.log(2) / 2
    low, high = math.sqrt(800) * np.exp([-half, half])
    assert sentence.endswith(f": rope 28.3 ({low:.3g} to {high / 1000:.3g}k).")


def test_wavelengths_name_seeds_without_such_heads():
    wavelength = np.full((4, 1, 3), 10.0)
    labels = np.full((4, 1, 3), "positional", dtype=object)
    compared = two_seeds(label=labels, mean_wavelength=wavelength)
    third = compared.isel(entry=[0]).copy(deep=True)
    third["label"][:] = "mixed"
    (sentence,) = wavelength_sentences(xr.concat([compared, third], "entry"))
    assert sentence.endswith(
        ": rope 10 (10 to 10, in 2 of 3 seeds), nope 10 (10 to 10)."
    )
