"""Rows of an attention call beside their keys, in blocks: what the models of a row read.

Blocks are views of queries and keys, so that scores are the largest tensors of an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ropelens.rope.planes import Planes, unrotate
from ropelens.statistics.call import AttentionCall, sees
from ropelens.statistics.kernel import offset_edges
from ropelens.statistics.memory import HIDDEN
from ropelens.statistics.rows import Rows

SINKS = ("first", "named", "found")
"""Kinds of sinks, 1, 2, 3 in tables of them: each has a weight of its own in the models."""

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Scores of a block; on a CPU they should stay in its caches."""


@dataclass(frozen=True)
class Cells:
    """Some rows of every sequence, beside the keys from `low` on that one of them may see.

    `q`, `k` carry their rotation, `q_still`, `k_still` do not; both queries carry the scale of
    the scores. `hidden` is 0 where a row sees a key, else `HIDDEN`. `columns` are the keys that
    are a sink for some head of some sequence, `kind` which of the `SINKS` (1, 2, ...; 0 none),
    `sink_bins` the bin of each row's offset to them. The sequences of one of the `parts` share
    the weights of a model, and their sums.
    """

    position: Int[Tensor, "batch row"]
    weight: Float[Tensor, "batch row"]
    low: int
    context: int
    q: Float[Tensor, "batch kv_head group row coordinate"]
    k: Float[Tensor, "batch kv_head key coordinate"]
    q_still: Float[Tensor, "batch kv_head group row coordinate"]
    k_still: Float[Tensor, "batch kv_head key coordinate"]
    hidden: Float[Tensor, "batch 1 1 row key"]
    columns: Int[Tensor, " column"]
    sink_bins: Int[Tensor, "batch row column"]
    kind: Int[Tensor, "batch kv_head group 1 column"]
    call: AttentionCall
    planes: Planes
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

    def by_part(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "part ..."]:
        """Sum over the sequences of each part, in float64."""
        x = x.to("cpu", torch.float64)
        return x.new_zeros(self.parts, *x.shape[1:]).index_add_(0, self.part, x)

    def weigh(self, per_row: Float[Tensor, "batch ... row"]) -> Float[Tensor, "part ..."]:
        """Weighted sum over the rows of each part, in float64."""
        return self.by_part((per_row * self.weight[:, None, None]).sum(-1))

    @property
    def log_keys(self) -> Float[Tensor, "batch 1 1 row"]:
        """Logarithm of the number of keys that each row sees."""
        return (self.hidden == 0).sum(-1).to(self.k.dtype).log()

    def features(self, sequence: int) -> Float[Tensor, "kv_head group row key first"]:
        """What beta and sigma multiply at every cell of one sequence."""
        q, k = self.q_still[sequence], self.k_still[sequence]
        by_plane = self.planes.sum_coordinates(q[..., None, :] * k[:, None, None])
        sinks = by_plane.new_zeros(*by_plane.shape[:4], 1 + len(SINKS))
        kind = self.kind[sequence].expand(-1, -1, by_plane.shape[2], -1)
        sinks[..., self.columns, :] = one_hot(kind, 1 + len(SINKS)).to(sinks.dtype)
        return torch.cat([by_plane, sinks[..., 1:]], dim=-1)

    def at_offsets(
        self, kernel: Float[Tensor, "batch kv_head group offset"]
    ) -> Float[Tensor, "batch kv_head group row key"]:
        """kernel(i - j) of every row i and key j: backwards, a row's is one stretch of it."""
        batch, kv_heads, group, context = kernel.shape
        backwards = pad(kernel.flip(-1), (0, context)).permute(1, 2, 0, 3)
        line = backwards.reshape(kv_heads * group, batch * 2 * context)
        first = torch.arange(batch, device=kernel.device)[:, None] * 2 * context
        begin = first + context - 1 - self.position + self.low
        windows = line.unfold(-1, self.k.shape[2], 1)[:, begin.flatten()]
        return windows.view(kv_heads, group, *begin.shape, -1).permute(2, 0, 1, 3, 4)

    def sum_by_offset(
        self, weighted: Float[Tensor, "batch kv_head group row key"]
    ) -> Float[Tensor, "part kv_head group offset"]:
        """Sum over rows and keys at each offset."""
        key = torch.arange(self.low, self.low + self.k.shape[2], device=self.k.device)
        return self._sum_at(
            (self.position[..., None] - key).clamp(min=0), weighted, self.context
        )

    def sum_by_bin(
        self, weighted: Float[Tensor, "batch kv_head group row column"]
    ) -> Float[Tensor, "part kv_head group bin"]:
        """Sum over rows and sinks in each bin of offsets."""
        at_sinks = weighted * (self.kind > 0)
        return self._sum_at(self.sink_bins, at_sinks, len(offset_edges(self.context)) - 1)

    def _sum_at(
        self,
        place: Int[Tensor, "batch row key"],
        weighted: Float[Tensor, "batch kv_head group row key"],
        places: int,
    ) -> Float[Tensor, "part kv_head group place"]:
        heads = weighted.shape[1:3]
        by_head = weighted.permute(1, 2, 0, 3, 4).reshape(heads.numel(), -1)
        sums = by_head.new_zeros(len(by_head), self.parts * places)
        at = self.part.to(place.device)[:, None, None] * places + place
        sums.index_add_(1, at.flatten(), by_head)
        return (
            sums.view(*heads, self.parts, places).permute(2, 0, 1, 3).to("cpu", torch.float64)
        )


