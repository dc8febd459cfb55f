"""Offsets, binned so that memory does not grow with the context."""

from __future__ import annotations

import torch
from jaxtyping import Int
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
    offsets = torch.arange(mass.shape[-1], device=mass.device)
    bins = torch.bucketize(offsets, edges.to(mass.device), right=True) - 1
    sums = mass.new_zeros(*mass.shape[:-1], len(edges) - 1)
    return sums.index_add_(-1, bins, mass)
