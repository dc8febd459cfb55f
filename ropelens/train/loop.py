"""The training loop, in plain torch.

It uses AdamW, gradient accumulation, gradient clipping, a linear warm-up and a cosine decay to
zero. The settings and the text determine all numbers, also of a resumed run, bit for bit.
"""

import io
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.checkpoints.files import quiet_transformers
from ropelens.errors import BadArgument, RopelensError, explained
from ropelens.runtime.devices import device_named
from ropelens.runtime.folder import write_whole
from ropelens.runtime.keys import Key
from ropelens.runtime.progress import Stage, show_progress
from ropelens.runtime.records import log_line
from ropelens.runtime.savepoint import SaveTimer
from ropelens.train.data import (
    copy_tokenizer,
    held_out_sequences,
    spread,
    training_stages,
)
from ropelens.train.settings import Settings

CHECKPOINT = "checkpoint.pt"  # the file from which a run is resumed
CHECKPOINT_FORMAT = 1

# Steps done, rows of metrics.csv, and the sum of the losses since the last row with a loss
TrainingState = tuple[int, list[dict[str, float]], Float[Tensor, ""]]
METRICS = (
    "step",
    "tokens",
    "train_loss",
    "valid_loss",
    "learning_rate",
    "tokens_per_second",
)
LOG_EVERY, EVAL_EVERY = (
    10,
    250,
)  # steps between rows of metrics.csv, and between validations
WATCHED_SEQUENCES = 8  # of which heads and planes are measured
VALID_SEQUENCES = 128  # sequences in a validation: 65,000 tokens at context 512


class TrainingFailed(RopelensError):
    """The loss or a weight became NaN or infinite."""


def require_finite(tensors: Iterable[Tensor], what: str, *, step: int) -> None:
    """Raise TrainingFailed if `what` is NaN or infinite after `step`."""
    if not all(tensor.isfinite().all() for tensor in tensors):
        fault = f"training stopped at step {step}: {what} is not a finite number."
        raise TrainingFailed(fault, hint="a lower learning rate, in a new run folder")


def fit_model(
    model: PreTrainedModel,
    settings: Settings,
    *,
    out: Path,
    data: Path,
    watch: bool = False,
) -> None:
    """Train `model` on the tokens in `data`, from the checkpoint in `out` if there is one.

    Writes metrics.csv, history/ with models of earlier steps, and a checkpoint every minute and
    at the end, but no weights that are NaN or infinite: raises `TrainingFailed`. With `watch`,
    measures some validation sequences at each validation, and adds the numbers to metrics.csv.
    """
    if settings.compile:
        model.compile(dynamic=False)  # few shapes occur
    stages = training_stages(data, batch=settings.shape.batch, context=settings.context)
    held_out = held_out_sequences(data)
    device = device_named("auto")
    optimizer = make_optimizer(model.train().to(device))
    step, rows, loss = 0, list[dict[str, float]](), torch.zeros((), device=device)
    if (out / CHECKPOINT).exists():
        step, rows, loss = load_checkpoint(out / CHECKPOINT, model, optimizer)
        log_line(f"resuming from step {step}")
    watching, columns = None, [*METRICS]
    if watch:
        from ropelens.train.watch import (
            RopeCallback,
        )  # slow: imports transformers' Trainer

        sample = torch.from_numpy(spread(held_out, WATCHED_SEQUENCES).astype(np.int64))
        watching = RopeCallback(sample, out=out / "watch")
        columns += watching.begin(model, step)
    saving = SaveTimer()
    timed_at, timed_from = time.perf_counter(), step
    note: dict[str, str] = {}
    per_step = settings.tokens_per_step
    stage = Stage("training", settings.steps * per_step, done=step * per_step)
    with show_progress(stage) as advance:
        for batch in batches(stages, settings, after=step):
            rate = learning_rate(settings, step)
            step += 1
            for part in learn(model, optimizer, batch, settings, rate=rate, step=step):
                loss += part
            row: dict[str, float] = {}
            if step % LOG_EVERY == 0:
                time_now = time.perf_counter()
                row["train_loss"] = float(loss.double() / LOG_EVERY)
                row["learning_rate"] = rate
                tokens = (step - timed_from) * per_step
                row["tokens_per_second"] = round(tokens / (time_now - timed_at))
                loss, timed_at, timed_from = torch.zeros_like(loss), time_now, step
                note["loss"] = f"loss {row['train_loss']:.4f}"
            last = step == settings.steps
            if last or step % EVAL_EVERY == 0:
                row["valid_loss"] = validation_loss(model, held_out, settings)
                row |= watching.measure(step) if watching else {}
                note["valid"] = f"validation loss {row['valid_loss']:.4f}"
            if row:
                rows.append({"step": step, "tokens": step * per_step} | row)
                # Write all rows: a resumed run must not keep rows after its checkpoint.
                table = pd.DataFrame(rows, columns=columns)
                write_whole(out / "metrics.csv", table.to_csv(index=False))
            advance(per_step, note=", ".join(note.values()))
            if settings.in_history(step):
                write_history(model, out, step=step, tokenizer=data)
            if last or saving.is_due:
                require_finite(model.parameters(), "a weight", step=step)
                save_checkpoint(out / CHECKPOINT, model, optimizer, (step, rows, loss))
                saving.restart()


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
) -> None:
    """Replace the checkpoint at `path`; a killed process leaves the earlier file."""
    parts = {
        "format": CHECKPOINT_FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": state,
    }
    content = io.BytesIO()
    torch.save(parts, content)
    write_whole(path, content.getbuffer())


