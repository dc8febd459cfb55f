"""Order and place if keys move away (Du et al. 2026, arXiv 2605.15514).

A key with c_f = s q~_if conj(k~_jf) has the score L(t) = Re sum_f c_f exp(i w_f t) at distance
t, before a soft-cap. The functions return two numbers of each bin of distances in turn: the
mean over the distances that a row sees, and 1. Both are 0 if the row does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Complex, Int

if TYPE_CHECKING:  # figures import the table of measures, and do not import torch
    from torch import Tensor

    from ropelens.attention.block import Block
else:
    Tensor = Block = Any

PER_BIN = 32  # distances that are read in each bin


@cache
def sampled_distances(bins: int) -> Int[np.ndarray, "3 distance"]:
    """Distances `near` and `far` in tokens, 32 of each bin, and the start of their bin.

    Bin b has the distances `far` from 2^b to 2^(b+1) - 1: one drawn from each of 32 equal
    stretches, or each distance repeatedly. `near` is drawn evenly from 0 to far - 1.
    """
    of_bins = []
    for bin_number in range(bins):
        start = 2**bin_number
        random = np.random.default_rng(start)  # more bins do not change these
        low = start + np.arange(PER_BIN) * start // PER_BIN
        far = random.integers(low, low + max(1, start // PER_BIN))
        near = random.integers(far)
        of_bins.append([near, far, np.full(PER_BIN, start)])
    return np.concatenate(of_bins, axis=1)


@dataclass(frozen=True)
class Distances:
    """`sampled_distances` as a tensor."""

    table: Int[Tensor, "3 distance"]

    @property
    def near(self) -> Int[Tensor, " distance"]:
        return self.table[0]

    @property
    def far(self) -> Int[Tensor, " distance"]:
        return self.table[1]

    @property
    def bin_start(self) -> Int[Tensor, " distance"]:
        return self.table[2]


def distances_of(block: Block) -> Distances:
    """`sampled_distances` up to the farthest key that a row of the call sees."""
    bins = max(1, block.sampled.visibility.farthest.bit_length())
    return Distances(block.self_column.new_tensor(sampled_distances(bins)))


def waves(block: Block, distance: Int[Tensor, " distance"]) -> Tensor:
    """exp(i w_f t) [term, distance] at every distance t; by head if heads differ."""
    w = block.planes.term_inv_freq.to(distance.device).double()[..., None]
    if w.ndim > 2:
        w = w[block.query_heads]
    return (1j * w * distance).exp()


@dataclass(frozen=True)
class DrawnKey:
    """A key of each row: c_f of its terms, and whether the row has such a key."""

    terms: Complex[Tensor, "batch head row term"]
    exists: Bool[Tensor, "batch head row"]


def drawn_keys(block: Block, *, evenly: bool = False) -> Iterator[DrawnKey]:
    """Yield two keys of each row.

    Keys other than sinks are drawn by the attention of the row, or evenly, without return.
    """
    order = block.sampled.rows.order
    assert order is not None
    first = 2 if evenly else 0
    weight = _drawing_weights(block, evenly=evenly)
    numbers = []
    for by_token in order[:, first : first + 2].unbind(1):
        by_row = by_token.gather(1, block.position.expand(len(by_token), -1))
        numbers.append(by_row.to(weight)[:, None, None, :, None])
    group = block.q.shape[2]
    keys = block.k_still[:, :, None].expand(-1, -1, group, -1, -1)
    for drawn in _draw_columns(weight, numbers):
        index = drawn.column.expand(*drawn.column.shape[:-1], keys.shape[-1])
        c = block.call.scale * block.planes.products(
            block.q_still, keys.gather(3, index)
        )
        exists = drawn.weight[..., 0] > 0
        yield DrawnKey(c.flatten(1, 2), exists.flatten(1, 2))


def _drawing_weights(block: Block, *, evenly: bool) -> Tensor:
    """Weights [batch, kv_head, group, row, key] by which keys are drawn."""
    others = block.q.new_ones(*block.q.shape[:3], 1, len(block.keys))
    others[..., block.sinks] = (block.sink_kind == 0).to(others)
    if evenly:
        return (others * block.device_visibility.sees()[:, None, None]).double()
    return (others * block.attention).double()


@dataclass(frozen=True)
class DrawnColumn:
    """The column of a drawn key, and its weight: 0 if there was no key."""

    column: Tensor
    weight: Tensor


def _draw_columns(weight: Tensor, numbers: Iterable[Tensor]) -> Iterator[DrawnColumn]:
    """Draw a column of each row for each of the random `numbers`, without return."""
    below = weight.cumsum(-1)
    left = below[..., -1:]
    before = left
    own = 0 * left
    for number in numbers:
        target = number * left
        target = target + own * (target >= before)  # without the key that was drawn
        column = (below <= target).sum(-1, keepdim=True)
        column = column.clamp(max=weight.shape[-1] - 1)
        own = weight.gather(-1, column)
        before = below.gather(-1, column) - own
        left = left - own
        yield DrawnColumn(column, own)


def mean_by_bin(
    block: Block, values: Tensor, counts: Tensor, size: int = PER_BIN
) -> Tensor:
    """Means of `values` over the distances of bins of this `size`; other rows have 0."""
    visible = block.device_visibility
    distances = distances_of(block)
    reach = (visible.position - visible.first)[:, None, :, None]
    weight = (distances.bin_start * (distances.far <= reach)).float()
    weighted = (values * weight).unflatten(-1, (-1, size)).sum(-1)
    total = weight.unflatten(-1, (-1, size)).sum(-1)
    sees = counts[..., None] & (total > 0)
    result = block.q.new_zeros(*sees.shape, 2)
    result[..., 0] = (weighted / total).where(sees, 0)
    result[..., 1] = sees
    return result.flatten(-2).unflatten(1, block.q.shape[1:3])


@dataclass(frozen=True)
class Lead:
    """c_f - d_f of two keys of each row, and whether they exist and differ in content."""

    terms: Complex[Tensor, "batch head row term"]
    counts: Bool[Tensor, "batch head row"]


def lead_of_keys(block: Block, *, evenly: bool = False) -> Lead:
    first, second = drawn_keys(block, evenly=evenly)
    lead = first.terms - second.terms
    sizes = first.terms.norm(dim=-1) + second.terms.norm(dim=-1)
    differ = lead.norm(dim=-1) > 1e-5 * sizes
    return Lead(lead, first.exists & second.exists & differ)


def reverses(lead: Tensor, moved: Tensor) -> Tensor:
    """Whether D(t) D(0) < 0 with D(t) = Re sum_f (c_f - d_f) exp(i w_f t)."""
    moved = moved.to(lead)
    scores = lead.real @ moved.real - lead.imag @ moved.imag
    return scores * lead.real.sum(-1, keepdim=True) < 0


def reversal(block: Block, *, evenly: bool = False) -> Tensor:
    """Whether two keys change their order if both move away by the same distance."""
    lead = lead_of_keys(block, evenly=evenly)
    moved = waves(block, distances_of(block).far)
    return mean_by_bin(block, reverses(lead.terms, moved), lead.counts)


uniform_reversal = partial(reversal, evenly=True)


def locality(block: Block) -> Tensor:
    """Whether L(near) > L(far) for a key; 1/2 if both are equal."""
    key = next(drawn_keys(block))
    distances = distances_of(block)
    nearer = waves(block, distances.near) - waves(block, distances.far)
    lead = (key.terms @ nearer.to(key.terms)).real
    return mean_by_bin(block, 0.5 + 0.5 * lead.sign(), key.exists)


def position_sensitivity(block: Block) -> Tensor:
    """Mean over t of |L(t) - L(t - 1)| / sqrt(sum_f |c_f|^2) for a key."""
    key = next(drawn_keys(block))
    far = distances_of(block).far
    step = waves(block, far) - waves(block, far - 1)
    length = key.terms.norm(dim=-1)
    change = (key.terms @ step.to(key.terms)).real.abs() / length[..., None]
    return mean_by_bin(block, change, key.exists & (length > 0), size=len(far))
