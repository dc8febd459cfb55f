"""What a user can cause ends in one clear line, and costs nothing that was there before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_runs import Command, apart, ropelens, save_family, unharmed
from disk import full_disk
from tiny_checkpoints import save_tiny

__all__ = ["ropelens"]

TEXT = "the quick brown fox jumps over the lazy dog " * 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint, to be damaged."""
    return save_tiny(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "out"
    folder.mkdir(parents=True)
    return folder


def cut(model: Path, text: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def without_tokenizer(model: Path, text: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def in_latin_1(model: Path, text: Path) -> None:
    text.write_bytes("naïve".encode("latin-1"))


@pytest.mark.parametrize(
    ("damage", "options", "words"),
    [
        (cut, (), "model.safetensors is missing, truncated or damaged"),
        (without_tokenizer, (), "A text needs the tokenizer of the model"),
        (in_latin_1, (), "is not a text in UTF-8"),
        (None, ("--revision", "main"), "has no revision main"),
        (None, ("--device", "toaster"), "There is no device 'toaster'"),
    ],
)
def test_one_line_says_what_is_wrong(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    damage: object,
    options: tuple[str, ...],
    words: str,
) -> None:
    if callable(damage):
        damage(model, text)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out, *options)
    assert ended.code == 1
    assert words in ended.problem


def test_a_model_that_cannot_be_measured(
    ropelens: Command, tmp_path: Path, text: Path, out: Path
) -> None:
    model = save_family(tmp_path / "family", "gptj")
    words = "GPTJForCausalLM hides its attention"
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert words in ended.problem
    swept = ropelens("truncate", model, "--text", text, "--out", tmp_path / "swept")
    for ended in (ropelens("rope", model), swept):
        assert ended.code == 1
        assert words in ended.problem


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["analyze"], "Missing option '--out'; see ropelens analyze --help"),
        (["analyze", "--context", "x"], "'--context': Input should be a valid integer"),
        (["analyze", "--rows", "0"], '\'0\' is neither "auto", "all" nor a number from 1'),
        (["analyze", "--seed", str(2**70)], "'--seed': Input should be less than or equal to"),
        (["analyze", "--backend", "jax"], "'--backend': 'jax' is not one of 'hf', 'transf"),
        (["analyze", "--nonsense"], "No such option: --nonsense"),
        (["analyze", "--out", ""], "'--out': it is empty"),
        (["truncate", "--keep", "half", "--out", "o"], "'half' in 'half' is no share from 0"),
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


# One process for all: to start one costs more than what it is to say.
EACH = """
from contextlib import suppress
from ropelens.commands.app import main
for args in {all_args}:
    sys.argv[1:] = args
    with suppress(SystemExit):
        main()
sys.exit()
"""


def test_what_is_wrong_is_said_before_anything_slow(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """Neither transformers nor our own figures are imported for it."""
    slow = "import sys\nfor name in ('transformers', 'plotly'): sys.modules[name] = None"
    to = ("--out", tmp_path / "out")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.json").write_text("{}")
    wrong: dict[tuple[object, ...], str] = {
        ("analyze", model, "--text", tmp_path / "none", *to): "There is no file or folder",
        ("analyze", model, *to): "There is no text to run",
        ("analyze", model, "--text", text, "--out", tmp_path / "held"): "holds a model",
        ("analyze", "--dtype", "float7", *to): "'float7' is not one of 'float32'",
        ("truncate", "--measures", "loos", *to): "There is no measure 'loos'",
    }
    all_args = [list(map(str, args)) for args in wrong]
    told = apart(before=f"{slow}\n{EACH.format(all_args=all_args)}").err.splitlines()
    for words, line in zip(wrong.values(), told, strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("text.txt", "text.txt is not a folder"),
        ("/proc/ropelens", "/proc/ropelens cannot be written to"),
        ("model", "holds a model, a run or a study; results would mix"),
    ],
)
def test_a_place_that_cannot_be_written_to(
    ropelens: Command, model: Path, text: Path, tmp_path: Path, place: str, words: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended = ropelens("analyze", model, "--text", text, "--out", tmp_path / place)
    assert ended.code == 1
    assert words in ended.problem
    assert sorted(tmp_path.rglob("*")) == before
    assert text.read_text() == TEXT


def test_a_disk_that_runs_full(ropelens: Command, model: Path, text: Path, out: Path) -> None:
    with unharmed(out), full_disk(200_000):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert f"The disk is full: the results do not fit into {out}; " in ended.problem


def test_memory_that_runs_out_is_one_line_and_a_bug_is_not(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_large(*args: object, **options: object) -> None:
        torch.empty(2**50, dtype=torch.float64)

    monkeypatch.setattr("ropelens.analysis.analyze.measure", too_large)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert "The measurement does not fit into memory; seen: context 64" in ended.problem
    assert "a smaller --context" in ended.problem
    monkeypatch.setattr("ropelens.analysis.analyze.measure", lambda *args, **options: 1 / 0)
    with unharmed(out), pytest.raises(ZeroDivisionError):  # a bug is not made pretty
        ropelens("analyze", model, "--text", text, "--out", out)
