"""Train a small model on a mixture and write down, as it learns, whether it copies.

    python tools/trials.py NAME --mixture FOLDER [--size 4x192x6x6] [--context 512] ...

`FOLDER` holds `train` and `valid`, each made by tools/mixture.py. A row of `trials.csv` is one
look at one trial; rows are added as they are measured. A trial that was stopped goes on from
its last look by the same command; more `--tokens` carry it on.

The recipe is that of `ropelens train` (AdamW 0.9, 0.95, weight decay 0.1, gradients clipped at
norm 1), with the rate held after the warm-up and falling to zero over the last part, so that a
trial can be stopped or carried on at will. Sequences come in a random order, once each where
there are enough.

Columns: `prose_loss`, `phrase_loss`, `repeat_loss` and `list_loss` are nats per token on
held-out documents of each kind. `random_loss` is the loss on the second run of random tokens.
`previous_token` is the best head's mean attention on the token before, on prose. `induction` is
the attention on what followed the same random token before: the head is the best of half of the
sequences, and measured on the other half. `retrieval` is the share of needles found, over
lengths up to the context (chance is 1 in 8). `cpu_seconds` is training alone.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

import ropelens as rl
from ropelens.models.texts import read_documents
from ropelens.train.data import Source, prepare_data, read_texts
from ropelens.train.sizes import Size, model_config
from ropelens.train.tokens import open_sequences, write_sequences

KINDS = {
    "prose": "prose_loss",
    "phrases": "phrase_loss",
    "repeats": "repeat_loss",
    "lists": "list_loss",
}
SEQUENCES = 24  # of each kind, for its loss
MICRO_BATCH = 2048  # tokens that go through the model at once
ROW = [  # the columns of trials.csv
    "trial", "mixture", "prose", "phrases", "repeats", "lists", "nearest", "farthest",
    "variant", "size", "parameters", "vocabulary", "context", "batch", "learning_rate",
    "beta2", "init", "precision", "seed", "step", "tokens", "cpu_seconds", "train_loss",
    "prose_loss", "phrase_loss", "repeat_loss", "list_loss", "random_loss",
    "previous_token", "induction", "retrieval",
]  # fmt: skip


def main(
    name: Annotated[str, typer.Argument(help="What the trial is called.")],
    mixture: Annotated[Path, typer.Option(help="Folder with train and valid.")],
    size: Annotated[str, typer.Option(help="layers x width x heads x kv_heads")] = "4x192x6x6",
    variant: Annotated[str, typer.Option(help="As in ropelens.VARIANTS.")] = "rope",
    vocabulary: Annotated[int, typer.Option(help="Tokens of the tokenizer.")] = 2048,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    beta2: Annotated[float, typer.Option(help="AdamW's second decay.")] = 0.95,
    init: Annotated[float, typer.Option(help="Spread of the first weights.")] = 0.02,
    precision: Annotated[str, typer.Option(help="bf16 (autocast) or fp32.")] = "bf16",
    seed: Annotated[int, typer.Option(help="First weights and order of text.")] = 0,
    tokens: Annotated[float, typer.Option(help="Tokens to see.")] = 5e6,
    cooldown: Annotated[float, typer.Option(help="Share of them with a falling rate.")] = 0.0,
    look: Annotated[float, typer.Option(help="Tokens between looks.")] = 5e5,
    out: Annotated[Path, typer.Option(help="Folder of trials.csv and checkpoints.")] = Path(
        "runs/trials"
    ),
) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    data = prepare(mixture, vocabulary=vocabulary, context=context, batch=batch)
    rows = open_sequences(data / "train.npy")
    tokenizer = AutoTokenizer.from_pretrained(data, local_files_only=True)
    torch.manual_seed(seed)
    layers, width, heads, kv_heads = map(int, size.split("x"))
    mlp = 64 * math.ceil(width * 8 / 3 / 64)
    shape = Size(layers, width, heads, kv_heads, width // heads, mlp, batch, 4, rate)
    config = model_config(shape, vocabulary=len(tokenizer), context=context, variant=variant)
    config.initializer_range = init
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, beta2), weight_decay=0.1, fused=True
    )
    steps = round(tokens / (batch * context))
    every = max(1, round(look / (batch * context)))
    step, seconds = resume(out / f"{name}.pt", model, optimizer)
    order = np.random.default_rng(seed).permutation(len(rows))
    train_losses: list[float] = []
    while step < steps:
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step, steps, cooldown=cooldown)
        at = order[np.arange(step * batch, (step + 1) * batch) % len(order)]
        picked = torch.from_numpy(rows[np.sort(at)].astype(np.int64))
        train_losses.append(train_step(model, optimizer, picked, precision=precision))
        step += 1
        seconds += time.process_time() - began
        if step % every and step < steps:
            continue
        facts = {
            "trial": name, "mixture": mixture.name, "variant": variant, "size": size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "vocabulary": len(tokenizer), "context": context, "batch": batch,
            "learning_rate": rate, "beta2": beta2, "init": init, "precision": precision,
            "seed": seed, "step": step, "tokens": step * batch * context,
            "cpu_seconds": round(seconds), "train_loss": float(np.mean(train_losses)),
        }  # fmt: skip
        made = json.loads((mixture / "train" / "mixture.json").read_text())
        facts |= made["shares"] | dict(zip(("nearest", "farthest"), made["reach"], strict=True))
        train_losses = []
        add_row(out / "trials.csv", facts | look_at(model, data, seed=seed))
        save(out / f"{name}.pt", model, optimizer, step=step, seconds=seconds)
    model.save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)


def schedule(step: int, steps: int, *, cooldown: float) -> float:
    """Share of the peak rate at `step`: 100 steps of warm-up, flat, then down to zero."""
    left = (steps - step) / max(1, cooldown * steps)
    return min(1.0, (step + 1) / 100, left)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    picked: torch.Tensor,
    *,
    precision: str,
) -> float:
    """One step of the optimizer on `picked` [sequence, position]; its loss."""
    model.train()
    parts = picked.split(max(1, MICRO_BATCH // picked.shape[1]))
    total = 0.0
    for part in parts:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=part, labels=part).loss * len(part) / len(picked)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def prepare(mixture: Path, *, vocabulary: int, context: int, batch: int) -> Path:
    """A tokenizer and token arrays of `mixture`: to learn from, and of each kind held out."""
    data = mixture / f"tokens-{vocabulary}-{context}"
    if (data / "data.json").exists():
        return data
    source = Source((mixture / "train",), (mixture / "valid",), vocabulary, context)
    prepare_data(data, source, read_texts(source), batch=batch)
    tokenizer = AutoTokenizer.from_pretrained(data, local_files_only=True)
    for kind in KINDS:
        texts = read_documents([mixture / "valid" / f"{kind}.jsonl"])
        write_sequences(texts, tokenizer, data / f"{kind}.npy", context=context, most=256)
    return data


def look_at(model: PreTrainedModel, data: Path, *, seed: int) -> dict[str, float]:
    """What the model has learnt, in float32; see the columns above."""
    model.eval()
    held_out = {kind: torch.from_numpy(rows) for kind, rows in spread(data)}
    with torch.no_grad():
        losses = {
            column: float(model(input_ids=held_out[kind], labels=held_out[kind]).loss)
            for kind, column in KINDS.items()
        }
    plan = rl.Retrieval(trials=6)
    seen = rl.evaluate(
        model, held_out["prose"], measures=("induction", "retrieval"), retrieval=plan, seed=seed
    ).isel(edit=0)
    trials = seen["trial_induction"].values  # trial, layer, head
    half = len(trials) // 2
    best = trials[:half].mean(0).argmax()
    return losses | {
        "random_loss": float(seen["repeat_loss"].mean()),
        "previous_token": previous_token(model, held_out["prose"][:4]),
        "induction": float(trials[half:].mean(0).flat[best]),
        "retrieval": float(seen["retrieval"].mean()),
    }


def spread(data: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Some held-out sequences of each kind, int64 [sequence, position]."""
    for kind in KINDS:
        rows = open_sequences(data / f"{kind}.npy")
        at = np.linspace(0, len(rows) - 1, min(SEQUENCES, len(rows))).round().astype(int)
        yield kind, rows[at].astype(np.int64)


def previous_token(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """The best head's mean attention on the token before."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(input_ids=tokens, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    before = [a.diagonal(-1, 2, 3).mean((0, 2)).max() for a in layers]
    return float(max(before))


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add `row` to the table at `path`, and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, ROW, lineterminator="\n")
        if new:
            table.writeheader()
        short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        table.writerow(short)
    print(" ".join(f"{k}={short[k]}" for k in ("trial", *ROW[ROW.index("step") :])), flush=True)


def save(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    seconds: float,
) -> None:
    """Write a checkpoint to `path`, whole or not at all."""
    aside = path.with_suffix(".partial")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"step": step, "seconds": seconds}, aside)
    aside.replace(path)


def resume(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Load the checkpoint at `path`, if there is one; its step and CPU seconds."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"]


if __name__ == "__main__":
    typer.run(main)
