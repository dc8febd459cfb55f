"""Bundled checkpoints: how one is made of a run, and what those that come with ropelens are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from trained import OPTIONS, story
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropelens.errors import BadArgument
from ropelens.models.bundled import BUNDLED, bundled_path, sample_path
from ropelens.train import bundle, train, write_bundle
from ropelens.train.data import training_and_validation

# Written for this test, in the manner of what the bundled checkpoint has read.
PASSAGE = """\
The old gentleman put down his hat upon the table, and looked at her for a long time without
speaking. "You have been very good to me, my dear," he said at last, "and I shall not forget
it; but I am afraid that I must go away to London in the morning." She did not answer him. The
fire had burned low, and there was no sound in the room but the ticking of the clock upon the
wall. "Will you come back again?" she asked, in a low voice, and her hand trembled a little.
"""

FINISHED = [name for name in BUNDLED if "-step-" not in name]
TURNING = [name for name in FINISHED if name != "nope"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "story.txt").write_text(story(600), encoding="utf-8")
    return train([folder / "story.txt"], out=folder / "nano", **OPTIONS)


def test_write_bundle(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "nano"
    monkeypatch.setattr(bundle, "MEASURED", 3)
    measured = write_bundle(
        run, out=out, command="ropelens train --text story.txt", text="a story", documents=4
    )
    card = (out / "README.md").read_text()
    assert "# nano: a checkpoint bundled with ropelens" in card
    assert "    ropelens train --text story.txt\n" in card
    assert "rotation: rope (rope_theta 10000.0, rope_type default), 8 of 8 planes turn" in card
    assert f"| float16, as stored | {measured.half_loss:.5f} |" in card
    assert f"tokens seen: {60 * 4 * 32:,} (60 steps of 4 sequences of 32)" in card
    assert card.count("| 60 | 7,680 |") == 1
    assert measured.half_loss == pytest.approx(measured.full_loss, abs=1e-3)
    held_out = np.array(training_and_validation(run / "data", batch=1)[1])
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


def test_an_early_model_is_bundled_without_a_sample(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "nano-step-8"
    measured = write_bundle(run, out=out, command="ropelens train", text="a story", step=8)
    card = (out / "README.md").read_text()
    assert f"tokens seen: {8 * 4 * 32:,} (8 steps of 4 sequences of 32, of the 60" in card
    assert "Without text of its own" in card
    assert not (out / "sample.jsonl").exists()
    stored = load_file(out / "model.safetensors")
    early = load_file(run / "history" / "step-000008" / "model.safetensors")
    assert all(torch.equal(stored[name], early[name].half()) for name in stored)
    facts = json.loads((out / "bundle.json").read_text())
    assert facts == {
        "tokens": 8 * 4 * 32,
        "step": 8,
        "validation_loss": measured.full_loss,
    }
    with pytest.raises(BadArgument, match="did not keep step 9"):
        write_bundle(run, out=tmp_path / "none", command="", text="", step=9)
    assert not (tmp_path / "none").exists()


def test_an_unfinished_run_is_not_bundled(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    del record["finished"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(BadArgument, match="is not finished"):
        write_bundle(tmp_path, out=tmp_path / "out", command="", text="")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=list(BUNDLED))
def bundled(request: pytest.FixtureRequest) -> Path:
    return bundled_path(request.param)


def test_bundled_is_small_and_described(bundled: Path) -> None:
    assert sum(p.stat().st_size for p in bundled.rglob("*")) <= 6_000_000
    card = (bundled / "README.md").read_text()
    assert "public-domain" in card
    assert "license: mit" in card
    assert "/work" not in card


@pytest.mark.parametrize("name", FINISHED)
def test_bundled_predicts_and_writes(name: str) -> None:
    bundled = bundled_path(name)
    model = AutoModelForCausalLM.from_pretrained(
        bundled, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(bundled, local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) > 2_000_000
    assert model.config.head_dim == 32
    turning = int((model.model.rotary_emb.inv_freq != 0).sum())
    assert f"{turning} of 16 planes turn" in (bundled / "README.md").read_text()
    tokens = tokenizer(PASSAGE, return_tensors="pt").input_ids
    assert model(input_ids=tokens, labels=tokens).loss < 0.5 * math.log(len(tokenizer))
    written = model.generate(tokens[:, :20], max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert written.shape == (1, 40)
    assert tokenizer.decode(written[0, 20:]).strip()


@pytest.mark.parametrize("name", TURNING)
def test_bundled_needs_its_rotation(name: str) -> None:
    bundled = bundled_path(name)
    model = AutoModelForCausalLM.from_pretrained(
        bundled, dtype=torch.float32, local_files_only=True
    )
    tokens = AutoTokenizer.from_pretrained(bundled)(PASSAGE, return_tensors="pt").input_ids
    loss = model(input_ids=tokens, labels=tokens).loss
    model.model.rotary_emb.inv_freq.zero_()
    assert model(input_ids=tokens, labels=tokens).loss > loss + 1


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
def test_bundled_tokenizer_gives_text_back(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_path(), local_files_only=True)
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_bundled_sample_is_one_context_a_document(bundled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled, local_files_only=True)
    lines = sample_path(bundled.name).read_text(encoding="utf-8").splitlines()
    lengths = [len(tokenizer(json.loads(line)["text"]).input_ids) for line in lines]
    assert len(lengths) >= 48
    assert set(lengths) == {512}


def test_no_such_bundled_checkpoint() -> None:
    with pytest.raises(BadArgument) as caught:
        bundled_path("alibi")
    assert caught.value.line.startswith(
        "no checkpoint called 'alibi' is bundled; try: one of: rope, p-rope-0.75, "
    )


def test_the_family_learnt_from_the_same_text_in_the_same_order() -> None:
    """One tokenizer, one number of tokens; an early model is worse than the finished one."""
    vocabularies = {(bundled_path(name) / "tokenizer.json").read_bytes() for name in BUNDLED}
    assert len(vocabularies) == 1
    facts = {n: json.loads((bundled_path(n) / "bundle.json").read_text()) for n in BUNDLED}
    assert {facts[name]["tokens"] for name in FINISHED} == {20_480_000}
    early = [facts[f"rope-step-{step}"]["validation_loss"] for step in (64, 256, 1024)]
    assert sorted(early, reverse=True) == early
    assert early[-1] > facts["rope"]["validation_loss"]
