"""The steps of training, in plain torch: batches, learning rate, losses and updates.

It uses AdamW, gradient accumulation, gradient clipping, a linear warm-up and a cosine decay to
zero.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import RopelensError
from ropelens.train.settings import Settings

VALID_SEQUENCES = 128  # sequences in a validation: 65,000 tokens at context 512

# On a CPU, the backward pass of flash attention takes 40 % of a bf16 step at 64 tokens
SHORT = 128


class TrainingFailed(RopelensError):
    """The loss or a weight became NaN or infinite."""


def require_finite(tensors: Iterable[Tensor], what: str, *, step: int) -> None:
    """Raise TrainingFailed if `what` is NaN or infinite after `step`."""
    if not all(tensor.isfinite().all() for tensor in tensors):
        fault = f"training stopped at step {step}: {what} is not a finite number."
        raise TrainingFailed(fault, hint="a lower learning rate, in a new run folder")


def make_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, and without weight decay for norms."""
    weights = list(model.parameters())
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(settings: Settings, step: int) -> float:
    """Learning rate at `step`, counted from 0: linear warm-up, constant, cosine decay."""
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.peak_rate * (step / warmup)
    constant = (1 - settings.decay) * (settings.steps - warmup)
    decaying = max(1, settings.steps - warmup - constant)
    done = max(0, step - warmup - constant) / decaying
    return settings.peak_rate * (0.5 * (1 + math.cos(math.pi * done)))


def batches(
    stages: Sequence[np.ndarray], settings: Settings, *, after: int
) -> Iterator[Int64[Tensor, "sequence position"]]:
    """Tokens of each step from `after` (counted from 0); the last stage is repeated."""
    start = 0
    for epoch, rows in enumerate(chain(stages, repeat(stages[-1]))):
        steps = rows.size // settings.tokens_per_step
        random = torch.Generator().manual_seed(settings.seed + epoch)
        drawn = torch.randperm(len(rows), generator=random, device="cpu")
        order = drawn.view(steps, -1).numpy()
        first = max(0, after - start)
        for chosen in order[first : settings.steps - start]:
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
) -> Float[Tensor, " pass"]:
    """Take one step on `batch`; return the share of each pass in the loss per token."""
    losses = []
    for tokens in passes_of(batch, settings):
        loss = loss_of(model, tokens, settings, predicted=batch[:, 1:].numel())
        loss.backward()
        losses.append(loss.detach())
    by_pass = torch.stack(losses)
    require_finite([by_pass], "the loss", step=step)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return by_pass


def passes_of(
    rows: Int64[Tensor, "sequence position"], settings: Settings
) -> Sequence[Tensor]:
    """Split the rows into passes that fit into memory, with equal numbers of tokens."""
    sequences_in_context = settings.context // rows.shape[1]
    return rows.split(settings.shape.micro_batch * sequences_in_context)


def loss_of(
    model: PreTrainedModel,
    tokens: Int64[Tensor, "sequence position"],
    settings: Settings,
    *,
    predicted: int,
) -> Float[Tensor, ""]:
    """Sum of the losses of `model` on `tokens` in nats, divided by `predicted`."""
    tokens = tokens.to(model.device)
    is_short = tokens.device.type == "cpu" and tokens.shape[1] <= SHORT
    model.set_attn_implementation("eager" if is_short else "sdpa")
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=settings.bf16):
        output = model(
            input_ids=tokens,
            labels=tokens,
            num_items_in_batch=predicted,
            use_cache=False,
        )
    return output.loss


@torch.no_grad()
def validation_loss(
    model: PreTrainedModel, held_out: np.ndarray, settings: Settings
) -> float:
    """Mean loss per predicted token on the first `VALID_SEQUENCES` of `held_out`, in nats."""
    tokens = torch.from_numpy(held_out[:VALID_SEQUENCES].astype(np.int64))
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    model.eval()
    for rows in passes_of(tokens, settings):
        loss = loss_of(model, rows, settings, predicted=rows[:, 1:].numel())
        total += loss * len(rows)
    model.train()
    return float(total) / len(tokens)
