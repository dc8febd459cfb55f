"""A folder of results from other people cannot change files outside the folder."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import xarray as xr
from cli_runs import works_or_is_refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ropelens.analysis.analysis import Analysis, earlier_results, rewrite_page
from ropelens.errors import RopelensError
from ropelens.report import write_index
from ropelens.runtime.folder import output_folder, write_whole
from ropelens.runtime.results import check_out, save
from ropelens.runtime.savepoint import UNFINISHED

NAMES = st.sampled_from(["run.json", "index.html", "heads.csv", ".page.html.part", "notes.txt"])
PLACES = st.sampled_from(["..", "../user", "../user/notes.txt", "/", "", "new", "\0", 5, None])
VALUES = st.recursive(
    PLACES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner)
)
PRINT = {"fingerprint": "0" * 64}
RECORDS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["analysis", "answer", "truncation", "comparison"]) | VALUES},
    optional={
        "findings": VALUES | st.lists(st.text()),
        **dict.fromkeys(("model", "text"), st.just(PRINT) | VALUES),
        **dict.fromkeys(("arguments", "entries", "versions", "seed"), VALUES),
    },
)
TEXTS = (RECORDS | VALUES).map(json.dumps) | st.text(max_size=9) | st.just("[" * 9**6)
LINKS = st.sampled_from(["../user", "../user/notes.txt", "../user/run.json", "../none"])
CONTENTS = st.dictionaries(
    NAMES | st.just(".unfinished") | NAMES.map(".unfinished/{}".format),
    st.tuples(st.just("text"), TEXTS) | st.tuples(st.just("link"), LINKS),
    max_size=6,
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = xr.Dataset({"loss": 1.0}, attrs={"kind": "profile", "seed": 0})
    return save(made, tmp_path_factory.mktemp("whole") / "profile.nc")


def tree(folder: Path) -> dict[str, object]:
    """Contents of all files, links and folders in `folder`."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.is_dir() or path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def receive(folder: Path, contents: dict[str, tuple[str, str]], profile: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(profile, folder)
    for name, (kind, what) in contents.items():
        path = folder / name
        with contextlib.suppress(OSError):  # some names exclude each other
            path.parent.mkdir(exist_ok=True)
            if kind == "link":
                path.symlink_to(os.path.relpath(folder / what, path.parent))
            else:
                path.write_text(what, errors="backslashreplace")


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=30, suppress_health_check=CHECKS)
@given(contents=CONTENTS)
@example({".unfinished": ("link", "../user")})
def test_nothing_outside_a_received_folder_changes(tmp_path, profile, contents):
    tmp_path = tmp_path / "answers"
    tmp_path.mkdir(exist_ok=True)
    received, user = tmp_path / "received", tmp_path / "user"
    shutil.rmtree(user, ignore_errors=True)
    user.mkdir()
    for name in ("notes.txt", "run.json", "heads.csv", "index.html"):
        (user / name).write_text(f"{name} of the user")

    receive(received, contents, profile)
    outside = tree(tmp_path)
    with (
        mock.patch.object(Analysis, "page", return_value="a page"),  # drawn elsewhere
        mock.patch("ropelens.analysis.analysis.classify_heads", return_value=pd.DataFrame()),
    ):
        for read in (
            lambda: rewrite_page(received),  # as `ropelens report` does
            lambda: check_out(received, "analysis"),
            lambda: earlier_results(received, PRINT["fingerprint"]),
            lambda: write_index(tmp_path.parent),
        ):
            with works_or_is_refused():
                read()
    shutil.rmtree(received / UNFINISHED, ignore_errors=True)
    with contextlib.suppress(RopelensError), output_folder(received) as results:
        for name in ("heads.csv", "index.html", "run.json"):
            (results / name).write_text("new")
    with contextlib.suppress(OSError):
        write_whole(received / "page.html", "new")
    with contextlib.suppress(RopelensError), output_folder(tmp_path / "beside") as results:
        (results / "run.json").write_text("new")
    shutil.rmtree(tmp_path / "beside", ignore_errors=True)

    def others(entries: dict[str, object]) -> dict[str, object]:
        return {name: what for name, what in entries.items() if not name.startswith("received")}

    assert others(tree(tmp_path)) == others(outside)


def test_a_part_that_is_a_link_is_refused(tmp_path: Path):
    """For example DIR/A in `analyze A B --out DIR`."""
    (tmp_path / "user").mkdir()
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / "A").symlink_to(tmp_path / "user")
    with pytest.raises(RopelensError, match="holds A: results would"):
        check_out(tmp_path / "received", "comparison", parts=["B", "A"])
