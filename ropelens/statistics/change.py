"""How far an edit moved the attention of each head: a divergence of every row, in blocks."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.statistics.call import AttentionCall
from ropelens.statistics.memory import HIDDEN, pick
from ropelens.statistics.rows import Rows

BLOCK_ELEMENTS = {"cpu": 2**16, "cuda": 2**26}
"""Scores held at once, twice over: on a CPU, as many as its caches hold."""

FEWEST_ROWS = 16
"""Rows of a block where scores of so many do not fit: products of fewer are slow."""


def without_values(call: AttentionCall) -> AttentionCall:
    """`call` as it can be kept until later: what decides its weights, not what they read."""
    value, output = call.value, call.output
    return replace(
        call,
        value=value.new_empty(*value.shape[:3], 0),
        output=output.new_empty(*output.shape[:3], 0),
    )


def attention_change(
    before: AttentionCall, after: AttentionCall, rows: Rows
) -> Float[Tensor, "batch head"]:
    """Sum over `rows` of KL(A_before || A_after), in nats, by their weights.

    The divergence between the weights of a row over the keys that it sees, the same in both
    calls: after soft-cap and mask, and with the weight of a learned sink as one key more.
    Exactly 0 where both calls have the same queries and keys. As
    torch.distributions.kl_divergence of two `Categorical`s has it.
    """
    position = rows.position[:1] if rows.dense else rows.position
    weight = rows.weight.to(after.query.device)
    sides = [_Side(call, position) for call in (before, after)]
    batch, heads = after.query.shape[:2]
    total = torch.zeros(batch, heads, dtype=torch.float64)
    area = BLOCK_ELEMENTS[after.query.device.type] // (batch * heads)
    begin = 0
    while begin < position.shape[1]:
        end = begin + FEWEST_ROWS
        step = area // (int(position[:, begin:end].max()) + 1)
        end = max(end, min(begin + step, position.shape[1]))
        old, new = (side.scores(begin, end) for side in sides)
        before_log, after_log = old.log_softmax(-1), new.log_softmax(-1)
        # Where chances are 0 so is the term: hidden keys have the same finite score twice.
        ratio = before_log - after_log
        divergence = before_log.exp_().mul_(ratio).sum(-1)
        part = (divergence * weight[:, None, begin:end]).sum(-1)
        total += part.to("cpu", torch.float64)
        begin = end
    return total


class _Side:
    """One of the two calls, laid out for blocks of rows."""

    def __init__(self, call: AttentionCall, position: Int[Tensor, "shared row"]) -> None:
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.call = call
        self.position = position
        self.query = pick(call.query, call.row_at(position)).to(dtype)
        self.key = call.key.to(dtype) * call.scale

    def scores(self, begin: int, end: int) -> Float[Tensor, "batch head row key"]:
        """What the softmax of rows `begin` to `end` gets; a learned sink comes last."""
        call, position = self.call, self.position[:, begin:end]
        first = call.start[position]
        low, high = int(first.min()), int(position.max()) + 1
        query, key = self.query[:, :, begin:end], self.key[:, :, low:high]
        by_key = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        scores = (by_key @ key.mT).view(*query.shape[:3], high - low)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        column = torch.arange(low, high)
        unseen = (column < first[..., None]) | (column > position[..., None])
        scores.add_(HIDDEN * unseen[:, None].to(scores))  # so large that no score is left
        if call.sink_logits is None:
            return scores
        sink = call.sink_logits.to(scores)[None, :, None, None]
        return torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1)
