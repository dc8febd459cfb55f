"""Check of observed calls: recomputed attention must match the output of the model."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product

import scipy
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall, attention_map, output_error
from ropelens.config_facts import rope_parameters
from ropelens.errors import UnsupportedModel
from ropelens.noise import allowed_residual
from ropelens.rope.planes import Pairing, Planes
from ropelens.rope.turn import TargetRotation, rotate_to

COMPARED_ROWS = 16  # rows of a call that are compared


@dataclass(frozen=True)
class OutputCheck:
    """Compare every kind of call once for each layer; errors name the model by `class_name`."""

    class_name: str
    config: PreTrainedConfig
    noise: Mapping[int, float]  # relative noise of the attention call of each layer
    compared: set[tuple[object, ...]]  # layer, rows, cache and kind of mask of compared calls

    def __call__(
        self, call: AttentionCall, real: Bool[Tensor, "_ row"], *, plain_mask: bool = True
    ) -> None:
        """Raise `UnsupportedModel` if the recomputed attention does not match the output.

        Only `real` tokens count. A call without a `plain_mask` is always compared.
        """
        rows, visibility = call.query.shape[2], call.visibility
        mask_kind = (visibility.mask is None, len(visibility.first) > 1)
        kind = (call.layer, rows, call.past > 0, mask_kind)
        if plain_mask and kind in self.compared:
            return
        row = torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS)).long()
        sample = call.of_rows(row)
        output = sample.output
        real = real.expand(len(call.query), -1)[:, row.to(real.device)].to(output.device)
        real = real & output.isfinite().all(-1).all(-1)
        visible = sample.visibility.sees().to(real.device) & real[..., None]
        sample = replace(
            sample,
            value=call.value.nan_to_num(0, 0, 0),  # keys that no compared row sees
            output=output.where(real[..., None, None], 0),
            visibility=replace(sample.visibility, mask=visible),
        )
        with torch.no_grad():
            residual = recomputed_residual(sample)
            noise = self.noise.get(call.layer, 0.0)
            allowed = allowed_residual(noise, torch.finfo(output.dtype).eps)
            if residual <= allowed:
                self.compared.add(kind)
                return
            cause = "the mask differs between heads or adds numbers to scores"
            if plain_mask:
                variants = chain(_variants(sample, real), _rotated(sample, self.config))
                matching = (name for name, x in variants if recomputed_residual(x) <= allowed)
                cause = next(matching, "")
                if not cause and _residual_up_to_factors(sample) <= allowed:
                    cause = "up to a factor of each row and head (a gate or a sink)"
                cause = f"it matches {cause}" * bool(cause)
        what = f"{self.class_name} attends in a way that ropelens does not know."
        seen = f"layer {call.layer}: attention from its queries, keys and mask misses the "
        seen += f"model's own output by {residual:.2g} (allowed {allowed:.0e})"
        seen += f"; {cause}" * bool(cause)
        means = "the model changes scores, mask or weights outside of its attention function"
        hint = "a causal language model of a tested family (docs/families.md)"
        raise UnsupportedModel(what, seen=seen, means=means, hint=hint)


def recomputed_residual(call: AttentionCall) -> float:
    """Relative difference between recomputed attention and the output of the model."""
    return float(output_error(call, attention_map(call).nan_to_num(0)).norm())


def _variants(
    call: AttentionCall, real: Bool[Tensor, "batch row"]
) -> Iterator[tuple[str, AttentionCall]]:
    """Calls in which one component is left out, fitted, or has a usual value."""
    key, see = torch.arange(call.key.shape[2]), call.visibility
    earlier = (key <= see.position[..., None]).to(real.device) & real[..., None]
    every = real[..., None].expand(-1, -1, len(key))
    see_earlier, see_every = (replace(see, mask=mask) for mask in (earlier, every))
    yield "if rows see all keys up to their own position", replace(call, visibility=see_earlier)
    yield "if rows see all keys, also later keys", replace(call, visibility=see_every)
    yield "if the soft-cap is left out", replace(call, softcap=None)
    yield "if the sink logits are left out", replace(call, sink_logits=None)
    usual = 1 / math.sqrt(call.query.shape[-1])
    yield "with the scale 1 / sqrt(head_dim)", replace(call, scale=usual)
    yield "if the scale is left out", replace(call, scale=1.0)
    fitted = _fit(lambda scale: replace(call, scale=scale))
    yield f"with the scale {fitted.scale:.4g} instead of {call.scale:.4g}", fitted
    capped = _fit(lambda cap: replace(call, softcap=cap))
    yield f"with a soft-cap of {capped.softcap:.4g}", capped


def _rotated(
    call: AttentionCall, config: PreTrainedConfig
) -> Iterator[tuple[str, AttentionCall]]:
    """Calls without the rotation of queries and keys, or with a further rotation."""
    bases = {part.get("rope_theta") for part in rope_parameters(config)} - {None}
    dim, see = call.query.shape[-1], call.visibility
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    for base, pairing in product(bases, pairings):
        planes = Planes(base ** -(torch.arange(0, dim, 2) / dim), dim, pairing)
        for factor, change in ((0, "without their rotation"), (2, "rotated once more")):
            target = TargetRotation(factor * planes.inv_freq[None], torch.ones(1, dim // 2))
            query = rotate_to(call.query, see.position, planes, target)
            key = rotate_to(call.key, torch.tensor([[*see.keys]]), planes, target)
            changed = replace(call, query=query, key=key)
            yield f"if queries and keys are {change} (base {base:g})", changed


def _fit(change: Callable[[float], AttentionCall]) -> AttentionCall:
    """The call with the smallest residual, for a number from 0.001 to 1000."""
    residual = lambda log: recomputed_residual(change(math.exp(log)))  # noqa: E731
    grid = [step / 4 for step in range(-28, 29)]
    best = min(grid, key=residual)
    how = {"bounds": (best - 0.25, best + 0.25), "options": {"xatol": 1e-9}}
    fit = scipy.optimize.minimize_scalar(residual, method="bounded", **how)
    return change(math.exp(fit.x))


def _residual_up_to_factors(call: AttentionCall) -> float:
    """Residual if the best factor multiplies the weights of each row and head."""
    weights = attention_map(call).nan_to_num(0)
    group = call.query.shape[1] // call.key.shape[1]
    ours = weights @ call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    theirs = call.output.to(weights.dtype).reshape(ours.transpose(1, 2).shape).transpose(1, 2)
    squares = ours.square().sum(-1, keepdim=True).clamp(min=1e-30)
    factor: Float[Tensor, "batch head row 1"] = (ours * theirs).sum(-1, keepdim=True) / squares
    return float(output_error(call, weights * factor).norm())
