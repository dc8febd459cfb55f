"""Whole attention matrices, for excerpts short enough to be looked at."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.statistics.call import AttentionCall


def attention_map(call: AttentionCall) -> Float[Tensor, "batch head row key"]:
    """The attention weights of a call; under a sink logit rows sum to less than one."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.to(dtype).repeat_interleave(group, dim=1)
    scores = call.query.to(dtype) @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    key, row = torch.arange(scores.shape[-1]), call.past + torch.arange(scores.shape[-2])
    seen = (key <= row[:, None]) & (key >= call.start[..., None])
    if seen.ndim == 3:  # sequences that begin at different places
        seen = seen[:, None]
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if call.sink_logits is None:
        return scores.softmax(-1)
    sink = call.sink_logits.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


def output_residual(call: AttentionCall, weights: Float[Tensor, "batch head row key"]) -> float:
    """Relative difference between `weights` times the values and what the model computed.

    Small only if scale, soft-cap, mask and sinks of the call are what the model uses.
    """
    group = call.query.shape[1] // call.key.shape[1]
    value = call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    ours = (weights @ value).transpose(1, 2)
    theirs = call.output.to(weights.dtype).reshape(ours.shape)
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
