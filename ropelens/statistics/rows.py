"""Which rows of the attention matrix are looked at: all, or an unbiased sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import Positive
from ropelens.statistics.generator import generator_of

ALL_ROWS = 2048
"""Tokens of the longest sequence up to which "auto" means all rows."""

SAMPLED_ROWS = 512
"""Rows of each sequence that "auto" means beyond."""

HowMany = Positive | Literal["auto", "all"]
"""Rows of each sequence that are looked at: so many, all, or as the context allows."""


def rows_for(rows: HowMany, context: int) -> int | Literal["all"]:
    """`rows` of sequences of `context` tokens: "auto" is all, or a sample of long ones."""
    if rows != "auto":
        return rows
    return "all" if context <= ALL_ROWS else SAMPLED_ROWS


@dataclass(frozen=True)
class Rows:
    """The rows of a batch of sequences that statistics are taken over.

    `position[b, r]` ascends along r; `weight[b, r]` says for how many rows of the
    sequence this one stands, 0 where it is only there to fill the table. Where `dense`,
    the rows are 1, 2, 3, ... for every sequence. `length[b]` counts the tokens that are
    not padding. The row of position 0, which has no choice, is never among them.
    """

    position: Int[Tensor, "batch row"]
    weight: Float[Tensor, "batch row"]
    length: Int[Tensor, " batch"]
    dense: bool

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
    length: Int[Tensor, " batch"], *, count: int, seed: int, first: int = 0
) -> Rows:
    """`count` rows of each sequence, one drawn from each of `count` equal stretches.

    Each row stands for the rows of its stretch, so weighted sums have the expectation of
    the sums over all rows, whatever the lengths. A sequence with `count` rows or fewer
    gives all of them. `first` numbers the batch's first sequence: the draw of a sequence
    depends on its number and `seed`, not on the batch it came in.
    """
    count = min(count, max(1, int(length.max()) - 1))  # more would only be drawn
    draws = torch.empty(len(length), count)
    for sequence, draw in enumerate(draws, start=first):
        draw.uniform_(generator=generator_of(seed, sequence))
    rows = (length - 1)[:, None]
    taken = rows.clamp(max=count)
    stretch = torch.arange(count + 1).minimum(taken)
    edges = 1 + stretch * rows // taken.clamp(min=1)
    begin, size = edges[:, :-1], edges.diff()
    position = begin + (draws * size).long().minimum((size - 1).clamp(min=0))
    position = position.clamp(max=max(int(length.max()) - 1, 1))
    most = max(1, int(taken.max()))  # of the longest sequence; no columns that are all filling
    return Rows(position[:, :most], size[:, :most].float(), length, dense=False)
