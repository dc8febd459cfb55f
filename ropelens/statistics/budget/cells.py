"""Rows of an attention call beside their keys, in blocks: what the models of a row read.

Scores are the largest tensors of an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from ropelens.rope.planes import Planes
from ropelens.statistics.block import CallRows
from ropelens.statistics.call import AttentionCall, sees
from ropelens.statistics.kernel import offset_edges
from ropelens.statistics.memory import BLOCK_ELEMENTS, HIDDEN, pick, products, row_blocks
from ropelens.statistics.rows import Rows

SINKS = ("first", "named", "found")
"""Kinds of sinks, 1, 2, 3 in tables of them: each has a weight of its own in the models."""


@dataclass(frozen=True)
class Cells:
    """Some rows of every sequence, beside the keys from `low` on that one of them may see.

    `q`, `k` carry their rotation, `q_still`, `k_still` do not; both queries carry the scale of
    the scores. `hidden` is 0 where a row sees a key, else `HIDDEN`. `offset` is that of each
    key, 0 for keys ahead. `columns` are the keys that are a sink for some head of some
    sequence, `kind` which of the `SINKS` (1, 2, ...; 0 none), `sink_bin` the bin of their
    offset. The sequences of one of the `parts` share the weights of a model, and their sums.
    """

    call: AttentionCall
    planes: Planes
    position: Int[Tensor, "batch row"]
    weight: Float[Tensor, "batch row"]
    low: int
    q: Float[Tensor, "batch kv_head group row coordinate"]
    k: Float[Tensor, "batch kv_head key coordinate"]
    q_still: Float[Tensor, "batch kv_head group row coordinate"]
    k_still: Float[Tensor, "batch kv_head key coordinate"]
    hidden: Float[Tensor, "batch 1 1 row key"]
    offset: Int[Tensor, "batch row key"]
    columns: Int[Tensor, " column"]
    kind: Int[Tensor, "batch kv_head group 1 column"]
    sink_bin: Int[Tensor, "batch row column"]
    part: Int[Tensor, " batch"]
    parts: int

    def attention(
        self,
        q: Float[Tensor, "batch kv_head group row coordinate"] | None = None,
        k: Float[Tensor, "batch kv_head key coordinate"] | None = None,
    ) -> tuple[Float[Tensor, "batch kv_head group row key"], Tensor]:
        """A and its entropy (nats) by row; of other queries and keys, where they are given."""
        scores = products(self.q if q is None else q, self.k if k is None else k)
        scores = self.call.squash(scores).add_(self.hidden)
        attention = scores.softmax(-1)
        return attention, log_norm(scores, attention) - torch.linalg.vecdot(attention, scores)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return len(self.call.start)

    @property
    def log_keys(self) -> Float[Tensor, "batch 1 1 row"]:
        """Logarithm of the number of keys that each row sees."""
        return (self.hidden == 0).sum(-1).to(self.k.dtype).log()

    def by_part(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "part ..."]:
        """Sum over the sequences of each part, in float64."""
        x = x.to("cpu", torch.float64)
        return x.new_zeros(self.parts, *x.shape[1:]).index_add_(0, self.part, x)

    def weigh(self, per_row: Float[Tensor, "batch ... row"]) -> Float[Tensor, "part ..."]:
        """Weighted sum over the rows of each part, in float64."""
        return self.by_part((per_row * self.weight[:, None, None]).sum(-1))

    def sum_at(
        self,
        place: Int[Tensor, "batch row key"],
        weighted: Float[Tensor, "batch kv_head group row key"],
        places: int,
    ) -> Float[Tensor, "part kv_head group place"]:
        """Sum over rows and keys at each place, such as an offset, in float64."""
        heads = weighted.shape[1:3]
        by_head = weighted.permute(1, 2, 0, 3, 4).reshape(heads.numel(), -1)
        sums = by_head.new_zeros(len(by_head), self.parts * places)
        at = self.part.to(place.device)[:, None, None] * places + place
        sums = sums.index_add_(1, at.flatten(), by_head).view(*heads, self.parts, places)
        return sums.permute(2, 0, 1, 3).to("cpu", torch.float64)

    def features(self, sequence: int) -> Float[Tensor, "kv_head group row key first"]:
        """What beta and sigma multiply at every cell of one sequence."""
        q, k = self.q_still[sequence], self.k_still[sequence]
        by_plane = self.planes.sum_coordinates(q[..., None, :] * k[:, None, None])
        sinks = by_plane.new_zeros(*by_plane.shape[:4], 1 + len(SINKS))
        kind = self.kind[sequence].expand(-1, -1, by_plane.shape[2], -1)
        sinks[..., self.columns, :] = one_hot(kind, 1 + len(SINKS)).to(sinks.dtype)
        return torch.cat([by_plane, sinks[..., 1:]], dim=-1)


def blocks(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    *,
    part: Int[Tensor, " batch"] | None = None,
    parts: int = 1,
) -> Iterator[Cells]:
    """The rows of a call in blocks, which hold half of `BLOCK_ELEMENTS` scores.

    `sinks` says which of the `SINKS` each key is (1, 2, ...; 0 none), in one row for all heads
    or in one for each. All sequences are one part, unless `part` says otherwise.
    """
    (batch, heads), kv_heads, device = call.query.shape[:2], call.key.shape[1], call.key.device
    query = call.query.to(torch.promote_types(call.query.dtype, torch.float32)) * call.scale
    call = replace(call, query=query, scale=1.0)
    of_call = CallRows(call, replace(rows, dense=False), planes)
    q_still = pick(of_call.q_still, call.row_at(rows.position)).unflatten(1, (kv_heads, -1))
    kind = sinks.expand(-1, heads, -1).unflatten(1, (kv_heads, -1))[..., None, :].to(device)
    edges = offset_edges(len(call.start)).to(device)
    area = BLOCK_ELEMENTS[device.type] // 2 // (batch * heads)
    count = rows.position.shape[1]
    few = count * int(rows.position.max() + 1) <= area // 4  # whichever of them are hidden
    for some, high in row_blocks(
        rows.position, area=area, most=count if few else max(16, -(-count // 8))
    ):
        at = rows.position[:, some]
        first = call.start.cpu()[at]
        low = int(first.min())
        keys, key = slice(low, high), torch.arange(low, high)
        offset = (at[..., None] - key).clamp(min=0).to(device)
        columns = kind[..., keys].flatten(0, -2).any(0).nonzero()[:, 0]
        hidden = torch.where(sees(first, at, key), 0.0, HIDDEN)
        yield Cells(
            call=call,
            planes=planes,
            position=at.to(device),
            weight=of_call.weight[:, some],
            low=low,
            q=of_call.row_q[..., some, :],
            k=of_call.k[:, :, keys],
            q_still=q_still[..., some, :],
            k_still=of_call.k_still[:, :, keys],
            hidden=hidden.to(device, query.dtype)[:, None, None],
            offset=offset,
            columns=columns,
            kind=kind[..., keys][..., columns],
            sink_bin=bin_of(offset[..., columns], edges),
            part=torch.zeros(batch, dtype=torch.long) if part is None else part,
            parts=parts,
        )


def log_norm(
    scores: Float[Tensor, "*batch key"], softmax: Float[Tensor, "*batch key"]
) -> Float[Tensor, "*batch"]:
    """log sum_j exp(score_j). A row's largest weight is at least 1 / keys: its log is exact."""
    return scores.amax(-1) - softmax.amax(-1).log()


def split(
    x: Float[Tensor, "*head variable"], terms: int, context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """beta, sigma, kappa and tau, or the sums that they multiply, which stand side by side.

    They belong to the terms of a score, kinds of sinks, offsets, and bins of offsets. What a
    model does not have is left out at the end.
    """
    first = terms + len(SINKS)
    beta, sigma, kappa, tau = x.tensor_split((terms, first, first + context), dim=-1)
    return beta, sigma, kappa, tau


def bin_of(offset: Int[Tensor, "*shape"], edges: Int[Tensor, " edge"]) -> Int[Tensor, "*shape"]:
    """The bin that each offset lies in."""
    return torch.bucketize(offset.contiguous(), edges, right=True) - 1
