"""Recalibrations: bases, texts, folders and refusals."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from full_disk import full_disk
from oracles.tiny import tiny
from recalibrated import (
    GEMMA3,
    SHORT,
    SMOLLM2,
    losses_of,
    same_weights,
    save_base,
    short_run,
    write_documents,
)
from tiny_checkpoints import edit_config, save_tiny
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
)

import ropelens as rl
from ropelens.commands.train import TrainOptions
from ropelens.errors import BadArgument, BadText, UnsupportedModel
from ropelens.runtime.records import write_json
from ropelens.train import recalibration, recalibration_loop, recalibration_memory
from ropelens.train.base_data import documents_of_rows, held_out
from ropelens.train.base_model import convert_weights
from ropelens.train.checkpoint import read_savepoint, write_savepoint
from ropelens.train.data import cut_stream, tokens_of
from ropelens.train.held_out import hold_out
from ropelens.train.recalibration import recalibrate, recalibrate_study
from ropelens.train.recalibration_settings import Recalibration
from ropelens.train.recalibration_study import (
    read_recalibration_study,
    recalibrations_of,
)
from ropelens.train.run_folder import lock_run, read_settings
from ropelens.train.steps import TrainingFailed


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("text") / "documents")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base("llama_gqa", tmp_path_factory.mktemp("base"))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "study.toml"
    file.write_text(
        'variants = ["nope"]\nseeds = [0, 1]\nsteps = 2\nother_rates = []\n'
    )
    return file


GIVEN = {name: value for name, value in SHORT.items() if name != "steps"}


# --- settings ---------------------------------------------------------------------------------


def test_the_rate_rises_over_a_tenth_of_the_steps_and_falls_to_a_tenth():
    settings = Recalibration(steps=100, learning_rate=1e-3, context=512)
    rates = [settings.rate_of(step) for step in range(100)]
    assert rates[:10] == pytest.approx([1e-4 * number for number in range(1, 11)])
    assert rates[9] == max(rates)
    falls = np.diff(rates[9:])
    np.testing.assert_allclose(falls, falls[0])
    assert rates[-1] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [0, 1]), (8, [0, 1, 2, 4, 8]), (100, [0, 1, 2, 4, 8, 16, 32, 64, 100])],
)
def test_evaluated_steps_are_powers_of_two_and_the_last(
    steps: int, expected: list[int]
):
    assert Recalibration(steps=steps).evaluated_steps == expected


@pytest.mark.parametrize(
    ("parameters", "trained", "rate", "context"),
    [(9_999_999, 256, 5e-4, 256), (10_000_000, 8192, 1e-4, 512), (5, None, 5e-4, 512)],
)
def test_defaults_depend_on_the_base(parameters, trained, rate, context):
    settings = Recalibration().for_model(
        parameters=parameters, trained=trained, bf16=True
    )
    assert settings.learning_rate == rate
    assert settings.context == context
    assert not settings.bf16


@pytest.mark.parametrize("bf16", [False, True])
def test_auto_is_bf16_on_devices_that_support_it(bf16: bool):
    settings = Recalibration(precision="auto")
    resolved = settings.for_model(parameters=5, trained=None, bf16=bf16)
    assert resolved.bf16 is bf16
    assert resolved.precision == ("bf16" if bf16 else "fp32")


def test_the_control_is_always_trained_and_the_file_wins(study: Path):
    read = read_recalibration_study(study, {"context": 16})
    runs = recalibrations_of(read)
    assert [str(run.folder) for run in runs] == [
        "control/seed-0",
        "nope/seed-0",
        "control/seed-1",
        "nope/seed-1",
    ]
    assert {run.settings.context for run in runs} == {16}
    assert read_recalibration_study(study, {"steps": 2})["steps"] == 2
    with pytest.raises(BadArgument, match="state different values of steps"):
        read_recalibration_study(study, {"steps": 3})
    with pytest.raises(BadArgument, match="state different values of seed"):
        read_recalibration_study(study, {"seed": 0})


def test_the_control_and_the_first_variant_are_repeated_at_other_rates(tmp_path: Path):
    file = tmp_path / "study.toml"
    file.write_text('variants = ["p-rope:0.5", "nope"]\nseeds = [3, 4]\n')
    repeated = {}
    for run in recalibrations_of(read_recalibration_study(file, {})):
        if run.rate_factor != 1:
            repeated[str(run.folder)] = run.rate_factor
    assert repeated == {
        "control/seed-3-third-rate": pytest.approx(1 / 3),
        "p-rope-0.5/seed-3-third-rate": pytest.approx(1 / 3),
        "control/seed-3-triple-rate": 3.0,
        "p-rope-0.5/seed-3-triple-rate": 3.0,
    }
    file.write_text('variants = ["nope"]\nlearning_rate = 0.0\n')
    assert read_recalibration_study(file, {})["other_rates"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        'variants = ["yeti"]',
        "steps = 3",
        'variants = ["nope"]\nsize = "tiny"',
        "steps =",
        'variants = ["nope"]\nstep = 9',
        'variants = "nope"',
        'variants = ["nope"]\nseeds = []',
        'variants = ["nope"]\nbase = "another"',
        'variants = ["nope"]\nother_rates = ["p-rope:0.5"]',
        'variants = ["nope"]\nother_rates = "nope"',
        'variants = ["nope"]\nlearning_rate = 0\nother_rates = ["nope"]',
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, wrong: str):
    file = tmp_path / "study.toml"
    file.write_text(wrong)
    with pytest.raises(BadArgument):
        read_recalibration_study(file, {})


def test_zero_is_a_value_of_an_option():
    options = TrainOptions(learning_rate=0.0, warmup=0.0, seed=0)
    assert options.given() == {"learning_rate": 0.0, "warmup": 0.0, "seed": 0}


# --- text -------------------------------------------------------------------------------------


def test_ids_above_65535_are_kept(tmp_path: Path):
    """The tokenizer has 70,000 words, and the text has the last words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w69998")
    (tokens,) = tokens_of(["w65535 w65536 w69999"], fast)
    assert tokens.tolist() == [65_535, 65_536, 69_999, 69_998]
    rows = cut_stream([tokens], begin=[66_000], context=3)
    assert rows.tolist() == [[66_000, 65_535, 65_536], [66_000, 69_999, 69_998]]


