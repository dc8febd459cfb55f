"""Comparison of two measurements that should agree."""

import numpy as np
import pytest
import xarray as xr

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def assert_same(actual: xr.Dataset | None, expected: xr.Dataset | None) -> None:
    """Check that all variables of `actual` agree with `expected` to 1e-6."""
    assert actual is not None
    assert expected is not None
    for name in actual.data_vars:
        xr.testing.assert_allclose(actual[name].variable, expected[name].variable, **EXACT)
    assert actual.attrs.keys() >= expected.attrs.keys()
    for name in {"loss", "loss_se", "rows_measured", "tokens"} & actual.attrs.keys():
        assert actual.attrs[name] == pytest.approx(expected.attrs[name], rel=1e-6)


def assert_alike(actual: xr.Dataset, expected: xr.Dataset) -> None:
    """Check all variables of `expected`, to 1e-5 of the largest number of the variable.

    Bits and gains are differences of float32 log-likelihoods, so their scale is at least 0.1.
    """
    for name, variable in expected.data_vars.items():
        values = variable.values
        if values.dtype.kind == "f":
            least = 0.1 if any(part in str(name) for part in ("bits", "gain")) else 1e-30
            scale = np.nanmax(np.abs(values), initial=least)
            np.testing.assert_allclose(
                actual[name].values, values, rtol=0, atol=1e-5 * scale, err_msg=str(name)
            )
        else:
            np.testing.assert_array_equal(actual[name].values, values, err_msg=str(name))
