"""Two measurements that should agree to 1e-6."""

from __future__ import annotations

import pytest
import xarray as xr

EXACT = {"rtol": 1e-6, "atol": 1e-9}


def assert_same(found: xr.Dataset | None, expected: xr.Dataset | None) -> None:
    """All that was found is as expected, of which it may be a part."""
    assert found is not None
    assert expected is not None
    for name in found.data_vars:
        xr.testing.assert_allclose(found[name].variable, expected[name].variable, **EXACT)
    assert found.attrs.keys() >= expected.attrs.keys()
    for name in {"loss", "loss_se", "rows_measured", "tokens"} & found.attrs.keys():
        assert found.attrs[name] == pytest.approx(expected.attrs[name], rel=1e-6)
