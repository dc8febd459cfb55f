"""One pass over the attention of one layer: every statistic, summed over tokens and rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes
from ropelens.statistics.block import Block, RowsOfCall, Vectors
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.memory import sum_by_offset
from ropelens.statistics.rows import Rows
from ropelens.statistics.schema import Statistic

SequenceSums = dict[str, Float[Tensor, "batch _ ..."]]
"""Sums over the tokens or rows of each sequence, by the names of the statistics, in float64."""


def sum_attention(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    *,
    tokens: Int[Tensor, "batch position"],
    statistics: Sequence[Statistic],
) -> SequenceSums:
    """The sums of one attention call over its tokens and `rows`.

    Rows beyond a sequence's length have no weight, so padding is never counted. Raises
    `BadArgument` for a statistic whose values are not of every row of a block.
    """
    vectors = Vectors.of(call, planes, tokens)
    position = torch.arange(call.key.shape[2])
    padding = (position >= rows.length[:, None]).to(call.key.device)
    by_token = [statistic for statistic in statistics if statistic.over == "tokens"]
    by_row = [statistic for statistic in statistics if statistic.over != "tokens"]
    sums = {row.name: _sum_tokens(row.of(vectors), padding) for row in by_token}
    if by_row:
        of_call = RowsOfCall(vectors, rows)
        for block in of_call.blocks():
            _add_block(of_call, block, by_row, sums)
    return sums


def _sum_tokens(
    values: Float[Tensor, "batch head position value"], padding: Bool[Tensor, "batch position"]
) -> Float[Tensor, "batch head value"]:
    """Sum over the tokens of each sequence."""
    if padding.any():
        values = values.masked_fill(padding[:, None, :, None], 0)
    return values.sum(2).to("cpu", torch.float64)


def _add_block(
    of_call: RowsOfCall, block: Block, statistics: Sequence[Statistic], sums: SequenceSums
) -> None:
    """Add the rows of a block, weighted, to the sums of its query heads."""
    single: dict[str, Tensor] = {}
    row_weight = block.weight[:, None, None, None]
    for statistic in statistics:
        name, values = statistic.name, _checked(statistic, block)
        if statistic.over == "offsets":
            part = sum_by_offset(values, block.own, block.weight, dense=of_call.dense)
            _add(sums, name, block, part, sizes=(of_call.context,))
        elif values.ndim == 4:
            single[name] = values
        else:
            part = (row_weight @ values)[..., 0, :]
            if statistic.dims[-1] == "coordinate":
                part = block.call.scale * part
            _add(sums, name, block, part, sizes=part.shape[3:])
    if single:  # one product for all
        parts = (row_weight @ torch.stack(list(single.values()), dim=-1))[..., 0, :]
        for name, part in zip(single, parts.unbind(-1), strict=True):
            _add(sums, name, block, part, sizes=())


def _checked(statistic: Statistic, block: Block) -> Tensor:
    """The values of a statistic on a block, which must be there for every row."""
    values = statistic.of(block)
    rows, matrix = block.q.shape[:4], (*block.q.shape[:4], len(block.keys))
    wanted = matrix if statistic.over == "offsets" else rows
    if values.shape[: len(wanted)] != wanted or values.ndim > 5:
        raise BadArgument(
            f"The statistic {statistic.name!r} has no value for every row.",
            seen=f"shape {tuple(values.shape)}; a block has {tuple(wanted)}",
            attempt="values [batch, kv_head, group, row], over offsets [..., row, key]",
        )
    return values


def _add(
    sums: SequenceSums,
    name: str,
    block: Block,
    part: Float[Tensor, "batch kv_head group *part"],
    *,
    sizes: tuple[int, ...],
) -> None:
    """Add a block's sums to those of its query heads; fewer offsets are the first ones."""
    part = part.flatten(1, 2).to("cpu", torch.float64)
    batch, heads = block.call.query.shape[:2]
    if name not in sums:
        sums[name] = part.new_zeros(batch, heads, *sizes)
    total = sums[name][:, block.query_heads]
    total[tuple(slice(size) for size in part.shape)] += part