def load_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> TrainingState:
    """Restore the states of `model` and `optimizer` from a checkpoint."""
    parts = torch.load(path, map_location=model.device, weights_only=True)
    Key({}, format=CHECKPOINT_FORMAT).require(parts, what=f"the checkpoint {path}")
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    return parts["progress"]


def make_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, and without weight decay for norms."""
    weights = list(model.parameters())
    matrices = {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.1}
    vectors = {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0}
    return torch.optim.AdamW(
        [matrices, vectors], betas=(0.9, 0.95), eps=1e-8, fused=True
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Learning rate at `step`, counted from 0: linear warm-up, constant, cosine decay."""
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.peak_rate * (step / warmup)
    flat = (1 - settings.decay) * (settings.steps - warmup)
    done = max(0, step - warmup - flat) / max(1, settings.steps - warmup - flat)
    return settings.peak_rate * (0.5 * (1 + math.cos(math.pi * done)))


def batches(
    stages: Sequence[np.ndarray], settings: Settings, *, after: int
) -> Iterator[Int64[Tensor, "sequence position"]]:
    """Tokens of each step from `after` (counted from 0); the last stage is repeated."""
    start = 0
    for epoch, rows in enumerate(chain(stages, repeat(stages[-1]))):
        steps = rows.size // settings.tokens_per_step
        random = torch.Generator().manual_seed(settings.seed + epoch)
        order = torch.randperm(len(rows), generator=random).view(steps, -1).numpy()
        for chosen in order[max(0, after - start) : settings.steps - start]:
            yield torch.from_numpy(rows[chosen].astype(np.int64))
        start += steps
        if start >= settings.steps:
            return


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Int64[Tensor, "sequence position"],
    settings: Settings,
    *,
    rate: float,
    step: int,
) -> Float[Tensor, " part"]:
    """Take one step on `batch`; return the part of each pass in the loss per token."""
    losses = []
    for tokens in passes_of(batch, settings):
        loss = loss_of(model, tokens, settings, predicted=batch[:, 1:].numel())
        loss.backward()
        losses.append(loss.detach())
    parts = torch.stack(losses)
    require_finite([parts], "the loss", step=step)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return parts


def passes_of(
    rows: Int64[Tensor, "sequence position"], settings: Settings
) -> Sequence[Tensor]:
    """Split the rows into passes that fit into memory, with equal numbers of tokens."""
    return rows.split(settings.shape.micro_batch * (settings.context // rows.shape[1]))


def loss_of(
    model: PreTrainedModel,
    tokens: Int64[Tensor, "sequence position"],
    settings: Settings,
    *,
    predicted: int,
) -> Float[Tensor, ""]:
    """Sum of the losses of `model` on `tokens` in nats, divided by `predicted`."""
    tokens = tokens.to(model.device)
    # On a CPU, the backward pass of flash attention takes 40 % of a bf16 step at 64 tokens.
    is_short = tokens.device.type == "cpu" and tokens.shape[1] <= 128
    model.set_attn_implementation("eager" if is_short else "sdpa")
    options = {"num_items_in_batch": predicted, "use_cache": False}
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=settings.bf16):
        return model(input_ids=tokens, labels=tokens, **options).loss


@torch.no_grad()
def validation_loss(
    model: PreTrainedModel, held_out: np.ndarray, settings: Settings
) -> float:
    """Mean loss per predicted token on the first `VALID_SEQUENCES` of `held_out`, in nats."""
    tokens = torch.from_numpy(held_out[:VALID_SEQUENCES].astype(np.int64))
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    model.eval()
    for rows in passes_of(tokens, settings):
        total += loss_of(model, rows, settings, predicted=rows[:, 1:].numel()) * len(
            rows
        )
    model.train()
    return float(total) / len(tokens)


def write_history(
    model: PreTrainedModel, out: Path, *, step: int, tokenizer: Path
) -> None:
    """Save the model of `step`, with its tokenizer, in history/."""
    require_finite(model.parameters(), "a weight", step=step)
    folder = out / "history" / f"step-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    write_model(model, folder)


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Save the configuration of `model`, and last its weights: then the folder is complete."""
    aside = folder / "model.partial"
    what = f"The model cannot be written to {folder}."
    with quiet_transformers(bars=False), explained(what, error=BadArgument):
        model.save_pretrained(aside)
    readers = (
        (aside / "config.json").stat().st_mode
    )  # only the owner could read the weights
    for file in sorted(aside.iterdir(), key=lambda f: f.suffix == ".safetensors"):
        file.chmod(readers)
        file.replace(folder / file.name)
    aside.rmdir()
