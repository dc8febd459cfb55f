"""One pass over the attention of one layer: statistics of it, or how far it has moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes
from ropelens.statistics.block import Block, CallRows
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows
from ropelens.statistics.variables import Statistic

SequenceSums = dict[str, Float[Tensor, "batch _ ..."]]
"""Sums over the tokens or rows of each sequence, by the names of the statistics, in float64."""


def sum_attention(rows: CallRows, statistics: Sequence[Statistic]) -> SequenceSums:
    """The sums of one attention call over its tokens and `rows`; padding has no weight.

    Raises `BadArgument` for a statistic that has no value for every row of a block.
    """
    sums: SequenceSums = {}
    padding = rows.places >= rows.rows.length.to(rows.places.device)[:, None]
    for statistic in statistics:
        if statistic.over == "tokens":
            values = statistic.of(rows)
            if padding.any():
                values = values.masked_fill(padding[:, None, :, None], 0)
            sums[statistic.name] = values.sum(2).double()
    by_row = [statistic for statistic in statistics if statistic.over != "tokens"]
    heads, keys = rows.q.shape[1], rows.k.shape[2]
    for block in rows.blocks() if by_row else ():
        for name, part in _block_sums(block, by_row, keys).items():
            if name not in sums:
                sums[name] = part.new_zeros(len(part), heads, *part.shape[3:]).double()
            sums[name][:, block.query_heads] += part.flatten(1, 2).double()
    return {name: x.cpu() for name, x in sums.items()}  # once: a GPU does not wait for blocks


def _block_sums(
    block: Block, statistics: Sequence[Statistic], keys: int
) -> dict[str, Float[Tensor, "batch kv_head group *value"]]:
    """The weighted sums over the rows of a block."""
    # All functions have run before sums by offset set the first key of their values to 0.
    values = {row.name: _checked(row, block) for row in statistics}
    weight = block.weight[:, None, None, None]
    sums: dict[str, Tensor] = {}
    single = [name for name, x in values.items() if x.ndim == 4]
    if single:  # one number a row: one product sums them all
        together = weight @ torch.stack([values[name] for name in single], dim=-1)
        sums |= zip(single, together[..., 0, :].unbind(-1), strict=True)
    for row in statistics:
        if row.over == "offsets":
            by_offset = block.sum_by_offset(values[row.name])
            sums[row.name] = pad(by_offset, (0, keys - by_offset.shape[-1]))
        elif row.name not in single:
            scale = block.call.scale if row.dims[-1] == "coordinate" else 1
            sums[row.name] = scale * (weight @ values[row.name])[..., 0, :]
    return sums


def _checked(statistic: Statistic, block: Block) -> Tensor:
    """The values of a statistic on a block, which must be there for every row."""
    values, keys = statistic.of(block), [len(block.keys)] * (statistic.over == "offsets")
    wanted = (*block.q.shape[:4], *keys)
    if values.shape[: len(wanted)] != wanted or values.ndim > 5:
        raise BadArgument(
            f"The statistic {statistic.name!r} has no value for every row.",
            seen=f"shape {tuple(values.shape)}; a block has {tuple(wanted)}",
            attempt="values [batch, kv_head, group, row], over offsets [..., row, key]",
        )
    return values


def attention_change(
    before: AttentionCall, after: AttentionCall, rows: Rows
) -> Float[Tensor, "batch head"]:
    """Sum over `rows` of KL(A_before || A_after), in nats, by their weights.

    The divergence between the weights of a row over the keys that it sees, the same in both
    calls: after soft-cap and mask, with the weight of a learned sink as one key more. Exactly 0
    where both calls have the same queries and keys. As torch.distributions.kl_divergence of two
    `Categorical`s.
    """
    still = Planes(torch.zeros(0), after.query.shape[-1], "none")
    total = torch.zeros(after.query.shape[:2], dtype=torch.float64)
    sides = [CallRows(call, rows, still) for call in (before, after)]
    blocks = (side.blocks(slice(0, side.k.shape[1])) for side in sides)
    for pair in zip(*blocks, strict=True):
        before_log, after_log = map(_log_weights, pair)
        # Where chances are 0 so is the term: hidden keys have the same finite score twice.
        ratio = before_log - after_log
        divergence = before_log.exp_().mul_(ratio).sum(-1)
        weighted = divergence * pair[0].weight[:, None]
        total += weighted.sum(-1).to("cpu", torch.float64)
    return total


def _log_weights(block: Block) -> Float[Tensor, "batch head row key"]:
    """Logarithms of the weights of the rows; a learned sink comes last."""
    scores = block.scores.flatten(1, 2)
    if block.call.sink_logits is not None:
        sink = block.call.sink_logits.to(scores)[None, :, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1)
    return scores.log_softmax(-1)
