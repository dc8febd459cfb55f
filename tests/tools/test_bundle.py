"""A bundled checkpoint is made from a run."""

import json
from pathlib import Path
from xml.etree import ElementTree

import bundle
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropelens.checkpoints.bundled import BUNDLED
from ropelens.errors import BadArgument
from ropelens.train.data import held_out_sequences


def test_write_bundle(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "nano"
    monkeypatch.setattr(bundle, "MEASURED", 3)
    texts = {"recipe": "ropelens train --text story.txt", "text": "a story"}
    measured = bundle.write_bundle(run, out=out, **texts, documents=4)
    card = (out / "README.md").read_text()
    assert "# nano: a checkpoint bundled with ropelens" in card
    assert "    ropelens train --text story.txt\n" in card
    assert "rotation: rope (rope_theta 10000.0, rope_type default), 8 of 8 planes turn" in card
    assert f"| float16, as stored | {measured.half_loss:.5f} |" in card
    assert f"tokens seen: {60 * 4 * 32:,} (60 steps of 128), in sequences of 32\n" in card
    assert card.count("| 60 | 7,680 |") == 1
    assert measured.half_loss == pytest.approx(measured.full_loss, abs=1e-3)
    held_out = np.array(held_out_sequences(run / "data"))
    few = held_out[np.linspace(0, len(held_out) - 1, 3).round().astype(int)]
    model = AutoModelForCausalLM.from_pretrained(run)
    rows = torch.from_numpy(few.astype(np.int64))
    with torch.no_grad():
        loss = float(model(rows, labels=rows).loss)
    assert measured.full_loss == pytest.approx(loss, rel=1e-5)
    ElementTree.fromstring((out / "loss.svg").read_text())
    assert 1 <= len((out / "sample.jsonl").read_text().splitlines()) <= 4
    stored = AutoModelForCausalLM.from_pretrained(out, dtype="auto", local_files_only=True)
    assert stored.dtype == torch.float16


def test_an_early_model_is_bundled_without_a_sample(run: Path, tmp_path: Path):
    out = tmp_path / "nano-step-8"
    recipe = {"recipe": "ropelens train", "text": "a story"}
    measured = bundle.write_bundle(run, out=out, **recipe, step=8)
    card = (out / "README.md").read_text()
    assert f"tokens seen: {8 * 4 * 32:,} (8 steps of 128, of 60 steps" in card
    assert "This checkpoint has no sampled text." in card
    assert not (out / "sample.jsonl").exists()
    stored = load_file(out / "model.safetensors")
    early = load_file(run / "history" / "step-000008" / "model.safetensors")
    assert all(torch.equal(stored[name], early[name].half()) for name in stored)
    facts = json.loads((out / "bundle.json").read_text())
    assert facts == {"tokens": 8 * 4 * 32, "step": 8, "validation_loss": measured.full_loss}
    with pytest.raises(BadArgument, match="did not keep step 9"):
        bundle.write_bundle(run, out=tmp_path / "none", recipe="", text="", step=9)
    assert not (tmp_path / "none").exists()


def test_all_checkpoints_are_made_from_a_study(tmp_path, monkeypatch, capsys):
    made = []
    for name in ("rope", "nope", "p-rope-0.25", "p-rope-0.75", "p-rope-reversed-0.75"):
        for seed in (0, 1):
            (tmp_path / "study" / "tiny" / name / f"seed-{seed}").mkdir(parents=True)

    def note(run: Path, *, out: Path, step: int | None, **_: str) -> bundle.Measured:
        made.append((out.name, run.relative_to(tmp_path / "study/tiny").as_posix(), step))
        return bundle.Measured(1, 0, 1.0, 3.0, 3.0, 1)

    monkeypatch.setattr(bundle, "write_bundle", note)
    bundle.main(tmp_path / "study", out=tmp_path / "out")
    assert [name for name, _, _ in made] == list(BUNDLED)
    assert made[0] == ("rope", "rope/seed-0", None)
    assert made[1] == ("p-rope-0.75", "p-rope-0.75/seed-0", None)
    assert made[-1] == ("rope-step-5000", "rope/seed-0", 5000)
    assert "nope: validation loss 3.0000\n" in capsys.readouterr().out
