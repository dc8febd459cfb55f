"""The vectors of one head by plane, and every term of its scores, as `capture` saves them."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.formulas import contrasts
from ropelens.rope.planes import Planes, unrotate


def write_head(
    call: AttentionCall,
    head: int,
    planes: Planes,
    into: Mapping[str, Tensor],
    *,
    runner_up: int | None = None,
    projection: Float[Tensor, "hidden feature"] | None = None,
    toward: Iterable[Float[Tensor, "query hidden"]] = (),
) -> None:
    """Write the vectors of one query head by plane, and all terms of its scores, to `into`.

    The call has one sequence. `into` has arrays of NaN, [query or key, frequency, ...] or
    [query, key], by name. A layer with fewer planes than others fills the first frequencies.
    With the output `projection`, also write the length of v W_O, which the head adds to the
    residual stream for each key, and the component of A v W_O in each direction of `toward`.
    """
    call = call.of_heads(torch.tensor([head]))
    attention, terms = attention_map(call)[0, 0], planes.terms
    q, k = (x[0, 0].to(attention.dtype) for x in (call.query, call.key))
    position, term_of = torch.arange(len(q)), planes.term_of
    hidden = ~call.visibility.sees()[0].to(q.device)

    def scores(chosen: Bool[Tensor, " coordinate"]) -> Float[Tensor, "query key"]:
        return (call.scale * q[:, chosen] @ k[:, chosen].mT).masked_fill(hidden, torch.nan)

    for side, x in (("q", q), ("k", k)):
        into[f"{side}_norm"][:, :terms] = planes.norms(x)
        still = unrotate(x, position, planes)
        by_plane = into[f"{side}_still"][:, : len(planes.inv_freq)]
        by_plane[..., 0], by_plane[..., 1] = still[:, planes.first], still[:, planes.second]
    into["score"].copy_(scores(term_of >= 0))
    for term in range(terms):
        into["contribution"][term].copy_(scores(term_of == term))
    into["attention"].copy_(attention)
    contrast = contrasts(into["contribution"], into["attention"], runner_up=runner_up)
    into["contrast"].copy_(contrast)
    into["inv_freq"][:terms] = planes.term_inv_freq
    into["wavelength"][:terms] = planes.wavelength
    into["scale"].fill_(call.scale)
    if projection is None:
        return
    value = call.value[0, 0].to(attention)
    written = value @ projection.to(attention).mT
    into["value_norm"].copy_(torch.linalg.vector_norm(value, dim=-1))
    into["write_norm"].copy_(torch.linalg.vector_norm(written, dim=-1))
    into["written_norm"].copy_(torch.linalg.vector_norm(attention @ written, dim=-1))
    for index, direction in enumerate(toward):
        into["logit"][index].copy_(attention * (direction.to(attention) @ written.mT))
