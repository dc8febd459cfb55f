"""Rows of the attention matrix that are measured: all rows, or an unbiased sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.arguments import Positive

ALL_ROWS = 2048  # longest context, in tokens, for which "auto" means all rows
SAMPLED_ROWS = 512  # rows of each sequence that "auto" means for a longer context

Ids = Int[Tensor, "sequence position"]
TokenMask = Bool[Tensor, "sequence position"]
Lengths = Int[Tensor, " sequence"]
HowMany = Positive | Literal["auto", "all"]  # rows of each sequence that are measured


def rows_for(rows: HowMany, context: int) -> int | Literal["all"]:
    """Rows per sequence of `context` tokens; "auto" means all, or 512 of a long context."""
    if rows != "auto":
        return rows
    return "all" if context <= ALL_ROWS else SAMPLED_ROWS


@dataclass(frozen=True)
class Rows:
    """Rows of a batch of sequences over which statistics are summed.

    `weight[b, r]` is the number of rows of the sequence that row r represents; rows that only
    fill the table have weight 0. Position 0 is never a row, because it has no choice of keys.
    """

    position: Int[Tensor, "batch row"]  # increases along a row of the table
    weight: Float[Tensor, "batch row"]
    length: Int[Tensor, " batch"]  # tokens without padding
    dense: bool  # rows are 1, 2, 3, ... in every sequence
    hidden: Bool[Tensor, "batch token"] | None = None  # by a mask
    # Random numbers, to exchange or draw keys
    order: Float[Tensor, "batch draw token"] | None = None

    @cached_property
    def shared_position(self) -> Int[Tensor, "shared row"]:
        """`position`, with one row for all sequences if the rows are dense."""
        return self.position[:1] if self.dense else self.position

    @cached_property
    def ends(self) -> list[int]:
        """The largest position of each row in any sequence, plus 1."""
        return (self.position.amax(0) + 1).tolist()

    def zero_hidden(self, hidden: Bool[Tensor, "batch token"] | None) -> "Rows":
        """The same rows, with weight 0 for the rows of `hidden` tokens."""
        if hidden is None:
            return self
        weight = self.weight.masked_fill(hidden.gather(1, self.position), 0)
        return replace(self, weight=weight, hidden=hidden)

    def every(self, step: int, first: int) -> "Rows":
        """Every `step`-th row of each sequence; rows of weight 0 fill up the last step."""
        missing = -self.position.shape[1] % step
        filling = self.position[:, -1:].expand(-1, missing)
        no_weight = torch.zeros_like(filling, dtype=self.weight.dtype)
        position = torch.cat([self.position, filling], dim=1)
        weight = torch.cat([self.weight, no_weight], dim=1)
        return replace(
            self,
            position=position[:, first::step],
            weight=weight[:, first::step],
            dense=False,
        )

    def in_turn(self, turns: Sequence[int], step: int) -> "Rows":
        """`every` row of each of the turns, for sequences that are repeated for each turn."""
        parts = [self.every(step, turn % step) for turn in turns]
        count = len(parts)
        return Rows(
            position=torch.cat([part.position for part in parts]),
            weight=torch.cat([part.weight for part in parts]),
            length=torch.cat([self.length] * count),
            dense=False,
            hidden=None if self.hidden is None else torch.cat([self.hidden] * count),
            order=None if self.order is None else torch.cat([self.order] * count),
        )

    def padding(self, key: Int[Tensor, " key"]) -> Bool[Tensor, "batch key"]:
        """The keys at these positions that are padding or hidden."""
        padding = key >= self.length[:, None]
        if self.hidden is None:
            return padding
        return padding | self.hidden[:, key]

    def from_share(self, share: float) -> "Rows":
        """The rows after this share of each sequence. Others have weight 0 or are left out."""
        late = self.position >= self.length[:, None].float() * share
        first = int(late.any(0).long().argmax())
        weight = self.weight * late
        return replace(
            self,
            position=self.position[:, first:],
            weight=weight[:, first:],
            dense=False,
        )

    def by_position(self, context: int) -> Float[Tensor, "batch position"]:
        """Total weight of the rows at each position."""
        total = torch.zeros(
            len(self.position), context, dtype=torch.float64, device="cpu"
        )
        return total.scatter_add_(1, self.position, self.weight.double())


def all_rows(length: Int[Tensor, " batch"]) -> Rows:
    """All rows of each sequence except the first."""
    longest = int(length.max())
    position = torch.arange(1, max(longest, 2), device="cpu").expand(len(length), -1)
    weight = (position < length[:, None]).float()
    return Rows(position, weight, length, dense=True)


def sample_rows(
    length: Int[Tensor, " batch"], *, count: int, seed: int, numbers: Sequence[int] = ()
) -> Rows:
    """Draw `count` rows of each sequence, one from each of `count` equal stretches.

    A row represents the rows of its stretch, so weighted sums are unbiased for all lengths. If
    a sequence has at most `count` rows, all are used. A draw depends on `seed` and on the
    number of the sequence (by default its index), not on the batch.
    """
    longest = int(length.max())
    last_row = max(longest - 1, 1)
    count = min(count, last_row)
    draws = torch.empty(len(length), count, dtype=torch.float32, device="cpu")
    for sequence, draw in zip(numbers or range(len(length)), draws, strict=True):
        draw.uniform_(generator=generator_of(seed, sequence))
    rows = (length - 1)[:, None]
    taken = rows.clamp(max=count)
    stretch = torch.arange(count + 1, device="cpu").minimum(taken)
    edges = 1 + stretch * rows // taken.clamp(min=1)
    begin = edges[:, :-1]
    size = edges.diff()
    last_of_stretch = (size - 1).clamp(min=0)
    position = begin + (draws * size).long().minimum(last_of_stretch)
    position = position.clamp(max=last_row)
    most = max(1, int(taken.max()))  # no columns that only fill the table
    return Rows(position[:, :most], size[:, :most].float(), length, dense=False)


def generator_of(seed: int, *key: int) -> torch.Generator:
    """Random generator for a seed, or for a seed and a `key` (the number of a sequence)."""
    if not key:
        return torch.Generator().manual_seed(int(seed) % 2**63)
    mixed = np.random.SeedSequence(int(seed) % 2**64, spawn_key=key)
    state = int(mixed.generate_state(1)[0])  # torch uses 32 bits
    return torch.Generator().manual_seed(state)
