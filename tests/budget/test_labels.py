"""Labels by the documented rules, offsets and bands of kernels, and the strongest planes."""

import math

import numpy as np
import pytest
import torch

from ropelens.attention.formulas import SEEN_BY, describe_kernel, describe_wavelengths
from ropelens.budget.labels import LABELS, label_heads

RULES = [  # total, sink, position, content -> label
    ((0.0999, 0.0, 0.0999, 0.0), "diffuse"),
    ((0.09, 0.09, 0.0, 0.0), "diffuse"),
    ((0.1, 0.0, 0.1, 0.0), "positional"),
    ((1.0, 0.901, 0.099, 0.0), "sink"),
    ((1.0, 0.9, 0.07, 0.0), "positional"),
    ((3.0, 0.0, 2.0, 1.0), "positional"),
    ((3.0, 0.0, 1.99, 1.01), "mixed"),
    ((3.0, 0.0, 1.01, 1.99), "mixed"),
    ((3.0, 0.0, 1.0, 2.0), "semantic"),
    ((3.0, 0.0, 0.0, 3.0), "semantic"),
    ((3.0, 0.0, 1.99, 0.0), "mixed"),
    ((3.0, 0.0, 0.0, 1.0), "mixed"),  # two thirds interact
    ((3.0, 2.4, 0.5, 0.1), "positional"),  # a share of the rest, not of the total
    ((3.0, 2.4, 0.1, 0.5), "semantic"),
    ((math.nan, math.nan, math.nan, math.nan), ""),  # a head that does not exist
]


def labelled(bits: tuple[float, ...], rows: float = 100.0) -> str:
    parts = zip(("total", "sink", "position", "content"), bits, strict=True)
    return label_heads({name: np.array([value]) for name, value in parts}, rows=rows)[0]


@pytest.mark.parametrize(("bits", "label"), RULES)
def test_the_first_rule_that_fits(bits: tuple[float, ...], label: str):
    assert labelled(bits) == label
    assert labelled(bits, rows=99.0) == ("untested" if label else ""), "too few rows"
    assert label in (*LABELS, "")


def test_where_a_kernel_peaks_and_its_middle_half():
    random = np.random.default_rng(0)
    counts = random.integers(0, 5, size=(20, 40))
    counts[range(20), random.integers(0, 40, 20)] = 9
    counts[0] = 9 * (np.arange(40) == 39)
    counts[:, 0] += counts.sum(1) % 2 == 0  # so that no sum is exactly 1/4
    found = describe_kernel(torch.from_numpy(counts).double().log(), torch.ones(40))
    shares = counts / counts.sum(1, keepdims=True)
    np.testing.assert_allclose(found["kernel"], shares)
    np.testing.assert_array_equal(found["offset"], shares.argmax(1))
    np.testing.assert_allclose(found["offset_weight"], shares.max(1))
    for head, own in enumerate(counts):
        draws = np.repeat(np.arange(40), own)
        band = np.quantile(draws, [0.25, 0.75], method="inverted_cdf")
        assert [found["offset_low"][head], found["offset_high"][head]] == band.tolist()


def test_an_offset_that_few_rows_see_is_not_the_offset_of_a_head():
    kappa = torch.zeros(1, 50)
    kappa[0, 49] = 20.0
    kappa[0, 5] = 10.0
    seen_by = torch.linspace(1, 0, 50)
    assert describe_kernel(kappa, torch.ones(50))["offset"][0] == 49
    found = describe_kernel(kappa, seen_by)
    assert found["offset"][0] == 5
    assert ((found["kernel"][0] > 0) == (seen_by >= SEEN_BY)).all()


@pytest.mark.parametrize(
    ("push", "mean", "top", "planes"),
    [
        ([1.0, 1.0, 5.0], 100.0, math.inf, 1),
        ([1.0, 0.0, 0.5], 10.0, 10.0, 1),
        ([3.0, 1.0, 3.5], 10**1.5, math.inf, 2),
        ([-7.0, 2.0, 1.0], 1000.0, 1000.0, 1),
        ([-1.0, 0.0, 5.0], math.nan, math.inf, 1),
        ([math.nan, 2.0, 2.0], 1000.0, 1000.0, 1),  # a plane that the layer does not have
        ([1.0, 1.0, 1.0], 100.0, 10.0, 2),
        ([-1.0, -1.0, -1.0], math.nan, math.nan, 0),
    ],
)
def test_means_are_geometric_over_planes_that_rotate(push, mean, top, planes):
    """Weights are the positive part of selectivity; a plane that stops has no wavelength."""
    found = describe_wavelengths(np.array([push]), np.array([[10.0, 1000.0, math.inf]]))
    np.testing.assert_allclose(found["mean_wavelength"], [mean])
    np.testing.assert_equal(found["top_wavelength"], [top])
    assert found["planes_to_half"].tolist() == [planes]
    positive = np.nan_to_num(push).clip(min=0)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found["top_share"], [positive.max() / positive.sum()])
