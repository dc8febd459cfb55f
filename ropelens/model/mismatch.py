"""Cause of a mismatch between the recomputed attention and the output of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from scipy.optimize import minimize_scalar
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map, output_residual


def find_cause(call: AttentionCall, *, real: Bool[Tensor, "batch row"], allowed: float) -> str:
    """The change of one component with which the recomputed attention matches, or "".

    `real` marks the rows of `call` that are tokens. One component at a time is left out or
    fitted: mask, soft-cap, sink logits, scale, and a factor on the output of each row and head.
    """
    for cause, changed in _variants(call, real):
        if _residual(changed) <= allowed:
            return cause
    scale = _fit(lambda factor: _residual(replace(call, scale=call.scale * factor)))
    if _residual(replace(call, scale=call.scale * scale)) <= allowed:
        return f"it matches with the scale {call.scale * scale:.4g} instead of {call.scale:.4g}"
    if call.softcap is None:
        cap = _fit(lambda factor: _residual(replace(call, softcap=10 * factor)))
        if _residual(replace(call, softcap=10 * cap)) <= allowed:
            return f"it matches with a soft-cap of {10 * cap:.4g}"
    if _residual_up_to_factors(call) <= allowed:
        return "it matches up to a factor of each row and head, such as of a gate or a sink"
    return ""


def _variants(
    call: AttentionCall, real: Bool[Tensor, "batch row"]
) -> Iterator[tuple[str, AttentionCall]]:
    """Calls in which one component is left out, or the scale has a usual value."""
    key = torch.arange(call.key.shape[2])
    causal = (key <= call.visibility.position[..., None]).to(real.device) & real[..., None]
    yield "it matches if rows see all keys up to their own position", _masked(call, causal)
    every = real[..., None].expand(-1, -1, len(key))
    yield "it matches if rows see all keys, also later keys", _masked(call, every)
    if call.softcap is not None:
        yield "it matches if the soft-cap is left out", replace(call, softcap=None)
    if call.sink_logits is not None:
        yield "it matches if the sink logits are left out", replace(call, sink_logits=None)
    usual = 1 / math.sqrt(call.query.shape[-1])
    yield "it matches with the scale 1 / sqrt(head_dim)", replace(call, scale=usual)
    yield "it matches if the scale is left out", replace(call, scale=1.0)


def _masked(call: AttentionCall, mask: Bool[Tensor, "batch row key"]) -> AttentionCall:
    return replace(call, visibility=replace(call.visibility, mask=mask))


def _fit(residual: Callable[[float], float]) -> float:
    """Factor from 1/50 to 50 with the smallest residual: the best of a grid, then refined."""
    grid = torch.linspace(-math.log(50), math.log(50), 33, dtype=torch.float64).tolist()
    best = min(grid, key=lambda log: residual(math.exp(log)))
    step = grid[1] - grid[0]
    found = minimize_scalar(
        lambda log: residual(math.exp(log)),
        bounds=(best - step, best + step),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return math.exp(found.x)


def _residual(call: AttentionCall) -> float:
    return output_residual(call, attention_map(call).nan_to_num(0))


def _residual_up_to_factors(call: AttentionCall) -> float:
    """Residual if the best factor multiplies the weights of each row and head."""
    weights = attention_map(call).nan_to_num(0)
    group = call.query.shape[1] // call.key.shape[1]
    value = call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    ours = weights @ value
    theirs = call.output.to(weights.dtype).reshape(ours.transpose(1, 2).shape).transpose(1, 2)
    squares = ours.square().sum(-1, keepdim=True).clamp(min=1e-30)
    factor: Float[Tensor, "batch head row 1"] = (ours * theirs).sum(-1, keepdim=True) / squares
    return output_residual(call, weights * factor)
