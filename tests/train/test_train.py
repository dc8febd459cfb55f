"""Training of single runs, compared with plain torch; stopped, resumed and refused runs."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from trained import NANO, OPTIONS, metrics, story, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, set_seed
from transformers.optimization import get_wsd_schedule

from ropelens.errors import BadArgument, BadText
from ropelens.runtime import savepoint
from ropelens.train import checkpoint, loop
from ropelens.train.checkpoint import TrainingProgress
from ropelens.train.data import (
    cut_stream,
    held_out_sequences,
    prepare_data,
    read_texts,
    tokens_of,
    training_stages,
)
from ropelens.train.run import model_config
from ropelens.train.settings import SIZES, Settings, get_size
from ropelens.train.steps import (
    TrainingFailed,
    batches,
    choose_attention,
    learning_rate,
    require_finite,
)


def settings_with(**changes: object) -> dict[str, Any]:
    """The settings of a small training, with some changes."""
    return OPTIONS | changes


def test_a_finished_run_is_a_checkpoint(trained_run: Path):
    model = AutoModelForCausalLM.from_pretrained(trained_run, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(trained_run, local_files_only=True)
    tokens = tokenizer(story(3), return_tensors="pt").input_ids[:, :32]
    assert model(input_ids=tokens, labels=tokens).loss < math.log(300) / 2
    first, *_, last = metrics(trained_run)
    assert float(last["valid_loss"]) < float(first["train_loss"]) - 0.5
    record = json.loads((trained_run / "run.json").read_text())
    assert record["tokens"] == 60 * 4 * 32 == int(metrics(trained_run)[-1]["tokens"])
    assert set(record["versions"]) > {"torch", "transformers", "accelerate"}
    assert {path.name for path in trained_run.iterdir()} == {
        "config.json",
        "generation_config.json",
        "metrics.csv",
        "model.safetensors",
        "run.json",
        "tokenizer.json",
        "tokenizer_config.json",
        ".lock",
        "data",
        "history",
    }


def test_auto_is_bf16_on_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # Every GPU emulates bf16, which is slow
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: True)
    assert Settings().recorded()["precision"] == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: emulated)
    assert Settings().recorded()["precision"] == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Settings().recorded()["precision"] == "fp32"
    assert Settings(precision="bf16").recorded()["precision"] == "bf16"


@pytest.mark.parametrize(
    ("tokens", "bf16", "attention"),
    [
        (128, False, "eager"),
        (129, False, "sdpa"),
        (256, True, "eager"),
        (257, True, "sdpa"),
    ],
)
def test_short_sequences_have_eager_attention_on_a_cpu(
    tokens: int, bf16: bool, attention: str
):
    model = LlamaForCausalLM(model_config(Settings(size="2x32x2x1")))
    choose_attention(model, tokens, bf16=bf16)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("file", ["config.json", "study.json", "history", "run.json"])
def test_another_model_is_not_overwritten(prose: Path, tmp_path: Path, file: str):
    (tmp_path / file).write_text("{}")
    with pytest.raises(
        BadArgument, match="holds a model, a run, a study or other files"
    ):
        train([prose], out=tmp_path, **OPTIONS)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {file: "{}"}


def test_other_settings_are_refused(trained_run: Path, prose: Path, tmp_path: Path):
    with pytest.raises(BadArgument) as caught:
        train([prose], out=trained_run, **settings_with(seed=1))
    assert (
        caught.value.what == f"the run in {trained_run} was made with other settings."
    )
    assert "seed: 0, now 1" in str(caught.value)
    with pytest.raises(BadArgument, match="vocabulary: 300, now 400"):
        train(
            [prose],
            out=trained_run,
            data=tmp_path / "data",
            **settings_with(vocabulary=400),
        )
    assert not (tmp_path / "data").exists()
    changed = tmp_path / "changed.txt"
    changed.write_text(prose.read_text() + "More.")
    with pytest.raises(BadArgument, match="text_sha256"):
        train([changed], out=trained_run, **OPTIONS)


def test_validation_text_that_is_also_training_text(prose: Path, tmp_path: Path):
    with pytest.raises(BadText, match="All validation documents are also training"):
        train([prose], valid=[prose], out=tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
    other = tmp_path / "other.txt"
    other.write_text(story(80)[7:])
    settings = settings_with(steps=2)
    message = "1 validation documents are also used to train"
    with pytest.warns(UserWarning, match=message):
        train([prose], valid=[prose, other], out=tmp_path / "run", **settings)


def prepared(folder: Path, *, text: Path) -> np.ndarray:
    """Write the tokens and the tokenizer of a training, and return the sequences."""
    texts = read_texts([text], [], data=folder)
    prepare_data(folder, texts, Settings(**OPTIONS))
    return np.load(folder / "train.npy")


@pytest.fixture
def stages(prose: Path, tmp_path: Path) -> Path:
    """Prepared tokens in two stages, which have sequences of 16 and 32 tokens."""
    folder = tmp_path / "made"
    rows = prepared(folder, text=prose)
    np.save(folder / "one.npy", rows[:16].reshape(32, 16))
    np.save(folder / "two.npy", rows[16:40])
    (folder / "train.npy").unlink()
    facts = json.loads((folder / "data.json").read_text())
    facts["stages"] = ["one.npy", "two.npy"]
    facts["seed"] = 99
    (folder / "data.json").write_text(json.dumps(facts))
    return folder


IN_STAGES = settings_with(steps=6, history_every=3)


def test_prepared_tokens(stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs of a study can use them as well."""
    monkeypatch.setattr(loop, "EVAL_EVERY", 4)
    run = train(data=stages, out=tmp_path / "run", **IN_STAGES)
    record = json.loads((run / "run.json").read_text())
    assert record["data"] == "../made"
    assert record["settings"]["stages"] == ["one.npy", "two.npy"]
    assert record["settings"]["seed"] == 0, "99 is the seed of the tokens"
    again = train(data=stages, out=tmp_path / "run", **IN_STAGES)
    assert again == run, "finished already"
    assert not (run / "data").exists()
    validated = [row["step"] for row in metrics(run) if float(row["valid_loss"])]
    assert validated == ["4", "6"]
    history = sorted(path.name for path in (run / "history").iterdir())
    assert history == [f"step-{step:06}" for step in (1, 2, 3, 4, 6)]


