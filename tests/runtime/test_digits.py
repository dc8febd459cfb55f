"""Fewer digits change numbers by a known amount, and only where files may lose them."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ropelens.runtime.digits import (
    FIVE_DIGITS,
    FOUR_DIGITS,
    THREE_DIGITS,
    in_float32,
    rounded,
)
from ropelens.runtime.netcdf import as_saved

NUMBERS = arrays(np.float32, 20, elements=st.floats(-(2.0**100), 2.0**100, width=32))


@pytest.mark.parametrize("bits", [THREE_DIGITS, FOUR_DIGITS, FIVE_DIGITS])
@given(values=NUMBERS)
def test_rounded_numbers_have_few_bits_and_a_small_error(bits, values):
    values[np.abs(values) < 1e-30] = 0  # the smallest numbers have fewer bits
    nearest = rounded(values, bits)
    assert nearest.dtype == np.float32
    np.testing.assert_allclose(nearest, values, rtol=2.0 ** -(bits + 1), atol=0)
    fractions = np.frexp(nearest)[0].astype(float) * 2.0 ** (bits + 1)
    np.testing.assert_array_equal(fractions, fractions.round())
    np.testing.assert_array_equal(rounded(nearest, bits), nearest)


def test_numbers_that_are_not_finite_stay():
    values = np.array([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(rounded(values, FOUR_DIGITS), values)


def test_only_large_maps_are_saved_with_few_digits():
    third = np.full((2, 3), 1 / 3)
    results = xr.Dataset(
        {
            "growth": (("layer", "step"), third),
            "score": (("layer", "head"), third),
            "mass": (("entry", "layer", "offset_bin"), third[None]),
        }
    )
    saved = as_saved(results)
    for name, bits in (("growth", FOUR_DIGITS), ("mass", THREE_DIGITS)):
        expected = rounded(results[name].values, bits)
        np.testing.assert_array_equal(saved[name], expected)
        assert np.all(saved[name] != np.float32(1 / 3))
    np.testing.assert_array_equal(saved["score"], third)
    assert in_float32(results)["score"].dtype == np.float32
