"""Labels by the documented rules, offsets and bands of kernels, and the strongest planes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from ropelens.attention import formulas
from ropelens.budget.labels import LABELS, assign_shared, follow_numbers, label_heads

RULES = [
    # total, sink, position, content -> label
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
    # two thirds interact
    ((3.0, 0.0, 0.0, 1.0), "mixed"),
    # a share of the rest, not of the total
    ((3.0, 2.4, 0.5, 0.1), "positional"),
    ((3.0, 2.4, 0.1, 0.5), "semantic"),
    # a head that does not exist
    ((math.nan, math.nan, math.nan, math.nan), ""),
]


def labelled(bits: tuple[float, ...], rows: float = 100.0) -> str:
    names = ("total", "sink", "position", "content")
    arrays = {}
    for name, value in zip(names, bits, strict=True):
        arrays[name] = np.array([value])
    return label_heads(arrays, rows=rows)[0]


@pytest.mark.parametrize(("bits", "label"), RULES)
def test_the_first_rule_that_fits(bits: tuple[float, ...], label: str):
    assert labelled(bits) == label
    assert label in (*LABELS, "")
    label_of_too_few_rows = "untested" if label else ""
    assert labelled(bits, rows=99.0) == label_of_too_few_rows


def test_where_a_kernel_peaks_and_its_middle_half():
    random = np.random.default_rng(0)
    counts = random.integers(0, 5, size=(20, 40))
    peaks = random.integers(0, 40, 20)
    counts[range(20), peaks] = 9
    counts[0] = 0
    counts[0, 39] = 9
    is_even = counts.sum(1) % 2 == 0
    counts[:, 0] += is_even  # so that no sum is exactly 1/4
    kappa = torch.from_numpy(counts).double().log()
    described = formulas.describe_kernel(kappa, torch.ones(40))
    expected_kernel = counts / counts.sum(1, keepdims=True)
    assert_allclose(described["kernel"], expected_kernel)
    assert_array_equal(described["offset"], expected_kernel.argmax(1))
    assert_allclose(described["offset_weight"], expected_kernel.max(1))
    for head, counts_of_head in enumerate(counts):
        offsets = np.repeat(np.arange(40), counts_of_head)
        expected_band = np.quantile(offsets, [0.25, 0.75], method="inverted_cdf")
        band = [described["offset_low"][head], described["offset_high"][head]]
        assert band == expected_band.tolist()


def test_an_offset_that_few_rows_see_is_not_the_offset_of_a_head():
    kappa = torch.zeros(1, 50)
    kappa[0, 49] = 20.0
    kappa[0, 5] = 10.0
    seen_by = torch.linspace(1, 0, 50)
    seen_by_all = formulas.describe_kernel(kappa, torch.ones(50))
    seen_by_fewer = formulas.describe_kernel(kappa, seen_by)
    assert seen_by_all["offset"][0] == 49
    assert seen_by_fewer["offset"][0] == 5
    has_weight = seen_by_fewer["kernel"][0] > 0
    expected = seen_by >= formulas.SEEN_BY
    assert (has_weight == expected).all()


@pytest.mark.parametrize(
    ("push", "mean", "top", "planes"),
    [
        ([1.0, 1.0, 5.0], 100.0, math.inf, 1),
        ([1.0, 0.0, 0.5], 10.0, 10.0, 1),
        ([3.0, 1.0, 3.5], 10**1.5, math.inf, 2),
        ([-7.0, 2.0, 1.0], 1000.0, 1000.0, 1),
        ([-1.0, 0.0, 5.0], math.nan, math.inf, 1),
        # a plane that the layer does not have
        ([math.nan, 2.0, 2.0], 1000.0, 1000.0, 1),
        ([1.0, 1.0, 1.0], 100.0, 10.0, 2),
        ([-1.0, -1.0, -1.0], math.nan, math.nan, 0),
    ],
)
def test_means_are_geometric_over_planes_that_rotate(push, mean, top, planes):
    wavelength = np.array([[10.0, 1000.0, math.inf]])
    described = formulas.describe_wavelengths(np.array([push]), wavelength)
    assert_allclose(described["mean_wavelength"], [mean])
    np.testing.assert_equal(described["top_wavelength"], [top])
    assert described["planes_to_half"].tolist() == [planes]
    positive = np.nan_to_num(push).clip(min=0)
    with np.errstate(invalid="ignore"):
        top_share = positive.max() / positive.sum()
    assert_allclose(described["top_share"], [top_share])


NAN = math.nan


@pytest.mark.parametrize(
    ("sums", "score", "weight"),
    [
        # position, content, chance, mass, rows (sums of formulas.FOLLOW)
        ((0.9, 0.1, 0.1, 1.0, 1.0), 0.8 / 0.9, 1.0),
        # shares of the attention on these keys
        ((0.45, 0.05, 0.05, 0.5, 1.0), 0.8 / 0.9, 1.0),
        # 0.4 and 0.1 above chance
        ((0.6, 0.3, 0.2, 1.0, 1.0), 0.3 / 0.8, 0.8),
        ((0.3, 0.6, 0.2, 1.0, 1.0), -0.3 / 0.8, 0.2),
        ((0.1, 0.9, 0.2, 1.0, 1.0), -1.0, 0.0),
        ((0.515, 0.505, 0.5, 1.0, 1.0), 0.02, 0.75),
        # less than 0.02 above chance
        ((0.512, 0.507, 0.5, 1.0, 1.0), NAN, 0.0),
        ((0.99, 0.98, 0.94, 1.0, 1.0), 0.01 / 0.06, 5 / 9),
        # even attention
        ((0.99, 0.98, 0.96, 1.0, 1.0), NAN, 0.0),
        # the keys have too little attention
        ((0.9, 0.1, 0.1, 1.0, 101.0), NAN, 0.0),
        ((0.0, 0.0, 0.0, 0.0, 1.0), NAN, 0.0),
        ((NAN,) * 5, NAN, 0.0),
    ],
)
def test_shared_bits_go_to_what_a_head_follows(sums, score: float, weight: float):
    numbers = follow_numbers(*np.array(sums)[:, None])
    assert_allclose(numbers.score, [score])
    assert_allclose(numbers.position_share, [weight])


@given(
    gains=st.lists(st.floats(-3, 12), min_size=5, max_size=5),
    weights=st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
)
def test_shared_bits_move_between_content_and_position(gains, weights):
    arrays = [np.array([gain, gain]) for gain in gains]
    bits = formulas.attention_budget(*arrays)
    moved = assign_shared(bits, np.array(weights))
    total = moved["position"] + moved["content"]
    expected_total = bits["position"] + bits["content"]
    assert_allclose(total, expected_total, atol=1e-12)
    assert (moved["content"] >= -1e-12).all()
    assert (np.diff(moved["position"]) >= 0).all()
    assert moved["interaction"] is bits["interaction"]