def test_prepared_tokens_that_do_not_fit(stages: Path, prose: Path, tmp_path: Path):
    shorter = settings_with(steps=6, history_every=3, context=16)
    with pytest.raises(BadArgument, match="context: 32, now 16"):
        train(data=stages, out=tmp_path / "other", **shorter)
    with pytest.raises(BadText, match="Text to train on is missing"):
        train(data=tmp_path, out=tmp_path / "third", **IN_STAGES)
    (stages / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(BadArgument, match=r"tokenizer_sha256: .*, now"):
        train(data=stages, out=tmp_path / "fourth", **IN_STAGES)
    whole = tmp_path / "whole"
    rows = prepared(whole, text=prose)
    np.save(whole / "train.npy", rows[:4, :24])
    message = "has a stage that does not fit steps of 4 x 32"
    with pytest.raises(BadArgument, match=message):
        train(data=whole, out=tmp_path / "third", **IN_STAGES)


def test_broken_weights_are_not_saved():
    weights = [torch.zeros(2), torch.tensor([math.nan])]
    with pytest.raises(TrainingFailed, match="step 8: a weight is not a finite number"):
        require_finite(weights, "a weight", step=8, rate=0.1)


A_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)


@examples(max_examples=20)
@given(texts=st.lists(A_TEXT, min_size=1, max_size=5))
def test_sequences_are_the_documents_end_to_end(trained_run: Path, texts: list[str]):
    tokenizer = AutoTokenizer.from_pretrained(trained_run, local_files_only=True)
    stream: list[int] = []
    for text in texts:
        with_bos = tokenizer(f"{text}\n</s>").input_ids
        stream += with_bos[1:]
    bos = tokenizer.bos_token_id
    rows = cut_stream(
        tokens_of([f"{text}\n" for text in texts], tokenizer), begin=[bos], context=8
    )
    assert len(rows) == len(stream) // 7
    assert (rows[:, 0] == bos).all()
    assert rows[:, 1:].flatten().tolist() == stream[: len(rows) * 7]


