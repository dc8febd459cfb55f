"""The judge of what is observed: the model's own output.

Whatever a model does otherwise than ropelens reads it (a mask, a scale, a bias, keys that
others share), attention by what was observed misses the output of the call. So every kind of
call is compared once for each layer, on a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map, output_residual
from ropelens.errors import UnsupportedModel


@dataclass(frozen=True)
class OutputCheck:
    """Compare every kind of call of a model once; errors name the model by `class_name`."""

    class_name: str
    judged: set[tuple[object, ...]] = field(default_factory=set)
    """Layer, rows, past and mask of what was compared."""

    def __call__(
        self, call: AttentionCall, real: Bool[Tensor, "_ row"], *, known: bool = True
    ) -> None:
        """Raise `UnsupportedModel` where attention as observed misses the call's own output.

        Attention is computed from queries, keys, values, scale, soft-cap, sink logits and the
        keys that each row sees. `real` marks the rows that are no padding. A row whose output
        is NaN or infinite is not compared. A call whose mask is not `known` always is.
        """
        rows = call.query.shape[2]
        visibility = call.visibility
        kind = (visibility.mask is None, len(visibility.first) > 1)
        like = (call.layer, rows, call.past > 0, kind)
        if known and like in self.judged:
            return
        row = torch.linspace(0, rows - 1, min(rows, 16)).long()  # the last is among them
        some = call.of_rows(row)
        output = some.output
        real = real.expand(len(call.query), -1)[:, row.to(real.device)].to(output.device)
        real = real & output.isfinite().all(-1).all(-1)
        visible = some.visibility.sees().to(real.device) & real[..., None]
        some = replace(
            some,
            value=call.value.nan_to_num(0, 0, 0),  # of keys that no compared row sees
            output=output.where(real[..., None, None], 0),
            visibility=replace(some.visibility, mask=visible),
        )
        with torch.no_grad():
            residual = output_residual(some, attention_map(some).nan_to_num(0))
            # scores are rounded relative to the lengths of queries and keys, weights by as much
            longest = [float(x.norm(dim=-1).max()) for x in (call.query, call.key)]
            eps = torch.finfo(output.dtype).eps
            allowed = max(1e-5, 2.5 * eps, eps * call.scale * longest[0] * longest[1])
        if residual > allowed:
            raise UnsupportedModel(
                f"{self.class_name} attends in a way that ropelens does not know.",
                seen=f"layer {call.layer}: attention from its queries, keys and mask "
                f"misses the model's own output by {residual:.2g} (allowed {allowed:.0e})",
                means="the model changes scores, mask or weights without a word",
                hint="a causal language model of a tested family (docs/families.md)",
            )
        self.judged.add(like)
