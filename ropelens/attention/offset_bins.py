"""Bins of offsets, and a sample of the offsets of a long context."""

import math

import torch
from jaxtyping import Int
from torch import Tensor

EXACT_OFFSETS = 64
BINS_PER_OCTAVE = 8
EVERY_OFFSET = 512  # longest context, in tokens, in which surrogates read every offset
READ_OFFSETS = 128  # otherwise they read the offsets below it, then this number in two octaves


def offset_edges(context: int) -> Int[Tensor, " edge"]:
    """Edges of the offset bins, in tokens. Bin b holds offsets edges[b] to edges[b + 1] - 1.

    Below 64 each bin has one offset; an octave above has 8 bins. A longer context only appends
    edges, so results of different contexts can be added.
    """
    edges = list(range(EXACT_OFFSETS + 1))
    step = EXACT_OFFSETS // BINS_PER_OCTAVE
    while edges[-1] < context:
        octave = (edges[-1] // EXACT_OFFSETS).bit_length() - 1
        edges.append(edges[-1] + (step << octave))
    return torch.tensor(edges)


def sampled_offsets(
    context: int, *, generator: torch.Generator
) -> tuple[Int[Tensor, " sample"], Int[Tensor, " sample"]]:
    """One offset from each stretch of a long context, and the lengths of the stretches."""
    edges = torch.arange(context + 1)
    if context > EVERY_OFFSET:
        steps = torch.arange(READ_OFFSETS * math.ceil(math.log2(context))) * 2 / READ_OFFSETS
        edges = torch.cat([edges[:READ_OFFSETS], (READ_OFFSETS * 2**steps).long()])
        edges = edges.clamp(max=context).unique()
    size = edges.diff()
    return edges[:-1] + (torch.rand(len(size), generator=generator) * size).long(), size


def sum_bins(mass: torch.Tensor, edges: Int[Tensor, " edge"]) -> torch.Tensor:
    """Sum of `mass` [..., offset] over the offsets of each bin: [..., bin]."""
    bins = bin_of(torch.arange(mass.shape[-1], device=mass.device), edges)
    sums = mass.new_zeros(*mass.shape[:-1], len(edges) - 1)
    return sums.index_add_(-1, bins, mass)


def bin_of(offset: Int[Tensor, "*shape"], edges: Int[Tensor, " edge"]) -> Int[Tensor, "*shape"]:
    """The bin of each offset."""
    return torch.bucketize(offset.contiguous(), edges.to(offset.device), right=True) - 1
