"""A bundled checkpoint is made from a run, and its text from the mixture."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import bundle
import mixture
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropelens.checkpoints.bundled import BUNDLED
from ropelens.errors import BadArgument
from ropelens.train.data import held_out_sequences


def sampled_sequences(run: Path, count: int) -> torch.Tensor:
    """Held-out sequences at equal distances, the first and the last included."""
    sequences = np.array(held_out_sequences(run / "data"))
    last = len(sequences) - 1
    numbers = np.linspace(0, last, count).round().astype(int)
    tokens = sequences[numbers].astype(np.int64)
    return torch.from_numpy(tokens)


def loss_of(folder: Path, sequences: torch.Tensor) -> float:
    """Loss of a stored model on some sequences, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return float(model(sequences, labels=sequences).loss)


def assert_card(card: str, measured: bundle.Measured) -> None:
    """The card has the recipe, the rotation, the loss and the number of tokens."""
    rotation = "rope (rope_theta 10000.0, rope_type default), 8 of 8 planes turn"
    tokens = f"{60 * 4 * 32:,} (60 steps of 128), in sequences of 32"
    assert "# nano: a checkpoint bundled with ropelens" in card
    assert "    ropelens train --text story.txt\n" in card
    assert f"rotation: {rotation}" in card
    assert f"| float16, as stored | {measured.half_loss:.5f} |" in card
    assert f"tokens seen: {tokens}\n" in card
    assert card.count("| 60 | 7,680 |") == 1


def test_write_bundle(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "nano"
    monkeypatch.setattr(bundle, "MEASURED", 3)
    measured = bundle.write_bundle(
        trained_run,
        out=out,
        recipe="ropelens train --text story.txt",
        text="a story",
        documents=4,
    )
    card = (out / "README.md").read_text()
    assert_card(card, measured)

    sequences = sampled_sequences(trained_run, count=3)
    expected_loss = loss_of(trained_run, sequences)
    assert measured.half_loss == pytest.approx(measured.full_loss, abs=1e-3)
    assert measured.full_loss == pytest.approx(expected_loss, rel=1e-5)

    svg = (out / "loss.svg").read_text()
    ElementTree.fromstring(svg)
    samples = (out / "sample.jsonl").read_text().splitlines()
    assert 1 <= len(samples) <= 4
    stored = AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", local_files_only=True
    )
    assert stored.dtype == torch.float16


def test_an_early_model_is_bundled_without_a_sample(trained_run: Path, tmp_path: Path):
    out = tmp_path / "nano-step-8"
    measured = bundle.write_bundle(
        trained_run, out=out, recipe="ropelens train", text="a story", step=8
    )
    card = (out / "README.md").read_text()
    tokens = 8 * 4 * 32
    assert f"tokens seen: {tokens:,} (8 steps of 128, of 60 steps" in card
    assert "This checkpoint has no sampled text." in card
    assert not (out / "sample.jsonl").exists()

    stored = load_file(out / "model.safetensors")
    early_folder = trained_run / "history" / "step-000008"
    early = load_file(early_folder / "model.safetensors")
    for name, weights in stored.items():
        assert torch.equal(weights, early[name].half())
    record = json.loads((out / "bundle.json").read_text())
    expected = {"tokens": tokens, "step": 8, "validation_loss": measured.full_loss}
    assert record == expected

    unwritten = tmp_path / "none"
    with pytest.raises(BadArgument, match="did not keep step 9"):
        bundle.write_bundle(trained_run, out=unwritten, recipe="", text="", step=9)
    assert not unwritten.exists()


@dataclass(frozen=True)
class Bundled:
    """A call of write_bundle: the name of the checkpoint, its run, and its step."""

    name: str
    run: str
    step: int | None


def test_all_checkpoints_are_made_from_a_study(tmp_path, monkeypatch, capsys):
    tiny = tmp_path / "study" / "tiny"
    for name in ("rope", "nope", "p-rope-0.25", "p-rope-0.75", "p-rope-reversed-0.75"):
        for seed in (0, 1):
            (tiny / name / f"seed-{seed}").mkdir(parents=True)
    calls = []

    def record(run: Path, *, out: Path, step: int | None, **_: str) -> bundle.Measured:
        run_name = run.relative_to(tiny).as_posix()
        calls.append(Bundled(out.name, run_name, step))
        return bundle.Measured(1, 0, 1.0, 3.0, 3.0, 1)

    monkeypatch.setattr(bundle, "write_bundle", record)
    bundle.main(tmp_path / "study", out=tmp_path / "out")
    assert [call.name for call in calls] == list(BUNDLED)
    assert calls[0] == Bundled("rope", "rope/seed-0", None)
    assert calls[1] == Bundled("p-rope-0.75", "p-rope-0.75/seed-0", None)
    assert calls[-1] == Bundled("rope-step-5000", "rope/seed-0", 5000)
    assert "nope: validation loss 3.0000\n" in capsys.readouterr().out


