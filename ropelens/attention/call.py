"""One attention call as the model made it, its attention in one piece, and one head of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import UnsupportedModel
from ropelens.rope.planes import Planes, unrotate


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one layer's attention, and the output of the model's own implementation.

    `query` and `key` carry their rotation. Row i sees the keys from `start[i]` to i: `start` is
    0 for full causal attention and i - window + 1 under a sliding window. It has a row for each
    sequence only where padding on the left makes them differ. A call that continues a key-value
    cache has `past` keys before those of its rows: row r is i = past + r, and sees the keys
    from `start[r]` to i. A call of some rows has those `at` these positions, ascending, of all
    sequences or of each: row r is i = at[r], and sees the keys from `start[i]` to i. Where the
    keys of some row are no such interval (a mask with gaps, a prefix, the top k), `visible`
    says which they are.

    Scores are `scale` q . k, squashed to `softcap` tanh(score / softcap) where the model does
    so; `sink_logits` (gpt-oss) take part in the softmax without a key.
    """

    layer: int
    query: Float[Tensor, "batch head row coordinate"]
    key: Float[Tensor, "batch kv_head key coordinate"]
    value: Float[Tensor, "batch kv_head key feature"]
    output: Float[Tensor, "batch row head feature"]
    scale: float
    softcap: float | None
    sink_logits: Float[Tensor, " head"] | None
    interval: Int[Tensor, "*sequence position"] | None
    past: int = 0
    at: Int[Tensor, "*each row"] | None = None
    visible: Bool[Tensor, "batch row key"] | None = None

    @property
    def start(self) -> Int[Tensor, "*sequence position"]:
        """First key that the row at each position sees, of all up to its own.

        Raises `UnsupportedModel` where they are no interval.
        """
        if self.interval is None:
            raise UnsupportedModel(
                "Some rows do not see all keys from a first one to their own.",
                seen=f"layer {self.layer}: a mask with gaps, or with keys ahead of their row",
                hint="call.visible; to measure, sequences that run in one pass",
            )
        return self.interval

    @property
    def farthest(self) -> int:
        """The farthest offset that any row sees."""
        mask = self.visible
        first = self.start if mask is None else mask.byte().argmax(-1).cpu()
        return int((torch.arange(first.shape[-1]) - first).max())

    def seen_by(self, row: Int[Tensor, " some"]) -> Bool[Tensor, "_ some key"]:
        """Which keys some rows of `query` see, in one table for all sequences or one each."""
        if self.visible is not None:
            return self.visible[:, row.to(self.visible.device)]
        first = self.start[..., row]
        last = (self.past + row).expand_as(first)
        seen = sees(first, last, torch.arange(self.key.shape[2]))
        return seen.reshape(-1, *seen.shape[-2:])

    def of_heads(self, heads: Int[Tensor, " head"]) -> AttentionCall:
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
        """`scores`, changed in place: softcap tanh(score / softcap) where the model does so."""
        cap = self.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def sees(
    first: Int[Tensor, "*batch row"], last: Int[Tensor, "*batch row"], key: Int[Tensor, " key"]
) -> Bool[Tensor, "*batch row key"]:
    """Whether each row, which sees the keys from `first` to `last`, sees each `key`."""
    return (key >= first[..., None]) & (key <= last[..., None])


def attention_map(call: AttentionCall) -> Float[Tensor, "batch head row key"]:
    """The whole attention matrix of a short call; with a sink logit rows sum to less than 1."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.to(dtype).repeat_interleave(group, dim=1)
    scores = call.squash(call.query.to(dtype) @ key.mT * call.scale)
    seen = call.seen_by(torch.arange(scores.shape[-2]))[:, None]
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if call.sink_logits is None:
        return scores.softmax(-1)
    sink = call.sink_logits.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


def output_residual(call: AttentionCall, weights: Float[Tensor, "batch head row key"]) -> float:
    """Relative difference between A V and the model's own output.

    Small only if scale, soft-cap, mask and sinks of the call are those of the model.
    """
    group = call.query.shape[1] // call.key.shape[1]
    value = call.value.to(weights.dtype).repeat_interleave(group, dim=1)
    ours = (weights @ value).transpose(1, 2)
    theirs = call.output.to(weights.dtype).reshape(ours.shape)
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def contrasts(
    contribution: Float[Tensor, "term query key"],
    attention: Float[Tensor, "query key"],
    *,
    runner_up: int | None = None,
) -> Float[Tensor, "term query key"]:
    """What each term adds to a key beyond the row's other keys, weighted by their attention.

    Softmax ignores what all keys of a row share, and so does this. Beyond the key `runner_up`
    alone where it is given: then terms sum to the log-odds of the two. NaN where no other key
    of the row has any attention.
    """
    if runner_up is not None:
        return contribution - contribution[..., runner_up, None]
    top = attention == attention.amax(-1, keepdim=True)
    terms, rest = contribution.nan_to_num(), attention.masked_fill(top, 0.0)

    def of_others(x: Tensor) -> Tensor:  # of a top key summed: its 1 - A would be rounding
        every = (attention * x).sum(-1, keepdim=True) - attention * x
        return every.where(~top, (rest * x).sum(-1, keepdim=True))

    return contribution - of_others(terms) / of_others(torch.ones_like(attention))


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
    """One query head on one sequence: its vectors by plane, and every term of its scores.

    With the output `projection` also what it passes on, v W_O by key, and what that adds
    `toward` each answer. Fills arrays of NaN, [query or key, frequency, ...] or [query, key],
    by their names. Layers of fewer planes than others fill only the first frequencies.
    """
    call = call.of_heads(torch.tensor([head]))
    attention, terms = attention_map(call)[0, 0], planes.terms
    q, k = (x[0, 0].to(attention.dtype) for x in (call.query, call.key))
    position, term_of = torch.arange(len(q)), planes.term_of
    hidden = ~call.seen_by(position)[0].to(q.device)

    def scores(chosen: Bool[Tensor, " coordinate"]) -> Float[Tensor, "query key"]:
        return (call.scale * q[:, chosen] @ k[:, chosen].mT).masked_fill(hidden, torch.nan)

    for side, x in (("q", q), ("k", k)):
        into[f"{side}_norm"][:, :terms] = planes.norms(x)
        still = unrotate(x, position, planes)
        turning = into[f"{side}_still"][:, : len(planes.inv_freq)]
        turning[..., 0], turning[..., 1] = still[:, planes.first], still[:, planes.second]
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
    for answer, direction in enumerate(toward):
        into["logit"][answer].copy_(attention * (direction.to(attention) @ written.mT))
