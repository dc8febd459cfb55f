"""Offsets: their bins, and the kernel of a head over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

EXACT_OFFSETS = 64
BINS_PER_OCTAVE = 8


def offset_edges(context: int) -> Int[Tensor, " edge"]:
    """Edges of the offset bins, in tokens: bin b holds offsets edges[b] to edges[b + 1] - 1.

    One offset a bin below 64, then 8 bins an octave. The edges do not depend on the
    context beyond where they end, so that results of different contexts add up.
    """
    edges = list(range(EXACT_OFFSETS + 1))
    step = EXACT_OFFSETS // BINS_PER_OCTAVE
    while edges[-1] < context:
        octave = (edges[-1] // EXACT_OFFSETS).bit_length() - 1
        edges.append(edges[-1] + (step << octave))
    return torch.tensor(edges)


def sum_bins(mass: torch.Tensor, edges: Int[Tensor, " edge"]) -> torch.Tensor:
    """Sum of `mass` [..., offset] over the offsets of each bin: [..., bin]."""
    bins = bin_of(torch.arange(mass.shape[-1], device=mass.device), edges)
    sums = mass.new_zeros(*mass.shape[:-1], len(edges) - 1)
    return sums.index_add_(-1, bins, mass)


def bin_of(offset: Int[Tensor, "*shape"], edges: Int[Tensor, " edge"]) -> Int[Tensor, "*shape"]:
    """The bin that each offset lies in."""
    return torch.bucketize(offset.contiguous(), edges.to(offset.device), right=True) - 1


SEEN_BY = 0.05
"""Share of rows that must see an offset for it to be called a head's offset."""


@dataclass(frozen=True)
class Kernel:
    """A kernel over offsets, which sums to one: where it peaks, and its middle half.

    `low` and `high` (tokens, both included) bound the band that holds it.
    """

    kernel: Float[Tensor, "*head offset"]
    offset: Int[Tensor, "*head"]
    weight: Float[Tensor, "*head"]
    low: Int[Tensor, "*head"]
    high: Int[Tensor, "*head"]


def describe_kernel(
    kappa: Float[Tensor, "*head offset"], seen_by: Float[Tensor, " offset"]
) -> Kernel:
    """The kernel exp(kappa) of each head, of one weight an offset.

    Offsets that fewer than 5 % of the rows see (`seen_by`, a share) are left out.
    """
    kernel = kappa.masked_fill(seen_by < SEEN_BY, -torch.inf).softmax(-1)
    weight, offset = kernel.max(-1)
    below = kernel.cumsum(-1)
    low, high = ((below < quantile).sum(-1) for quantile in (0.25, 0.75))
    last = torch.tensor(kernel.shape[-1] - 1)
    return Kernel(kernel, offset, weight, low.minimum(last), high.minimum(last))
