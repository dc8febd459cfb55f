"""Labels by the documented rules, offsets and bands of kernels, and the strongest planes."""

from __future__ import annotations

import math

import pytest
import torch

from ropelens.statistics.labels import (
    LABELS,
    Thresholds,
    describe_kernel,
    describe_wavelengths,
    faint,
    label,
)


@pytest.mark.parametrize(
    ("total", "sink", "position", "content", "expected"),
    [
        (0.09, 0.0, 0.09, 0.0, "diffuse"),
        (0.09, 0.09, 0.0, 0.0, "diffuse"),
        (1.0, 0.91, 0.09, 0.0, "sink"),
        (1.0, 0.9, 0.07, 0.0, "positional"),
        (3.0, 0.0, 2.0, 1.0, "positional"),
        (3.0, 0.0, 1.0, 2.0, "semantic"),
        (3.0, 0.0, 1.99, 0.0, "mixed"),
        (3.0, 0.0, 0.0, 1.0, "mixed"),  # two thirds interact
        (4.0, 1.0, 2.0, 0.5, "positional"),  # of the rest, not of the total
    ],
)
def test_the_first_rule_that_fits(total, sink, position, content, expected):
    values = {"total": total, "sink": sink, "position": position, "content": content}
    tensors = {name: torch.tensor([value]).double() for name, value in values.items()}
    assert LABELS[int(label(Thresholds(), **tensors)[0])] == expected


def test_faint_heads():
    bits = torch.tensor([0.3, 0.5, 2.0])
    assert faint(Thresholds(), bits).tolist() == [True, False, False]


def test_an_offset_where_one_stands_out_and_a_band_otherwise():
    kernel = torch.full((3, 100), 1e-9)
    kernel[0, 70] = 0.29 / 0.71  # of the other 0.71
    kernel[0, 10:20] = 0.1
    kernel[1, 70] = 1.0
    kernel[1, 3] = 0.9
    kernel[2, 20:40] = 0.05
    found = describe_kernel(Thresholds(), kernel.log(), torch.ones(100))
    assert found.named.tolist() == [False, True, False]
    assert found.offset[1] == 70
    assert found.weight[1] == pytest.approx(1 / 1.9, rel=1e-4)
    assert (int(found.low[2]), int(found.high[2])) == (24, 34)
    assert (int(found.low[1]), int(found.high[1])) == (3, 70)


def test_offsets_that_hardly_a_row_sees_are_no_heads_offset():
    kappa = torch.zeros(1, 50)
    kappa[0, 49] = 20.0
    kappa[0, 5] = 10.0
    seen_by = torch.linspace(1, 0, 50)
    assert describe_kernel(Thresholds(), kappa, torch.ones(50)).offset[0] == 49
    assert describe_kernel(Thresholds(), kappa, seen_by).offset[0] == 5


def test_two_peaks_are_told_apart():
    """30 and 56 % at 6 and 628 tokens: a mean would name a wavelength between them."""
    wavelength = torch.tensor([6.0, 119.0, 628.0, math.inf]).double()
    push = torch.tensor([[0.30, 0.10, 0.56, 0.04], [-1.0, -1.0, -1.0, -1.0], [-5, 0, 0, 2.0]])
    found = describe_wavelengths(push, wavelength)
    assert found.top[0] == 628
    assert found.top_share[0] == pytest.approx(0.56)
    assert found.holding_half.tolist() == [1, 0, 1]
    turning = (0.3 * math.log(6) + 0.1 * math.log(119) + 0.56 * math.log(628)) / 0.96
    assert found.mean[0] == pytest.approx(math.exp(turning), rel=1e-6)
    assert found.top[1:].tolist()[1] == math.inf
    assert found.top[1].isnan()
    assert found.mean[1:].isnan().all()