def test_a_size_can_be_spelled_out():
    size = get_size("8x384x6x2")
    assert size.layers == 8
    assert size.width == 384
    assert size.heads == 6
    assert size.kv_heads == 2
    assert size.head_dim == 64
    assert size.mlp == 1024
    for wrong in ("0x384x6x2", "8x384x7x1", "8x384x6x4"):
        with pytest.raises(BadArgument, match=f"No model has the size '{wrong}'"):
            get_size(wrong)


def test_sizes_have_the_stated_number_of_parameters():
    millions = {}
    for name, vocabulary in (("tiny", 2048), ("small", 16_384), ("base", 16_384)):
        settings = Settings(size=name, vocabulary=vocabulary)
        with torch.device("meta"):
            model = LlamaForCausalLM(model_config(settings))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        millions[name] = round(parameters / 1e6, 1)
    assert millions == {"tiny": 2.5, "small": 26.8, "base": 65.1}


def train_until(step: int, *, text: Path, out: Path) -> None:
    """A training that ends after the checkpoint of a step."""
    save = loop.save_checkpoint

    def save_and_stop(path: Path, *state: Any) -> None:
        save(path, *state)
        progress = state[-1]
        if progress.step == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", save_and_stop)
        patch.setattr(savepoint, "SECONDS", 0)
        with pytest.raises(KeyboardInterrupt):
            train([text], out=out, **OPTIONS)


def names_of_history(run: Path) -> set[str]:
    return {folder.name for folder in (run / "history").iterdir()}


