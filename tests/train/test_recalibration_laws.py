"""The laws of recalibrations, with a plain model, with YaRN, and with two kinds of layers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from recalibrated import losses_of, save_base, short_run, write_documents
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import ropelens as rl
from ropelens.runtime import savepoint
from ropelens.text.text import Text
from ropelens.train import recalibration_loop
from ropelens.train import steps as training_steps
from ropelens.train.base_data import held_out

BASES = ["bundled", "llama_yarn", "gemma3"]


@pytest.fixture(scope="module", params=BASES)
def base(request, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(request.param, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("text") / "documents")


@pytest.fixture(scope="module")
def runs(base: str, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the control, and runs with variants."""
    folder = tmp_path_factory.mktemp("runs")
    for variant in ("control", "p-rope:1", "p-rope:0.25", "nope"):
        short_run(base, variant, out=folder / variant, text=text)
    return folder


def test_gaps_before_the_training_are_those_of_evaluate(base: str, runs: Path):
    model, _ = rl.load(base)
    chosen = held_out(runs / "control/data", sequences=12)
    tokens = torch.from_numpy(chosen.rows.astype(np.int64))
    read = Text(tokens, documents=torch.from_numpy(chosen.documents))
    variants = ["p-rope:0.25", "nope"]
    evaluated = rl.evaluate(
        model, read, edits={name: name for name in variants}, measures="loss"
    )
    mean_loss = evaluated["mean_loss"]
    control = losses_of(runs / "control").loc[0].mean()
    assert control == pytest.approx(float(mean_loss.sel(edit="none")), abs=1e-4)
    for name in variants:
        gap = losses_of(runs / name).loc[0].mean() - control
        expected = float(mean_loss.sel(edit=name) - mean_loss.sel(edit="none"))
        assert gap == pytest.approx(expected, abs=1e-4)
        assert abs(gap) > 1e-3


def test_a_variant_that_stops_no_plane_equals_the_control_in_all_bits(runs: Path):
    control = losses_of(runs / "control")
    assert losses_of(runs / "p-rope:1").equals(control)
    assert not losses_of(runs / "p-rope:0.25").equals(control)
    assert control.index.tolist() == [0, 1, 2, 4, 5]


def test_without_a_rate_no_loss_changes(base: str, text: Path, tmp_path: Path):
    run = short_run(base, "nope", out=tmp_path, text=text, learning_rate=0.0)
    losses = losses_of(run)
    for step in losses.index:
        assert losses.loc[step].equals(losses.loc[0])


@pytest.mark.parametrize(
    ("where", "every"),
    [
        ("loss_of", 3),
        pytest.param("sequence_loss", 17, marks=pytest.mark.thorough),
    ],
)
def test_a_stopped_run_continues_in_all_bits(
    base: str,
    text: Path,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    every: int,
):
    """The run is saved after each step and sequence, and stopped in some calls."""
    monkeypatch.setattr(savepoint, "SECONDS", 0.0)
    module = recalibration_loop if where == "sequence_loss" else training_steps
    measure = getattr(module, where)
    calls = 0

    def stopped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(module, where, stopped)
    stops = 0
    finished = False
    while not finished:
        try:
            run = short_run(base, "p-rope:0.25", out=tmp_path, text=text)
            finished = True
        except KeyboardInterrupt:
            stops += 1
    assert stops > 1
    assert losses_of(run).equals(losses_of(runs / "p-rope:0.25"))
    weights = (run / "model.safetensors").read_bytes()
    assert weights == (runs / "p-rope:0.25/model.safetensors").read_bytes()
    assert not (run / "checkpoint.pt").exists()


@pytest.mark.parametrize("variant", ["control", "p-rope:0.25", "nope"])
def test_the_final_folder_has_the_logits_of_the_trained_model(runs: Path, variant: str):
    model = AutoModelForCausalLM.from_pretrained(runs / variant, dtype="float32")
    chosen = held_out(runs / variant / "data", sequences=12)
    tokens = torch.from_numpy(chosen.rows.astype(np.int64))
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    losses = cross_entropy(
        logits.transpose(1, 2), tokens[:, 1:], reduction="none"
    ).mean(1)
    trained = losses_of(runs / variant).iloc[-1].to_numpy()
    np.testing.assert_allclose(losses.numpy(), trained, atol=1e-5)
    loaded, tokenizer = rl.load(str(runs / variant))
    assert tokenizer is not None
    assert math.isfinite(float(loaded(tokens).logits.sum()))
