"""Results appear completely or not at all, and a received folder changes no other files."""

import contextlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import xarray as xr
from cli_runs import works_or_is_refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ropelens.analysis.analysis_result import Analysis
from ropelens.analysis.open_folder import rewrite_page
from ropelens.analysis.saved_numbers import earlier_numbers
from ropelens.errors import BadArgument, RopelensError
from ropelens.report import write_index
from ropelens.runtime.folder import (
    UNFINISHED,
    check_new_folder,
    check_writable,
    locked,
    output_folder,
    write_whole,
)
from ropelens.runtime.netcdf import save
from ropelens.runtime.result_folder import ResultFolder, check_out

NAMES = ("heads.csv", "index.html", "profile.nc", "run.json")


def write_run(folder: Path, words: str) -> None:
    for name in NAMES:
        (folder / name).write_text(f"{words} {name}")


def holds(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.fixture
def earlier(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    folder = tmp_path / "out"
    folder.mkdir()
    write_run(folder, "earlier")
    (folder / "notes.txt").write_text("mine")
    return folder, holds(folder)


def test_a_new_folder_appears_with_everything_in_it(tmp_path: Path):
    folder = tmp_path / "out"
    with output_folder(folder) as results:
        write_run(results, "new")
        assert not folder.exists()
    assert holds(folder) == {name: f"new {name}" for name in NAMES}
    assert list(tmp_path.iterdir()) == [folder]
    made = tmp_path / "made"
    made.mkdir()
    assert folder.stat().st_mode == made.stat().st_mode


def test_missing_folders_above_appear_at_the_end(tmp_path: Path):
    folder = tmp_path / "a" / "b" / "out"
    check_writable(folder)
    check_new_folder(folder)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(KeyError), output_folder(folder):
        raise KeyError
    assert not [*tmp_path.iterdir()]
    with output_folder(folder) as results:
        write_run(results, "new")
        assert not (tmp_path / "a").exists()
    assert holds(tmp_path) == {f"a/b/out/{name}": f"new {name}" for name in NAMES}
    with pytest.raises(BadArgument, match="out is not an empty folder"):
        check_new_folder(folder)


def test_results_are_written_below_folders_that_do_not_exist(tmp_path: Path):
    folder = tmp_path / "ft" / "rope"
    check_out(folder, "watch")
    page = ResultFolder("watch", (), {}, {}, page=str).write(folder)
    assert page == folder / "index.html"
    assert (folder / "run.json").is_file()


def test_an_earlier_run_is_replaced_and_other_files_stay(
    earlier: tuple[Path, dict[str, str]],
):
    folder, before = earlier
    with output_folder(str(folder)) as results:
        write_run(results, "new")
        assert {name: holds(folder)[name] for name in before} == before
    assert holds(folder) == {name: f"new {name}" for name in NAMES} | {
        "notes.txt": "mine"
    }


def test_simultaneous_runs_write_one_after_the_other(tmp_path: Path):
    def write(number: int) -> None:
        for _ in range(20):
            write_whole(tmp_path / "page.html", str(number) * 10_000)

    with ThreadPoolExecutor() as pool:
        for result in [pool.submit(write, number) for number in range(4)]:
            result.result()
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]
    results = ResultFolder("answer", (), {}, {}, page=str)
    with ThreadPoolExecutor() as pool:
        with locked(tmp_path), locked(tmp_path / "." / "" / "x" / ".."):
            other = pool.submit(results.write, tmp_path)
            with pytest.raises(TimeoutError):
                other.result(timeout=0.5)
        assert other.result(timeout=60) == tmp_path / "index.html"


@pytest.mark.parametrize("new", [True, False])
def test_a_body_that_ends_early_changes_nothing(earlier, tmp_path, new):
    folder, before = (tmp_path / "other", None) if new else earlier
    neighbours = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), output_folder(folder) as results:  # noqa: PT012
        write_run(results, "new")
        raise KeyboardInterrupt
    assert (holds(folder) if folder.exists() else None) == before
    assert set(tmp_path.iterdir()) == neighbours


