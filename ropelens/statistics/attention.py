"""One pass over the attention of one layer: every statistic, summed over tokens and rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes
from ropelens.statistics.block import Block, CallRows
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows
from ropelens.statistics.variables import Statistic

SequenceSums = dict[str, Float[Tensor, "batch _ ..."]]
"""Sums over the tokens or rows of each sequence, by the names of the statistics, in float64."""


def sum_attention(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    *,
    tokens: Int[Tensor, "batch position"],
    sinks: Int[Tensor, "batch shared position"] | None = None,
    statistics: Sequence[Statistic],
    first: int = 0,
) -> SequenceSums:
    """The sums of one attention call over its tokens and `rows`.

    Rows and tokens of padding have no weight. `sinks` and `first` are as in `CallRows`. Raises
    `BadArgument` for a statistic that has no value for every row of a block.
    """
    of_call = CallRows(call, rows, planes, tokens=tokens, sinks=sinks, first=first)
    padding = of_call.places >= rows.length.to(of_call.places.device)[:, None]
    by_row = [statistic for statistic in statistics if statistic.over != "tokens"]
    sums = {
        statistic.name: _sum_tokens(statistic.of(of_call), padding)
        for statistic in statistics
        if statistic.over == "tokens"
    }
    if by_row:
        sums |= _sum_blocks(of_call, by_row)
    return {name: x.cpu() for name, x in sums.items()}  # once: a GPU does not wait for blocks


def _sum_tokens(
    values: Float[Tensor, "batch head position value"], padding: Bool[Tensor, "batch position"]
) -> Float[Tensor, "batch head value"]:
    """Sum over the tokens of each sequence, in float64."""
    if padding.any():
        values = values.masked_fill(padding[:, None, :, None], 0)
    return values.sum(2).double()


def _sum_blocks(rows: CallRows, statistics: Sequence[Statistic]) -> SequenceSums:
    """The sums over all rows, where the layer is."""
    sums: SequenceSums = {}
    single: list[str] = []  # one number a row: one product sums them all
    for block in rows.blocks():
        # All functions have run before sums by offset set the first key of their values to 0.
        values = {row.name: _checked(row, block) for row in statistics}
        single = [row.name for row in statistics if values[row.name].ndim == 4]
        weight = block.weight[:, None, None, None]
        if single:
            together = torch.stack([values[name] for name in single], dim=-1)
            _add(sums, "", block, (weight @ together)[..., 0, :])
        for row in statistics:
            if row.over == "offsets":
                by_offset = block.sum_by_offset(values[row.name])
                _add(sums, row.name, block, by_offset, width=rows.k.shape[2])
            elif row.name not in single:
                scale = block.call.scale if row.dims[-1] == "coordinate" else 1
                _add(sums, row.name, block, scale * (weight @ values[row.name])[..., 0, :])
    return sums | dict(zip(single, sums.pop("").unbind(-1), strict=True)) if single else sums


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
    part: Float[Tensor, "batch kv_head group value"],
    *,
    width: int | None = None,
) -> None:
    """Add a block's sums to those of its query heads; fewer offsets are the first ones."""
    part = part.flatten(1, 2).double()
    if name not in sums:
        batch, heads = block.call.query.shape[:2]
        sums[name] = part.new_zeros(batch, heads, width or part.shape[-1])
    sums[name][:, block.query_heads, : part.shape[-1]] += part
