"""Two measurements that should agree."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def assert_same(found: xr.Dataset | None, expected: xr.Dataset | None) -> None:
    """All that was found is as expected to 1e-6, of which it may be a part."""
    assert found is not None
    assert expected is not None
    for name in found.data_vars:
        xr.testing.assert_allclose(found[name].variable, expected[name].variable, **EXACT)
    assert found.attrs.keys() >= expected.attrs.keys()
    for name in {"loss", "loss_se", "rows_measured", "tokens"} & found.attrs.keys():
        assert found.attrs[name] == pytest.approx(expected.attrs[name], rel=1e-6)


def assert_alike(found: xr.Dataset, expected: xr.Dataset) -> None:
    """All that was expected was found, to 1e-5 of the largest number of its variable.

    Bits and gains are differences of float32 log-likelihoods of some nats a row, which carry
    1e-6 of them.
    """
    for name, variable in expected.data_vars.items():
        values = variable.values
        if values.dtype.kind == "f":
            least = 0.1 if any(part in str(name) for part in ("bits", "gain")) else 1e-30
            scale = np.nanmax(np.abs(values), initial=least)
            np.testing.assert_allclose(
                found[name].values, values, rtol=0, atol=1e-5 * scale, err_msg=str(name)
            )
        else:
            np.testing.assert_array_equal(found[name].values, values, err_msg=str(name))