LINE_END = 999
WORDS = np.arange(200, 900)
"""Words of documents; prose has tokens below 200."""


def made(kind: str, *, count: int, length: int = 512) -> np.ndarray:
    """Documents of one kind, [document, token] without BOS."""
    r = np.random.default_rng(0)
    prose = r.integers(2, 200, (50, 600))
    text = mixture.Text(prose, WORDS, LINE_END)
    stage = mixture.Stage(0, length, (130, 700), 40, {kind: 1.0})
    documents = mixture.Maker(text, stage, r).sequences(count)
    assert documents.shape == (count, length)
    assert not documents[:, 0].any()
    return documents[:, 1:]


def returns_of_the_first_pair(document: np.ndarray) -> list[int]:
    """Distances at which the first two tokens occur again."""
    distances = []
    for distance in range(4, 341):
        pair = document[distance : distance + 2]
        if (pair == document[:2]).all():
            distances.append(distance)
    return distances


def has_period(document: np.ndarray, distance: int) -> bool:
    return bool((document[distance:] == document[:-distance]).all())


def test_repeats_come_back_at_one_distance():
    """Half of the documents have no break, and distances are log-uniform."""
    periods = []
    for document in made("repeats", count=300):
        returns = returns_of_the_first_pair(document)
        assert returns
        whole = [distance for distance in returns if has_period(document, distance)]
        periods += whole[:1]
    assert 0.4 < len(periods) / 300 < 0.65
    log_uniform = stats.uniform(np.log(4), np.log(85)).cdf
    assert stats.kstest(np.log(periods), log_uniform).pvalue > 0.001


def test_needles_occur_two_or_three_times_in_prose():
    for document in made("needles", count=30):
        is_needle = document >= 200
        occurrences = Counter(document[is_needle].tolist())
        assert set(occurrences.values()) <= {2, 3}
        assert 6 <= is_needle.sum() <= 12 * 5 * 3
        assert is_needle.mean() < 0.4


def complete_lines(document: np.ndarray) -> list[tuple[int, ...]]:
    """Lines of a document with their ends, without the last line, which may be cut."""
    starts = np.flatnonzero(document == LINE_END) + 1
    lines = [tuple(line) for line in np.split(document, starts)]
    return lines[:-1]


def test_lists_repeat_the_same_values():
    for document in made("lists", count=30):
        lines = complete_lines(document)
        value = {line[:-2]: line[-2] for line in lines}
        for line in lines:
            assert value[line[:-2]] == line[-2]
        lengths = {len(line) for line in lines}
        assert lengths in ({3}, {4})
        # Every key comes once before a key repeats.
        first = lines[: len(value)]
        assert len(set(first)) == len(value)
        assert len(lines) >= 2 * len(value) - 1


def write_corpus(folder: Path, words: list[str]) -> None:
    """Random lines of ten words for training and for validation."""
    r = random.Random(0)
    for name in ("text.txt", "valid.txt"):
        lines = []
        for _ in range(1_000):
            line = r.choices(words, k=10)
            lines.append(" ".join(line))
        (folder / name).write_text("\n".join(lines))


def bytes_of_stages(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("stage-*.npy")}


def make_mixture(corpus: Path, name: str, *, seed: int) -> Path:
    folder = corpus / name
    texts = (corpus / "text.txt", corpus / "valid.txt")
    mixture.main(*texts, folder, seed=seed, share=0.002)
    return folder


def assert_record(folder: Path, *, names: list[str]) -> None:
    """The record of a folder lists the stages, and the lengths of their sequences."""
    record = json.loads((folder / "data.json").read_text())
    expected_lengths = [stage.length for stage in mixture.RECIPES["copying"].stages]
    lengths = [record["mixture"][name]["length"] for name in names]
    assert record["stages"] == names
    assert lengths == expected_lengths


def assert_documents(folder: Path, *, last_stage: str, words: list[str]) -> None:
    """Documents begin with BOS and have known tokens, and validation text is decoded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = np.load(folder / last_stage)
    assert (documents[:, 0] == tokenizer.bos_token_id).all()
    assert documents.max() < len(tokenizer)
    validation = np.load(folder / "valid.npy")
    decoded = tokenizer.decode(validation[0, 1:])
    whole_words = decoded.split()[1:-1]
    assert set(whole_words) <= set(words)


def test_a_folder_to_train_on(tmp_path):
    words = [a + b for a in "abcdefghij" for b in "klmnopqrst"]
    write_corpus(tmp_path, words)
    folder = make_mixture(tmp_path, "one", seed=0)
    same_seed = make_mixture(tmp_path, "two", seed=0)
    other_seed = make_mixture(tmp_path, "three", seed=1)

    stages = bytes_of_stages(folder)
    assert bytes_of_stages(same_seed) == stages
    other_stages = bytes_of_stages(other_seed)
    for name, content in stages.items():
        assert other_stages[name] != content

    names = sorted(stages)
    assert_record(folder, names=names)
    assert_documents(folder, last_stage=names[-1], words=words)
