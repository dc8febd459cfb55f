"""Results appear whole or not at all, whatever happens when."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from ropelens.errors import BadArgument
from ropelens.files.folder import check_writable, output_folder

NAMES = ("heads.csv", "index.html", "profile.nc", "run.json")


def write_run(folder: Path, words: str) -> None:
    for name in NAMES:
        (folder / name).write_text(f"{words} {name}")


def publish(folder: Path, write: Callable[[Path], object]) -> None:
    with output_folder(folder) as results:
        write_run(results, "new")
        write(results)


def holds(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def earlier(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with an earlier run and a file of the user's, and what it holds."""
    folder = tmp_path / "out"
    folder.mkdir()
    write_run(folder, "earlier")
    (folder / "notes.txt").write_text("mine")
    return folder, holds(folder)


@contextmanager
def unharmed(folder: Path, before: dict[str, str] | None) -> Iterator[None]:
    """Nothing changes in `folder`, and nothing is left beside it."""
    neighbours = set(folder.parent.iterdir())
    yield
    assert (holds(folder) if folder.exists() else None) == before
    assert set(folder.parent.iterdir()) == neighbours
    assert not folder.exists() or not list(folder.glob(".ropelens*"))


# When all goes well.


def test_a_new_folder_appears_with_everything_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with output_folder(folder) as results:
        write_run(results, "new")
        assert not folder.exists()
    assert holds(folder) == {name: f"new {name}" for name in NAMES}
    assert list(tmp_path.iterdir()) == [folder]
    made = tmp_path / "made"
    made.mkdir()
    assert folder.stat().st_mode == made.stat().st_mode


def test_an_earlier_run_is_replaced_and_other_files_stay(
    earlier: tuple[Path, dict[str, str]],
) -> None:
    folder, before = earlier
    with output_folder(str(folder)) as results:
        write_run(results, "new")
        (results / "figures").mkdir()
        (results / "figures" / "a.html").write_text("figure")
        assert {name: holds(folder)[name] for name in before} == before
    expected = {name: f"new {name}" for name in NAMES}
    assert holds(folder) == expected | {"notes.txt": "mine", "figures/a.html": "figure"}


def test_a_relative_folder_stays_where_it_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with output_folder("out") as results:
        write_run(results, "new")
        os.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "out" / "run.json").exists()


# When it does not.


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("new", [True, False])
def test_a_body_that_ends_early_changes_nothing(
    earlier: tuple[Path, dict[str, str]], tmp_path: Path, error: type[BaseException], new: bool
) -> None:
    folder, before = (tmp_path / "other", None) if new else earlier

    def fail(results: Path) -> None:
        raise error

    with unharmed(folder, before), pytest.raises(error):
        publish(folder, fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt, PermissionError])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(9))
def test_an_interruption_between_any_two_moves_changes_nothing(
    earlier: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    when: str,
    error: type[BaseException],
) -> None:
    """Four files leave and five come; Ctrl-C comes again while they are put back."""
    folder, before = earlier
    move, moves, states = Path.replace, 0, []

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal moves
        moves += 1
        if moves - 1 == step and when == "before":
            raise error
        moved = move(path, target)
        states.append(holds_run(folder))
        if moves - 1 == step or (moves - 1 == step + 2 and error is KeyboardInterrupt):
            raise error
        return moved

    monkeypatch.setattr(Path, "replace", interrupted)
    with unharmed(folder, before), pytest.raises(error):
        publish(folder, lambda results: (results / "extra.txt").write_text("new extra.txt"))
    moving = states[: step + (when == "after")]
    assert not any({"earlier", "new"} <= kinds for kinds in moving)  # never of two runs


def holds_run(folder: Path) -> set[str]:
    return {
        text.split()[0]
        for name, text in holds(folder).items()
        if "/" not in name and " " in text
    }