@pytest.mark.thorough
def test_ids_of_gemma3_are_those_of_its_tokenizer():
    _, tokenizer = rl.load(str(GEMMA3))
    text = "Ein Löwe 🦁 geht über die Straße."
    (tokens,) = tokens_of([text], tokenizer)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens.tolist() == [*plain, tokenizer.eos_token_id]
    assert tokens.max() > 65_535


def test_a_sequence_belongs_to_the_document_in_which_it_begins():
    documents = [np.zeros(length, np.uint16) for length in (5, 1, 9, 0, 3, 4)]
    by_token = np.repeat(np.arange(6), [5, 1, 9, 0, 3, 4])
    np.testing.assert_array_equal(
        documents_of_rows(documents, body=3), by_token[::3][: len(by_token) // 3]
    )


def test_held_out_sequences_come_from_all_documents(
    base: str, text: Path, tmp_path: Path
):
    run = short_run(base, "control", out=tmp_path / "run", text=text, steps=1)
    chosen = held_out(run / "data", sequences=8)
    assert sorted(chosen.documents) == list(range(8))
    rows = np.load(run / "data/valid.npy")
    documents = np.load(run / "data/valid_documents.npy")
    for row, document in zip(chosen.rows, chosen.documents, strict=True):
        numbers = np.flatnonzero((rows == row).all(1))
        assert document in documents[numbers]


def test_too_few_documents_are_refused_with_their_number(base: str, tmp_path: Path):
    few = write_documents(tmp_path / "few", count=3, words=300)
    with pytest.raises(BadText, match="8 held-out documents") as caught:
        short_run(base, "control", out=tmp_path / "run", text=few)
    assert caught.value.parts["seen"] == "documents of --text: 3"
    many = write_documents(tmp_path / "many", count=9, words=200)
    settings = Recalibration(**SHORT)
    with pytest.raises(BadText, match="8 held-out documents") as caught:
        recalibrate(base, settings, out=tmp_path / "run", text=[many], valid=[few])
    assert caught.value.parts["seen"] == "documents of --valid: 3"


def test_short_documents_in_few_sequences_are_refused(base: str, tmp_path: Path):
    """There are 12 documents, but one of them has nearly all held-out tokens."""
    text = write_documents(tmp_path / "text")
    valid = write_documents(tmp_path / "valid", count=12, words=1)
    (valid / "00.txt").write_text("x" * 500)
    settings = Recalibration(**SHORT)
    with pytest.raises(BadText, match="8 held-out documents") as caught:
        recalibrate(base, settings, out=tmp_path / "run", text=[text], valid=[valid])
    assert "held-out sequences" in caught.value.parts["seen"]


def test_the_random_state_stays(base: str, text: Path, tmp_path: Path):
    before = torch.get_rng_state()
    short_run(base, "control", out=tmp_path, text=text, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_fewer_held_out_sequences_are_counted(base, text, tmp_path, capfd):
    run = short_run(base, "control", out=tmp_path, text=text, steps=1, evaluated=1000)
    count = len(np.load(run / "data/valid.npy"))
    assert (
        f"all {count} held-out sequences: 1000 were asked for" in capfd.readouterr().err
    )
    assert json.loads((run / "run.json").read_text())["evaluated_sequences"] == count


def test_too_short_text_is_refused_with_the_tokens_that_it_needs(
    base: str, tmp_path: Path
):
    short = write_documents(tmp_path / "short", count=20, words=2)
    with pytest.raises(BadText, match="too short at a context of 32 tokens") as caught:
        short_run(base, "control", out=tmp_path / "run", text=short, context=32)
    assert "which needs" in caught.value.parts["seen"]
    assert "tokens)" in caught.value.parts["seen"]


def test_ids_of_a_vocabulary_with_gaps_are_kept():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tokens,) = tokens_of(["a b"], PreTrainedTokenizerFast(tokenizer_object=words))
    assert tokens.tolist() == [0, 70_000]


def test_held_out_ends_share_no_token_with_the_training_without_an_end_of_text():
    split = hold_out([np.arange(10)], least=3, marked_ends=False)
    assert split.training[0].tolist() == [*range(7)]
    assert split.validation[0].tolist() == [7, 8, 9]
    marked = hold_out([np.arange(10)], least=3)
    assert marked.training[0].tolist() == [*range(7), 9]


def test_tokens_that_the_model_does_not_have_are_refused(text: Path, tmp_path: Path):
    folder = save_tiny(tmp_path / "base", vocab_size=20)
    with pytest.raises(BadText, match="tokens that the model does not have") as caught:
        short_run(str(folder), "control", out=tmp_path / "run", text=text)
    assert "a vocabulary of 20" in caught.value.parts["seen"]


def test_tokens_of_another_base_are_not_used(base, text, tmp_path):
    """A killed process leaves data.json without run.json."""
    run = short_run(base, "control", out=tmp_path / "run", text=text, steps=1)
    data = tmp_path / "next/data"
    data.parent.mkdir()
    (run / "data").rename(data)
    other = save_tiny(tmp_path / "other")
    with pytest.raises(BadArgument, match="was made with other settings") as caught:
        short_run(str(other), "control", out=tmp_path / "next", text=text)
    assert "base: files:" in caught.value.parts["seen"]


# --- refusals ---------------------------------------------------------------------------------


def test_a_foreign_folder_is_refused_and_stays(base: str, text: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(BadArgument, match="files would mix"):
        short_run(base, "control", out=tmp_path / "run", text=text)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_files_that_are_no_tokens_are_not_replaced(
    base: str, text: Path, tmp_path: Path
):
    data = tmp_path / "run/data"
    data.mkdir(parents=True)
    (data / "train.npy").write_text("mine")
    with pytest.raises(BadArgument, match="holds other files") as caught:
        short_run(base, "control", out=tmp_path / "run", text=text)
    assert caught.value.parts["seen"] == "train.npy"
    assert (data / "train.npy").read_text() == "mine"


def test_a_file_as_the_folder_of_a_run_is_refused(
    base: str, text: Path, tmp_path: Path
):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadArgument, match="cannot be read"):
        short_run(base, "control", out=tmp_path / "file", text=text)
    with pytest.raises(BadArgument, match="cannot be written to"):
        short_run(base, "control", out=tmp_path / "file/run", text=text)


def test_a_run_that_begins_meanwhile_is_no_foreign_folder(tmp_path, monkeypatch):
    """Another process writes the first files of the run between two reads of the folder."""

    listed = Path.iterdir

    def begin(folder: Path) -> Iterator[Path]:
        write_json(tmp_path / "run.json", {"settings": {"seed": 0}})
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", begin)
    begun = read_settings(tmp_path, "run.json", key="settings")
    assert begun == {"settings": {"seed": 0}}


def test_a_study_is_refused_before_it_trains_if_a_variant_cannot_be_stored(
    base: str, text: Path, tmp_path: Path
):
    file = tmp_path / "study.toml"
    file.write_text('variants = ["nope", "p-rope:0.5@sliding"]\nsteps = 1\n')
    with pytest.raises(
        UnsupportedModel, match=r"stores p-rope:0\.5@sliding of"
    ) as caught:
        recalibrate_study(base, file, given=GIVEN, out=tmp_path / "out", text=[text])
    assert "no head 'sliding" in caught.value.parts["seen"]
    assert not (tmp_path / "out").exists()


def test_a_configuration_that_cannot_be_written_is_refused_before_the_training(
    text: Path, tmp_path: Path
):
    folder = save_base("gemma4", tmp_path / "base")
    with pytest.raises(UnsupportedModel, match=r"No configuration stores p-rope:0\.5"):
        short_run(folder, "p-rope:0.5", out=tmp_path / "run", text=text)
    assert not (tmp_path / "run/data").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seed": 1}, "seed"),
        ({"variant": "nope"}, "variant"),
        ({"learning_rate": 1e-5}, "learning_rate"),
    ],
)
def test_other_settings_are_refused(base, text, tmp_path, changes, what):
    short_run(base, "control", out=tmp_path, text=text, steps=1)
    with pytest.raises(BadArgument, match="was made with other settings") as caught:
        short_run(
            base,
            out=tmp_path,
            text=text,
            **{"variant": "control", "steps": 1, **changes},
        )
    assert what in caught.value.parts["seen"]


