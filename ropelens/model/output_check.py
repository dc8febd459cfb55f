"""Check of observed calls: recomputed attention must match the output of the model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map, output_error
from ropelens.errors import UnsupportedModel
from ropelens.noise import allowed_residual

COMPARED_ROWS = 16  # rows of a call that are compared


class NoiseNeeded(Exception):
    """The noise of the calls decides whether recomputed attention matches the output."""


@dataclass(frozen=True)
class OutputCheck:
    """Compare every kind of call once for each layer; errors name the model by `class_name`.

    `noise` is the relative noise of the attention call of each layer. It is None if it is not
    measured yet; `NoiseNeeded` is raised if the check depends on it.
    """

    class_name: str
    noise: Mapping[int, float] | None
    compared: set[tuple[object, ...]]  # layer, rows, cache and mask of compared calls

    @torch.no_grad()
    def __call__(
        self,
        call: AttentionCall,
        real: Bool[Tensor, "_ row"],
        *,
        plain_mask: bool = True,
    ) -> None:
        """Raise `UnsupportedModel` if recomputed attention of `real` rows misses the output."""
        has_mask = call.visibility.mask is not None
        has_masks = len(call.visibility.first) > 1  # one for each sequence
        rows = call.query.shape[2]
        compared = (call.layer, rows, call.past > 0, has_mask, has_masks)
        if plain_mask and compared in self.compared:
            return
        sample = ComparedRows.of(call, real)
        residual = _residual(sample.call)
        noise = 0.0
        if self.noise is not None:
            noise = self.noise.get(call.layer, 0.0)
        allowed = allowed_residual(noise, torch.finfo(call.output.dtype).eps)
        if residual <= allowed:
            self.compared.add(compared)
            return
        if self.noise is None:
            raise NoiseNeeded
        seen = (
            f"layer {call.layer}: attention from its queries, keys and mask misses the "
            f"model's own output by {residual:.2g} (allowed {allowed:.0e})"
        )
        if plain_mask:
            cause = sample.cause(allowed)
        else:
            cause = "the mask differs between heads or adds numbers to scores"
        if cause:
            seen += f"; {cause}"
        raise UnsupportedModel(
            f"{self.class_name} attends in a way that ropelens does not know.",
            seen=seen,
            means="the model changes scores, mask or weights outside of its attention "
            "function",
            hint="a causal language model of a tested family (docs/families.md)",
        )


@dataclass(frozen=True)
class ComparedRows:
    """A call of some rows. Rows that are not `real` see no key, and have an output of 0."""

    call: AttentionCall
    real: Bool[Tensor, "batch row"]

    @classmethod
    def of(cls, call: AttentionCall, real: Bool[Tensor, "_ row"]) -> "ComparedRows":
        """Up to `COMPARED_ROWS` rows of a call. Rows that are not finite are not real."""
        rows = call.query.shape[2]
        row = torch.linspace(
            0, rows - 1, min(rows, COMPARED_ROWS), dtype=torch.float32, device="cpu"
        ).long()
        sample = call.of_rows(row)
        output = sample.output
        real = real.expand(len(call.query), -1)[:, row.to(real.device)]
        real = real.to(output.device) & output.isfinite().all(-1).all(-1)
        visible = sample.visibility.sees().to(real.device) & real[..., None]
        without_others = replace(
            sample,
            value=call.value.nan_to_num(0, 0, 0),  # keys that no compared row sees
            output=output.where(real[..., None, None], 0),
            visibility=replace(sample.visibility, mask=visible),
        )
        return cls(without_others, real)

    def cause(self, allowed: float) -> str:
        """The component that the model leaves out or has in a usual form; "" if unknown."""
        for name, variant in self._variants().items():
            if _residual(variant) <= allowed:
                return f"it matches {name}"
        return ""

    def _variants(self) -> dict[str, AttentionCall]:
        """Calls in which one component is left out or has a usual value."""
        call = self.call
        visibility = call.visibility
        key = torch.arange(call.key.shape[2], device="cpu")
        real = self.real[..., None]
        earlier = (key <= visibility.position[..., None]).to(real.device) & real
        every = real.expand(-1, -1, len(key))
        sees_earlier = replace(visibility, mask=earlier)
        sees_every = replace(visibility, mask=every)
        usual_scale = 1 / math.sqrt(call.query.shape[-1])
        return {
            "if rows see all keys up to their own position": replace(
                call, visibility=sees_earlier
            ),
            "if rows see all keys, also later keys": replace(
                call, visibility=sees_every
            ),
            "if the soft-cap is left out": replace(call, softcap=None),
            "if the sink logits are left out": replace(call, sink_logits=None),
            "with the scale 1 / sqrt(head_dim)": replace(call, scale=usual_scale),
            "if the scale is left out": replace(call, scale=1.0),
        }


def _residual(call: AttentionCall) -> float:
    """Relative difference between recomputed attention and the output of the model."""
    return float(output_error(call, attention_map(call).nan_to_num(0)).norm())
