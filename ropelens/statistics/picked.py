"""The keys that heads pick, scored at other distances and under other rotations.

The picked key of a row is the one with the largest attention, position 0 and the row's own
key left out: neither a sink nor a token's match with itself is a choice among other tokens.
From q~ and k~, queries and keys with their rotation taken off, its score follows at any
distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor

from ropelens.rope.planes import Planes, plane_products
from ropelens.rope.turn import Side, moved_scores, turn
from ropelens.statistics.block import Block, CallRows
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows

TIE = 4.0
"""A lead below this many roundings of the score's terms is a tie: copies of a token tie.

Between equal tokens of a layer 0, up to 2.3 were measured.
"""


@dataclass(frozen=True)
class Rotation:
    """A way for a layer to rotate: how its queries and keys change, one row for all heads.

    `inv_freq` (rad/token) and `gain` (of a score) are those of each term; the rest, which RoPE
    leaves alone, has 0 and 1.
    """

    side: Side
    inv_freq: Float[Tensor, " term"]
    gain: Float[Tensor, " term"]

    @classmethod
    def of(cls, side: Side, planes: Planes) -> Rotation:
        """The rotation under which queries and keys both change as `side` says."""
        rest = torch.zeros(planes.terms - len(planes.inv_freq), dtype=torch.float64)
        return cls(
            side,
            inv_freq=torch.cat([side.inv_freq[0].double(), rest]),
            gain=torch.cat([side.gain[0].double() ** 2, rest + 1]),
        )


@dataclass(frozen=True)
class PickedSums:
    """Weighted sums over the rows of each sequence, or group of sequences; scores in nats.

    `product` is s q~ conj(k~) of the picked key by term, `distance` how many tokens back it
    stands. `level` is the mean score of the other keys, at their own places under each
    rotation. `wins` counts the rows in which the picked key scores above all of them when moved
    to a distance, `kept` those in which it does so at its own place. A tie is no win. `weight`
    counts the rows, of `rows` with two keys to choose from.
    """

    rows: Float[Tensor, " group"]
    weight: Float[Tensor, "group head"]
    distance: Float[Tensor, "group head"]
    product: Complex[Tensor, "group head term"]
    level: Float[Tensor, "group head rotation"]
    wins: Float[Tensor, "group head rotation distance"]
    kept: Float[Tensor, "group head rotation"]

    def __add__(self, other: PickedSums) -> PickedSums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return PickedSums(*(a + b for a, b in pairs))


def sum_picked(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    *,
    heads: Int[Tensor, " head"],
    rotations: list[Rotation],
    distances: Float[Tensor, " distance"],
    group: Int[Tensor, " batch"],
    groups: int,
) -> PickedSums:
    """The sums of one attention call over `rows`, for some heads, in float64.

    Rows with fewer than two keys to choose from, or in which the first key scores above the
    picked one, are left out. Scores are those before a
    soft-cap, which changes no order. `group` is the group, of `groups`, of each sequence.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    rounding = TIE * max(torch.finfo(x).eps for x in (call.query.dtype, torch.float32))
    own = call.of_heads(heads)
    query, key = own.query.to(dtype) * call.scale, own.key.to(dtype)
    calls = [replace(own, query=query, key=key, scale=1.0, softcap=None)]
    at = torch.arange(key.shape[2], device=key.device)[None]
    for rotation in rotations:
        new_query, new_key = (turn(x, at, planes, rotation.side) for x in (query, key))
        calls.append(replace(calls[0], query=new_query, key=new_key))
    blocks = (CallRows(each, rows, planes).blocks(slice(0, len(heads))) for each in calls)
    parts = (
        _sum_block(*each, rotations=rotations, distances=distances, rounding=rounding)
        for each in zip(*blocks, strict=True)
    )
    of_sequences = reduce(add, parts)
    sums = (x.cpu() for x in vars(of_sequences).values())
    return PickedSums(
        *(x.new_zeros(groups, *x.shape[1:]).index_add_(0, group, x) for x in sums)
    )


def _sum_block(
    own: Block,
    *turned: Block,
    rotations: list[Rotation],
    distances: Float[Tensor, " distance"],
    rounding: float,
) -> PickedSums:
    """The sums over some rows of each sequence: the model's block, and each rotation's."""
    device = own.k.device
    column = torch.arange(len(own.keys), device=device)
    choice = own.seen & (column < own.own[..., None]) & (column + own.keys.start > 0)
    choice = choice[:, None]
    picked = own.scores[:, :, 0].masked_fill(~choice, -torch.inf).argmax(-1)
    others = choice & (column != picked[..., None])
    query, count = own.q_still[:, :, 0].double(), others.sum(-1)
    key = own.k_still.gather(2, picked[..., None].expand(query.shape)).double()
    product = plane_products(query, key, own.planes)  # s q~ conj(k~), s in q
    picks = own.scores[:, :, 0].gather(-1, picked[..., None])[..., 0]
    acts = others.any(-1)
    if own.keys.start == 0:  # rows that would rather have the first key pick none
        acts = acts & ~(own.seen[:, None, :, 0] & (own.scores[:, :, 0, :, 0] > picks))
    weight = own.weight.double()[:, None] * acts

    def total(x: Shaped[Tensor, "batch head row *value"]) -> Tensor:
        return torch.einsum("bhr,bhr...->bh...", weight.to(x.dtype), x)

    levels, wins, kept = [], [], []
    for block, rotation in zip(turned, rotations, strict=True):
        scores = block.scores[:, :, 0]
        mean = scores.masked_fill(~others, 0).sum(-1, dtype=torch.float64) / count.clamp(min=1)
        largest = scores.masked_fill(~others, -torch.inf).amax(-1).double()
        largest = largest.masked_fill(count == 0, 0)
        term = product * rotation.gain.to(device)
        to_beat = largest + rounding * term.abs().sum(-1)
        moved = moved_scores(term, rotation.inv_freq.to(device), distances.to(device))
        unmoved = scores.gather(-1, picked[..., None])[..., 0]
        levels.append(total(mean))
        wins.append(total((moved > to_beat[..., None]).double()))
        kept.append(total((unmoved > to_beat).double()))
    return PickedSums(
        rows=(own.weight.double() * others[:, 0].any(-1)).sum(1),
        weight=weight.sum(-1),
        distance=total((own.own[:, None] - picked).double()),
        product=total(product),
        level=torch.stack(levels, dim=-1),
        wins=torch.stack(wins, dim=2),
        kept=torch.stack(kept, dim=-1),
    )
