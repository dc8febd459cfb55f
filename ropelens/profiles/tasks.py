"""Tasks for a model on random tokens: to repeat them, and to copy them from afar."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.arguments import check_count
from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import by_layer, sum_attention
from ropelens.errors import BadArgument
from ropelens.profiles.chunks import observer_of_chunks
from ropelens.profiles.measurement import TOKENS_PER_BATCH, Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.profiles.passes import Progress
from ropelens.rope.planes import Planes
from ropelens.text.rows import Ids, Lengths, Rows, generator_of

REPEATED_TOKENS = 64
"""Random tokens that are repeated, if both copies fit in the context."""

REPEATS = 8  # sequences of repeated random tokens that are averaged
NEAREST = 8  # default of the shortest distance between copies, in tokens
MOST_TOKENS = 10**8

OFFSET_MASS = [row for row in STATISTICS if row.name == "offset_mass"]


@runtime_checkable
class Task(Protocol):
    """A task of `tokens` tokens; `coordinates` label the numbers that it measures."""

    tokens: int
    coordinates: dict[str, np.ndarray]

    def measure(self, progress: Progress) -> dict[str, Tensor]:
        """Run the task; the numbers by name."""
        ...


class Repeats:
    """Attention on repeated random tokens, mean over the repeated rows, and their losses.

    `induction`, the prefix-matching score of Olsson et al. 2022, is NaN if the mask hides the
    earlier occurrence. `first_loss` and `repeat_loss` (nats/token) exclude the first token of
    either copy.
    """

    def __init__(self, measurement: Measurement, planes: Sequence[Planes]) -> None:
        live = measurement.live
        self.live = live
        self.planes = planes
        self.length = max(2, min(REPEATED_TOKENS, (live.context - 1) // 2))
        self.ids = repeated_tokens(
            measurement.text.first_token,
            self.length,
            vocabulary=live.vocabulary,
            seed=measurement.seed,
        )
        self.lengths = whole_lengths(self.ids)
        second_copy = torch.arange(self.length + 1, 2 * self.length + 1, device="cpu")
        position = second_copy.expand(len(self.ids), -1)
        weight = torch.full(
            position.shape, 1 / self.length, dtype=torch.float32, device="cpu"
        )
        self.rows = Rows(position, weight, self.lengths, dense=False)
        self.tokens = self.ids.numel()
        self.coordinates: dict[str, np.ndarray] = {}

    def measure(self, progress: Progress) -> dict[str, Tensor]:
        """The scores [layer, head] and losses [trial], and `trial_induction` of each trial."""
        mass: dict[int, Tensor] = {}

        def see(call: AttentionCall) -> None:
            mass[call.layer] = self.mass_by_offset(call)

        live = self.live
        live.forget_length()
        context = self.ids.shape[1]
        chunk = live.chunk_length(context)
        with live.observe(observer_of_chunks(chunk, (self.rows,), context, see)):
            losses = live.losses(self.ids, self.lengths)
        progress(self.tokens)
        of_layers = by_layer(mass, live.layers)
        on_next = of_layers[..., self.length - 1]
        on_same = of_layers[..., self.length]
        return {
            "induction": on_next.mean(1),
            "trial_induction": on_next.transpose(0, 1),
            "duplicate_token": on_same.mean(1),
            "first_loss": losses[:, 2 : self.length + 1].mean(1),
            "repeat_loss": losses[:, self.length + 2 :].mean(1),
        }

    def mass_by_offset(
        self, call: AttentionCall
    ) -> Float[Tensor, "trial head offset_bin"]:
        """Mean attention of the repeated rows; NaN if none sees its earlier occurrence."""
        sampled = SampledCall(call, self.rows, self.planes[call.layer])
        mass = sum_attention(sampled, OFFSET_MASS)["offset_mass"]
        position = self.rows.position[:1]
        sees = call.visibility.at(position).sees().cpu()
        row = torch.arange(self.length, device="cpu")
        sees_earlier = sees[:, row, position[0] - self.length]
        return mass.masked_fill(~sees_earlier.any(), torch.nan)


class Copies:
    """Losses (nats/token) of random tokens that are copied, without the first token."""

    def __init__(
        self, measurement: Measurement, distances: Sequence[int] | None
    ) -> None:
        live = measurement.live
        text = measurement.text
        if not distances:
            longest = max(2, (min(live.context, text.context) - 1) // 2)
            distances = (longest,)
            if longest >= NEAREST:
                distances = doublings(NEAREST, longest)
        self.distances = tuple(dict.fromkeys(map(int, distances)))
        if min(self.distances) < 2:
            raise BadArgument(
                "Distances of copies must be 2 tokens or more.",
                seen=str(self.distances),
            )
        self.tokens = REPEATS * sum(1 + 2 * distance for distance in self.distances)
        check_count(self.tokens, "tokens of copies", most=MOST_TOKENS)
        self.live = live
        self.first_token = text.first_token
        self.seed = measurement.seed
        self.coordinates = {"copy_distance": np.array(self.distances)}

    def measure(self, progress: Progress) -> dict[str, Tensor]:
        """`copy_loss` [distance, trial]."""
        by_distance = []
        for distance in self.distances:
            ids = repeated_tokens(
                self.first_token,
                distance,
                vocabulary=self.live.vocabulary,
                seed=self.seed,
            )
            self.live.forget_length()
            losses = [
                self.live.losses(batch, whole_lengths(batch))
                for batch in split_by_memory(ids, self.live.device)
            ]
            copied = torch.cat(losses)[:, distance + 2 :]
            by_distance.append(copied.mean(1))
            progress(ids.numel())
        return {"copy_loss": torch.stack(by_distance)}


def repeated_tokens(
    first: int, length: int, *, vocabulary: int, seed: int
) -> Int[Tensor, "trial position"]:
    """The token `first`, then `length` random tokens and the same again (arXiv 2209.11895)."""
    generator = generator_of(seed)
    index = torch.arange(length, device="cpu")
    copies = []
    for _ in range(REPEATS):
        drawn = torch.randperm(vocabulary, generator=generator, device="cpu")
        copies.append(drawn[index % len(drawn)])
    once = torch.stack(copies)
    begin = torch.full((REPEATS, 1), first, dtype=torch.long, device="cpu")
    return torch.cat([begin, once, once], dim=1)


def whole_lengths(tokens: Ids) -> Lengths:
    return torch.full(tokens.shape[:1], tokens.shape[1], dtype=torch.long, device="cpu")


def doublings(least: int, most: int) -> tuple[int, ...]:
    """Return `least`, 2 `least`, 4 `least`, ..., up to `most`."""
    count = max(1, (most // least).bit_length())
    return tuple(least << power for power in range(count))


def split_by_memory(
    tokens: Ids, device: torch.device
) -> tuple[Int[Tensor, "_ position"], ...]:
    size = TOKENS_PER_BATCH[device.type] // tokens.shape[1]
    return tokens.split(max(1, size))
