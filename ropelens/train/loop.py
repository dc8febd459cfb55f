"""The loop of training, in plain torch.

AdamW on matrices and vectors, gradients summed over passes and processes and clipped, a
linear warm-up, then a cosine to zero. Every number follows from the settings and the text,
so a run that goes on from a checkpoint ends with the same weights, bit for bit.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils import broadcast_object_list, reduce
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import RopelensError
from ropelens.files.folder import write_whole
from ropelens.files.progress import show_progress, silent
from ropelens.models.processes import processes
from ropelens.train.data import copy_tokenizer, held_out_sequences, training_stages
from ropelens.train.record import say, write_model
from ropelens.train.settings import Settings, passes_of

CHECKPOINT = "checkpoint.pt"
"""The file of a run's folder that the run resumes from."""

COLUMNS = ("step", "tokens", "train_loss", "valid_loss", "learning_rate", "tokens_per_second")
FEW_TOKENS = 128
VALID_SEQUENCES = 128
"""Sequences of each validation: 65,000 tokens at context 512."""


class TrainingFailed(RopelensError):
    """The loss or the weights stopped being numbers."""


def failed(what: str, *, step: int) -> TrainingFailed:
    """The error for `what`, which is NaN or infinite after `step`."""
    return TrainingFailed(
        f"training stopped at step {step}: {what} is not a finite number.",
        attempt="a lower learning rate, in a new run folder",
    )


@dataclass
class State:
    """The progress of a run, beside its weights and the moments of its optimizer.

    `loss` is the sum over the steps since the last row that has one, in float32; `rows` are
    those of metrics.csv.
    """

    step: int = 0
    loss: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def fit(
    model: PreTrainedModel,
    settings: Settings,
    *,
    out: Path,
    data: Path,
    checkpoint_seconds: float,
) -> None:
    """Train `model` on the tokens in `data`, starting at the checkpoint in `out`, if any.

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
    checkpoint, state = out / CHECKPOINT, State()
    if checkpoint.exists():
        state = load_checkpoint(checkpoint, model, optimizer)
        say(f"resuming from step {state.step}")
    loss = torch.tensor(state.loss, device=processes().device)
    saved_at, timed_at, timed_from = time.monotonic(), time.perf_counter(), state.step
    note: dict[str, str] = {}
    per_step = settings.tokens_per_step
    show = show_progress if processes().is_main_process else silent
    total, before = settings.steps * per_step, state.step * per_step
    with show("training", total=total, unit="tokens", completed=before) as advance:
        for batch in batches(stages, settings, after=state.step):
            rate = learning_rate(settings, state.step)
            for part in learn(model, optimizer, batch, settings, rate=rate, step=state.step):
                loss += part
            state.step += 1
            row: dict[str, float] = {}
            if state.step % settings.log_every == 0:
                now = time.perf_counter()
                row["train_loss"] = float(loss.double() / settings.log_every)
                row["learning_rate"] = rate
                tokens = (state.step - timed_from) * per_step
                row["tokens_per_second"] = round(tokens / (now - timed_at))
                loss, timed_at, timed_from = torch.zeros_like(loss), now, state.step
                note["loss"] = f"loss {row['train_loss']:.4f}"
            last = state.step == settings.steps
            if last or state.step % settings.eval_every == 0:
                row["valid_loss"] = validation_loss(model, held_out, settings)
                note["valid"] = f"validation loss {row['valid_loss']:.4f}"
            if row:
                row |= {"step": state.step, "tokens": state.step * per_step}
                state.rows.append(row)
                write_metrics(out / "metrics.csv", state.rows)
            advance(per_step, note=", ".join(note.values()))
            if settings.in_history(state.step):
                write_history(model, out, step=state.step, tokenizer=data)
            # By the clock of the first process, so that all of them check their weights.
            due = broadcast_object_list([time.monotonic() - saved_at >= checkpoint_seconds])[0]
            if last or due:
                check_weights(model, step=state.step)
                state.loss, saved_at = loss.item(), time.monotonic()
                save_checkpoint(checkpoint, model, optimizer, state)


def save_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: State
) -> None:
    """Replace the checkpoint at `path`, in the first process; a kill leaves the earlier one."""
    if processes().is_main_process:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        content = io.BytesIO()
        torch.save(parts | {"state": asdict(state)}, content)
        write_whole(path, content.getbuffer())


def load_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> State:
    """Set `model` and `optimizer` to what they were when the checkpoint was written."""
    parts = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    return State(**parts["state"])


def write_metrics(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write metrics.csv anew, in the first process: after a resume, lost rows are gone.

    Losses in nats per token; `train_loss` is the mean since the row before.
    """
    if processes().is_main_process:
        write_whole(path, pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False))


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
    for tokens in passes_here(batch, settings):
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


def passes_here(
    rows: Int64[Tensor, "sequence position"], settings: Settings
) -> list[Int64[Tensor, "pass_sequence position"]]:
    """The rows of this process, in passes that fit its memory."""
    together = processes()
    micro = passes_of(settings.size, among=together.num_processes)
    micro *= settings.context // rows.shape[1]  # as many tokens if sequences are shorter
    here = rows.split(micro)[together.process_index :: together.num_processes]
    return [tokens.to(together.device) for tokens in here]


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
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=settings.bf16):
        return model(
            input_ids=tokens, labels=tokens, num_items_in_batch=predicted, use_cache=False
        ).loss


@torch.no_grad()
def validation_loss(model: PreTrainedModel, held_out: np.ndarray, settings: Settings) -> float:
    """The mean loss per predicted token of the first `VALID_SEQUENCES` of `held_out`, nats."""
    tokens = torch.from_numpy(held_out[:VALID_SEQUENCES].astype(np.int64))
    total = torch.zeros((), dtype=torch.float64, device=processes().device)
    model.eval()
    for some in passes_here(tokens, settings):
        total += loss_of(model, some, settings, predicted=some[:, 1:].numel()) * len(some)
    model.train()
    return float(reduce(total, "sum")) / len(tokens)


def check_weights(model: PreTrainedModel, *, step: int) -> None:
    """Raise TrainingFailed if a weight is NaN or infinite."""
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise failed("a weight", step=step)


def write_history(model: PreTrainedModel, out: Path, *, step: int, tokenizer: Path) -> None:
    """Save the model of `step` in history/, as a checkpoint that loads alone."""
    check_weights(model, step=step)
    if not processes().is_main_process:
        return
    folder = out / "history" / f"step-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    write_model(model, folder)
