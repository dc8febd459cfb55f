"""Change of the attention of a layer between two calls."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.rope.planes import Planes, zero_frequencies
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
    still = Planes(zero_frequencies(0), after.query.shape[-1], "none")
    total = torch.zeros(
        sets.shape[1], after.query.shape[1], dtype=torch.float64, device="cpu"
    )
    if not before.visibility.agrees(after.visibility):
        return total + torch.nan
    sampled_before = SampledCall(before, rows, still)
    sampled_after = SampledCall(after, rows, still)
    # An edit that makes heads of a group differ gives each of them its own key.
    blocks_before = blocks_of(sampled_before, slice(0, sampled_before.k.shape[1]))
    blocks_after = blocks_of(sampled_after, slice(0, sampled_after.k.shape[1]))
    for block, changed_block in zip(blocks_before, blocks_after, strict=True):
        log_before = _log_attention(block)
        log_after = _log_attention(changed_block)
        # If A is 0, so is the term: keys that are not seen have the same finite score twice.
        log_ratio = log_before - log_after
        divergence = log_before.exp_().mul_(log_ratio).sum(-1)
        weight = _weight_in_sets(block, sets)
        change = torch.einsum("bsr,bhr->sh", weight.to(divergence), divergence)
        total += change.to("cpu", torch.float64)
    return total


def _weight_in_sets(
    block: Block, sets: Bool[Tensor, "batch set position"]
) -> Float[Tensor, "batch set row"]:
    """Weight of each row of the block in the sets that contain its position, otherwise 0."""
    batch, count, _ = sets.shape
    position = block.position[:, None].expand(batch, count, -1).to(sets.device)
    return sets.gather(2, position) * block.weight[:, None].to(sets.device)


def _log_attention(block: Block) -> Float[Tensor, "batch head row _"]:
    """Log of the attention on each key, and on the learned sink if there is one."""
    scores = block.scores.flatten(1, 2)
    if block.call.sink_logits is not None:
        sink = block.call.sink_logits.to(scores)[None, :, None, None]
        of_rows = sink.expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_rows], dim=-1)
    return scores.log_softmax(-1)