def test_run_json_leaves_first_and_comes_last(earlier, monkeypatch):
    """While files move, run.json is missing, so it never describes files of two runs."""
    folder, _ = earlier
    move = Path.replace
    there = []

    def noted(path: Path, target: Path) -> Path:
        there.append((folder / "run.json").exists())
        return move(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    with output_folder(folder) as results:
        write_run(results, "new")
        (results / "zebra.txt").write_text("last in the alphabet")
    assert there == [False] * 5
    assert (folder / "run.json").read_text() == "new run.json"


def test_links_in_a_result_folder_are_replaced_and_not_followed(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("heads.csv", "run.json", "page.html"):
        (folder / name).symlink_to(tmp_path / "mine.txt")
    with output_folder(folder) as results:
        write_run(results, "new")
    write_whole(folder / "page.html", "a page")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert holds(folder) == {name: f"new {name}" for name in NAMES} | {
        "page.html": "a page"
    }


@pytest.mark.parametrize(
    "call", [check_writable, lambda path: output_folder(path).__enter__()]
)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file", "Not a directory"),
        ("link", "No such file"),
        ("file/none/out", "Not a directory"),
        ("link/none/out", "No such file"),
    ],
)
def test_an_impossible_folder_is_refused_before_any_work(tmp_path, place, words, call):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        BadArgument, match=rf"{place} cannot be written to[\s\S]*{words}"
    ):
        call(tmp_path / place)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


ANY_NAME = st.sampled_from(
    ["run.json", "index.html", "heads.csv", ".a.html.part", "notes.txt"]
)
PLACES = st.sampled_from(
    ["..", "../user", "../user/notes.txt", "/", "", "new", "\0", 5, None]
)
VALUES = st.recursive(
    PLACES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_NAME, inner)
)
PRINT = {"fingerprint": "0" * 64}
RECORDS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["analysis", "answer", "truncation", "comparison"])
        | VALUES
    },
    optional=dict.fromkeys(
        ("findings", "model", "text", "arguments", "entries", "versions", "seed"),
        VALUES | st.lists(st.text()) | st.just(PRINT),
    ),
)
TEXTS = (RECORDS | VALUES).map(json.dumps) | st.text(max_size=9) | st.just("[" * 9**6)
LINKS = st.sampled_from(["../user", "../user/notes.txt", "../user/run.json", "../none"])
CONTENTS = st.dictionaries(
    ANY_NAME | st.just(".unfinished") | ANY_NAME.map(".unfinished/{}".format),
    st.tuples(st.just("text"), TEXTS) | st.tuples(st.just("link"), LINKS),
    max_size=6,
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = xr.Dataset({"loss": 1.0}, attrs={"kind": "profile", "seed": 0})
    return save(made, tmp_path_factory.mktemp("whole") / "profile.nc")


def outside(received: Path) -> dict[Path, object]:
    paths = [p for p in received.parent.rglob("*") if not p.is_relative_to(received)]
    links = {path: path.readlink() for path in paths if path.is_symlink()}
    return {path: path.is_dir() or path.read_bytes() for path in paths} | links


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
    received = tmp_path / "received"
    user = tmp_path / "user"
    shutil.rmtree(user, ignore_errors=True)
    user.mkdir()
    for name in ("notes.txt", "run.json", "heads.csv", "index.html"):
        (user / name).write_text(f"{name} of the user")

    receive(received, contents, profile)
    before = outside(received)
    with (
        mock.patch.object(Analysis, "page", return_value="a page"),  # drawn elsewhere
        mock.patch(
            "ropelens.analysis.analysis_result.classify_heads",
            return_value=pd.DataFrame(),
        ),
    ):
        for read in (
            lambda: rewrite_page(received),  # as `ropelens report` does
            lambda: check_out(received, "analysis"),
            lambda: earlier_numbers(received, PRINT["fingerprint"]),
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
    with (
        contextlib.suppress(RopelensError),
        output_folder(tmp_path / "beside") as results,
    ):
        (results / "run.json").write_text("new")
    shutil.rmtree(tmp_path / "beside", ignore_errors=True)
    assert outside(received) == before


def test_a_part_that_is_a_link_is_refused(tmp_path: Path):
    (tmp_path / "user").mkdir()
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / "A").symlink_to(tmp_path / "user")
    with pytest.raises(RopelensError, match="holds A: results would"):
        check_out(tmp_path / "received", "comparison", parts=["B", "A"])
    (tmp_path / "received" / "B").touch()
    with pytest.raises(RopelensError, match="holds B: results"):
        check_out(tmp_path / "received", "comparison", parts=["B"])
