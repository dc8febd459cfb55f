"""Saved profiles are read back unchanged, and other files are refused."""

import os
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from only_in_repository import repository_path
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.runtime.netcdf import open_results, save
from ropelens.runtime.result_folder import ResultFolder, check_out
from ropelens.runtime.run_record import read_record


@pytest.fixture
def profile() -> xr.Dataset:
    made, _ = synthetic_profile(
        layers=2, heads=4, frequencies=4, context=64, excerpt=16
    )
    return made.assign_attrs(kind="profile")


def test_characters_that_netcdf_cannot_store_are_replaced(
    profile: xr.Dataset, tmp_path: Path
):
    names = ["a\0b", "\0", "😀", "", "<b>", *"cdefghijklm"]
    names_at = (("excerpt", "excerpt_key"), np.array([names, names], dtype=object))
    profile = profile.drop_vars("excerpt_token").assign_coords(excerpt_token=names_at)
    profile.attrs["command"] = "ropelens \udcff"
    before = profile.copy(deep=True)
    read = open_results(save(profile, tmp_path / "profile.nc"), "profile")
    xr.testing.assert_identical(profile, before)
    assert read["excerpt_token"].values[0].tolist()[:5] == ["a␀b", "␀", "😀", "", "<b>"]
    assert "excerpt_token" in read.coords
    assert read.attrs["command"] == "ropelens \\udcff"


def test_every_number_and_type_is_kept(profile: xr.Dataset, tmp_path: Path):
    profile.attrs["seed"] = 2**40
    profile.attrs["loss"] = 0.1 + 0.2
    profile.attrs["rows"] = "all"
    profile.attrs["created"] = ""
    profile.attrs["command"] = "ropelens " + 20_000 * "--text FILE "
    profile["selectivity"][0, 0, 0] = np.nextafter(1.0, 2.0)
    profile["total_bits"][0, 0] = np.nan
    path = save(profile, tmp_path / "profile.nc")
    read = open_results(path, "profile")
    xr.testing.assert_identical(read, profile)
    kinds = {name: type(value) for name, value in profile.attrs.items()}
    assert {name: type(value) for name, value in read.attrs.items()} == kinds
    assert set(kinds.values()) == {str, int, float}
    for name, variable in profile.variables.items():
        assert variable.dtype.kind == "O" or read[name].dtype == variable.dtype
    assert list(tmp_path.iterdir()) == [path]
    with xr.open_dataset(path) as plain:
        named = sorted(plain.attrs.pop("contents").split())
        assert named == sorted(map(str, profile.variables))
        xr.testing.assert_identical(plain.load(), profile)


def test_many_texts_and_maps_of_layers_take_little_space(tmp_path: Path):
    labels = np.array(["positional", "semantic", "é"] * 5_000, dtype=object)
    numbers = np.random.default_rng(0).random((30, 500))
    numbers[0, :3] = np.nan, np.inf, -np.inf
    results = xr.Dataset(
        {
            "label": (("layer", "head"), labels.reshape(30, 500)),
            "growth_norm": (("layer", "step"), numbers),
            "norm": (("layer", "head"), numbers),
        },
        attrs={"kind": "comparison"},
    )
    path = save(results, tmp_path / "comparison.nc")
    assert path.stat().st_size < 2.6 * numbers.size + 8 * numbers.size + 20_000
    read = open_results(path)
    xr.testing.assert_identical(read["label"], results["label"])
    xr.testing.assert_identical(read["norm"], results["norm"])
    assert read["growth_norm"].dtype == np.float32
    np.testing.assert_allclose(read["growth_norm"], numbers, rtol=6.2e-5)


