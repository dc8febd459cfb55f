"""Results appear completely or not at all, even after an interruption."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ropelens.errors import BadArgument
from ropelens.runtime.folder import check_writable, output_folder, write_whole

NAMES = ("heads.csv", "index.html", "profile.nc", "run.json")


def write_run(folder: Path, words: str) -> None:
    for name in NAMES:
        (folder / name).write_text(f"{words} {name}")


def publish(folder: Path, write: Callable[[Path], object]) -> None:
    with output_folder(folder) as results:
        write_run(results, "new")
        write(results)


def holds(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.fixture
def earlier(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with an earlier run and a file of the user, and the contents of both."""
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


def test_an_earlier_run_is_replaced_and_other_files_stay(earlier: tuple[Path, dict[str, str]]):
    folder, before = earlier
    with output_folder(str(folder)) as results:
        write_run(results, "new")
        assert {name: holds(folder)[name] for name in before} == before
    expected = {name: f"new {name}" for name in NAMES}
    assert holds(folder) == expected | {"notes.txt": "mine"}


@pytest.mark.parametrize("new", [True, False])
def test_a_body_that_ends_early_changes_nothing(earlier, tmp_path, new):
    folder, before = (tmp_path / "other", None) if new else earlier
    neighbours = set(tmp_path.iterdir())

    def fail(results: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(folder, fail)
    assert (holds(folder) if folder.exists() else None) == before
    assert set(tmp_path.iterdir()) == neighbours


def test_run_json_leaves_first_and_comes_last(earlier, monkeypatch):
    """While files move, run.json is missing, so it never describes files of two runs."""
    folder, _ = earlier
    move, there = Path.replace, []

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
    for name in ("heads.csv", "run.json", ".page.html.part"):
        (folder / name).symlink_to(tmp_path / "mine.txt")
    publish(folder, lambda results: None)
    write_whole(folder / "page.html", "a page")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert holds(folder) == {name: f"new {name}" for name in NAMES} | {"page.html": "a page"}


@pytest.mark.parametrize(
    "call", [check_writable, lambda path: publish(path, lambda _: pytest.fail("the body ran"))]
)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file", "Not a directory"),
        ("link", "No such file"),
        ("none/out", "No such file or directory: .*none"),
    ],
)
def test_an_impossible_folder_is_refused_before_any_work(tmp_path, place, words, call):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadArgument, match=rf"{place} cannot be written to[\s\S]*{words}"):
        call(tmp_path / place)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
