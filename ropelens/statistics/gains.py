"""What the models of a row gain on rows that they were not fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.budget import GAINS
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.cells import Parts, blocks
from ropelens.statistics.logit import MODELS, Fits, sequences_of
from ropelens.statistics.offsets import OffsetRows
from ropelens.statistics.rows import Rows


@dataclass(frozen=True)
class Scores:
    """Sums over the rows of each slot, in nats: what attention and its models say of its keys.

    `information` is sum_j A_ij log A_ij; the others are sum_j A_ij log P_i(j), P uniform, S,
    P, C and B. `weight` counts the rows. Scores of two sets of sequences add.
    """

    weight: Float[Tensor, "*slot"]
    information: Float[Tensor, "*slot head"]
    uniform: Float[Tensor, "*slot head"]
    sink: Float[Tensor, "*slot head"]
    position: Float[Tensor, "*slot head"]
    content: Float[Tensor, "*slot head"]
    both: Float[Tensor, "*slot head"]

    def __add__(self, other: Scores) -> Scores:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Scores(*(a + b for a, b in pairs))

    @property
    def gains(self) -> dict[str, Float[Tensor, "*slot head"]]:
        """Bits per row over even attention, by the names of `GAINS`; NaN without rows."""
        nats = (self.information, self.sink, self.position, self.content, self.both)
        rows_in_bits = self.weight[..., None] * math.log(2)
        bits = [(one - self.uniform) / rows_in_bits for one in nats]
        return dict(zip(GAINS, bits, strict=True))

    @property
    def whole(self) -> Scores:
        """The same over all slots."""
        return Scores(*(x.sum(0) for x in vars(self).values()))


@torch.no_grad()
def score(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    fits: Fits,
    *,
    by: Int[Tensor, " batch"],
    slot: Int[Tensor, " batch"],
    slots: int,
) -> Scores:
    """The likelihood of `rows` under models fitted elsewhere: sequence b by those of `by[b]`.

    Sums over the sequences of each slot (a document, say).
    """
    batch, group = len(by), call.query.shape[1] // call.key.shape[1]
    like = torch.zeros(batch, call.key.shape[1], group, dtype=torch.float64)
    sums = {name: like.clone() for name in ("information", "uniform", *MODELS)}
    every = torch.arange(batch)
    for block in blocks(call, rows, planes, sinks):
        attention, entropy = block.attention()
        observed = block.sums(attention, every, slots=batch)
        sums["information"] -= block.weigh(entropy)
        sums["uniform"] -= block.weigh(block.log_keys()[:, None, None])
        for name, model in MODELS.items():
            sums[name] += (observed * fits.weights[name].flat[by]).sum(-1)
            if model.content:
                weights = fits.weights[name]
                scores = block.scores(weights, by, content=True, offsets=model.offsets)
                sums[name] -= block.weigh(scores.logsumexp(-1))
    for name in ("sink", "position"):
        sums[name] -= _offset_norms(call, rows, sinks, fits.weights[name], by)
    weight = torch.zeros(slots, dtype=torch.float64)
    return Scores(
        weight.index_add_(0, slot, rows.weight.double().sum(1)),
        *(
            values.new_zeros(slots, *values.shape[1:]).index_add_(0, slot, values).flatten(1)
            for values in sums.values()
        ),
    )


def _offset_norms(
    call: AttentionCall,
    rows: Rows,
    sinks: Int[Tensor, "batch shared position"],
    weights: Parts,
    by: Int[Tensor, " batch"],
) -> Float[Tensor, "batch kv_head group"]:
    """Sum over the rows of each sequence of log Z, where contents have no weight."""
    norms = torch.zeros(len(by), *weights.sink.shape[1:3], dtype=torch.float64)
    for part in by.unique().tolist():
        own = by == part
        table = OffsetRows.of(sequences_of(rows, own), call.start, sinks[own])
        flat = weights.flat[part].flatten(0, 1)[:, weights.plane.shape[-1] :]
        per_row = table.log_norms(flat)
        per_row = (per_row * table.weight).unflatten(1, (int(own.sum()), -1)).sum(-1)
        norms[own] = per_row.mT.unflatten(1, norms.shape[1:])
    return norms
