"""Which rows of the attention matrix are measured: all, or an unbiased sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import Positive

ALL_ROWS = 2048  # longest sequences, in tokens, of which "auto" means all rows
SAMPLED_ROWS = 512  # rows of each longer sequence that "auto" means

HowMany = Positive | Literal["auto", "all"]
"""Rows of each sequence that are measured: a number, all, or as the context allows."""


def rows_for(rows: HowMany, context: int) -> int | Literal["all"]:
    """`rows` for sequences of `context` tokens: "auto" is all, or a sample of long ones."""
    if rows != "auto":
        return rows
    return "all" if context <= ALL_ROWS else SAMPLED_ROWS


@dataclass(frozen=True)
class Rows:
    """The rows of a batch of sequences that statistics are taken over.

    `position[b, r]` ascends along r; `weight[b, r]` is the number of rows of the sequence that
    this one stands for, 0 where it only fills the table. `dense` rows are 1, 2, 3, ... for
    every sequence. `length[b]` counts the tokens that are not padding; `hidden` marks those of
    them that a mask hides, where there are any. Position 0, which has no choice, is never among
    the rows.
    """

    position: Int[Tensor, "batch row"]
    weight: Float[Tensor, "batch row"]
    length: Int[Tensor, " batch"]
    dense: bool
    hidden: Bool[Tensor, "batch token"] | None = None

    def zero_hidden(self, hidden: Bool[Tensor, "batch token"] | None) -> Rows:
        """These rows; those of the tokens that are `hidden` have no weight."""
        if hidden is None:
            return self
        weight = self.weight.masked_fill(hidden.gather(1, self.position), 0)
        return replace(self, weight=weight, hidden=hidden)

    def every_other(self, first: int) -> Rows:
        """Every other row of each sequence; if their number is odd, one without weight more."""
        even = self.position.shape[1] // 2 * 2
        position = torch.cat([self.position, self.position[:, even:]], dim=1)
        weight = torch.cat([self.weight, 0 * self.weight[:, even:]], dim=1)
        position, weight = position[:, first::2], weight[:, first::2]
        return replace(self, position=position, weight=weight, dense=False)

    def by_position(self, context: int) -> Float[Tensor, "batch position"]:
        """Total weight of the rows at each position."""
        total = torch.zeros(len(self.position), context, dtype=torch.float64)
        return total.scatter_add_(1, self.position, self.weight.double())


def all_rows(length: Int[Tensor, " batch"]) -> Rows:
    """Every row but the first of each sequence."""
    position = torch.arange(1, max(int(length.max()), 2)).expand(len(length), -1)
    weight = (position < length[:, None]).float()
    return Rows(position, weight, length, dense=True)


def sample_rows(
    length: Int[Tensor, " batch"], *, count: int, seed: int, numbers: Sequence[int] = ()
) -> Rows:
    """`count` rows of each sequence, one drawn from each of `count` equal stretches.

    Each row stands for the rows of its stretch, so weighted sums have the expectation of the
    sums over all rows, whatever the lengths. Of a sequence with at most `count` rows all are
    taken. A draw depends on `seed` and on the sequence's number, not on the batch: by default
    sequences are numbered from 0.
    """
    count = min(count, max(1, int(length.max()) - 1))
    draws = torch.empty(len(length), count)
    for sequence, draw in zip(numbers or range(len(length)), draws, strict=True):
        draw.uniform_(generator=generator_of(seed, sequence))
    rows = (length - 1)[:, None]
    taken = rows.clamp(max=count)
    stretch = torch.arange(count + 1).minimum(taken)
    edges = 1 + stretch * rows // taken.clamp(min=1)
    begin, size = edges[:, :-1], edges.diff()
    position = begin + (draws * size).long().minimum((size - 1).clamp(min=0))
    position = position.clamp(max=max(int(length.max()) - 1, 1))
    most = max(1, int(taken.max()))  # no columns that only fill the table
    return Rows(position[:, :most], size[:, :most].float(), length, dense=False)


def generator_of(seed: int, *key: int) -> torch.Generator:
    """torch's generator for a seed, or for a seed and a `key` such as a sequence's number.

    torch takes 32 bits of a seed, so seed and key are mixed into these.
    """
    if not key:
        return torch.Generator().manual_seed(int(seed) % 2**63)
    mixed = np.random.SeedSequence(int(seed) % 2**64, spawn_key=key)
    return torch.Generator().manual_seed(int(mixed.generate_state(1)[0]))
