"""Profiles survive being written and read; what is no profile is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from synthetic_profile import synthetic_profile

from ropelens.errors import BadArgument
from ropelens.files.results import open_profile, save_profile, save_results


@pytest.fixture
def profile() -> xr.Dataset:
    made, _ = synthetic_profile(layers=2, heads=4, frequencies=4, context=64, excerpt=16)
    return made.assign_attrs(kind="profile")


def test_what_is_written_is_read(profile: xr.Dataset, tmp_path: Path) -> None:
    path = save_profile(profile, tmp_path / "profile.nc")
    read = open_profile(path)
    xr.testing.assert_identical(read, profile)
    assert list(tmp_path.iterdir()) == [path]
    with xr.open_dataset(path) as plain:
        named = sorted(plain.attrs.pop("contents").split())
        assert named == sorted(map(str, profile.variables))
        xr.testing.assert_identical(plain.load(), profile)


def test_texts_that_netcdf_cannot_hold_are_told_in_another_way(
    profile: xr.Dataset, tmp_path: Path
) -> None:
    names = ["a\0b", "\0", "😀", "", "<b>", *"cdefghijklm"]
    names_at = (("excerpt", "excerpt_key"), np.array([names, names], dtype=object))
    profile = profile.drop_vars("excerpt_token").assign_coords(excerpt_token=names_at)
    profile.attrs["command"] = "ropelens \udcff"
    before = profile.copy(deep=True)
    read = open_profile(save_profile(profile, tmp_path / "profile.nc"))
    xr.testing.assert_identical(profile, before)
    assert read["excerpt_token"].values[0].tolist()[:5] == ["a␀b", "␀", "😀", "", "<b>"]
    assert "excerpt_token" in read.coords
    assert read.attrs["command"] == "ropelens \\udcff"


def test_attributes_of_any_length_are_kept(profile: xr.Dataset, tmp_path: Path) -> None:
    profile.attrs["command"] = "ropelens " + 20_000 * "--text FILE "
    read = open_profile(save_profile(profile, tmp_path / "profile.nc"))
    assert read.attrs["command"] == profile.attrs["command"]


def test_every_number_and_type_is_kept(profile: xr.Dataset, tmp_path: Path) -> None:
    profile.attrs |= {"seed": 2**40, "loss": 0.1 + 0.2, "rows": "all", "created": ""}
    profile["selectivity"][0, 0, 0] = np.nextafter(1.0, 2.0)
    profile["total_bits"][0, 0] = np.nan
    read = open_profile(save_profile(profile, tmp_path / "profile.nc"))
    assert read.attrs == profile.attrs
    kinds = {name: type(value) for name, value in profile.attrs.items()}
    assert {name: type(value) for name, value in read.attrs.items()} == kinds
    assert set(kinds.values()) == {str, int, float}
    for name, variable in profile.variables.items():
        assert read[name].attrs == variable.attrs
        if variable.dtype.kind != "O":
            assert read[name].dtype == variable.dtype
            np.testing.assert_array_equal(read[name].values, variable.values, strict=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_file_is_refused_or_read_whole(profile: xr.Dataset, tmp_path: Path) -> None:
    """Whatever bytes change: never another error, nor a crash."""
    path = save_profile(profile, tmp_path / "profile.nc")
    content, random = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(len(damaged), size=20):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            assert set(open_profile(path).variables) == set(profile.variables)
        except BadArgument:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize("kept", [0, 4, 100, 5_000, 0.5, 0.99])
def test_a_truncated_file_is_refused(profile: xr.Dataset, tmp_path: Path, kept: float) -> None:
    path = save_profile(profile, tmp_path / "profile.nc")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(BadArgument, match="is no profile"):
        open_profile(path)


def test_a_file_of_another_kind_is_refused(profile: xr.Dataset, tmp_path: Path) -> None:
    other = tmp_path / "other.nc"
    profile.to_netcdf(other, engine="h5netcdf")
    with pytest.raises(BadArgument, match="it does not say what it holds"):
        open_profile(other)
    save_results(profile.assign_attrs(kind="comparison"), other)
    with pytest.raises(BadArgument, match="it says that it is of kind comparison"):
        open_profile(other)
    with pytest.raises(BadArgument, match="There is no profile at"):
        open_profile(tmp_path)


def test_a_file_that_lost_a_variable_is_refused(profile: xr.Dataset, tmp_path: Path) -> None:
    path = save_profile(profile, tmp_path / "profile.nc")
    whole = xr.load_dataset(path, engine="h5netcdf")
    whole.drop_vars("q_norm").to_netcdf(path, engine="h5netcdf")
    with pytest.raises(BadArgument, match="it has no q_norm"):
        open_profile(path)


def test_an_earlier_file_stays_where_writing_fails(
    profile: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.nc"
    path.write_text("earlier")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_profile(profile, path)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
