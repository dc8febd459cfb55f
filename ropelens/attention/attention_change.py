"""Change of the attention of a layer between two calls."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows


def attention_change(
    before: AttentionCall,
    after: AttentionCall,
    rows: Rows,
    sets: Bool[Tensor, "batch set position"],
) -> Float[Tensor, "set head"]:
    """Weighted sum over the rows of each set of KL(A_i || A'_i), in nats.

    A' is the attention after a change of the model. A learned sink counts as one more key. The
    divergence is exactly 0 if both calls have the same queries and keys, and NaN if their rows
    see different keys.
    """
    still = Planes(torch.zeros(0), after.query.shape[-1], "none")
    total = torch.zeros(sets.shape[1], after.query.shape[1], dtype=torch.float64)
    if not before.visibility.agrees(after.visibility):
        return total + torch.nan
    calls = [SampledCall(call, rows, still) for call in (before, after)]
    blocks = (blocks_of(call, slice(0, call.k.shape[1])) for call in calls)
    for pair in zip(*blocks, strict=True):
        log_before, log_after = (_log_attention(block) for block in pair)
        # If A is 0, so is the term: keys that are not seen have the same finite score twice.
        ratio = log_before - log_after
        divergence = log_before.exp_().mul_(ratio).sum(-1)
        position = pair[0].position[:, None].expand(*sets.shape[:2], -1).to(sets.device)
        weight = sets.gather(2, position) * pair[0].weight[:, None].to(sets.device)
        moved = torch.einsum("bsr,bhr->sh", weight.to(divergence), divergence)
        total += moved.to("cpu", torch.float64)
    return total


def _log_attention(block: Block) -> Float[Tensor, "batch head row key"]:
    scores = block.scores.flatten(1, 2)
    if block.call.sink_logits is None:
        return scores.log_softmax(-1)
    sink = block.call.sink_logits.to(scores)[None, :, None, None]
    return torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1).log_softmax(
        -1
    )