def test_another_number_of_threads_is_refused(base, text, tmp_path, monkeypatch):
    short_run(base, "control", out=tmp_path, text=text, steps=1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    with pytest.raises(BadArgument, match="was made with other settings") as caught:
        short_run(base, "control", out=tmp_path, text=text, steps=1)
    assert "threads" in caught.value.parts["seen"]


def test_a_finished_run_is_not_trained_again(base, text, tmp_path, capfd):
    run = short_run(base, "control", out=tmp_path, text=text, steps=1)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*.safetensors")}
    short_run(base, "control", out=tmp_path, text=text, steps=1)
    assert before == {file: file.stat().st_mtime_ns for file in before}
    assert "is finished already" in capfd.readouterr().err


def test_models_that_cannot_train_are_refused(text: Path, tmp_path: Path):
    quantized = save_tiny(tmp_path / "quantized")
    edit_config(quantized, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match="quantized, and cannot train"):
        short_run(str(quantized), "control", out=tmp_path / "run", text=text)
    experts = save_base("mixtral", tmp_path / "experts")
    with pytest.raises(UnsupportedModel, match="auxiliary loss"):
        short_run(experts, "control", out=tmp_path / "run", text=text)
    dynamic = save_tiny(
        tmp_path / "dynamic",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    with pytest.raises(UnsupportedModel, match=r"depends on the length|cannot undo"):
        short_run(str(dynamic), "nope", out=tmp_path / "run", text=text)
    assert not (tmp_path / "run/data").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls transformers
def test_an_adapter_is_refused(base: str, text: Path, tmp_path: Path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        tiny("llama_gqa"), peft.LoraConfig(target_modules=["q_proj"])
    )
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedModel, match="has an adapter"):
        short_run(str(tmp_path / "adapter"), "control", out=tmp_path / "run", text=text)


def test_a_run_without_memory_is_refused_before_it_starts(
    base, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(recalibration_memory, "free_bytes", lambda device: 1000)
    with pytest.raises(BadArgument, match="does not fit into the memory") as caught:
        short_run(base, "control", out=tmp_path / "run", text=text)
    assert "optimizer" in caught.value.parts["seen"]
    assert not (tmp_path / "run").exists()


def test_a_validation_loss_that_is_not_finite_ends_the_run(
    base, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(recalibration_loop, "sequence_loss", lambda *_: float("inf"))
    with pytest.raises(
        TrainingFailed, match="a validation loss is not a finite number"
    ):
        short_run(base, "control", out=tmp_path, text=text)


def test_a_loss_that_is_not_finite_names_the_rate(base, text, tmp_path):
    with pytest.raises(TrainingFailed, match="is not a finite number") as caught:
        short_run(base, "control", out=tmp_path, text=text, steps=9, learning_rate=1e30)
    assert "learning rate of" in caught.value.parts["seen"]
    assert "e+" in caught.value.parts["seen"]


# --- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_saved_in_their_own_dtype(text: Path, tmp_path: Path, dtype: str):
    folder = save_tiny(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(folder)
    run = short_run(str(folder), "p-rope:0.5", out=tmp_path / "run", text=text)
    saved = AutoModelForCausalLM.from_pretrained(run)
    assert saved.dtype == getattr(torch, dtype)
    trained = rl.load(str(run))[0]
    chosen = held_out(run / "data", sequences=12)
    tokens = torch.from_numpy(chosen.rows.astype(np.int64))
    losses = rl.evaluate(trained, tokens, measures="loss")["loss"].isel(edit=0)
    np.testing.assert_allclose(losses, losses_of(run).iloc[-1], atol=1e-5)


def test_a_configuration_without_a_dtype_has_that_of_its_weights(
    text: Path, tmp_path: Path
):
    folder = save_tiny(tmp_path / "base")
    LlamaForCausalLM.from_pretrained(folder, dtype="bfloat16").save_pretrained(folder)
    edit_config(folder, dtype=None)
    run = short_run(str(folder), "control", out=tmp_path / "run", text=text)
    assert AutoModelForCausalLM.from_pretrained(run).dtype == torch.bfloat16


def test_all_parts_of_a_configuration_state_the_dtype():
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text_config = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}
    config = Gemma3Config(text_config=text_config, vision_config=vision)
    model = Gemma3ForConditionalGeneration(config)
    convert_weights(model, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config.text_config.dtype == torch.bfloat16


def test_tied_embeddings_stay_tied(text: Path, tmp_path: Path):
    folder = save_tiny(tmp_path / "base", tie_word_embeddings=True)
    run = short_run(str(folder), "nope", out=tmp_path / "run", text=text)
    model = AutoModelForCausalLM.from_pretrained(run)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoConfig.from_pretrained(run).tie_word_embeddings


def test_only_projections_of_attention_train(base: str, text: Path, tmp_path: Path):
    run = short_run(base, "nope", out=tmp_path, text=text, train="attention")
    trained = AutoModelForCausalLM.from_pretrained(run)
    equal = same_weights(AutoModelForCausalLM.from_pretrained(base), trained)
    changed = {name for name, _ in trained.named_parameters()} - set(equal)
    kinds = {name.split(".")[-2] for name in changed}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(changed) == 4 * trained.config.num_hidden_layers


def test_a_large_model_computes_layers_again_with_equal_losses(
    base, text, tmp_path, monkeypatch
):
    """Recomputation and passes of one sequence change sums only by their rounding."""
    plain = short_run(base, "nope", out=tmp_path / "plain", text=text)
    monkeypatch.setattr(recalibration_loop, "SMALL", 0)
    saving = short_run(base, "nope", out=tmp_path / "saving", text=text)
    np.testing.assert_allclose(losses_of(saving), losses_of(plain), atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_step_is_that_of_a_plain_loop(
    precision: str, base: str, text: Path, tmp_path: Path
):
    """The oracle is the loop of a user: transformers' loss, AdamW and a clipped gradient."""
    run = short_run(
        base,
        "control",
        out=tmp_path,
        text=text,
        steps=1,
        warmup=1.0,
        learning_rate=1e-3,
        precision=precision,
    )
    rows = np.load(run / "data/train.npy")
    order = torch.randperm(
        len(rows) // 4 * 4, generator=torch.Generator().manual_seed(0)
    )[:4]
    ids = torch.from_numpy(rows[order.numpy()].astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    trained = AutoModelForCausalLM.from_pretrained(run)
    others = dict(trained.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.data, others[name].data, atol=2e-5, rtol=1e-3)


def test_evaluations_are_in_float32(base: str, text: Path, tmp_path: Path):
    """Before the training, the precision of the training does not matter."""
    losses = {}
    for precision in ("fp32", "bf16"):
        run = short_run(
            base,
            "nope",
            out=tmp_path / precision,
            text=text,
            steps=1,
            precision=precision,
        )
        losses[precision] = losses_of(run).loc[0]
    np.testing.assert_array_equal(losses["bf16"], losses["fp32"])


# --- files ------------------------------------------------------------------------------------


def test_a_run_has_a_card_a_record_and_the_licence_of_its_base(base, text, tmp_path):
    (Path(base) / "LICENSE").write_text("Do what you like.")
    (Path(base) / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    run = short_run(base, "p-rope:0.5", out=tmp_path, text=text)
    card = (run / "README.md").read_text()
    for words in (
        "p-rope:0.5",
        "320 (5 steps of 4 sequences of 16)",
        "apache-2.0",
        "LICENSE",
    ):
        assert words in card
    assert (run / "LICENSE").read_text() == "Do what you like."
    record = json.loads((run / "run.json").read_text())
    assert record["kind"] == "recalibration"
    assert record["tokens"] == 320
    assert record["losses"]["before"] == losses_of(run).loc[0].mean()
    assert record["base"]["name"] == base
    assert not (run / "history").exists()
    analysed = rl.load(str(run))
    assert analysed[1] is not None


def test_a_study_trains_the_control_and_states_its_losses(
    base, text, tmp_path, study, capfd
):
    out = recalibrate_study(base, study, given=GIVEN, out=tmp_path / "out", text=[text])
    card = (out / "nope/seed-0/README.md").read_text()
    losses = json.loads((out / "control/seed-0/run.json").read_text())["losses"]
    assert f"- control: {losses['before']:.4f} before, {losses['after']:.4f}" in card
    assert (
        losses_of(out / "nope/seed-0")
        .loc[0]
        .equals(losses_of(out / "nope/seed-1").loc[0])
    )
    first = losses_of(out / "control/seed-0").iloc[-1]
    assert not first.equals(losses_of(out / "control/seed-1").iloc[-1])
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    assert capfd.readouterr().err.count("is finished already") == 4
    study.write_text(study.read_text() + "warmup = 0.5\n")
    with pytest.raises(BadArgument, match="made with other settings"):
        recalibrate_study(base, study, given=GIVEN, out=out, text=[text])


def test_runs_at_other_rates_are_added_to_a_finished_study(base, text, tmp_path, study):
    study.write_text('variants = ["nope"]\nsteps = 2\nother_rates = []\n')
    out = recalibrate_study(base, study, given=GIVEN, out=tmp_path / "out", text=[text])
    study.write_text('variants = ["nope"]\nsteps = 2\n')
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    rates = {}
    for name in ("seed-0-third-rate", "seed-0", "seed-0-triple-rate"):
        record = json.loads((out / "nope" / name / "run.json").read_text())
        rates[name] = record["settings"]["learning_rate"]
        card = (out / "nope" / name / "README.md").read_text()
        control = json.loads((out / "control" / name / "run.json").read_text())
        assert f"- control: {control['losses']['before']:.4f} before" in card
    rate = rates["seed-0"]
    assert rates["seed-0-third-rate"] == pytest.approx(rate / 3)
    assert rates["seed-0-triple-rate"] == pytest.approx(3 * rate)
    study.write_text('variants = ["nope"]\nsteps = 2\nother_rates = []\n')
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    assert json.loads((out / "study.json").read_text())["other_rates"] == ["nope"]
    third = losses_of(out / "nope/seed-0-third-rate").iloc[-1]
    assert not third.equals(losses_of(out / "nope/seed-0").iloc[-1])


@pytest.mark.parametrize("diverges", ["seed-0", "seed-0-triple-rate"])
def test_a_study_is_complete_if_only_a_run_at_another_rate_diverges(
    base, text, tmp_path, study, monkeypatch, capfd, diverges
):
    recalibrate_run = recalibration._recalibrate

    def failing(*arguments, out: Path, **settings):
        if out.name == diverges and out.parent.name == "nope":
            raise TrainingFailed("the loss is not a finite number.")
        return recalibrate_run(*arguments, out=out, **settings)

    monkeypatch.setattr(recalibration, "_recalibrate", failing)
    study.write_text('variants = ["nope"]\nsteps = 1\n')
    out = tmp_path / "out"
    if diverges == "seed-0":
        with pytest.raises(TrainingFailed, match="1 of 6 runs of the study diverged"):
            recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    else:
        recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
        assert f"continues without nope/{diverges}" in capfd.readouterr().err
    card = (out / "nope/seed-0-third-rate/README.md").read_text()
    assert "- control: " in card


def test_a_study_whose_control_became_worse_says_so(base, text, tmp_path, study, capfd):
    study.write_text(
        'variants = ["nope"]\nsteps = 1\nlearning_rate = 0.03\nother_rates = []\n'
    )
    out = tmp_path / "out"
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    record = json.loads((out / "control/seed-0/run.json").read_text())
    record["losses"] = {"before": 4.0, "after": 4.25}
    write_json(out / "control/seed-0/run.json", record)
    capfd.readouterr()
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    err = capfd.readouterr().err
    assert "control/seed-0: the loss is 0.25 nats/token higher than before" in err
    assert "a learning rate of 0.03 is too high" in err


def test_a_card_states_a_control_that_finishes_later(base, text, tmp_path, study):
    """Another process trains the control of the study."""
    study.write_text('variants = ["nope"]\nsteps = 1\nother_rates = []\n')
    out = tmp_path / "out"
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    record = json.loads((out / "control/seed-0/run.json").read_text())
    del record["finished"]
    del record["losses"]
    write_json(out / "control/seed-0/run.json", record)
    with lock_run(out / "control/seed-0"):
        recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    card = out / "nope/seed-0/README.md"
    assert "- control: of the same study; it was not finished" in card.read_text()
    recalibrate_study(base, study, given=GIVEN, out=out, text=[text])
    losses = json.loads((out / "control/seed-0/run.json").read_text())["losses"]
    assert f"- control: {losses['before']:.4f} before" in card.read_text()


def test_files_of_a_killed_process_are_removed(base, text, tmp_path):
    (tmp_path / ".ropelens-0123.part").write_text("half a savepoint")
    run = short_run(base, "control", out=tmp_path, text=text, steps=1)
    assert not [*run.glob(".ropelens-*")]
    (run / "checkpoint.pt").write_text("a savepoint of the finished run")
    short_run(base, "control", out=tmp_path, text=text, steps=1)
    assert not (run / "checkpoint.pt").exists()


def test_savepoints_that_cannot_be_written_or_read_are_explained(tmp_path: Path):
    savepoint = tmp_path / "checkpoint.pt"
    savepoint.write_text("no savepoint")
    with pytest.raises(BadArgument, match="cannot be read") as caught:
        read_savepoint(savepoint, device=torch.device("cpu"), saved_format=1)
    assert "begin the run again" in caught.value.parts["try"]
    with full_disk(1000), pytest.raises(BadArgument, match="cannot be written"):
        write_savepoint(savepoint, {"weights": torch.zeros(100_000)})
    assert savepoint.read_text() == "no savepoint"


COMMAND = [sys.executable, "-W", "ignore", "-m", "ropelens", "train", "--from"]
QUICK = ["--context", "16", "--sequences", "4", "--evaluated", "12"]


@pytest.mark.thorough
def test_a_killed_command_continues_in_all_bits(base: str, text: Path, tmp_path: Path):
    """`kill -9` after the first savepoint; savepoints are made each second."""
    long = ["--variant", "nope", "--steps", "300", *QUICK, "--text", str(text)]
    quick_saves = (
        "import ropelens.runtime.savepoint as s; s.SECONDS = 0.2; "
        "from ropelens.commands.app import main; main()"
    )
    begin = [sys.executable, "-W", "ignore", "-c", quick_saves, "train", "--from"]
    out = tmp_path / "killed"
    killed = subprocess.Popen(
        [*begin, base, *long, "--out", str(out)], stderr=subprocess.DEVNULL
    )
    while not (out / "checkpoint.pt").exists():
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (out / "model.safetensors").exists()
    subprocess.run([*COMMAND, base, *long, "--out", str(out)], check=True)
    subprocess.run(
        [*COMMAND, base, *long, "--out", str(tmp_path / "whole")], check=True
    )
    assert losses_of(out).equals(losses_of(tmp_path / "whole"))
    assert not [file for file in out.iterdir() if file.name.startswith(".ropelens-")]


@pytest.mark.thorough
def test_two_processes_divide_a_study(
    base: str, text: Path, tmp_path: Path, study: Path
):
    study.write_text(
        'variants = ["nope"]\nseeds = [0, 1]\nsteps = 200\nother_rates = []\n'
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--standalone", "-m", "ropelens", "train", "--from", base, *QUICK]
    launch += [
        "--text",
        str(text),
        "--study",
        str(study),
        "--out",
        str(tmp_path / "out"),
    ]
    ended = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    alone = recalibrate_study(
        base, study, given=GIVEN, out=tmp_path / "alone", text=[text]
    )
    for folder in ("control/seed-0", "nope/seed-0", "control/seed-1", "nope/seed-1"):
        assert losses_of(tmp_path / "out" / folder).equals(losses_of(alone / folder))
    assert "another process works on" in ended.stderr


@pytest.mark.thorough
def test_a_gguf_file_starts_from_the_weights_of_load(tmp_path: Path):
    """Before the training, the losses equal the losses of the model from `load`."""
    text = write_documents(tmp_path / "text", words=60)
    settings = {"steps": 1, "sequences": 1, "learning_rate": 0.0, "evaluated": 8}
    run = short_run(
        str(SMOLLM2), "control", out=tmp_path / "run", text=text, **settings
    )
    model, _ = rl.load(str(SMOLLM2))
    chosen = held_out(run / "data", sequences=8)
    tokens = torch.from_numpy(chosen.rows.astype(np.int64))
    losses = rl.evaluate(model, tokens, measures="loss")["loss"].isel(edit=0)
    np.testing.assert_allclose(losses, losses_of(run).loc[0], atol=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(run)
    assert set(same_weights(model, saved)) == {
        name for name, _ in model.named_parameters()
    }
