"""Training of single runs, stopped and resumed runs, and refused runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from trained import OPTIONS, metrics, story, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from ropelens.errors import BadArgument, BadText
from ropelens.train import loop
from ropelens.train.data import prepare_data, read_texts, sequences_of
from ropelens.train.loop import TrainingFailed, write_history
from ropelens.train.run import model_config
from ropelens.train.settings import Settings, get_size


def test_a_finished_run_is_a_checkpoint(run: Path):
    model = AutoModelForCausalLM.from_pretrained(run, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(run, local_files_only=True)
    tokens = tokenizer(story(3), return_tensors="pt").input_ids[:, :32]
    assert model(input_ids=tokens, labels=tokens).loss < math.log(300) / 2
    first, *_, last = metrics(run)
    assert float(last["valid_loss"]) < float(first["train_loss"]) - 0.5
    record = json.loads((run / "run.json").read_text())
    assert record["tokens"] == 60 * 4 * 32 == int(metrics(run)[-1]["tokens"])
    assert set(record["versions"]) > {"torch", "transformers", "accelerate"}
    names = "config.json generation_config.json metrics.csv model.safetensors run.json"
    names += " tokenizer.json tokenizer_config.json .lock data history"
    assert {path.name for path in run.iterdir()} == set(names.split())


def test_auto_is_bf16_on_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch):
    for gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        assert Settings().facts()["precision"] == ("bf16" if gpu else "fp32")
    assert Settings(precision="bf16").facts()["precision"] == "bf16"


@pytest.mark.parametrize("file", ["config.json", "study.json", "history", "run.json"])
def test_another_model_is_not_overwritten(prose: Path, tmp_path: Path, file: str):
    (tmp_path / file).write_text("{}")
    with pytest.raises(BadArgument, match="holds a model, a run, a study or other results"):
        train([prose], out=tmp_path, **OPTIONS)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {file: "{}"}


def test_other_settings_are_refused(run: Path, prose: Path, tmp_path: Path):
    with pytest.raises(BadArgument) as caught:
        train([prose], out=run, **OPTIONS | {"seed": 1})
    assert caught.value.what == f"the run in {run} was made with other settings."
    assert "seed: 0, now 1" in str(caught.value)
    with pytest.raises(BadArgument, match="vocabulary: 300, now 400"):
        train([prose], out=run, data=tmp_path / "data", **OPTIONS | {"vocabulary": 400})
    assert not (tmp_path / "data").exists()
    changed = tmp_path / "changed.txt"
    changed.write_text(prose.read_text() + "More.")
    with pytest.raises(BadArgument, match="text_sha256"):
        train([changed], out=run, **OPTIONS)


def test_validation_text_that_is_also_training_text(prose: Path, tmp_path: Path):
    with pytest.raises(BadText, match="All validation documents are also training"):
        train([prose], valid=[prose], out=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
    other = tmp_path / "other.txt"
    other.write_text(story(80)[7:])
    with pytest.warns(UserWarning, match="1 validation documents are also used to train"):
        train([prose], valid=[prose, other], out=tmp_path / "run", **OPTIONS | {"steps": 2})


def test_prepared_tokens(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two stages have sequences of 16 and 32 tokens; runs of a study can use them as well."""
    made = tmp_path / "made"
    prepare_data(made, read_texts([prose], [], data=made), Settings(**OPTIONS))
    rows = np.load(made / "train.npy")
    np.save(made / "one.npy", rows[:16].reshape(32, 16))
    np.save(made / "two.npy", rows[16:40])
    (made / "train.npy").unlink()
    facts = json.loads((made / "data.json").read_text())
    facts |= {"stages": ["one.npy", "two.npy"], "seed": 99}
    (made / "data.json").write_text(json.dumps(facts))
    monkeypatch.setattr(loop, "EVAL_EVERY", 4)
    options = OPTIONS | {"steps": 6, "history_every": 3}
    run = train(data=made, out=tmp_path / "run", **options)
    record = json.loads((run / "run.json").read_text())
    assert (record["data"], record["settings"]["stages"]) == ("../made", ["one.npy", "two.npy"])
    assert record["settings"]["seed"] == 0, "99 is the seed of the tokens"
    assert train(data=made, out=tmp_path / "run", **options) == run, "finished already"
    assert not (run / "data").exists()
    assert [row["step"] for row in metrics(run) if float(row["valid_loss"])] == ["4", "6"]
    history = sorted(path.name for path in (run / "history").iterdir())
    assert history == [f"step-{step:06}" for step in (1, 2, 3, 4, 6)]
    with pytest.raises(BadArgument, match="context: 32, now 16"):
        train(data=made, out=tmp_path / "other", **options | {"context": 16})
    with pytest.raises(BadText, match="Text to train on is missing"):
        train(data=tmp_path, out=tmp_path / "third", **options)
    (made / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(BadArgument, match=r"tokenizer_sha256: .*, now"):
        train(data=made, out=tmp_path / "fourth", **options)
    prepare_data(tmp_path / "whole", read_texts([prose], [], data=made), Settings(**OPTIONS))
    made = tmp_path / "whole"
    np.save(made / "train.npy", rows[:4, :24])
    with pytest.raises(BadArgument, match="has a stage that does not fit steps of 4 x 32"):
        train(data=made, out=tmp_path / "third", **options)


def test_broken_weights_are_not_saved(tmp_path: Path):
    model = LlamaForCausalLM(model_config(Settings(**OPTIONS)))
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(TrainingFailed, match="step 8: a weight is not a finite number"):
        write_history(model, tmp_path, step=8, tokenizer=tmp_path)
    assert not list(tmp_path.iterdir())


A_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)


