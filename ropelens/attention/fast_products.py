"""Products that keep blocks of scores in fast memory; plain products take twice the time."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.caches import on_device

BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Number of scores of a block. On a CPU, a block should fit into the caches."""

BLOCK_ROWS = {"cpu": 128, "cuda": 1024}
"""Largest number of rows of a block, which computes the keys of the last row for all rows."""

SPARSE_BLOCKS = {"cpu": 8, "cuda": 2}
"""Number of blocks of sampled rows: half of a block with all rows would be hidden."""

FEWEST_ROWS = 16  # least number of rows of a block: products of fewer rows are slow

HIDDEN = -1e30
"""Score of a key that a row does not see: the weight is 0, and products are finite."""

STRETCH = 64  # positions that a running sum adds by one product


def products(
    q: Float[Tensor, "batch kv_head group row coordinate"],
    k: Float[Tensor, "batch kv_head key coordinate"],
    *,
    out: Float[Tensor, "batch kv_head group row key"],
    add: bool = False,
    scale: float = 1.0,
) -> Float[Tensor, "batch kv_head group row key"]:
    """Query-key products of all query heads of a key-value head, or `out` plus the products."""
    batch, kv_heads, group, rows, _ = q.shape
    products_of_heads = out.view(batch * kv_heads, group * rows, -1)
    torch.baddbmm(
        products_of_heads,
        q.flatten(2, 3).flatten(0, 1),
        k.flatten(0, 1).mT,
        beta=int(add),
        alpha=scale,
        out=products_of_heads,
    )
    return out


@dataclass(frozen=True)
class Softmax:
    """The softmax of scores, and log sum_j exp(score_j)."""

    weights: Float[Tensor, "*batch key"]
    log_norm: Float[Tensor, "*batch"]


def softmax(
    scores: Float[Tensor, "*batch key"],
    *,
    out: Float[Tensor, "*batch key"] | None = None,
) -> Softmax:
    """The softmax in `out`, by default in `scores`.

    log sum_j exp(score_j) is exact, because the largest weight is at least 1 / keys.
    """
    largest = scores.amax(-1)
    weights = torch.softmax(scores, -1, out=scores if out is None else out)
    return Softmax(weights, log_norm=largest - weights.amax(-1).log())


def take_rows(
    x: Shaped[Tensor, "batch head position value"], index: Int[Tensor, "shared row"]
) -> Shaped[Tensor, "batch head row value"]:
    """Rows of `x` by their indices, which all sequences share or each sequence has."""
    index = on_device(index, x.device)
    if len(index) == 1:
        return x.index_select(2, index[0])
    by_head = index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, by_head)


def running_sum(
    x: Float[Tensor, "batch head position value"],
) -> Float[Tensor, "batch head position value"]:
    """Sum up to each position, by products within stretches, which are faster than cumsum."""
    count = x.shape[2]
    padded = pad(x, (0, 0, 0, -count % STRETCH))
    stretches = padded.unflatten(2, (-1, STRETCH))
    within = x.new_ones(STRETCH, STRETCH).tril() @ stretches
    before = pad(within[..., -1, :].cumsum(2), (0, 0, 1, -1))
    sums = within + before[..., None, :]
    return sums.flatten(2, 3)[:, :, :count]


def windows(
    x: Float[Tensor, "*shape"],
    begin: Int[Tensor, " row"],
    *,
    out: Float[Tensor, "*rows key"],
) -> Float[Tensor, "*rows key"]:
    """Consecutive elements of `x` in memory, for each row from its element `begin`."""
    count = out.shape[-1]
    flat = x.contiguous().view(-1).unfold(0, count, 1)
    torch.index_select(flat, 0, begin, out=out.view(-1, count))
    return out


def sum_diagonals(
    values: Float[Tensor, "batch kv_head group row key"],
    row_weight: Float[Tensor, "batch row"],
) -> Float[Tensor, "batch kv_head group offset"]:
    """Weighted sum of contiguous `values` at each offset, for rows that are consecutive.

    Row i of r rows has its own key in column S - r + i. If the stride of a row is one element
    larger, a diagonal becomes a column, and one vector-matrix product sums all columns without
    a copy. Such a column also reads the end of the row above, which has only zeros after its
    own key. The first row has no row above and is added separately.
    """
    heads = values.shape[:3]
    rows, keys = values.shape[3:]
    weight = row_weight[:, None, None].expand(*heads, rows).reshape(-1, 1, rows)
    by_head = values.view(-1, rows, keys)
    skewed = by_head.as_strided(
        size=(len(by_head), rows - 1, keys),
        stride=(rows * keys, keys + 1, 1),
        storage_offset=values.storage_offset() + keys + 1 - (rows - 1),
    )
    sums = (weight[..., 1:] @ skewed)[:, 0]
    sums[:, rows - 1 :] += weight[:, 0, :1] * by_head[:, 0, : keys - rows + 1]
    return sums.flip(-1).view(*heads, keys)
