"""Repeated random tokens: the induction score of each head, and the loss of the repeat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import by_layer, sum_attention
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.profiles.passes import Progress, observer_of_chunks
from ropelens.rope.planes import Planes
from ropelens.text.rows import Ids, Lengths, Rows, generator_of

REPEATED_TOKENS = 64  # random tokens that are repeated, if both copies fit in the context
REPEATS = 8  # sequences of repeated random tokens that are averaged


@dataclass(frozen=True)
class Task:
    """A task: `measure` runs `tokens` tokens and returns numbers that `coordinates` label."""

    tokens: int
    measure: Callable[[Progress], dict[str, Tensor]]
    coordinates: dict[str, np.ndarray] = field(default_factory=dict)


def repeated_tokens(
    first: int, length: int, *, vocabulary: int, seed: int
) -> Int[Tensor, "trial position"]:
    """The token `first`, then `length` random tokens, then the same tokens again.

    The random tokens differ if the vocabulary allows it (Olsson et al. 2022, arXiv 2209.11895).
    """
    generator = generator_of(seed)
    draws = [torch.randperm(vocabulary, generator=generator) for _ in range(REPEATS)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    return torch.cat([torch.full((REPEATS, 1), first), once, once], dim=1)


def repeats(measurement: Measurement, planes: Sequence[Planes]) -> Task:
    """Task: attention on repeated random tokens, mean over the repeated rows, and their losses.

    `induction` is the prefix-matching score of Olsson et al. 2022. It is NaN if the mask hides
    the earlier occurrence. `first_loss` and `repeat_loss` (nats/token) exclude the first token
    of either copy, which cannot be predicted.
    """
    live, text, seed = measurement.live, measurement.text, measurement.seed
    length = max(2, min(REPEATED_TOKENS, (live.context - 1) // 2))
    tokens = repeated_tokens(text.first_token, length, vocabulary=live.vocabulary, seed=seed)
    second = torch.arange(length + 1, 2 * length + 1).expand(len(tokens), -1)
    weight, whole = torch.full(second.shape, 1 / length), whole_lengths(tokens)
    by_offset = [row for row in STATISTICS if row.name == "offset_mass"]
    rows = Rows(second, weight, whole, dense=False)

    def measure(progress: Progress) -> dict[str, Tensor]:
        mass: dict[int, Tensor] = {}

        def see(call: AttentionCall) -> None:
            sums = sum_attention(SampledCall(call, rows, planes[call.layer]), by_offset)
            seen = call.visibility.at(second[:1]).sees().cpu()
            seen = seen[:, torch.arange(length), second[0] - length]
            mass[call.layer] = sums["offset_mass"].masked_fill(~seen.any(), torch.nan)

        live.forget_length()
        context = tokens.shape[1]
        chunk = live.chunk_length(context)
        with live.observe(observer_of_chunks(chunk, (rows,), context, see)):
            losses = live.losses(tokens, whole)
        progress(tokens.numel())
        of_layers = by_layer(mass, live.layers)
        after, same = of_layers[..., length - 1], of_layers[..., length]
        return {
            "induction": after.mean(1),
            "trial_induction": after.transpose(0, 1),
            "duplicate_token": same.mean(1),
            "first_loss": losses[:, 2 : length + 1].mean(1),
            "repeat_loss": losses[:, length + 2 :].mean(1),
        }

    return Task(tokens.numel(), measure)


def whole_lengths(tokens: Ids) -> Lengths:
    return torch.full(tokens.shape[:1], tokens.shape[1])
