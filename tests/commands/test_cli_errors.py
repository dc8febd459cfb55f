"""What a user can cause ends in one clear line, and costs nothing that was there before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_runs import Command, apart, ropelens, save_family, unharmed
from disk import full_disk
from synthetic_profile import synthetic_profile
from tiny_checkpoints import edit_config, edit_weights, save_tiny, tiny_llama

from ropelens.files.results import save

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


# Checkpoints.


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def with_nan(model: Path) -> None:
    edit_weights(model, lambda weights: weights["lm_head.weight"].view(-1)[:1].fill_(torch.nan))


def pickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), model / "pytorch_model.bin")


def without_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def with_too_few_tokens(model: Path) -> None:
    tiny_llama(vocab_size=20).save_pretrained(model)


def with_a_broken_config(model: Path) -> None:
    edit_config(model, num_attention_heads="four")


def with_a_broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_config, "has no config.json"),
        (truncated, "model.safetensors is truncated or damaged"),
        (with_nan, "lm_head.weight holds NaN or infinite numbers"),
        (pickled, "pytorch_model.bin is a pickle, which ropelens never loads"),
        (without_tokenizer, "A text needs the tokenizer of the model"),
        (with_too_few_tokens, "Some tokens are not in the model's vocabulary"),
        (with_a_broken_config, "transformers cannot read"),
        (with_a_broken_tokenizer, "cannot be read"),
    ],
)
def test_a_damaged_checkpoint(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    damage: Callable[[Path], None],
    words: str,
) -> None:
    damage(model)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert words in ended.problem


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "GPT2LMHeadModel does not rotate its queries"),
        ("opt", "OPTForCausalLM does not rotate its queries"),
        ("bloom", "BloomForCausalLM hides its attention"),
        ("mamba", "MambaForCausalLM hides its attention"),
        ("gptj", "GPTJForCausalLM hides its attention"),
        ("bert", "BertForMaskedLM is not a causal language model"),
    ],
)
def test_a_model_that_cannot_be_measured(
    ropelens: Command, tmp_path: Path, text: Path, out: Path, family: str, words: str
) -> None:
    model = save_family(tmp_path / "family", family)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert words in ended.problem
    ended = ropelens("rope", model)
    assert ended.code == 1
    assert words in ended.problem


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./no/such/folder", "There is no checkpoint called ./no/such/folder"),
        ("weights.safetensors", "There is no checkpoint called weights.safetensors"),
        ("nobody/nothing", "There is no checkpoint called nobody/nothing"),
        ("bundled:nothing", "no checkpoint called 'nothing' is bundled"),
    ],
)
def test_a_checkpoint_that_is_not_there(
    ropelens: Command, text: Path, out: Path, name: str, words: str
) -> None:
    with unharmed(out):
        ended = ropelens("analyze", name, "--text", text, "--out", out)
    assert ended.code == 1
    assert words in ended.problem


def test_a_revision_of_a_folder(ropelens: Command, model: Path, text: Path, out: Path) -> None:
    ended = ropelens("analyze", model, "--text", text, "--out", out, "--revision", "main")
    assert ended.code == 1
    assert "has no revision main" in ended.problem


# Texts.


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "There is no text at"),
        ("empty.txt", b"", "is empty"),
        ("spaces.txt", b" \n \n", "is empty"),
        ("latin.txt", "naïve".encode("latin-1"), "is not UTF-8"),
        ("short.txt", b"a fox", "The text is shorter than one context of 64 tokens"),
        ("bad.jsonl", b'{"text": 1}', "holds no text"),
    ],
)
def test_a_text_that_cannot_be_used(
    ropelens: Command,
    model: Path,
    tmp_path: Path,
    out: Path,
    name: str,
    content: bytes | None,
    words: str,
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", tmp_path / name, "--out", out)
    assert ended.code == 1
    assert words in ended.problem


def test_a_folder_without_text(
    ropelens: Command, model: Path, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "texts").mkdir()
    ended = ropelens("analyze", model, "--text", tmp_path / "texts", "--out", out)
    assert ended.code == 1
    assert "holds no *.txt, *.md or *.jsonl file" in ended.problem


def test_a_model_without_text_is_told_what_to_pass(
    ropelens: Command, model: Path, out: Path
) -> None:
    with unharmed(out):
        ended = ropelens("analyze", model, "--out", out)
    assert ended.code == 1
    assert f"There is no text to run {model} on" in ended.problem
    assert "--text FILE" in ended.problem


# Values.


@pytest.mark.parametrize(
    ("option", "value", "code", "words"),
    [
        ("--context", 0, 2, "'--context': Input should be greater than or equal to 3"),
        ("--context", 1, 2, "'--context': Input should be greater than or equal to 3"),
        ("--context", 2, 2, "'--context': Input should be greater than or equal to 3"),
        ("--context", "x", 2, "'--context': Input should be a valid integer"),
        ("--sequences", 0, 2, "'--sequences': Input should be greater than or equal to 1"),
        (
            "--rows",
            0,
            2,
            "'--rows': '0' is neither \"auto\", \"all\" nor a number from 1 to 9,999,999",
        ),
        ("--rows", -1, 2, "'--rows': '-1' is neither"),
        ("--rows", "x", 2, "'--rows': 'x' is neither"),
        ("--rows", "", 2, "'--rows': '' is neither"),
        ("--rows", "²", 2, "'--rows': '²' is neither"),
        ("--batch-size", 0, 2, "'--batch-size': Input should be greater than or equal to 1"),
        ("--seed", -1, 2, "'--seed': Input should be greater than or equal to 0"),
        ("--seed", 2**70, 2, "'--seed': Input should be less than or equal to"),
        ("--backend", "jax", 2, "'--backend'"),
        ("--device", "toaster", 1, "There is no device 'toaster'"),
        ("--device", "meta", 1, "There is no device 'meta'"),
        ("--device-map", "car", 1, "There is no device map 'car'"),
        ("--quantize", "int2", 1, "Weights are not quantized to 'int2'"),
        ("--dtype", "float7", 1, "There is no dtype 'float7'; try: one of float32"),
        ("--nonsense", 1, 2, "No such option: --nonsense"),
    ],
)
def test_a_value_out_of_range(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    option: str,
    value: object,
    code: int,
    words: str,
) -> None:
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out, option, value)
    assert ended.code == code
    assert words in ended.problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_where_there_is_none(
    ropelens: Command, model: Path, text: Path, out: Path
) -> None:
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out, "--device", "cuda")
    assert ended.code == 1
    assert "There is no device 'cuda' that works here" in ended.problem


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["analyze"], "Missing option '--out'; see ropelens analyze --help"),
        (
            ["analyze", "--revision", ","],
            "Option '--revision' names nothing; see ropelens analyze --help",
        ),
        (["analyze", "--out"], "Option '--out' requires an argument"),
        (["analyse"], "No such command 'analyse'"),
        (["analyze", "--out", ""], "'--out': it is empty"),
        (["analyze", "--text", "", "--out", "x"], "'--text': it is empty"),
        (["analyze", "", "--out", "x"], "it is empty"),
        (["rope", ""], "'MODEL': it is empty"),
        (["train", "--text", "a.txt", "--out", " "], "'--out': it is empty"),
        (["rope", "one", "two"], "unexpected extra argument"),
        (["report"], "Missing argument 'DIR'"),
        (["train", "--out", "run"], "one of --text, --tokens and --study is needed"),
        (
            ["train", "--study", "s.toml", "--out", "runs", "--steps", "9"],
            "--steps stands in the file of --study",
        ),
        (["--nonsense"], "No such option: --nonsense"),
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
        ("analyze", model, "--text", tmp_path / "none", *to): "There is no text at",
        ("analyze", model, *to): "There is no text to run",
        ("analyze", model, "--ids", "a.pt", *to): "There are no token ids at a.pt",
        ("analyze", model, "--text", text, "--out", tmp_path / "held"): "holds a model",
        ("analyze", model, "--text", text, "--dtype", "float7", *to): "no dtype 'float7'",
        ("analyze", "--device", "toaster", *to): "There is no device 'toaster'",
        ("analyze", "--rows", "x", *to): "'--rows': 'x' is neither",
        ("truncate", "--keep", "2", *to): "'2' in '2' is no share from 0 to 1",
        ("truncate", "--measures", "loos", *to): "There is no measure 'loos'",
        ("train", "--study", "none.toml", *to): "There is no study file none.toml",
    }
    all_args = [list(map(str, args)) for args in wrong]
    told = apart(before=f"{slow}\n{EACH.format(all_args=all_args)}").err.splitlines()
    for words, line in zip(wrong.values(), told, strict=True):
        assert words in line


# Where results go.


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("text.txt", "text.txt is not a folder"),
        ("text.txt/out", "cannot be made: there is no folder"),
        ("no/parent", "cannot be made: there is no folder"),
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


@pytest.mark.parametrize("limit", [2_000, 200_000])
def test_a_disk_that_runs_full(
    ropelens: Command, model: Path, text: Path, out: Path, limit: int
) -> None:
    with unharmed(out), full_disk(limit):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert f"The disk is full: the results do not fit into {out}; " in ended.problem


def test_memory_that_runs_out(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_large(*args: object, **options: object) -> None:
        torch.empty(2**50, dtype=torch.float64)

    monkeypatch.setattr("ropelens.analysis.analyze.profile", too_large)
    with unharmed(out):
        ended = ropelens("analyze", model, "--text", text, "--out", out)
    assert ended.code == 1
    assert "The measurement does not fit into memory; seen: context 64" in ended.problem
    assert "a smaller --context" in ended.problem


def test_a_bug_is_not_made_pretty(
    ropelens: Command,
    model: Path,
    text: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ropelens.analysis.analyze.profile", lambda *args, **options: 1 / 0)
    with unharmed(out), pytest.raises(ZeroDivisionError):
        ropelens("analyze", model, "--text", text, "--out", out)


# The page again.


def test_report_needs_a_profile(ropelens: Command, tmp_path: Path) -> None:
    ended = ropelens("report", tmp_path / "nowhere")
    assert ended.code == 1
    assert f"There is no profile at {tmp_path / 'nowhere' / 'profile.nc'}" in ended.problem
    (tmp_path / "index.html").write_text("an earlier page")
    (tmp_path / "profile.nc").write_text("no netCDF")
    ended = ropelens("report", tmp_path)
    assert ended.code == 1
    assert "profile.nc is no profile" in ended.problem
    assert (tmp_path / "index.html").read_text() == "an earlier page"


def test_report_on_a_full_disk_leaves_the_earlier_page(
    ropelens: Command, tmp_path: Path
) -> None:
    profile, _ = synthetic_profile(layers=2, heads=2, frequencies=4)
    save(profile, tmp_path / "profile.nc")
    (tmp_path / "index.html").write_text("an earlier page")
    before = sorted(tmp_path.iterdir())
    with full_disk(200_000):
        ended = ropelens("report", tmp_path)
    assert ended.code == 1
    assert ended.problem.startswith("The disk is full")
    assert (tmp_path / "index.html").read_text() == "an earlier page"
    assert sorted(tmp_path.iterdir()) == before
    assert ropelens("report", tmp_path).code == 0
    assert (tmp_path / "index.html").read_text().startswith("<!")
