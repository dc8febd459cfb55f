"""How far an edit moved the attention of each head: a divergence of every row."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.block import Block, CallRows
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows


def without_values(call: AttentionCall) -> AttentionCall:
    """`call` without values and output: enough to compare its attention later."""
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
    calls: after soft-cap and mask, with the weight of a learned sink as one key more. Exactly 0
    where both calls have the same queries and keys. As torch.distributions.kl_divergence of two
    `Categorical`s.
    """
    still = Planes(torch.zeros(0), after.query.shape[-1], "none")
    sides = [CallRows(call, rows, still) for call in (before, after)]
    batch, heads = after.query.shape[:2]
    total = torch.zeros(batch, heads, dtype=torch.float64)
    blocks = zip(*(side.blocks(slice(0, side.k.shape[1])) for side in sides), strict=True)
    for pair in blocks:
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
