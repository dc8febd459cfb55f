"""The loop of training, in plain torch.

AdamW on matrices and vectors, gradients summed over passes and processes and clipped, a
linear warm-up, then a cosine to zero. Every number follows from the settings and the text,
so a run that goes on from a checkpoint ends with the same weights, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, reduce
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import RopelensError
from ropelens.files.progress import show_progress
from ropelens.models.processes import processes
from ropelens.train.data import copy_tokenizer, held_out_sequences, training_stages
from ropelens.train.record import (
    State,
    last_whole_checkpoint,
    load_checkpoint,
    save_checkpoint,
    say,
    write_metrics,
    write_model,
)
from ropelens.train.settings import Settings, passes_of

FEW_TOKENS = 128
VALID_SEQUENCES = 128  # seen at each validation: 65,000 tokens at context 512
SHOWN = {"train_loss": "loss", "valid_loss": "validation loss"}


class TrainingFailed(RopelensError):
    """The loss or the weights stopped being numbers."""


def fit(
    model: PreTrainedModel,
    settings: Settings,
    *,
    out: Path,
    data: Path,
    checkpoint_seconds: float,
) -> None:
    """Train `model` on the tokens in `data`, starting at the last whole checkpoint in `out`.

    `out` gets metrics.csv, models of steps on the way in history/, and a checkpoint every
    `checkpoint_seconds` and at the end.

    Raises:
        TrainingFailed: the loss or a weight is NaN or infinite; no such weight is written.
    """
    if settings.compile:
        model.compile(dynamic=False)  # there are only a few shapes
    stages = training_stages(data, batch=settings.size.batch, context=settings.context)
    held_out = held_out_sequences(data)
    optimizer = make_optimizer(model.to(processes().device).train())
    state = State()
    if kept := last_whole_checkpoint(out / "checkpoints"):
        say(f"resuming from {kept.name}")
        state = load_checkpoint(kept, model, optimizer)
    loss = torch.tensor(state.loss, device=processes().device)
    saved_at, timed_at, tokens = time.monotonic(), time.perf_counter(), 0
    newest: dict[str, float] = {}
    per_step = settings.tokens_per_step
    progress: AbstractContextManager[Callable[..., None]] = nullcontext(lambda *_, **__: None)
    if processes().is_main_process:
        total, before = settings.steps * per_step, state.step * per_step
        progress = show_progress("training", total=total, unit="tokens", completed=before)
    with progress as advance:
        for batch in batches(stages, settings, after=state.step):
            rate = learning_rate(settings, state.step)
            for part in learn(model, optimizer, batch, settings, rate=rate, step=state.step):
                loss += part
            state.step += 1
            tokens += per_step
            row: dict[str, float] = {}
            if state.step % settings.log_every == 0:
                now = time.perf_counter()
                row["train_loss"] = float(loss.double() / settings.log_every)
                row["learning_rate"] = rate
                row["tokens_per_second"] = round(tokens / (now - timed_at))
                loss, timed_at, tokens = torch.zeros_like(loss), now, 0
            last = state.step == settings.steps
            if last or state.step % settings.eval_every == 0:
                row["valid_loss"] = validation_loss(model, held_out, settings)
            if row:
                rows = {"step": state.step, "tokens": state.step * per_step}
                state.rows.append(rows | row)
                write_metrics(out / "metrics.csv", state.rows)
                newest |= row
            text = (f"{SHOWN[name]} {newest[name]:.4f}" for name in SHOWN if name in newest)
            advance(per_step, note=", ".join(text))
            if settings.in_history(state.step):
                write_history(model, out, step=state.step, tokenizer=data)
            # By the clock of the first process, so that all of them check their weights.
            due = broadcast_object_list([time.monotonic() - saved_at >= checkpoint_seconds])[0]
            if last or due:
                check_weights(model, step=state.step)
                state.loss, saved_at = loss.item(), time.monotonic()
                save_checkpoint(out / "checkpoints", model, optimizer, state)


def make_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW; the weights of matrices decay, those of norms do not."""
    weights = list(model.parameters())
    matrices = {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.1}
    vectors = {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, vectors], betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of `step`, counted from 0: a line up, flat, half a cosine down."""
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.peak_rate * (step / warmup)
    flat = (1 - settings.decay) * (settings.steps - warmup)
    done = max(0, step - warmup - flat) / max(1, settings.steps - warmup - flat)
    return settings.peak_rate * (0.5 * (1 + math.cos(math.pi * done)))


def batches(
    stages: Sequence[np.ndarray], settings: Settings, *, after: int
) -> Iterator[Int64[Tensor, "sequence position"]]:
    """The tokens of each step, from the step `after` (counted from 0).

    The stages follow one another, and the last is repeated. The seed decides the order of the
    sequences in a stage; every epoch has its own.
    """
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
    """Take one step on `batch`; the loss per predicted token, as parts that sum to it.

    A part is the sum over the passes that all processes make at the same time.

    Raises:
        TrainingFailed: the loss is NaN or infinite, in any process; nothing was changed.
    """
    losses = []
    for tokens in own_passes(batch, settings):
        loss = loss_of(model, tokens, settings, predicted=batch[:, 1:].numel())
        loss.backward()
        losses.append(loss.detach())
    parts = reduce(torch.stack(losses), "sum")
    if not parts.isfinite().all():
        raise failed("the loss", step=step + 1)
    if processes().use_distributed:
        for weight in model.parameters():
            torch.distributed.all_reduce(weight.grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return parts


def own_passes(
    rows: Int64[Tensor, "sequence position"], settings: Settings
) -> list[Int64[Tensor, "own_sequence position"]]:
    """The rows of this process, in passes that fit its memory."""
    together = processes()
    micro = passes_of(settings.size, among=together.num_processes)
    micro *= settings.context // rows.shape[1]  # as many tokens if sequences are shorter
    own = rows.split(micro)[together.process_index :: together.num_processes]
    return [tokens.to(together.device) for tokens in own]


def loss_of(
    model: PreTrainedModel,
    tokens: Int64[Tensor, "sequence position"],
    settings: Settings,
    *,
    predicted: int,
) -> Float[Tensor, ""]:
    """The loss of `model` on `tokens`, nats, summed and divided by `predicted`."""
    # The backward pass of flash attention is slow on a CPU: 40 % of a bf16 step at 64 tokens.
    few = tokens.device.type == "cpu" and tokens.shape[1] <= FEW_TOKENS
    model.set_attn_implementation("eager" if few else "sdpa")
    bf16 = settings.precision == "bf16"
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        return model(
            input_ids=tokens, labels=tokens, num_items_in_batch=predicted, use_cache=False
        ).loss


@torch.no_grad()
def validation_loss(model: PreTrainedModel, held_out: np.ndarray, settings: Settings) -> float:
    """The mean loss per predicted token of the first `VALID_SEQUENCES` of `held_out`, nats."""
    tokens = torch.from_numpy(held_out[:VALID_SEQUENCES].astype(np.int64))
    total = torch.zeros((), dtype=torch.float64, device=processes().device)
    model.eval()
    for own in own_passes(tokens, settings):
        total += loss_of(model, own, settings, predicted=own[:, 1:].numel()) * len(own)
    model.train()
    return float(reduce(total, "sum")) / len(tokens)


def check_weights(model: PreTrainedModel, *, step: int) -> None:
    """Raise TrainingFailed if a weight is NaN or infinite."""
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise failed("a weight", step=step)


def failed(what: str, *, step: int) -> TrainingFailed:
    """The error for `what`, which is NaN or infinite after `step`."""
    return TrainingFailed(
        f"training stopped at step {step}: {what} is not a finite number.",
        means="the run diverged; checkpoints that were written before are kept",
        attempt="a lower learning rate, in a new run folder",
    )


def write_history(model: PreTrainedModel, out: Path, *, step: int, tokenizer: Path) -> None:
    """Save the model of `step` in history/, as a checkpoint that loads alone."""
    check_weights(model, step=step)
    if not processes().is_main_process:
        return
    folder = out / "history" / f"step-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    write_model(model, folder)
