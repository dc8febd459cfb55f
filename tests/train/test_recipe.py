"""Training compared with the same steps in plain torch."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from safetensors.torch import load_file
from torch import Tensor
from trained import NANO, OPTIONS, metrics, train
from transformers import AutoModelForCausalLM, LlamaForCausalLM, set_seed
from transformers.optimization import get_wsd_schedule

from ropelens.train.data import held_out_sequences, training_stages
from ropelens.train.loop import batches, learning_rate
from ropelens.train.run import model_config
from ropelens.train.settings import SIZES, Settings

STEPS = 66  # an epoch and two steps; after the warm-up there are 64 steps
RECIPE = OPTIONS | {"steps": STEPS, "precision": "fp32"}


@pytest.fixture(scope="module")
def recipe_run(prose, tmp_path_factory) -> tuple[Path, list[Tensor]]:
    passes: list[Tensor] = []
    forward = LlamaForCausalLM.forward

    def watched(model: LlamaForCausalLM, input_ids: Tensor, **options: object):
        if model.training:
            passes.append(input_ids.clone())
        return forward(model, input_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", watched)
        return train([prose], out=tmp_path_factory.mktemp("recipe"), **RECIPE), passes


@pytest.mark.parametrize("decay", [1.0, 0.25, 0.0])
def test_the_rate_follows_the_schedule_of_transformers(decay: float):
    settings = Settings(**RECIPE | {"decay": decay})
    warmup = settings.warmup_steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=NANO.learning_rate)
    falling = round(decay * (STEPS - warmup))
    theirs = get_wsd_schedule(optimizer, warmup, falling, num_training_steps=STEPS)
    for step in range(STEPS):
        assert learning_rate(settings, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def train_losses(run: Path) -> list[float]:
    return [float(row["train_loss"]) for row in metrics(run) if row["train_loss"]]


def trained_by_hand(batches: list[Tensor]) -> tuple[list[float], LlamaForCausalLM, int]:
    """Loss of each step, the final model, and the number of steps with clipped gradients."""
    set_seed(0)
    settings = Settings(**RECIPE)
    model = LlamaForCausalLM(model_config(settings))
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses, clipped = [], 0
    for step, tokens in enumerate(batches):
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clipped += int(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model, clipped


def test_a_run_is_its_recipe_in_plain_torch(recipe_run: tuple[Path, list[Tensor]]):
    run, inputs = recipe_run
    passes = NANO.batch // NANO.micro_batch
    assert len(inputs) == STEPS * passes
    steps = [torch.cat(inputs[i : i + passes]) for i in range(0, len(inputs), passes)]
    losses, model, clipped = trained_by_hand(steps)
    assert 5 < clipped < STEPS
    means = np.reshape(losses[:60], (6, 10)).mean(1)
    np.testing.assert_allclose(train_losses(run), means, rtol=2e-4)
    weights = load_file(run / "model.safetensors")
    by_hand = model.state_dict()
    assert all(torch.allclose(weights[name], by_hand[name], atol=2e-3) for name in weights)
    first = load_file(run / "history" / "step-000001" / "model.safetensors")
    set_seed(0)
    begun = LlamaForCausalLM(model.config).state_dict()  # the rate of the first step is 0
    assert all(torch.equal(first[name], begun[name]) for name in first)
    assert not all(torch.equal(weights[name], begun[name]) for name in weights)


def test_validation_text_is_measured_and_not_trained_on(recipe_run: tuple[Path, list[Tensor]]):
    run, inputs = recipe_run
    (rows,) = training_stages(run / "data", batch=NANO.batch, context=OPTIONS["context"])
    held_out = held_out_sequences(run / "data")
    tokens = {tuple(row) for of_pass in inputs for row in of_pass.tolist()}
    assert tokens == {tuple(row) for row in rows.tolist()}
    assert not tokens & {tuple(row) for row in held_out.tolist()}
    batch = torch.from_numpy(held_out.astype(np.int64))
    assert len(batch) == 5
    with torch.no_grad():
        loss = float(LlamaForCausalLM.from_pretrained(run)(batch, labels=batch).loss)
    assert float(metrics(run)[-1]["valid_loss"]) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("after", [0, 5, 7, 16])
def test_each_epoch_has_another_order(after: int, monkeypatch: pytest.MonkeyPatch):
    """accelerate's sampler has the same order, also after a stop. 9 sequences are 3 steps."""
    monkeypatch.setitem(SIZES, "nano", dataclasses.replace(NANO, batch=3))
    settings = Settings(**OPTIONS | {"steps": 20, "seed": 4})
    rows = np.arange(9)[:, None].repeat(settings.context, 1)
    sampler = SeedableRandomSampler(range(9), data_seed=4)
    order = torch.tensor([list(sampler) for _ in range(7)]).view(-1, 3)[after:20]
    steps = torch.stack(list(batches([rows], settings, after=after)))[..., 0]
    assert torch.equal(steps, order)


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_stages_follow_each_other_and_the_last_is_repeated(after: int):
    settings = Settings(**OPTIONS | {"steps": 8, "seed": 4})
    batch, context = NANO.batch, settings.context
    short = np.arange(6 * batch)[:, None].repeat(context // 2, 1)
    whole = np.arange(2 * batch)[:, None].repeat(context, 1) + 1000
    steps = list(batches([short, whole], settings, after=after))
    shapes = [(2 * batch, context // 2)] * 3 + [(batch, context)] * 5
    assert [tuple(tokens.shape) for tokens in steps] == shapes[after:]
    inputs = [tokens[:, 0].tolist() for tokens in batches([short, whole], settings, after=0)]
    assert [tokens[:, 0].tolist() for tokens in steps] == inputs[after:]
    assert sorted(inputs[0] + inputs[1] + inputs[2]) == list(range(6 * batch))
    first, second = inputs[3] + inputs[4], inputs[5] + inputs[6]
    assert sorted(first) == sorted(second) == list(range(1000, 1000 + 2 * batch))
    assert first != second


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from imports of torch.compile
def test_a_compiled_run_has_the_same_losses(recipe_run, prose, tmp_path):
    run = train([prose], out=tmp_path, **RECIPE, compile=True)
    AutoModelForCausalLM.from_pretrained(run, local_files_only=True)
    losses = train_losses(recipe_run[0])
    np.testing.assert_allclose(train_losses(run), losses, rtol=1e-3)
    assert train_losses(run) != losses  # so it was compiled
