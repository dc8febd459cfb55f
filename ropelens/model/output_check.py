"""Check of observed calls: recomputed attention must match the output of the model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map, output_error
from ropelens.errors import UnsupportedModel
from ropelens.noise import allowed_residual

COMPARED_ROWS = 16  # rows of a call that are compared


@dataclass(frozen=True)
class OutputCheck:
    """Compare every kind of call once for each layer; errors name the model by `class_name`."""

    class_name: str
    noise: Mapping[int, float]  # relative noise of the attention call of each layer
    compared: set[
        tuple[object, ...]
    ]  # layer, rows, cache and kind of mask of compared calls

    def __call__(
        self,
        call: AttentionCall,
        real: Bool[Tensor, "_ row"],
        *,
        plain_mask: bool = True,
    ) -> None:
        """Raise `UnsupportedModel` if recomputed attention of `real` rows misses the output."""
        rows, visibility = call.query.shape[2], call.visibility
        mask_kind = (visibility.mask is None, len(visibility.first) > 1)
        kind = (call.layer, rows, call.past > 0, mask_kind)
        if plain_mask and kind in self.compared:
            return
        row = torch.linspace(0, rows - 1, min(rows, COMPARED_ROWS)).long()
        sample = call.of_rows(row)
        output = sample.output
        real = real.expand(len(call.query), -1)[:, row.to(real.device)].to(
            output.device
        )
        real = real & output.isfinite().all(-1).all(-1)
        visible = sample.visibility.sees().to(real.device) & real[..., None]
        sample = replace(
            sample,
            value=call.value.nan_to_num(0, 0, 0),  # keys that no compared row sees
            output=output.where(real[..., None, None], 0),
            visibility=replace(sample.visibility, mask=visible),
        )
        with torch.no_grad():
            residual = _residual(sample)
            noise = self.noise.get(call.layer, 0.0)
            allowed = allowed_residual(noise, torch.finfo(output.dtype).eps)
            if residual <= allowed:
                self.compared.add(kind)
                return
            cause = "the mask differs between heads or adds numbers to scores"
            if plain_mask:
                near = (
                    n for n, x in _variants(sample, real) if _residual(x) <= allowed
                )
                cause = next((f"it matches {name}" for name in near), "")
        what = f"{self.class_name} attends in a way that ropelens does not know."
        seen = (
            f"layer {call.layer}: attention from its queries, keys and mask misses the "
        )
        seen += f"model's own output by {residual:.2g} (allowed {allowed:.0e})"
        seen += f"; {cause}" * bool(cause)
        means = "the model changes scores, mask or weights outside of its attention function"
        hint = "a causal language model of a tested family (docs/families.md)"
        raise UnsupportedModel(what, seen=seen, means=means, hint=hint)


def _residual(call: AttentionCall) -> float:
    """Relative difference between recomputed attention and the output of the model."""
    return float(output_error(call, attention_map(call).nan_to_num(0)).norm())


def _variants(
    call: AttentionCall, real: Bool[Tensor, "batch row"]
) -> Iterator[tuple[str, AttentionCall]]:
    """Calls in which one component is left out or has a usual value."""
    key, see = torch.arange(call.key.shape[2]), call.visibility
    earlier = (key <= see.position[..., None]).to(real.device) & real[..., None]
    every = real[..., None].expand(-1, -1, len(key))
    see_earlier, see_every = (replace(see, mask=mask) for mask in (earlier, every))
    yield (
        "if rows see all keys up to their own position",
        replace(call, visibility=see_earlier),
    )
    yield "if rows see all keys, also later keys", replace(call, visibility=see_every)
    yield "if the soft-cap is left out", replace(call, softcap=None)
    yield "if the sink logits are left out", replace(call, sink_logits=None)
    usual = 1 / math.sqrt(call.query.shape[-1])
    yield "with the scale 1 / sqrt(head_dim)", replace(call, scale=usual)
    yield "if the scale is left out", replace(call, scale=1.0)
