"""Commands without --out: no command replaces the results of another one."""

from pathlib import Path

import pytest
import xarray as xr
from cli_runs import Command, Ended
from tiny_checkpoints import save_tiny

import ropelens as rl
from ropelens.runtime.folder import UNFINISHED
from ropelens.runtime.own_folder import COMMAND

pytestmark = pytest.mark.usefixtures("pageless")

WORDS = "the quick brown fox jumps over the lazy dog " * 20
FEW = ["--surrogates", "1", "--rows", "8"]
LOSS = ["--keep", "1,0.5", "--end", "slow", "--controls", "0", "--measures", "loss"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two models and two texts."""
    monkeypatch.chdir(tmp_path)
    save_tiny(Path("one"))
    save_tiny(Path("other"), num_hidden_layers=1)
    Path("a.txt").write_text(WORDS)
    Path("b.txt").write_text(WORDS[::-1])
    return tmp_path


def files_in(folder: str) -> dict[str, bytes]:
    """The content of all files, by path."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


def page_of(ended: Ended) -> Path:
    assert ended.code == 0, ended.err
    return Path(ended.out.strip())


TWO_RUNS: dict[str, tuple[str, list[str], list[str]]] = {
    "analyze": (
        "out",
        ["one", "--text", "a.txt", *FEW],
        ["one", "--text", "b.txt", *FEW],
    ),
    "analyze several": (
        "out",
        ["one", "other", "--text", "a.txt", *FEW],
        ["one", "other", "--text", "b.txt", *FEW],
    ),
    "truncate": (
        "out",
        ["one", "--text", "a.txt", *LOSS],
        ["one", "--text", "a.txt", *LOSS, "--bands", "1"],
    ),
    "claims": (
        "claims",
        ["one", "--text", "a.txt", "--quick"],
        ["other", "--text", "a.txt", "--quick"],
    ),
    "prompt": ("prompt", ["one", "the cat"], ["one", "the dog"]),
}


SLOW_RUNS = ("analyze several", "truncate")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in SLOW_RUNS else name
        for name in TWO_RUNS
    ],
)
def test_another_run_gets_another_folder(name: str, here: Path, ropelens: Command):
    command = name.split()[0]
    folder, first, second = TWO_RUNS[name]
    assert page_of(ropelens(command, *first)).parent == Path(folder)
    kept = files_in(folder)
    ended = ropelens(command, *second)
    assert page_of(ended).parent == Path(f"{folder}-2")
    assert f"{folder} has results of another command; using {folder}-2" in ended.err
    assert page_of(ropelens(command, *second)).parent == Path(f"{folder}-2")
    assert not Path(f"{folder}-3").exists(), "the same command replaces its results"
    assert files_in(folder) == kept
    assert not Path(folder, UNFINISHED).exists()


def test_another_comparison_gets_another_folder(here: Path, ropelens: Command):
    for model in ("one", "other"):
        page_of(
            ropelens("analyze", model, "--text", "a.txt", *FEW, "--out", f"of {model}")
        )
    assert page_of(ropelens("compare", "of one", "of other")).parent == Path("compared")
    kept = files_in("compared")
    page = page_of(ropelens("compare", "of other", "of one"))
    assert page.parent == Path("compared-2")
    assert files_in("compared") == kept


@pytest.mark.thorough
def test_a_sweep_joins_an_analysis_of_the_same_text(here: Path, ropelens: Command):
    analyze = ["analyze", "one", "--text", "a.txt", *FEW]
    truncate = ["truncate", "one", "--text", "a.txt", *LOSS]
    assert page_of(ropelens(*analyze)).parent == Path("out")
    profile = rl.open("out").profile
    assert page_of(ropelens(*truncate)).parent == Path("out")
    assert page_of(ropelens(*truncate)).parent == Path("out")
    xr.testing.assert_identical(rl.open("out").profile, profile)
    assert page_of(ropelens(*truncate, "--bands", "1")).parent == Path("out-2")
    assert page_of(ropelens(*analyze)).parent == Path("out")
    assert rl.open("out").truncation is not None
    truncate[3] = "b.txt"
    assert page_of(ropelens(*truncate)).parent == Path("out-3")


@pytest.mark.parametrize("has_progress", [False, True])
def test_progress_of_a_stopped_command_is_kept_for_it(
    has_progress: bool, here: Path, ropelens: Command, monkeypatch: pytest.MonkeyPatch
):
    analyze = ["analyze", "one", "--text", "a.txt", *FEW]

    def stop_with_progress(*_: object, **__: object) -> None:
        if has_progress:
            Path("out", UNFINISHED, "0-0-of-1.safetensors").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(
            "ropelens.commands.measure.measure_and_save", stop_with_progress
        )
        assert ropelens(*analyze).code != 0
    assert Path("out").exists() == has_progress
    other = page_of(ropelens("analyze", "one", "--text", "b.txt", *FEW))
    assert other.parent == Path("out-2" if has_progress else "out")
    if has_progress:
        assert Path("out", UNFINISHED, COMMAND).exists()
        assert page_of(ropelens(*analyze)).parent == Path("out")
        assert not Path("out", UNFINISHED).exists()


def test_a_folder_that_is_named_gets_the_results_of_the_command_as_before(
    here: Path, ropelens: Command
):
    for text in ("a.txt", "b.txt"):
        page = page_of(
            ropelens("analyze", "one", "--text", text, *FEW, "--out", "mine")
        )
        assert page.parent == Path("mine")
    assert not Path("mine-2").exists()
