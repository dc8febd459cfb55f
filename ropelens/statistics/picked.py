"""The keys that heads pick, scored at other distances and under other rotations.

Of every row the key with the largest attention is looked at, position 0 and the row's own
key aside: the sink and a token's match with itself are no choice among what was read. From
q~ and k~, queries and keys with their rotation removed, its score follows at any distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from ropelens.rope.horizon import moved_scores
from ropelens.rope.planes import Planes, unrotate
from ropelens.rope.turn import Side, turn
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows

BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Scores held at once."""

TIE = 4.0
"""A lead below this many roundings of the score's terms is a tie, for copies of a token tie.

Seen between equal tokens of a layer 0: up to 2.3.
"""


@dataclass(frozen=True)
class Rotation:
    """A way for a layer to rotate: what becomes of its queries and keys, one row for all heads.

    `inv_freq` (rad/token) and `gain` (of a score) are those of each term; the rest that RoPE
    leaves alone has 0 and 1.
    """

    side: Side
    inv_freq: Float[Tensor, " term"]
    gain: Float[Tensor, " term"]

    @classmethod
    def of(cls, side: Side, planes: Planes) -> Rotation:
        """From what becomes of queries and, alike, of keys."""
        rest = torch.zeros(planes.terms - len(planes.inv_freq), dtype=torch.float64)
        return cls(
            side,
            inv_freq=torch.cat([side.inv_freq[0].double(), rest]),
            gain=torch.cat([side.gain[0].double() ** 2, rest + 1]),
        )


@dataclass(frozen=True)
class PickedSums:
    """Sums over the rows of each group of sequences, weighted; scores in nats.

    `product` is s q~ conj(k~) of the picked key by term, `distance` how many tokens back it
    stands. Of the other keys, at their own places under each rotation: `level` their mean
    score, `best` the largest. `wins` counts, over all groups, the rows in which the picked
    key, moved to a distance, scores above `best`; `kept` those in which it does so where it
    stands. A tie is no win. `weight` counts the rows.
    """

    weight: Float[Tensor, " group"]
    distance: Float[Tensor, "group head"]
    product: Complex[Tensor, "group head term"]
    level: Float[Tensor, "group head rotation"]
    best: Float[Tensor, "group head rotation"]
    wins: Float[Tensor, "head rotation distance"]
    kept: Float[Tensor, "head rotation"]

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

    Rows with fewer than two keys to choose from are left out. A soft-cap changes no order of
    scores, so it is left off: scores are those before it. `group` deals the sequences of the
    batch to `groups` groups.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    kv_heads = heads // (call.query.shape[1] // call.key.shape[1])
    q = call.query[:, heads.to(call.query.device)].to(dtype) * call.scale
    k = call.key[:, kv_heads.to(call.key.device)].to(dtype)
    at = torch.arange(q.shape[2], device=q.device)
    both = [(_turned(q, at, planes, r.side), _turned(k, at, planes, r.side)) for r in rotations]
    still = unrotate(q, at, planes), unrotate(k, at, planes)
    rounding = TIE * max(torch.finfo(x).eps for x in (call.query.dtype, torch.float32))
    total: PickedSums | None = None
    for block in _blocks(rows, q):
        picked, others = _pick(q, k, block, call.start)
        product = _products(*still, block.position, picked, planes)
        terms = [product * rotation.gain.to(product.device) for rotation in rotations]
        ties = [rounding * term.abs().sum(-1) for term in terms]
        rivals = [_rivals(*pair, block.position, picked, others) for pair in both]
        wins = [
            _wins(term, rival, tie, rotation.inv_freq, distances)
            for term, rival, tie, rotation in zip(terms, rivals, ties, rotations, strict=True)
        ]
        kept = [rival.own > rival.best + tie for rival, tie in zip(rivals, ties, strict=True)]
        part = _sum_rows(product, picked, others, rivals, wins, kept, block)
        by_group = _by_group(part, group, groups)
        total = by_group if total is None else total + by_group
    assert total is not None, "a batch has rows"
    return total


def _turned(
    x: Float[Tensor, "batch head position coordinate"],
    at: Int[Tensor, " position"],
    planes: Planes,
    side: Side,
) -> Float[Tensor, "batch head position coordinate"]:
    """Queries or keys as another rotation has them; as they are where it changes nothing."""
    return x if side.leaves(planes) else turn(x, at[None], planes, side)


