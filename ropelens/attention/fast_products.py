"""Tricks that keep blocks of scores in fast memory: plain products take twice as long."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores of a block; on a CPU a block should stay in its caches."""

BLOCK_ROWS = {"cpu": 128, "cuda": 1024}
"""Most rows of a block: the keys of its last row are computed for all its rows."""

FEWEST_ROWS = 16  # rows of a block even where scores do not fit: products of fewer are slow
HIDDEN = -1e30  # score of a key that a row does not see: weight exactly 0, product finite
STRETCH = 64  # positions that a running sum takes by one product


def products(
    q: Float[Tensor, "batch kv_head group row coordinate"],
    k: Float[Tensor, "batch kv_head key coordinate"],
    *,
    out: Float[Tensor, "batch kv_head group row key"],
    add: bool = False,
) -> Float[Tensor, "batch kv_head group row key"]:
    """q k of every row and key, or `out` + q k: one product for all the heads of a kv head."""
    batch, kv_heads, group, rows, _ = q.shape
    flat = out.view(batch * kv_heads, group * rows, -1)
    q, k = q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1)
    torch.baddbmm(flat, q, k.mT, beta=int(add), out=flat)
    return out


def softmax(
    scores: Float[Tensor, "*batch key"], *, out: Float[Tensor, "*batch key"] | None = None
) -> tuple[Float[Tensor, "*batch key"], Float[Tensor, "*batch"]]:
    """Softmax of each row and log sum_j exp(score_j), in the memory of `out` or of the scores.

    A row's largest weight is at least 1 / keys, so its logarithm is exact.
    """
    largest = scores.amax(-1)
    weights = torch.softmax(scores, -1, out=scores if out is None else out)
    return weights, largest - weights.amax(-1).log()


def take_rows(
    x: Shaped[Tensor, "batch head position value"], at: Int[Tensor, "shared row"]
) -> Shaped[Tensor, "batch head row value"]:
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
    row_weight: Float[Tensor, "batch row"],
    offset: Int[Tensor, "shared row key"] | None,
) -> Float[Tensor, "batch kv_head group offset"]:
    """Weighted sum of `values` at each offset, without the first key, which is set to 0.

    `offset` is that of each key; None where rows follow each other: then offsets are diagonals.
    Row i of r has its own key in column S - r + i. With one more element of stride a row, a
    diagonal becomes a column, and their sums one vector-matrix product without a copy. What
    such a column reads from the end of the row above lies behind that row's own key, where
    values are zero; the first row, which has no row above, is added by itself.
    """
    values = values.contiguous()
    values[..., 0] = 0
    if offset is not None:
        # The key at an offset is in the column that has the key's offset; where a row has no
        # such key, that column has no weight.
        index = offset[:, None, None].expand_as(values)
        return (row_weight[:, None, None, None] @ values.gather(-1, index))[..., 0, :]
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
