"""Change of the attention of a layer between two calls."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.block import blocks_of
from ropelens.attention.call import AttentionCall
from ropelens.attention.formulas import attention_divergence
from ropelens.attention.sampled_call import SampledCall
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows


def attention_change(
    before: AttentionCall,
    after: AttentionCall,
    rows: Rows,
    sets: Bool[Tensor, "batch set position"],
) -> Float[Tensor, "set head"]:
    """Weighted sum over the rows of each set of the `attention_divergence`, in nats.

    NaN if the rows of both calls see different keys.
    """
    still = Planes(torch.zeros(0), after.query.shape[-1], "none")
    total = torch.zeros(sets.shape[1], after.query.shape[1], dtype=torch.float64)
    if not before.visibility.agrees(after.visibility):
        return total + torch.nan
    calls = [SampledCall(call, rows, still) for call in (before, after)]
    blocks = (blocks_of(call, slice(0, call.k.shape[1])) for call in calls)
    for pair in zip(*blocks, strict=True):
        divergence = attention_divergence(*pair)
        position = pair[0].position[:, None].expand(*sets.shape[:2], -1).to(sets.device)
        weight = sets.gather(2, position) * pair[0].weight[:, None].to(sets.device)
        moved = torch.einsum("bsr,bhr->sh", weight.to(divergence), divergence)
        total += moved.to("cpu", torch.float64)
    return total
