"""Residual of recomputed attention, and the component of the model that explains it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from scipy.optimize import minimize_scalar
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map, output_residual


def recomputed_residual(call: AttentionCall) -> float:
    """Relative difference between recomputed attention and the output of the model."""
    return output_residual(call, attention_map(call).nan_to_num(0))


def find_cause(call: AttentionCall, *, real: Bool[Tensor, "batch row"], allowed: float) -> str:
    """The change of one component with which the recomputed attention matches, or "".

    `real` marks the rows of `call` that are tokens. One component at a time is left out or
    fitted: mask, soft-cap, sink logits, scale, and a factor on the output of each row and head.
    """
    for cause, changed in _variants(call, real):
        if recomputed_residual(changed) <= allowed:
            return cause
    if _residual_up_to_factors(call) <= allowed:
        return "it matches up to a factor of each row and head, such as of a gate or a sink"
    return ""


def _variants(
    call: AttentionCall, real: Bool[Tensor, "batch row"]
) -> Iterator[tuple[str, AttentionCall]]:
    """Calls in which one component is left out, fitted, or has a usual value."""
    key, see = torch.arange(call.key.shape[2]), call.visibility
    earlier = (key <= see.position[..., None]).to(real.device)
    for mask, keys in (
        (earlier & real[..., None], "all keys up to their own position"),
        (real[..., None].expand(-1, -1, len(key)), "all keys, also later keys"),
    ):
        yield (
            f"it matches if rows see {keys}",
            replace(call, visibility=replace(see, mask=mask)),
        )
    if call.softcap is not None:
        yield "it matches if the soft-cap is left out", replace(call, softcap=None)
    if call.sink_logits is not None:
        yield "it matches if the sink logits are left out", replace(call, sink_logits=None)
    usual = 1 / math.sqrt(call.query.shape[-1])
    yield "it matches with the scale 1 / sqrt(head_dim)", replace(call, scale=usual)
    yield "it matches if the scale is left out", replace(call, scale=1.0)
    fitted = _fit(lambda scale: replace(call, scale=scale))
    yield f"it matches with the scale {fitted.scale:.4g} instead of {call.scale:.4g}", fitted
    if call.softcap is None:
        capped = _fit(lambda cap: replace(call, softcap=cap))
        yield f"it matches with a soft-cap of {capped.softcap:.4g}", capped


def _fit(change: Callable[[float], AttentionCall]) -> AttentionCall:
    """The call with the smallest residual, for a number from 0.001 to 1000."""
    residual = lambda log: recomputed_residual(change(math.exp(log)))  # noqa: E731
    grid = [step / 4 for step in range(-28, 29)]
    best = min(grid, key=residual)
    fit = minimize_scalar(
        residual, bounds=(best - 0.25, best + 0.25), method="bounded", options={"xatol": 1e-9}
    )
    return change(math.exp(fit.x))


def _residual_up_to_factors(call: AttentionCall) -> float:
    """Residual if the best factor multiplies the weights of each row and head."""
    weights = attention_map(call).nan_to_num(0)
    group = call.query.shape[1] // call.key.shape[1]
    ours = weights @ call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    theirs = call.output.to(weights.dtype).reshape(ours.transpose(1, 2).shape).transpose(1, 2)
    squares = ours.square().sum(-1, keepdim=True).clamp(min=1e-30)
    factor: Float[Tensor, "batch head row 1"] = (ours * theirs).sum(-1, keepdim=True) / squares
    return output_residual(call, weights * factor)
