"""Check of observed calls: attention recomputed from a call must match the model's own output.

If ropelens misreads a model (its mask, scale, bias or shared keys), the recomputed output does
not match. Every kind of call is therefore compared once for each layer, on a few rows.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.errors import UnsupportedModel
from ropelens.model.mismatch import find_cause, recomputed_residual

COMPARED_ROWS = 16  # rows of a call that are compared


@dataclass(frozen=True)
class OutputCheck:
    """Compare every kind of call of a model once; errors name the model by `class_name`."""

    class_name: str
    compared: set[tuple[object, ...]] = field(default_factory=set)
    """Kinds of calls that were compared: layer, number of rows, cache, and kind of mask."""

    def __call__(
        self, call: AttentionCall, real: Bool[Tensor, "_ row"], *, plain_mask: bool = True
    ) -> None:
        """Raise `UnsupportedModel` if the recomputed attention does not match the output.

        Attention is computed from queries, keys, values, scale, soft-cap, sink logits and the
        keys that each row sees. `real` marks the rows that are tokens. Rows whose output is NaN
        or infinite are skipped. A call without a `plain_mask` is always compared.
        """
        rows = call.query.shape[2]
        visibility = call.visibility
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
            # Scores, and weights with them, are rounded relative to |q| |k|.
            longest = [float(x.norm(dim=-1).max()) for x in (call.query, call.key)]
            eps = torch.finfo(output.dtype).eps
            allowed = max(1e-5, 2.5 * eps, eps * call.scale * longest[0] * longest[1])
            if residual <= allowed:
                self.compared.add(kind)
                return
            cause = "the mask differs between heads or adds numbers to scores"
            if plain_mask:
                cause = find_cause(sample, real=real, allowed=allowed)
        raise UnsupportedModel(
            f"{self.class_name} attends in a way that ropelens does not know.",
            seen=f"layer {call.layer}: attention from its queries, keys and mask "
            f"misses the model's own output by {residual:.2g} (allowed {allowed:.0e})"
            + (f"; {cause}" if cause else ""),
            means="the model changes scores, mask or weights in a way that it does not pass to "
            "its attention function",
            hint="a causal language model of a tested family (docs/families.md)",
        )