def blocks(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    *,
    part: Int[Tensor, " batch"] | None = None,
    parts: int = 1,
    kv_heads: slice = slice(None),
) -> Iterator[Cells]:
    """The rows of a call in blocks, for the query heads of some kv heads.

    `sinks` says which of the `SINKS` each key is (1, 2, ...; 0 none), in one row for all heads
    or in one for each. All sequences are one part, unless `part` says otherwise.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    device = call.key.device
    heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    k = call.key[:, kv_heads].to(dtype)
    q = call.query.unflatten(1, (heads, group))[:, kv_heads].to(dtype) * call.scale
    of_keys = planes.of_keys(heads)
    if of_keys.inv_freq.ndim == 2:
        of_keys = replace(of_keys, inv_freq=of_keys.inv_freq[kv_heads])
    of_queries = replace(of_keys, inv_freq=of_keys.inv_freq.unsqueeze(-2))
    everywhere = torch.arange(k.shape[2], device=device)
    q_still = unrotate(q, everywhere if call.at is None else call.at, of_queries)
    k_still = unrotate(k, everywhere, of_keys)
    kind = sinks.unflatten(1, (heads, group)) if sinks.shape[1] > 1 else sinks[:, :, None]
    kind = kind.expand(-1, heads, group, -1)[:, kv_heads, :, None].to(device)
    position, start = rows.position.to(device), call.start.to(device)
    edges = offset_edges(k.shape[2]).to(device)
    for some in row_blocks(rows, per_cell=len(k) * k.shape[1] * group, device=device.type):
        at = position[:, some]
        low, high = int(start[at].min()), int(at.max()) + 1
        key = everywhere[low:high]
        seen = sees(start[at], at, key)
        index = call.row_at(at)[:, None, None, :, None].expand(
            -1, *q.shape[1:3], -1, q.shape[-1]
        )
        columns = kind[..., low:high].flatten(0, -2).any(0).nonzero()[:, 0]
        yield Cells(
            position=at,
            weight=rows.weight[:, some].to(device, dtype),
            low=low,
            context=k.shape[2],
            q=q.gather(3, index),
            k=k[:, :, low:high],
            q_still=q_still.gather(3, index),
            k_still=k_still[:, :, low:high],
            hidden=torch.where(seen, 0.0, HIDDEN).to(dtype)[:, None, None],
            columns=columns,
            sink_bins=bin_of((at[..., None] - low - columns).clamp(min=0), edges),
            kind=kind[..., low:high][..., columns],
            call=call,
            planes=planes,
            part=torch.zeros(len(k), dtype=torch.long) if part is None else part,
            parts=parts,
        )


def row_blocks(rows: Rows, *, per_cell: int, device: str) -> Iterator[slice]:
    """Ranges of rows whose scores fill about one block, `per_cell` scores for a row and key.

    At least 16 rows, for products of few rows run far below a processor's speed; of many at
    most an eighth, for a block computes the keys of its last row for all. A quarter of a block
    is not divided.
    """
    count = rows.position.shape[1]
    last = rows.position.amax(0) + 1
    few = count * int(last.max()) * per_cell <= BLOCK_ELEMENTS["cpu"] // 4
    most = count if few else max(16, -(-count // 8))
    begin = 0
    while begin < count:
        step = min(most, count - begin)
        while (
            step > 16 and step * int(last[begin + step - 1]) * per_cell > BLOCK_ELEMENTS[device]
        ):
            step = (step + 1) // 2
        yield slice(begin, begin + step)
        begin += step


def products(
    q: Float[Tensor, "batch kv_head group row coordinate"],
    k: Float[Tensor, "batch kv_head key coordinate"],
) -> Float[Tensor, "batch kv_head group row key"]:
    """q k of every row and key: one product serves all the heads of a kv head."""
    return (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])


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
