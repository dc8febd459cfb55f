"""One head on one sequence, whole: its vectors by plane, and every term of its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.rope.planes import Planes, plane_norms, unrotate
from ropelens.statistics.call import AttentionCall, attention_map

VECTORS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Head:
    """A call of one query head on one sequence, the key and value that it reads, its planes."""

    call: AttentionCall
    planes: Planes
    attention: Float[Tensor, "query key"]

    @classmethod
    def of(cls, call: AttentionCall, head: int, planes: Planes) -> Head:
        """The head of this number, in float32 or wider."""
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        alone = call.of_heads(torch.tensor([head]))
        vectors = {name: vars(alone)[name].to(dtype) for name in VECTORS}
        alone = replace(alone, **vectors)
        return cls(alone, planes, attention_map(alone)[0, 0])

    def write(self, into: Mapping[str, Tensor]) -> None:
        """Fill arrays of NaN, [query or key, frequency, ...] or [query, key], by their names.

        Layers of fewer planes than others fill only the first frequencies.
        """
        call, planes, terms = self.call, self.planes, self.planes.terms
        q, k = call.query[0, 0], call.key[0, 0]
        for side, x in (("q", q), ("k", k)):
            into[f"{side}_norm"][:, :terms] = plane_norms(x, planes)
            still = unrotate(x, torch.arange(len(x)), planes)
            turning = into[f"{side}_still"][:, : len(planes.inv_freq)]
            turning[..., 0], turning[..., 1] = still[:, planes.first], still[:, planes.second]
        into["score"].copy_(self._scores(q, k))
        of = planes.term_of
        for term in range(terms):
            into["contribution"][term].copy_(self._scores(q[:, of == term], k[:, of == term]))
        into["attention"].copy_(self.attention)
        if "value_norm" in into:
            into["value_norm"].copy_(torch.linalg.vector_norm(call.value[0, 0], dim=-1))
        into["inv_freq"][:terms] = planes.term_inv_freq
        into["wavelength"][:terms] = planes.wavelength
        into["scale"].fill_(call.scale)

    def _scores(
        self, q: Float[Tensor, "query coordinate"], k: Float[Tensor, "key coordinate"]
    ) -> Float[Tensor, "query key"]:
        """s q k of some coordinates, NaN where the query does not see the key."""
        seen = self.call.seen_by(torch.arange(len(q)))[0]
        return (self.call.scale * q @ k.mT).masked_fill(~seen.to(q.device), torch.nan)
