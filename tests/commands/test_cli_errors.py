"""What a user can cause ends in one clear line, and costs nothing that was there before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_runs import Command, out, ropelens, save_family, text, unharmed
from disk import full_disk
from tiny_checkpoints import save_tiny

__all__ = ["out", "ropelens", "text"]

ANALYSIS = "ropelens.analysis.analyze"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint, to be damaged."""
    return save_tiny(tmp_path / "model")


def cut(model: Path, text: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def in_latin_1(model: Path, text: Path) -> None:
    text.write_bytes("naïve".encode("latin-1"))


@pytest.mark.parametrize(
    ("damage", "options", "words"),
    [
        (cut, (), "SafetensorError"),
        (in_latin_1, (), "is not a text in UTF-8"),
        (lambda *_: None, ("--device", "toaster"), "There is no device 'toaster'"),
    ],
)
def test_one_line_says_what_is_wrong(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    damage: Callable[[Path, Path], None],
    options: tuple[str, ...],
    words: str,
) -> None:
    damage(model, text)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out, *options)
    assert (ended.code, words in ended.problem) == (1, True)


def test_a_model_that_cannot_be_measured(
    ropelens: Command, tmp_path: Path, text: Path, out: Path
) -> None:
    model = save_family(tmp_path / "family", "gptj")
    on_text = (model, "--text", text, "--out")
    with unharmed(out):
        ended = [ropelens("analyze", *on_text, out)]
    ended += [ropelens("rope", model), ropelens("truncate", *on_text, tmp_path / "swept")]
    for one in ended:
        assert one.code == 1
        assert "GPTJForCausalLM hides its attention" in one.problem


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train"], "Missing option '--out'; see ropelens train --help"),
        (["analyze", "--rows", "few"], "'--rows': invalid literal for int()"),
        (["analyze", "--seed", str(2**70)], "'--seed': Input should be less than or equal to"),
        (["analyze", "--backend", "jax"], "'--backend': 'jax' is not one of 'hf', 'transf"),
        (["analyze", "--nonsense"], "No such option: --nonsense"),
        (["analyze", "--out", ""], "'--out': it is empty"),
        (
            ["truncate", "--keep", "half", "--out", "o"],
            "could not convert string to float: 'half'",
        ),
        (["train", "--out", "run"], "one of --text, --tokens and --study is needed"),
        (
            ["train", "--study", "s.toml", "--out", "runs", "--steps", "9"],
            "--steps stands in the file of --study",
        ),
    ],
)
def test_wrong_usage(ropelens: Command, args: list[str], words: str) -> None:
    ended = ropelens(*args)
    assert ended.code == 2
    assert words in ended.problem


def test_a_place_that_cannot_be_written_to(
    ropelens: Command, model: Path, text: Path, tmp_path: Path
) -> None:
    before, content = sorted(tmp_path.rglob("*")), text.read_bytes()
    ended = ropelens("analyze", model, "--text", text, "--out", text)
    assert (ended.code, "text.txt cannot be written to" in ended.problem) == (1, True)
    assert (sorted(tmp_path.rglob("*")), text.read_bytes()) == (before, content)


def test_a_disk_that_runs_full(ropelens: Command, model: Path, text: Path, out: Path) -> None:
    with unharmed(out), full_disk(200_000):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert "File too large" in ended.problem


def test_memory_that_runs_out_is_one_line_and_a_bug_is_not(
    ropelens: Command, model: Path, text: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, measure = ("analyze", model, "--text", text, "--out", out), f"{ANALYSIS}.measure"
    monkeypatch.setattr(measure, lambda *_, **__: torch.empty(2**50, dtype=torch.float64))
    with unharmed(out):
        ended = ropelens(*args)
    assert ended.code == 1
    assert "The measurement does not fit into memory; seen: context 64" in ended.problem
    assert "a smaller --context" in ended.problem
    monkeypatch.setattr(measure, lambda *_, **__: 1 / 0)
    with unharmed(out), pytest.raises(ZeroDivisionError):  # a bug is not made pretty
        ropelens(*args)