def test_run_json_leaves_first_and_comes_last(
    earlier: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = earlier
    move, order = Path.replace, []

    def noted(path: Path, target: Path) -> Path:
        order.append(path.name)
        return move(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    with output_folder(folder) as results:
        write_run(results, "new")
        (results / "zebra.txt").write_text("last in the alphabet")
    assert order[0] == order[-1] == "run.json"


def test_a_kill_between_any_two_moves_loses_nothing(
    earlier: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk as a kill would leave it, at every step; the next call finds it so."""
    folder, before = earlier
    states = tmp_path / "states"
    states.mkdir()
    steps = {"replace": Path.replace, "unlink": Path.unlink}

    def noted(name: str) -> Callable[..., object]:
        def step(path: Path, *args: object, **options: object) -> object:
            done = steps[name](path, *args, **options)
            shutil.copytree(folder, states / str(len(list(states.iterdir()))) / "out")
            return done

        return step

    with monkeypatch.context() as patched:
        for name in steps:
            patched.setattr(Path, name, noted(name))
        publish(folder, lambda results: (results / "extra.txt").write_text("new extra.txt"))
    after = holds(folder)
    assert len(list(states.iterdir())) == 10  # nine moves, and the end of them
    for state in states.iterdir():
        left = state / "out"
        assert list(left.glob(".ropelens-*"))
        check_writable(left)
        assert holds(left) == (after if state.name == "9" else before)
        assert not list(left.glob(".ropelens-*"))


def test_what_a_killed_process_left_beside_is_cleared_away(tmp_path: Path) -> None:
    """A folder that was never made, a note that is cut off; not what others are at work on."""
    for name in ("a", "b"):
        (tmp_path / f".ropelens-part-{name}" / "new").mkdir(parents=True)
    (tmp_path / ".ropelens-part-a" / "new" / "heads.csv").write_text("half")
    (tmp_path / ".ropelens-part-b" / "moving.json").write_text('{"into"')
    mine = tmp_path / ".ropelens-cache"
    mine.mkdir()
    with output_folder(tmp_path / "one") as one:
        (one / "heads.csv").write_text("one")
        with output_folder(tmp_path / "two") as two:
            (two / "heads.csv").write_text("two")
    assert sorted(tmp_path.iterdir()) == [mine, tmp_path / "one", tmp_path / "two"]
    assert holds(tmp_path) == {"one/heads.csv": "one", "two/heads.csv": "two"}


@pytest.mark.parametrize("new", [True, False])
def test_two_writers_at_once_leave_a_whole_set(tmp_path: Path, new: bool) -> None:
    folder = tmp_path / "out"
    if not new:
        folder.mkdir()

    def write(words: str) -> None:
        for _ in range(10):
            with output_folder(folder) as results:
                write_run(results, words)

    writers = [Thread(target=write, args=(words,)) for words in ("one", "two", "three")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(holds_run(folder)) == 1
    assert set(holds(folder)) == set(NAMES)
    assert list(tmp_path.iterdir()) == [folder]


def test_what_cannot_be_put_back_is_kept(
    earlier: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = earlier
    move, moves = Path.replace, 0

    def locked(path: Path, target: Path) -> Path:
        nonlocal moves
        moves += 1
        if moves > 3:  # three files have left, and the folder takes nothing any more
            raise PermissionError(errno.EACCES, "Permission denied")
        return move(path, target)

    monkeypatch.setattr(Path, "replace", locked)
    with pytest.raises(BadArgument, match="could not be put back into") as caught:
        publish(folder, lambda results: None)
    (kept,) = folder.glob(".ropelens-*/old")
    assert f"they are in {kept}" in str(caught.value)
    left = {name: text for name, text in holds(folder).items() if ".ropelens" not in name}
    assert left | holds(kept) == before


def test_a_folder_in_the_way_of_a_file_is_refused(
    earlier: tuple[Path, dict[str, str]],
) -> None:
    folder, _ = earlier
    (folder / "heads.csv").unlink()
    (folder / "heads.csv").mkdir()
    before = holds(folder)
    with (
        unharmed(folder, before),
        pytest.raises(BadArgument, match=r"heads\.csv is a folder; a result of that name"),
    ):
        publish(folder, lambda results: None)
    assert (folder / "heads.csv").is_dir()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_in_one_line(earlier: tuple[Path, dict[str, str]]) -> None:
    folder, before = earlier

    def fill(results: Path) -> None:
        (results / "profile.nc").unlink()
        (results / "profile.nc").symlink_to("/dev/full")
        (results / "profile.nc").write_text("a profile")

    with (
        unharmed(folder, before),
        pytest.raises(BadArgument, match="The disk is full: the results do not fit") as caught,
    ):
        publish(folder, fill)
    assert "No space left on device" in str(caught.value)
    assert "\n" not in caught.value.line


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
@pytest.mark.parametrize("writer", ["plain", "netcdf", "safetensors"])
def test_a_file_that_stops_growing_is_said_in_one_line(
    earlier: tuple[Path, dict[str, str]], writer: str
) -> None:
    """The operating system refuses the write half way through a real file."""
    folder, before = earlier
    program = textwrap.dedent(f"""
        import resource, signal, sys
        import numpy, safetensors.numpy, xarray
        from ropelens.errors import BadArgument
        from ropelens.files.folder import output_folder

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        array = numpy.zeros(100_000)
        writers = {{
            "plain": lambda path: path.write_bytes(array.tobytes()),
            "netcdf": lambda path: path.write_bytes(
                xarray.Dataset({{"a": ("x", array)}}).to_netcdf(engine="h5netcdf")
            ),
            "safetensors": lambda path: safetensors.numpy.save_file({{"a": array}}, path),
        }}
        try:
            with output_folder(sys.argv[1]) as results:
                (results / "heads.csv").write_text("small")
                writers["{writer}"](results / "profile.nc")
        except BadArgument as error:
            print(error.line)
    """)
    with unharmed(folder, before):
        done = subprocess.run(
            [sys.executable, "-c", program, folder], capture_output=True, text=True, timeout=300
        )
    assert done.stderr == ""
    assert done.stdout.startswith("The disk is full: the results do not fit into")
    assert "File too large" in done.stdout


def test_another_failure_of_the_system_is_passed_on(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with unharmed(folder, None), pytest.raises(FileNotFoundError):
        publish(folder, lambda results: (results / "no" / "such").write_text(""))


# Where nothing can be written.


@pytest.mark.parametrize(
    "call", [check_writable, lambda path: publish(path, lambda _: pytest.fail("the body ran"))]
)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file", r"file is not a folder; results go into one"),
        ("link", r"link is not a folder"),
        ("none/out", r"cannot be made: there is no folder .*none[\s\S]*mkdir -p"),
        ("file/out", r"cannot be made: there is no folder .*file"),
    ],
)
def test_an_impossible_folder_is_refused_before_any_work(
    tmp_path: Path, place: str, words: str, call: Callable[[Path], None]
) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadArgument, match=words) as caught:
        call(tmp_path / place)
    assert "\n" not in caught.value.line
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("path", ["/proc", "/proc/out"])
def test_a_folder_that_takes_no_files_is_refused(path: str) -> None:
    # Not by permissions, which do not stop root.
    with pytest.raises(BadArgument, match=f"{path} cannot be written to[\\s\\S]*in /proc"):
        check_writable(path)


@contextmanager
def not_as_root() -> Iterator[None]:
    """Root writes anywhere, so for a moment be somebody else."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


def test_a_folder_without_permission_is_refused() -> None:
    # Not in tmp_path, which nobody but its owner may look into.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        for place in (Path(folder), Path(folder) / "out"):
            refused = pytest.raises(
                BadArgument, match=r"cannot be written to[\s\S]*Permission denied"
            )
            with not_as_root(), refused:
                check_writable(place)
        Path(folder).chmod(0o755)


def test_checking_leaves_nothing_behind(earlier: tuple[Path, dict[str, str]]) -> None:
    folder, before = earlier
    with unharmed(folder, before):
        check_writable(folder)
        check_writable(folder.parent / "new")
