"""Order and place if keys move away (Du et al. 2026, arXiv 2605.15514).

A key with c_f = s q~_if conj(k~_jf) has the score L(t) = Re sum_f c_f exp(i w_f t) at distance
t, before a soft-cap. The functions return two numbers of each bin of distances in turn: the
mean over the distances that a row sees, and 1. Both are 0 if the row does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

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
    parts = []
    for start in (2**n for n in range(bins)):
        random = np.random.default_rng(start)  # more bins do not change these
        low = start + np.arange(PER_BIN) * start // PER_BIN
        far = random.integers(low, low + max(1, start // PER_BIN))
        parts.append([random.integers(far), far, np.full(PER_BIN, start)])
    return np.concatenate(parts, axis=1)


def distances_of(block: Block) -> Int[Tensor, "3 distance"]:
    """`sampled_distances` up to the farthest key that a row of the call sees."""
    bins = max(1, block.sampled.visibility.farthest.bit_length())
    return block.self_column.new_tensor(sampled_distances(bins))


def waves(block: Block, distance: Int[Tensor, " distance"]) -> Tensor:
    """exp(i w_f t) [term, distance] at every distance t; by head if heads differ."""
    w = block.planes.term_inv_freq.to(distance.device).double()[..., None]
    return (1j * (w if w.ndim == 2 else w[block.query_heads]) * distance).exp()


def drawn_keys(
    block: Block, *, evenly: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield c_f [batch, head, row, term] of two keys of each row, and whether they exist.

    Keys other than sinks are drawn by the attention of the row, or evenly, without return.
    """
    order = block.sampled.rows.order
    assert order is not None
    others = block.q.new_ones(*block.q.shape[:3], 1, len(block.keys))
    others[..., block.sinks] = (block.sink_kind == 0).to(others)
    by_key = (
        block.device_visibility.sees()[:, None, None] if evenly else block.attention
    )
    weight = (others * by_key).double()
    below = weight.cumsum(-1)
    left = before = below[..., -1:]
    own, keys = (
        0 * left,
        block.k_still[:, :, None].expand(-1, -1, left.shape[2], -1, -1),
    )
    for numbers in order.unbind(1)[2 * evenly :][:2]:
        number = numbers.gather(1, block.position.expand(len(numbers), -1)).to(own)
        target = number[:, None, None, :, None] * left
        target = target + own * (target >= before)  # without the key that was drawn
        column = (below <= target).sum(-1, keepdim=True).clamp(max=len(block.keys) - 1)
        own = weight.gather(-1, column)
        before, left = below.gather(-1, column) - own, left - own
        still = keys.gather(3, column.expand(*column.shape[:-1], keys.shape[-1]))
        c = block.call.scale * block.planes.products(block.q_still, still)
        yield c.flatten(1, 2), own[..., 0].flatten(1, 2) > 0


def mean_by_bin(
    block: Block, values: Tensor, counts: Tensor, size: int = PER_BIN
) -> Tensor:
    """Means of `values` over the distances of bins of this `size`; other rows have 0."""
    visible, (_, far, start) = block.device_visibility, distances_of(block)
    weight = (
        start * (far <= (visible.position - visible.first)[:, None, :, None])
    ).float()
    part, whole = (
        x.unflatten(-1, (-1, size)).sum(-1) for x in (values * weight, weight)
    )
    sees = counts[..., None] & (whole > 0)
    result = block.q.new_zeros(*sees.shape, 2)
    result[..., 0], result[..., 1] = (part / whole).where(sees, 0), sees
    return result.flatten(-2).unflatten(1, block.q.shape[1:3])


def leads(block: Block, *, evenly: bool = False) -> tuple[Tensor, Tensor]:
    """c_f - d_f of two keys of each row, and whether the keys exist and differ in content."""
    (c, first), (d, second) = drawn_keys(block, evenly=evenly)
    lead = c - d
    differ = lead.norm(dim=-1) > 1e-5 * (c.norm(dim=-1) + d.norm(dim=-1))
    return lead, first & second & differ


def reverses(lead: Tensor, moved: Tensor) -> Tensor:
    """Whether D(t) D(0) < 0 with D(t) = Re sum_f (c_f - d_f) exp(i w_f t)."""
    moved = moved.to(lead)
    scores = lead.real @ moved.real - lead.imag @ moved.imag
    return scores * lead.real.sum(-1, keepdim=True) < 0


def reversal(block: Block, *, evenly: bool = False) -> Tensor:
    """Whether two keys change their order if both move away by the same distance."""
    lead, counts = leads(block, evenly=evenly)
    return mean_by_bin(
        block, reverses(lead, waves(block, distances_of(block)[1])), counts
    )


uniform_reversal = partial(reversal, evenly=True)


def locality(block: Block) -> Tensor:
    """Whether L(near) > L(far) for a key; 1/2 if both are equal."""
    (c, exists), (near, far, _) = next(drawn_keys(block)), distances_of(block)
    lead = (c @ (waves(block, near) - waves(block, far)).to(c)).real
    return mean_by_bin(block, 0.5 + 0.5 * lead.sign(), exists)


def position_sensitivity(block: Block) -> Tensor:
    """Mean over t of |L(t) - L(t - 1)| / sqrt(sum_f |c_f|^2) for a key."""
    (c, exists), (_, far, _) = next(drawn_keys(block)), distances_of(block)
    step, length = waves(block, far) - waves(block, far - 1), c.norm(dim=-1)
    change = (c @ step.to(c)).real.abs() / length[..., None]
    return mean_by_bin(block, change, exists & (length > 0), len(far))
