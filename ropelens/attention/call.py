"""One attention call as the model made it, its attention matrix, and every term of a head."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.formulas import contrasts
from ropelens.attention.visibility import Visibility
from ropelens.rope.planes import Planes, unrotate


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one layer's attention, and the output of the model's own implementation.

    `query` and `key` carry their rotation. A score is `scale` q . k, or with a `softcap`
    softcap tanh(scale q . k / softcap). `sink_logits` (gpt-oss) take part in the softmax
    without a key. `visibility` has the position of each row and the keys that the row sees;
    `call.visibility.sees()` is the table [sequence or 1, row, key].
    """

    layer: int
    query: Float[Tensor, "batch head row coordinate"]
    key: Float[Tensor, "batch kv_head key coordinate"]
    value: Float[Tensor, "batch kv_head key feature"]
    output: Float[Tensor, "batch row head feature"]
    scale: float
    softcap: float | None
    sink_logits: Float[Tensor, " head"] | None
    visibility: Visibility

    @property
    def past(self) -> int:
        """Number of keys before the key of the first row, for example from a cache."""
        return int(self.visibility.position[0, 0]) - self.visibility.keys.start

    def of_rows(self, index: Int[Tensor, " some"]) -> "AttentionCall":
        """The call of some rows, by their indices in `query`."""
        return replace(
            self,
            query=self.query[:, :, index],
            output=self.output[:, index],
            visibility=self.visibility.rows(index[None]),
        )

    def of_heads(self, heads: Int[Tensor, " head"]) -> "AttentionCall":
        """The call of some query heads, each with the key and value that it reads."""
        read = heads // (self.query.shape[1] // self.key.shape[1])
        sinks = self.sink_logits
        return replace(
            self,
            query=self.query[:, heads.to(self.query.device)],
            key=self.key[:, read.to(self.key.device)],
            value=self.value[:, read.to(self.value.device)],
            output=self.output[:, :, heads.to(self.output.device)],
            sink_logits=None if sinks is None else sinks[heads.to(sinks.device)],
        )

    def squash(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`scores` after the model's soft-cap, if it has one; changed in place."""
        cap = self.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def attention_map(call: AttentionCall) -> Float[Tensor, "batch head row key"]:
    """Attention matrix of a short call. If there is a sink logit, rows sum to less than 1."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.to(dtype).repeat_interleave(group, dim=1)
    scores = call.squash(call.query.to(dtype) @ key.mT * call.scale)
    hidden = ~call.visibility.sees()[:, None]
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    if call.sink_logits is None:
        return scores.softmax(-1)
    sink = call.sink_logits.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


def output_residual(call: AttentionCall, weights: Float[Tensor, "batch head row key"]) -> float:
    """Difference between A V and the model's output, relative to the size of the output.

    The residual is small only if ropelens reads the scale, soft-cap, mask and sinks correctly.
    """
    group = call.query.shape[1] // call.key.shape[1]
    value = call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    ours = (weights @ value).transpose(1, 2)
    theirs = call.output.to(weights.dtype).reshape(ours.shape)
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


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
