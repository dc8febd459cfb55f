"""Tricks that keep blocks of scores in memory that is fast.

The formulas of block.py and attention.py would read the same with plain products, and take
twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.statistics.call import sees

BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores of a block; on a CPU a block should stay in its caches."""

BLOCK_ROWS = {"cpu": 128, "cuda": 1024}
"""Most rows of a block: the keys of its last row are computed for all its rows."""

FEWEST_ROWS = 16
"""Rows of a block even where their scores do not fit: products of fewer are slow."""

HIDDEN = -1e30
"""Score of a key that the row does not see: its weight is exactly 0, its product finite."""

STRETCH = 64
"""Positions that a running sum takes by one product."""


def row_blocks(
    position: Int[Tensor, "shared row"], *, area: int, most: int
) -> Iterator[tuple[slice, int]]:
    """Ranges of rows in order, and the keys up to their last row.

    A range has at most `area` scores a head and `most` rows, but 16 rows where there are so
    many.
    """
    keys = position.amax(0) + 1
    begin, count = 0, position.shape[1]
    while begin < count:
        rows = min(most, count - begin)
        while rows > FEWEST_ROWS and rows * int(keys[begin : begin + rows].max()) > area:
            rows = (rows + 1) // 2
        yield slice(begin, begin + rows), int(keys[begin : begin + rows].max())
        begin += rows


class Scratch:
    """Memory that every block uses again: fresh pages cost more than the products.

    A block asks for each name once, so none of its tensors is overwritten while it lives.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape in the memory of this name; its former content is lost."""
        size = math.prod(shape)
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = self._like.new_empty(size)
        return self._memory[name][:size].view(shape)


def products(
    q: Float[Tensor, "batch kv_head group row coordinate"],
    k: Float[Tensor, "batch kv_head key coordinate"],
    *,
    out: Float[Tensor, "batch kv_head group row key"] | None = None,
) -> Float[Tensor, "batch kv_head group row key"]:
    """q k of every row and key: one product serves all the heads of a kv head."""
    batch, kv_heads, group, rows, _ = q.shape
    out = q.new_empty(*q.shape[:4], k.shape[2]) if out is None else out
    flat = out.view(batch * kv_heads, group * rows, -1)
    torch.bmm(q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).mT, out=flat)
    return out


def hide_unseen(
    scores: Float[Tensor, "batch kv_head group row key"],
    first: Int[Tensor, "shared row"],
    last: Int[Tensor, "shared row"],
    keys: range,
) -> Float[Tensor, "batch kv_head group row key"]:
    """`scores`, changed in place: `HIDDEN` beyond the keys from `first` to `last` of each row.

    Only the columns that some row does not see are touched.
    """
    for begin, end in (
        (keys.start, int(first.max())),
        (int(last.min()) + 1, keys.stop),
    ):
        if begin < end:
            seen = sees(first, last, torch.arange(begin, end))
            penalty = torch.where(seen, 0.0, HIDDEN)[:, None, None].to(scores.device)
            scores[..., begin - keys.start : end - keys.start] += penalty
    return scores


def pick(
    x: Float[Tensor, "batch head position coordinate"], at: Int[Tensor, "shared row"]
) -> Float[Tensor, "batch head row coordinate"]:
    """`x` at the positions `at` of each sequence, or of all of them."""
    at = at.to(x.device)
    if len(at) == 1:
        return x.index_select(2, at[0])
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def running_sum(
    x: Float[Tensor, "batch head position value"],
) -> Float[Tensor, "batch head position value"]:
    """The sum up to each position: within stretches a product, which is faster than cumsum."""
    count = x.shape[2]
    parts = pad(x, (0, 0, 0, -count % STRETCH)).unflatten(2, (-1, STRETCH))
    within = x.new_ones(STRETCH, STRETCH).tril() @ parts
    before = pad(within[..., -1, :].cumsum(2), (0, 0, 1, -1))
    return (within + before[..., None, :]).flatten(2, 3)[:, :, :count]


def sum_by_offset(
    values: Float[Tensor, "batch kv_head group row key"],
    own: Int[Tensor, "shared row"],
    row_weight: Float[Tensor, "batch row"],
    *,
    dense: bool,
) -> Float[Tensor, "batch kv_head group offset"]:
    """Weighted sum of `values` at each offset, without the first key, which is set to 0.

    `own` is the column of each row's own key; values behind it are 0. `dense` rows follow each
    other.
    """
    values = values.contiguous()
    values[..., 0] = 0
    if dense:
        return _sum_diagonals(values, own, row_weight)
    by_row = _sum_shifted if values.device.type == "cpu" else _sum_gathered
    return by_row(values, own, row_weight)


def _sum_diagonals(
    values: Float[Tensor, "batch kv_head group row key"],
    own: Int[Tensor, "1 row"],
    row_weight: Float[Tensor, "batch row"],
) -> Float[Tensor, "batch kv_head group offset"]:
    """Sums along each diagonal, for rows that follow each other.

    Row i of r has its own key in column S - r + i. With one more element of stride a row, a
    diagonal becomes a column, and their sums one vector-matrix product without a copy. What
    such a column reads from the end of the row above lies behind that row's own key, where
    values are zero; the first row, which has no row above, is added by itself.
    """
    heads, (rows, keys) = values.shape[:3], values.shape[3:]
    by_head = row_weight[:, None, None].expand(*heads, rows).reshape(-1, 1, rows)
    flat = values.view(-1, rows, keys)
    skewed = flat.as_strided(
        (len(flat), rows - 1, keys),
        (rows * keys, keys + 1, 1),
        values.storage_offset() + keys + 1 - (rows - 1),
    )
    sums = (by_head[..., 1:] @ skewed)[:, 0]
    sums[:, rows - 1 :] += by_head[:, 0, :1] * flat[:, 0, : keys - rows + 1]
    return sums.flip(-1).view(*heads, keys)


def _sum_shifted(
    values: Float[Tensor, "batch kv_head group row key"],
    own: Int[Tensor, "shared row"],
    row_weight: Float[Tensor, "batch row"],
) -> Float[Tensor, "batch kv_head group offset"]:
    """Sums at each offset, for rows anywhere: each is added so that its own key comes last."""
    last = values.shape[-1] - 1
    sums = torch.zeros_like(values[..., 0, :])
    sequences = zip(sums.flatten(1, 2), values.flatten(1, 2), strict=True)
    places = own.expand(len(values), -1).tolist(), row_weight.tolist()
    for (total, by_row), of_rows, weights in zip(sequences, *places, strict=True):
        for row, (at, weight) in enumerate(zip(of_rows, weights, strict=True)):
            total[:, last - at :].add_(by_row[:, row, : at + 1], alpha=weight)
    return sums.flip(-1)


def _sum_gathered(
    values: Float[Tensor, "batch kv_head group row key"],
    own: Int[Tensor, "batch row"],
    row_weight: Float[Tensor, "batch row"],
) -> Float[Tensor, "batch kv_head group offset"]:
    """The same on a GPU, for which one row is too little work.

    Offsets beyond the keys of a row read the first key, whose value is 0.
    """
    at = own[..., None] - torch.arange(values.shape[-1], device=values.device)
    index = at.clamp(min=0)[:, None, None].expand_as(values)
    return (row_weight[:, None, None, None] @ values.gather(-1, index))[..., 0, :]
