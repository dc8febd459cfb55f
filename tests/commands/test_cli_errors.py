"""An error that a user can cause prints one clear line, and keeps earlier results."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cli_runs import NAMES, Ended, save_family, unharmed

from ropelens.runtime.results import PAGE

MEASURE = "ropelens.analysis.analyze.measure"


def test_a_model_that_cannot_be_measured(ropelens, tmp_path, text, out):
    model = save_family(tmp_path / "family", "falcon")
    on_text = (model, "--text", text, "--out")
    with unharmed(out):
        ended = [ropelens("analyze", *on_text, out)]
    ended += [ropelens("rope", model), ropelens("truncate", *on_text, tmp_path / "swept")]
    for end in ended:
        assert end.code == 1
        assert "FalconForCausalLM hides its attention" in end.problem


@pytest.mark.parametrize("command", ["analyze", "truncate", "analyze two", "claims"])
def test_results_of_another_model_are_refused_before_loading(
    ropelens, folder, model, text, tmp_path, monkeypatch, command
):
    monkeypatch.delattr("ropelens.checkpoints.load.Opened.read")
    name, *two = command.split()
    place = tmp_path / "out" / ("model" if two or name == "claims" else "")
    place.mkdir(parents=True)
    record = {"kind": "analysis", "model": {"name": "other llama", "fingerprint": "files:0"}}
    (place / "run.json").write_text(json.dumps(record))
    models = [folder, model] if two else [folder]
    ended = ropelens(name, *models, "--text", text, "--out", tmp_path / "out")
    assert ended.code == 1
    assert f"{place} has results of another model, other llama" in ended.problem
    assert list(place.iterdir()) == [place / "run.json"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train"], "Missing option '--out'; see ropelens train --help"),
        (["analyze", "--rows", "few"], "'--rows': invalid literal for int()"),
        (["analyze", "--seed", str(2**70)], "'--seed': Input should be less than or equal to"),
        (["analyze", "--nonsense"], "No such option: --nonsense"),
        (["analyze", "--out", ""], "'--out': it is empty"),
        (["truncate", "--keep", "half"], "could not convert string to float: 'half'"),
        (["train", "--out", "run"], "one of --text, --tokens and --study is needed"),
        (["train", "--study", "s", "--out", "o", "--steps", "9"], "--steps cannot be used"),
    ],
)
def test_wrong_usage(ropelens, args: list[str], words: str):
    ended = ropelens(*args)
    assert ended.code == 2
    assert words in ended.problem


def test_a_place_that_cannot_be_written_to(ropelens, folder, text, tmp_path):
    before, content = sorted(tmp_path.rglob("*")), text.read_bytes()
    ended = ropelens("analyze", folder, "--text", text, "--out", text)
    assert (ended.code, "text.txt cannot be written to" in ended.problem) == (1, True)
    assert (sorted(tmp_path.rglob("*")), text.read_bytes()) == (before, content)


def test_a_page_that_cannot_be_drawn_loses_no_number(ropelens, folder, text, out, monkeypatch):
    def fails(*_: object) -> str:
        raise ValueError("no axis")

    (out / "index.html").write_text("<title>ropelens</title>, of an earlier run")
    commands = ("analyze", folder, "--text", text, "--surrogates", 2, "--out"), ("report",)
    with monkeypatch.context() as patch:
        patch.setattr("ropelens.analysis.analysis.render_page", fails)
        for command in commands:
            ended = ropelens(*command, out)
            assert ended.code == 1
            assert "all numbers are saved; seen: no axis" in ended.problem
            assert [path.name for path in sorted(out.iterdir())] == sorted({*NAMES} - {PAGE})
    assert ropelens("report", out) == Ended(0, f"{out / PAGE}\n", "")


def test_a_working_directory_that_is_gone(ropelens, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in ("analyze", "rope", "truncate", "compare", "report", "train", "list"):
        ended = ropelens(command)
        assert (ended.code, "The working directory is gone" in ended.problem) == (1, True)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Writing more than `limit` bytes to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_runs_full(ropelens, folder, text, out, monkeypatch):
    analyze = ("analyze", folder, "--text", text, "--surrogates", 2, "--out")
    with unharmed(out), full_disk(200_000):
        ended = ropelens(*analyze, out)
    assert (ended.code, "File too large" in ended.problem) == (1, True)
    monkeypatch.setattr("ropelens.runtime.savepoint.SECONDS", 0)
    with full_disk(200_000):
        ended = ropelens(*analyze, out / "new")
    place = out / "new" / ".unfinished"
    assert ended.problem.endswith(f"the same command continues from {place}")
    with full_disk(10_000):
        ended = ropelens(*analyze, out / "none")
        size = ("--size", "1x16x1x1", "--context", 16, "--vocabulary", 258, "--steps", 1)
        learning = ropelens("train", "--text", text, *size, "--out", out / "run")
    assert (ended.code, learning.code) == (1, 1)
    assert not (out / "none").exists()
    assert learning.err.splitlines()[-1].startswith("ropelens: The model cannot be written")


def test_memory_that_runs_out_and_a_bug(ropelens, model, text, out, monkeypatch):
    args = ("analyze", model, "--text", text, "--out", out)
    monkeypatch.setattr(MEASURE, lambda *_, **__: torch.empty(2**50, dtype=torch.float64))
    with unharmed(out):
        ended = ropelens(*args)
    assert ended.code == 1
    assert "The measurement does not fit into memory; seen: context 64" in ended.problem
    assert "a smaller --context" in ended.problem
    monkeypatch.setattr(MEASURE, lambda *_, **__: 1 / 0)
    with unharmed(out), pytest.raises(ZeroDivisionError):  # a bug shows its traceback
        ropelens(*args)
