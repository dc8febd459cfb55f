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

# On a CPU, the backward pass of flash attention is slow in bf16: a step of `micro` takes 2.0
# times as long as with eager attention at 64 tokens, and 1.4 times at 256. In fp32 it takes
# the same time at 64 tokens, and less than eager attention at 256.
SHORT = 128
SHORT_IN_BF16 = 256


class TrainingFailed(RopelensError):
    """The loss or a weight became NaN or infinite."""


def require_finite(
    tensors: Iterable[Tensor], what: str, *, step: int, rate: float
) -> None:
    """Raise TrainingFailed if `what` is NaN or infinite after `step`, at this learning rate."""
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise TrainingFailed(
            f"training stopped at step {step}: {what} is not a finite number.",
            seen=f"a learning rate of {rate:.3g} in this step",
            hint="a lower learning rate, in a new run folder",
        )


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
    stages: Sequence[np.ndarray],
    *,
    steps: int,
    tokens_per_step: int,
    seed: int,
    after: int,
) -> Iterator[Int64[Tensor, "sequence position"]]:
    """Tokens of each step from `after` (counted from 0); the last stage is repeated.

    Each stage [sequence, position] has the tokens of complete steps.
    """
    start = 0
    for epoch, rows in enumerate(chain(stages, repeat(stages[-1]))):
        steps_in_stage = rows.size // tokens_per_step
        random = torch.Generator().manual_seed(seed + epoch)
        drawn = torch.randperm(len(rows), generator=random, device="cpu")
        order = drawn.view(steps_in_stage, -1).numpy()
        first = max(0, after - start)
        for chosen in order[first : steps - start]:
            yield torch.from_numpy(rows[chosen].astype(np.int64))
        start += steps_in_stage
        if start >= steps:
            return


def learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Int64[Tensor, "sequence position"],
    *,
    in_pass: int,
    rate: float,
    step: int,
    bf16: bool = False,
) -> Float[Tensor, " pass"]:
    """Take one step on `batch`, in passes of `in_pass` sequences.

    Returns the share of each pass in the loss per predicted token, in nats.
    """
    losses = []
    for tokens in batch.split(in_pass):
        loss = loss_of(model, tokens, predicted=batch[:, 1:].numel(), bf16=bf16)
        loss.backward()
        losses.append(loss.detach())
    by_pass = torch.stack(losses)
    require_finite([by_pass], "the loss", step=step, rate=rate)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return by_pass


def choose_attention(model: PreTrainedModel, tokens: int, *, bf16: bool) -> None:
    """Choose the quicker attention for sequences of this many tokens."""
    longest = SHORT_IN_BF16 if bf16 else SHORT
    is_short = model.device.type == "cpu" and tokens <= longest
    model.set_attn_implementation("eager" if is_short else "sdpa")


def sequences_in_pass(settings: Settings, tokens: int) -> int:
    """Number of sequences of this many tokens in a pass that fits into memory."""
    sequences_in_context = settings.context // tokens
    return settings.shape.micro_batch * sequences_in_context


def loss_of(
    model: PreTrainedModel,
    tokens: Int64[Tensor, "sequence position"],
    *,
    predicted: int,
    bf16: bool = False,
) -> Float[Tensor, ""]:
    """Sum of the losses of `model` on `tokens` in nats, divided by `predicted`."""
    tokens = tokens.to(model.device)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
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
    length = tokens.shape[1]
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    choose_attention(model, length, bf16=settings.bf16)
    model.eval()
    for rows in tokens.split(sequences_in_pass(settings, length)):
        predicted = rows[:, 1:].numel()
        loss = loss_of(model, rows, predicted=predicted, bf16=settings.bf16)
        total += loss * len(rows)
    model.train()
    return float(total) / len(tokens)