def _blocks(rows: Rows, q: Float[Tensor, "batch head position coordinate"]) -> Iterator[Rows]:
    """The rows in parts whose scores fill about one block."""
    per_row = q.shape[0] * q.shape[1] * q.shape[2]
    size = max(1, BLOCK_ELEMENTS[q.device.type] // per_row)
    for begin in range(0, rows.position.shape[1], size):
        part = slice(begin, begin + size)
        yield Rows(rows.position[:, part], rows.weight[:, part], rows.length, dense=False)


def _gather(
    x: Float[Tensor, "batch head position coordinate"], at: Int[Tensor, "batch _ row"]
) -> Float[Tensor, "batch head row coordinate"]:
    """`x` at some positions of every sequence, which may differ from head to head."""
    index = at.to(x.device)[..., None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


def _pick(
    q: Float[Tensor, "batch head position coordinate"],
    k: Float[Tensor, "batch head position coordinate"],
    rows: Rows,
    start: Int[Tensor, " position"],
) -> tuple[Int[Tensor, "batch head row"], Bool[Tensor, "batch head row position"]]:
    """The picked key of every row, and which keys are the others that it could have picked."""
    position = rows.position.to(q.device)
    first = start.to(q.device)[position].clamp(min=1)
    key = torch.arange(k.shape[2], device=q.device)
    choice = ((key >= first[..., None]) & (key < position[..., None]))[:, None]
    scores = _gather(q, position[:, None]) @ k.mT
    picked = scores.masked_fill(~choice, -torch.inf).argmax(-1)
    return picked, choice & (key != picked[..., None])


def _products(
    q: Float[Tensor, "batch head position coordinate"],
    k: Float[Tensor, "batch head position coordinate"],
    position: Int[Tensor, "batch row"],
    picked: Int[Tensor, "batch head row"],
    planes: Planes,
) -> Complex[Tensor, "batch head row term"]:
    """q~ conj(k~) of every row and its picked key, by term; scaled as `q` is."""
    query, key = _gather(q, position[:, None]).double(), _gather(k, picked).double()
    real = planes.sum_coordinates(query * key)
    imaginary = torch.zeros_like(real)
    turned = query[..., planes.second] * key[..., planes.first]
    turned -= query[..., planes.first] * key[..., planes.second]
    imaginary[..., : turned.shape[-1]] = turned
    return torch.complex(real, imaginary)


@dataclass(frozen=True)
class _Rivals:
    """Of every row: mean and best score of the other keys (0 without any), and the picked's."""

    level: Float[Tensor, "batch head row"]
    best: Float[Tensor, "batch head row"]
    own: Float[Tensor, "batch head row"]


def _rivals(
    q: Float[Tensor, "batch head position coordinate"],
    k: Float[Tensor, "batch head position coordinate"],
    position: Int[Tensor, "batch row"],
    picked: Int[Tensor, "batch head row"],
    others: Bool[Tensor, "batch head row position"],
) -> _Rivals:
    """The scores that the picked key is held against, every key at its own place."""
    scores = _gather(q, position[:, None]) @ k.mT
    count = others.sum(-1)
    level = scores.masked_fill(~others, 0).sum(-1, dtype=torch.float64) / count.clamp(min=1)
    best = scores.masked_fill(~others, -torch.inf).amax(-1).double()
    own = scores.gather(-1, picked[..., None])[..., 0].double()
    return _Rivals(level, best.masked_fill(count == 0, 0), own)


def _wins(
    product: Complex[Tensor, "batch head row term"],
    rivals: _Rivals,
    tie: Float[Tensor, "batch head row"],
    inv_freq: Float[Tensor, " term"],
    distances: Float[Tensor, " distance"],
) -> Bool[Tensor, "batch head row distance"]:
    """Whether each row's picked key, moved to each distance, scores above all others."""
    at = distances.to(product.device)
    moved = moved_scores(product, inv_freq.to(product.device), at)
    return moved > (rivals.best + tie)[..., None]


def _sum_rows(
    product: Complex[Tensor, "batch head row term"],
    picked: Int[Tensor, "batch head row"],
    others: Bool[Tensor, "batch head row position"],
    rivals: list[_Rivals],
    wins: list[Bool[Tensor, "batch head row distance"]],
    kept: list[Bool[Tensor, "batch head row"]],
    rows: Rows,
) -> PickedSums:
    """The weighted sums over rows, each sequence a group of its own."""
    position = rows.position.to(picked.device)
    weight = rows.weight.to(picked.device, torch.float64) * others[:, 0].any(-1)

    def total(x: Tensor) -> Tensor:
        return (x * weight[:, None].to(x.dtype)).sum(2)

    return PickedSums(
        weight=weight.sum(1),
        distance=total((position[:, None] - picked).double()),
        product=(product * weight[:, None, :, None]).sum(2),
        level=torch.stack([total(rival.level) for rival in rivals], dim=-1),
        best=torch.stack([total(rival.best) for rival in rivals], dim=-1),
        wins=torch.stack([(won * weight[:, None, :, None]).sum((0, 2)) for won in wins], dim=1),
        kept=torch.stack([total(stays.double()).sum(0) for stays in kept], dim=-1),
    )


def _by_group(sums: PickedSums, group: Int[Tensor, " batch"], groups: int) -> PickedSums:
    """Sums of sequences added up to sums of groups, on the CPU."""

    def deal(x: Tensor) -> Tensor:
        return torch.zeros(groups, *x.shape[1:], dtype=x.dtype).index_add_(0, group, x.cpu())

    return PickedSums(
        weight=deal(sums.weight),
        distance=deal(sums.distance),
        product=deal(sums.product),
        level=deal(sums.level),
        best=deal(sums.best),
        wins=sums.wins.cpu(),
        kept=sums.kept.cpu(),
    )