@examples(max_examples=20)
@given(texts=st.lists(A_TEXT, min_size=1, max_size=5))
def test_sequences_are_the_documents_end_to_end(run: Path, texts: list[str]):
    tokenizer = AutoTokenizer.from_pretrained(run, local_files_only=True)
    stream = [i for t in texts for i in tokenizer(f"{t}\n</s>").input_ids[1:]]
    rows = sequences_of(texts, tokenizer, context=8)
    assert len(rows) == len(stream) // 7
    assert (rows[:, 0] == tokenizer.bos_token_id).all()
    assert rows[:, 1:].flatten().tolist() == stream[: len(rows) * 7]


def test_a_size_can_be_spelled_out():
    size = get_size("8x384x6x2")
    assert (size.layers, size.width, size.heads, size.kv_heads) == (8, 384, 6, 2)
    assert (size.head_dim, size.mlp) == (64, 1024)
    for wrong in ("0x384x6x2", "8x384x7x1", "8x384x6x4"):
        with pytest.raises(BadArgument, match=f"No model has the size '{wrong}'"):
            get_size(wrong)


def test_sizes_have_the_stated_number_of_parameters():
    count = {}
    for name, vocabulary in (("tiny", 2048), ("small", 16_384), ("base", 16_384)):
        with torch.device("meta"):
            config = model_config(Settings(size=name, vocabulary=vocabulary))
            count[name] = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    millions = {name: round(number / 1e6, 1) for name, number in count.items()}
    assert millions == {"tiny": 2.5, "small": 26.8, "base": 65.1}


@pytest.mark.parametrize("step", [24, 60])
def test_a_stop_after_any_step(run, prose, tmp_path, step, capfd):
    save = loop.save_checkpoint

    def save_and_stop(path: Path, *state: object) -> None:
        save(path, *state)
        if state[-1][0] == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", save_and_stop)
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0)
        with pytest.raises(KeyboardInterrupt):
            train([prose], out=tmp_path, **OPTIONS)
    assert not (tmp_path / "model.safetensors").exists()
    train([prose], out=tmp_path, **OPTIONS)
    assert f"resuming from step {step}\n" in capfd.readouterr().err
    assert not (tmp_path / loop.CHECKPOINT).exists()
    assert metrics(tmp_path) == metrics(run)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
    history, expected = ((out / "history").iterdir() for out in (tmp_path, run))
    assert {folder.name for folder in history} == {folder.name for folder in expected}


def test_files_of_a_failed_start_are_not_used(prose: Path, tmp_path: Path):
    out = tmp_path / "run"
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(BadText, match=r"0 sequences for train\.npy, which needs 4"):
        train([tmp_path / "short.txt"], out=out, **OPTIONS)
    with pytest.raises(BadText, match=r"too short at a context of 32[\s\S]*for valid\.npy"):
        train([prose], valid=[tmp_path / "short.txt"], out=out, **OPTIONS)
    assert (out / "data" / "train.npy").exists()
    train([prose], out=out, **OPTIONS | {"steps": 2})
    assert metrics(out)[-1]["valid_loss"]
