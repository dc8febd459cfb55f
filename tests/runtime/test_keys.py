"""Saved work fits a key if its format and all values of the key are equal."""

import numpy as np
import pytest
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.runtime.keys import Key
from ropelens.runtime.netcdf import read_if_fits, save, with_key

SAVED = {"seed": 0, "names": ["a", "b"], "size": {"layers": 2}}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (Key(SAVED), ""),
        (Key({"names": ("a", "b")}), ""),
        (Key({}), ""),
        (Key(SAVED, format=2), "format: 1, now 2"),
        (
            Key({"seed": 1, "size": None}),
            "seed: 0, now 1; size: {'layers': 2}, now None",
        ),
        (Key({"added": 1}), "added: None, now 1"),
    ],
)
def test_all_values_of_a_key_must_be_equal(key: Key, changes: str):
    assert key.changes(SAVED) == changes
    assert key.fits(SAVED) == (changes == "")
    assert Key(SAVED).fits(Key(SAVED).recorded)
    assert (key.digest == Key(SAVED).digest) == (key == Key(SAVED))
    if changes:
        with pytest.raises(BadArgument) as error:
            key.require(SAVED, what="the run")
        assert error.value.line.startswith("the run was made with other settings")
        assert changes in error.value.line
    else:
        key.require(SAVED, what="the run")


WITH_EXTRA = {"torch": "2.13.0", "transformer-lens": "4.3.0"}
WITHOUT_EXTRA = {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("used", "recorded", "changes"),
    [
        (WITHOUT_EXTRA, WITH_EXTRA, ""),
        (WITHOUT_EXTRA, WITHOUT_EXTRA, ""),
        (WITH_EXTRA, WITH_EXTRA, ""),
        (
            WITH_EXTRA,
            WITHOUT_EXTRA,
            f"versions: {WITHOUT_EXTRA}, now {WITH_EXTRA}",
        ),
        (
            {"torch": "2.14.0"},
            WITH_EXTRA,
            "versions: {'torch': '2.13.0'}, now {'torch': '2.14.0'}",
        ),
        (WITHOUT_EXTRA, None, f"versions: None, now {WITHOUT_EXTRA}"),
    ],
)
def test_only_versions_of_packages_that_take_part_decide(used, recorded, changes):
    """Earlier results name transformer-lens, although a model of transformers ran."""
    assert Key({"versions": used}).changes({"versions": recorded}) == changes


def test_results_are_read_again_if_their_key_fits(tmp_path):
    key = Key({"weights": "files:0", "seed": 0})
    results = xr.Dataset(
        {"loss": ("step", [0.1, np.nan])}, attrs={"kind": "measurement"}
    )
    path = save(with_key(results, key), tmp_path / "final.nc")
    again = read_if_fits(path, "measurement", Key({"seed": 0}))
    xr.testing.assert_equal(again, results)
    assert read_if_fits(path, "measurement", Key({"seed": 1})) is None
    assert read_if_fits(path, "profile", key) is None
    assert read_if_fits(tmp_path / "none.nc", "measurement", key) is None
    earlier = save(results.assign_attrs(key='{"seed": 0}'), tmp_path / "earlier.nc")
    assert read_if_fits(earlier, "measurement", Key({"seed": 0})) is not None
    path.write_bytes(path.read_bytes()[:100])
    assert read_if_fits(path, "measurement", key) is None
