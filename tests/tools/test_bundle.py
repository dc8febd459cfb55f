"""A bundled checkpoint is made from a run, and its text from the mixture."""

import json
import random
from collections import Counter
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
    assert "# nano: a checkpoint bundled with ropelens" in card
    assert "    ropelens train --text story.txt\n" in card
    assert (
        "rotation: rope (rope_theta 10000.0, rope_type default), 8 of 8 planes turn"
        in card
    )
    assert f"| float16, as stored | {measured.half_loss:.5f} |" in card
    assert (
        f"tokens seen: {60 * 4 * 32:,} (60 steps of 128), in sequences of 32\n" in card
    )
    assert card.count("| 60 | 7,680 |") == 1
    assert measured.half_loss == pytest.approx(measured.full_loss, abs=1e-3)
    held_out = np.array(held_out_sequences(trained_run / "data"))
    few = held_out[np.linspace(0, len(held_out) - 1, 3).round().astype(int)]
    model = AutoModelForCausalLM.from_pretrained(trained_run)
    rows = torch.from_numpy(few.astype(np.int64))
    with torch.no_grad():
        loss = float(model(rows, labels=rows).loss)
    assert measured.full_loss == pytest.approx(loss, rel=1e-5)
    ElementTree.fromstring((out / "loss.svg").read_text())
    assert 1 <= len((out / "sample.jsonl").read_text().splitlines()) <= 4
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
    assert f"tokens seen: {8 * 4 * 32:,} (8 steps of 128, of 60 steps" in card
    assert "This checkpoint has no sampled text." in card
    assert not (out / "sample.jsonl").exists()
    stored = load_file(out / "model.safetensors")
    early = load_file(trained_run / "history" / "step-000008" / "model.safetensors")
    assert all(torch.equal(stored[name], early[name].half()) for name in stored)
    facts = json.loads((out / "bundle.json").read_text())
    assert facts == {
        "tokens": 8 * 4 * 32,
        "step": 8,
        "validation_loss": measured.full_loss,
    }
    with pytest.raises(BadArgument, match="did not keep step 9"):
        bundle.write_bundle(
            trained_run, out=tmp_path / "none", recipe="", text="", step=9
        )
    assert not (tmp_path / "none").exists()


def test_all_checkpoints_are_made_from_a_study(tmp_path, monkeypatch, capsys):
    made = []
    for name in ("rope", "nope", "p-rope-0.25", "p-rope-0.75", "p-rope-reversed-0.75"):
        for seed in (0, 1):
            (tmp_path / "study" / "tiny" / name / f"seed-{seed}").mkdir(parents=True)

    def note(run: Path, *, out: Path, step: int | None, **_: str) -> bundle.Measured:
        made.append(
            (out.name, run.relative_to(tmp_path / "study/tiny").as_posix(), step)
        )
        return bundle.Measured(1, 0, 1.0, 3.0, 3.0, 1)

    monkeypatch.setattr(bundle, "write_bundle", note)
    bundle.main(tmp_path / "study", out=tmp_path / "out")
    assert [name for name, _, _ in made] == list(BUNDLED)
    assert made[0] == ("rope", "rope/seed-0", None)
    assert made[1] == ("p-rope-0.75", "p-rope-0.75/seed-0", None)
    assert made[-1] == ("rope-step-5000", "rope/seed-0", 5000)
    assert "nope: validation loss 3.0000\n" in capsys.readouterr().out


LINE_END = 999
WORDS = np.arange(200, 900)
"""Words of documents; prose has tokens below 200."""


def made(kind: str, *, count: int, length: int = 512) -> np.ndarray:
    """Documents of one kind, [document, token] without BOS."""
    r = np.random.default_rng(0)
    text = mixture.Text(r.integers(2, 200, (50, 600)), WORDS, LINE_END)
    stage = mixture.Stage(0, length, (130, 700), 40, {kind: 1.0})
    rows = mixture.Maker(text, stage, r).sequences(count)
    assert rows.shape == (count, length)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_repeats_come_back_at_one_distance():
    """Half of them have no break; their distances are log-uniform."""
    distances = []
    for row in made("repeats", count=300):
        returns = [d for d in range(4, 341) if (row[d : d + 2] == row[:2]).all()]
        assert returns
        distances += [d for d in returns if (row[d:] == row[:-d]).all()][:1]
    assert 0.4 < len(distances) / 300 < 0.65
    uniform = stats.uniform(np.log(4), np.log(85)).cdf
    assert stats.kstest(np.log(distances), uniform).pvalue > 0.001


def test_needles_occur_two_or_three_times_in_prose():
    for row in made("needles", count=30):
        hidden = row >= 200
        assert set(Counter(row[hidden].tolist()).values()) <= {2, 3}
        assert 6 <= hidden.sum() <= 12 * 5 * 3
        assert hidden.mean() < 0.4


def test_lists_repeat_the_same_values():
    for row in made("lists", count=30):
        lines = [
            tuple(line) for line in np.split(row, np.flatnonzero(row == LINE_END) + 1)
        ]
        (*complete, _) = lines  # the last may be cut
        value = {line[:-2]: line[-2] for line in complete}
        assert all(value[line[:-2]] == line[-2] for line in complete)
        assert {len(line) for line in complete} in ({3}, {4})
        first = complete[: len(value)]
        assert len(set(first)) == len(
            value
        )  # every key comes once before a key repeats
        assert len(complete) >= 2 * len(value) - 1


def test_a_folder_to_train_on(tmp_path):
    r = random.Random(0)
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    for name in ("text.txt", "valid.txt"):
        lines = [" ".join(r.choices(words, k=10)) for _ in range(1_000)]
        (tmp_path / name).write_text("\n".join(lines))
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        texts = (tmp_path / "text.txt", tmp_path / "valid.txt")
        mixture.main(*texts, folder, seed=seed, share=0.002)
    stages = [sorted(folder.glob("stage-*.npy")) for folder in folders]
    one, two, three = [{path.name: path.read_bytes() for path in x} for x in stages]
    assert one == two
    assert all(one[name] != three[name] for name in one)
    record = json.loads((folders[0] / "data.json").read_text())
    assert record["stages"] == sorted(one)
    lengths = [record["mixture"][name]["length"] for name in sorted(one)]
    assert lengths == [stage.length for stage in mixture.STAGES]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    lines = np.load(folders[0] / record["stages"][-1])
    assert (lines[:, 0] == tokenizer.bos_token_id).all()
    assert lines.max() < len(tokenizer)
    valid = tokenizer.decode(np.load(folders[0] / "valid.npy")[0, 1:])
    assert set(valid.split()[1:-1]) <= set(words)