@pytest.mark.parametrize("step", [24, 60])
def test_a_stop_after_any_step(trained_run, prose, tmp_path, step, capfd):
    train_until(step, text=prose, out=tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    train([prose], out=tmp_path, **OPTIONS)
    assert f"resuming from step {step}\n" in capfd.readouterr().err
    assert not (tmp_path / checkpoint.CHECKPOINT).exists()
    assert metrics(tmp_path) == metrics(trained_run)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (trained_run / name).read_bytes()
    assert names_of_history(tmp_path) == names_of_history(trained_run)


def test_a_checkpoint_of_an_earlier_version_is_used_and_of_a_later_one_refused(
    tmp_path: Path,
):
    model = torch.nn.Linear(2, 2)
    model.device = torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingProgress(step=3, rows=[{"step": 3}], loss=torch.tensor(0.5))
    path = tmp_path / checkpoint.CHECKPOINT
    checkpoint.save_checkpoint(path, model, optimizer, state)
    parts = torch.load(path, weights_only=True)
    del parts["format"]  # as ropelens wrote it before checkpoints had a format
    torch.save(parts, path)
    assert checkpoint.load_checkpoint(path, model, optimizer) == state
    torch.save(parts | {"format": 2}, path)
    with pytest.raises(BadArgument, match=r"other settings[\s\S]*format: 2, now 1"):
        checkpoint.load_checkpoint(path, model, optimizer)


def test_files_of_a_failed_start_are_not_used(prose: Path, tmp_path: Path):
    out = tmp_path / "run"
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(BadText, match=r"0 sequences for train\.npy, which needs 4"):
        train([tmp_path / "short.txt"], out=out, **OPTIONS)
    message = r"too short at a context of 32[\s\S]*for valid\.npy"
    with pytest.raises(BadText, match=message):
        train([prose], valid=[tmp_path / "short.txt"], out=out, **OPTIONS)
    assert (out / "data" / "train.npy").exists()
    train([prose], out=out, **settings_with(steps=2))
    assert metrics(out)[-1]["valid_loss"]


STEPS = 66  # an epoch and two steps; after the warm-up there are 64 steps
RECIPE = settings_with(steps=STEPS, precision="fp32")


@dataclass(frozen=True)
class WatchedRun:
    """A finished run, and the tokens of each forward pass of its training."""

    folder: Path
    passes: list[Tensor]


@pytest.fixture(scope="module")
def recipe_run(prose, tmp_path_factory) -> WatchedRun:
    passes: list[Tensor] = []
    forward = LlamaForCausalLM.forward
    out = tmp_path_factory.mktemp("recipe")

    def watched(model: LlamaForCausalLM, input_ids: Tensor, **options: object):
        if model.training:
            passes.append(input_ids.clone())
        return forward(model, input_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", watched)
        train([prose], out=out, **RECIPE)
    return WatchedRun(out, passes)


@pytest.mark.parametrize("decay", [1.0, 0.25, 0.0])
def test_the_rate_follows_the_schedule_of_transformers(decay: float):
    settings = replace(Settings(**RECIPE), decay=decay)
    warmup = settings.warmup_steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=NANO.learning_rate)
    falling = round(decay * (STEPS - warmup))
    theirs = get_wsd_schedule(optimizer, warmup, falling, num_training_steps=STEPS)
    for step in range(STEPS):
        (expected,) = theirs.get_last_lr()
        assert learning_rate(settings, step) == pytest.approx(expected)
        optimizer.step()
        theirs.step()


def train_losses(run: Path) -> list[float]:
    return [float(row["train_loss"]) for row in metrics(run) if row["train_loss"]]


def adamw(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """The optimizer of the recipe: weights of norms do not decay."""
    norms = []
    rest = []
    for name, parameter in model.named_parameters():
        group = norms if "norm" in name else rest
        group.append(parameter)
    groups = [
        {"params": rest, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits[:, :-1]
    next_tokens = tokens[:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), next_tokens.flatten()
    )


@dataclass
class TrainedByHand:
    """The model, the loss of each step, and the number of steps with clipped gradients."""

    model: LlamaForCausalLM
    losses: list[float] = field(default_factory=list)
    clipped: int = 0


def trained_by_hand(batches: list[Tensor]) -> TrainedByHand:
    set_seed(0)
    settings = Settings(**RECIPE)
    model = LlamaForCausalLM(model_config(settings))
    optimizer = adamw(model)
    trained = TrainedByHand(model)
    for step, tokens in enumerate(batches):
        loss = next_token_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm > 1:
            trained.clipped += 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        trained.losses.append(loss.item())
    return trained


def test_a_run_is_its_recipe_in_plain_torch(recipe_run: WatchedRun):
    run = recipe_run.folder
    passes = NANO.batch // NANO.micro_batch
    assert len(recipe_run.passes) == STEPS * passes
    steps = list(torch.cat(recipe_run.passes).split(NANO.batch))
    by_hand = trained_by_hand(steps)
    assert 5 < by_hand.clipped < STEPS
    means = np.reshape(by_hand.losses[:60], (6, 10)).mean(1)
    np.testing.assert_allclose(train_losses(run), means, rtol=2e-4)
    weights = load_file(run / "model.safetensors")
    expected = by_hand.model.state_dict()
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], atol=2e-3)
    first = load_file(run / "history" / "step-000001" / "model.safetensors")
    set_seed(0)
    begun = LlamaForCausalLM(by_hand.model.config).state_dict()
    # The learning rate of the first step is 0.
    assert all(torch.equal(first[name], begun[name]) for name in first)
    assert not all(torch.equal(weights[name], begun[name]) for name in weights)


def set_of_rows(tokens: Tensor | np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


def test_validation_text_is_measured_and_not_trained_on(
    recipe_run: WatchedRun, prose: Path
):
    run = recipe_run.folder
    trained = set_of_rows(torch.cat(recipe_run.passes))
    (rows,) = training_stages(
        run / "data", batch=NANO.batch, context=OPTIONS["context"]
    )
    held_out = held_out_sequences(run / "data")
    assert trained == set_of_rows(rows)
    tokenizer = AutoTokenizer.from_pretrained(run, local_files_only=True)
    tokens = tokenizer(f"{prose.read_text()}\n</s>").input_ids[1:]
    held = math.ceil(0.02 * len(tokens))
    begin = rows[:, 1:].ravel().tolist()
    end = held_out[:, 1:].ravel().tolist()
    assert begin == tokens[:-held][: len(begin)]
    assert end == tokens[-held:][: len(end)]
    batch = torch.from_numpy(held_out.astype(np.int64))
    assert len(batch) == 5
    model = LlamaForCausalLM.from_pretrained(run)
    with torch.no_grad():
        expected = float(model(batch, labels=batch).loss)
    valid_loss = float(metrics(run)[-1]["valid_loss"])
    assert valid_loss == pytest.approx(expected, rel=1e-6)


def batches_of(
    stages: list[np.ndarray], settings: Settings, *, after: int
) -> Iterator[Tensor]:
    return batches(
        stages,
        steps=settings.steps,
        tokens_per_step=settings.tokens_per_step,
        seed=settings.seed,
        after=after,
    )


@pytest.mark.parametrize("after", [0, 5, 7, 16])
def test_each_epoch_has_another_order(after: int, monkeypatch: pytest.MonkeyPatch):
    """accelerate's sampler has the same order, also after a stop. 9 sequences are 3 steps."""
    monkeypatch.setitem(SIZES, "nano", replace(NANO, batch=3))
    settings = replace(Settings(**OPTIONS), steps=20, seed=4)
    rows = np.arange(9)[:, None].repeat(settings.context, 1)
    sampler = SeedableRandomSampler(range(9), data_seed=4)
    epochs = [list(sampler) for _ in range(7)]
    expected = torch.tensor(epochs).view(-1, 3)[after:20]
    steps = torch.stack(list(batches_of([rows], settings, after=after)))
    assert torch.equal(steps[..., 0], expected)


def numbered_rows(first: int, *, count: int, context: int) -> np.ndarray:
    """Sequences in which every token is the number of the sequence."""
    numbers = np.arange(first, first + count)
    return numbers[:, None].repeat(context, 1)


def numbers_of(steps: list[Tensor]) -> list[list[int]]:
    return [tokens[:, 0].tolist() for tokens in steps]


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_stages_follow_each_other_and_the_last_is_repeated(after: int):
    settings = replace(Settings(**OPTIONS), steps=8, seed=4)
    batch = NANO.batch
    context = settings.context
    short = numbered_rows(0, count=6 * batch, context=context // 2)
    whole = numbered_rows(1000, count=2 * batch, context=context)
    steps = list(batches_of([short, whole], settings, after=after))
    shapes = [(2 * batch, context // 2)] * 3 + [(batch, context)] * 5
    assert [tuple(tokens.shape) for tokens in steps] == shapes[after:]
    numbers = numbers_of(list(batches_of([short, whole], settings, after=0)))
    assert numbers_of(steps) == numbers[after:]
    assert sorted(numbers[0] + numbers[1] + numbers[2]) == list(range(6 * batch))
    first = numbers[3] + numbers[4]
    second = numbers[5] + numbers[6]
    assert sorted(first) == sorted(second) == list(range(1000, 1000 + 2 * batch))
    assert first != second


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # imports of torch.compile
def test_a_compiled_run_has_the_same_losses(recipe_run, prose, tmp_path):
    run = train([prose], out=tmp_path, **RECIPE, compile=True)
    AutoModelForCausalLM.from_pretrained(run, local_files_only=True)
    losses = train_losses(recipe_run.folder)
    np.testing.assert_allclose(train_losses(run), losses, rtol=1e-3)
    assert train_losses(run) != losses  # so it was compiled