def test_a_file_of_another_kind_is_refused(profile: xr.Dataset, tmp_path: Path):
    path = save(profile, tmp_path / "profile.nc")
    xr.testing.assert_identical(open_results(path), profile)
    with pytest.raises(BadArgument, match=r"is not a reach[^$]*its kind is profile"):
        open_results(path, "reach")
    with pytest.raises(BadArgument, match="is not a profile"):
        open_results(tmp_path, "profile")
    (tmp_path / "text").write_text("no numbers")
    for name, words in (
        ("nothere", "does not exist"),
        ("text", "is not a netCDF file"),
    ):
        with pytest.raises(BadArgument, match=f"{name} {words}") as refused:
            rl.open(tmp_path / name)
        assert "HDF5" not in str(refused.value)
    with h5py.File(tmp_path / "bomb.nc", "w") as file:
        file.create_dataset("x", (3_000_000_000,), "f8", chunks=True, fillvalue=0)
    with pytest.raises(BadArgument, match=r"it unpacks to 24.0 GB"):
        rl.open(tmp_path / "bomb.nc")
    whole = xr.load_dataset(path, engine="h5netcdf")
    content = path.read_bytes()
    for part in (0, len(content) // 2):
        path.write_bytes(content[:part])
        with pytest.raises(BadArgument, match="is not a profile"):
            open_results(path, "profile")
    whole.drop_vars("q_norm").to_netcdf(path, engine="h5netcdf")
    with pytest.raises(BadArgument, match="it lacks q_norm"):
        open_results(path)


def test_committed_files_of_earlier_versions_still_open():
    reports = repository_path("reports/copying").parent
    earlier = Path(__file__).parent / "needles_of_november_26.nc"
    assert open_results(earlier, "needles").attrs["context"] == 512
    files = [
        *reports.glob("*/bundled-rope/*.nc"),
        reports / "copying/copying/comparison.nc",
    ]
    kinds = {file.stem: open_results(file).attrs["kind"] for file in files}
    names = ("profile", "reach", "needles", "truncation", "comparison")
    assert kinds == {name: name for name in names}


def external_link(file: h5py.File, _: Path) -> None:
    del file["selectivity"]
    file["selectivity"] = h5py.ExternalLink("/etc/hostname", "/selectivity")


def virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((4,), "u1")
    layout[:] = h5py.VirtualSource(str(secret), "more", (4,))
    file.create_virtual_dataset("more", layout)


def external_storage(file: h5py.File, secret: Path) -> None:
    file.create_dataset("more", (4,), "u1", external=[(str(secret), 0, 4)])


ELSEWHERE = {
    external_link: "selectivity",
    external_storage: "more",
    virtual: "more",
    lambda file, _: file.create_group("/".join("a" * 500)): "a",
    lambda file, _: file.update(more=h5py.SoftLink("/more")): "more",
}


@pytest.mark.parametrize(("damage", "name"), ELSEWHERE.items())
def test_a_file_that_points_elsewhere_is_not_read(tmp_path, monkeypatch, damage, name):
    small = xr.Dataset(
        {"selectivity": ("x", [1.0])}, attrs={"kind": "profile", "seed": 0}
    )
    path = save(small, tmp_path / "profile.nc")
    (tmp_path / "secret").write_text("abcd")
    with h5py.File(path, "r+") as file:
        damage(file, tmp_path / "secret")
    monkeypatch.setattr(xr, "load_dataset", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(BadArgument, match=f"{name} is not stored in it"):
        open_results(path, "profile")


def test_numbers_in_tables_have_nine_digits(tmp_path: Path):
    table = pd.DataFrame({"share": [1 / 3, np.nan], "tokens": [2**40, 0]})
    files = {"heads.csv": table}
    folder = ResultFolder(kind="answer", findings=[], files=files, record={})
    folder.write(tmp_path / "out")
    lines = (tmp_path / "out" / "heads.csv").read_text().splitlines()
    assert lines == ["share,tokens", "0.333333333,1099511627776", ",0"]


OWN = "<!doctype html>\n<title>model · ropelens</title>"


@pytest.mark.parametrize(
    ("files", "lost"),
    [
        ({"index.html": "<title>My home page</title>"}, "index.html"),
        ({"run.json": '{"kind": "marathon"}'}, "run.json"),
        ({"run.json": "[" * 100_000, "history": ""}, "history, run.json"),
        ({"run.json": '{"kind": "comparison"}'}, "a comparison"),
        ({"index.html": OWN}, None),
        (
            {
                "run.json": '{"kind": "truncation"}',
                "index.html": "of an earlier version",
            },
            None,
        ),
    ],
)
def test_files_of_others_are_not_overwritten(tmp_path, files, lost):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if lost is None:
        check_out(tmp_path, "analysis")
        return
    with pytest.raises(BadArgument, match=f"holds {lost}: results would replace"):
        check_out(tmp_path, "analysis")


def test_a_pipe_is_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "run.json")  # reading it would never end
    assert read_record(tmp_path) == {}
    with pytest.raises(BadArgument, match=r"holds run\.json"):
        check_out(tmp_path, "analysis")


def test_names_that_look_like_formulas_stay_texts(tmp_path: Path):
    names = ["=HYPERLINK(0)", "+1", "-1", "@SUM(1)", "\tx", "a=b", "bundled:rope"]
    table = pd.DataFrame({"entry": names, "loss": [-1.0] * len(names)})
    results = ResultFolder("comparison", (), {"comparison.csv": table}, {}, page=str)
    results.write(tmp_path)
    read = pd.read_csv(tmp_path / "comparison.csv")
    assert read["entry"].tolist() == [f"'{name}" for name in names[:5]] + names[5:]
    assert read["loss"].tolist() == table["loss"].tolist()


def test_integers_stay_integers_in_csv(tmp_path: Path):
    """Also next to a missing one, which old versions of pandas take for a float."""
    offsets = pd.array([0, 14, None], dtype="Int64")
    table = pd.DataFrame({"offset": offsets, "label": ["a", "b", "c"]})
    results = ResultFolder("comparison", (), {"heads.csv": table}, {}, page=str)
    results.write(tmp_path)
    written = (tmp_path / "heads.csv").read_text()
    assert written == "offset,label\n0,a\n14,b\n,c\n"
