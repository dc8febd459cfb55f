"""The cells of an attention matrix, a row and a key each, with and without rotation.

What the models of a row in `logit.py` are fitted to and scored on: some rows of one attention
call beside all their keys, in blocks. `Cells` are views of queries and keys, so that their
scores are the largest thing that an evaluation makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ropelens.rope.planes import Planes, unrotate
from ropelens.statistics.bins import offset_edges
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows

SINKS = ("first", "named", "found")
"""Kinds of sinks, 1, 2, 3 in tables of them: each has a weight of its own in the models."""

HIDDEN = -1e30
"""Score of a key that the row does not see: its weight is exactly 0, its product finite."""

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Scores of a block; on a CPU they should stay in its caches."""

FEW_ELEMENTS = 2**17
"""Scores that take one block, whichever of them are hidden: each block costs its calls."""


@dataclass(frozen=True)
class Parts:
    """One number for each part of the model: its weights, or the sums that they multiply.

    Weights are beta (`plane`), sigma (`sink`), kappa (`offset`) and tau (`sink_offset`). The
    sums of any attention are sum_j A_ij c~_ijf by plane, its mass on sinks of each kind, that
    by offset, and that on sinks by bin of offsets.
    """

    plane: Float[Tensor, "*slot kv_head group term"]
    sink: Float[Tensor, "*slot kv_head group kind"]
    offset: Float[Tensor, "*slot kv_head group offset"]
    sink_offset: Float[Tensor, "*slot kv_head group bin"]

    @classmethod
    def of(
        cls, flat: Float[Tensor, "*slot kv_head group part"], *, terms: int, context: int
    ) -> Parts:
        """From all parts side by side."""
        sizes = [terms, len(SINKS), context, len(offset_edges(context)) - 1]
        return cls(*flat.split(sizes, dim=-1))

    def upto(self, context: int) -> Parts:
        """What there is of it in a shorter context."""
        bins = len(offset_edges(context)) - 1
        return replace(
            self, offset=self.offset[..., :context], sink_offset=self.sink_offset[..., :bins]
        )

    @property
    def flat(self) -> Float[Tensor, "*slot kv_head group part"]:
        """All parts side by side."""
        return torch.cat([self.plane, self.sink, self.offset, self.sink_offset], dim=-1)


@dataclass(frozen=True)
class Cells:
    """Some rows of every sequence, beside the keys from `low` on that one of them may see.

    `q`, `k` carry their rotation, `q_still`, `k_still` do not; the scale of the scores is in
    both queries. `hidden` is 0 where a row sees a key, else `HIDDEN`. `columns` are the keys
    that are a sink for some head of some sequence, and `kind` says of which of the `SINKS`
    (1, 2, ...; 0 of none); `sink_bins` holds the bin, of `bins`, of each row's offset to them.
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
    bins: int
    kind: Int[Tensor, "batch kv_head group 1 column"]
    softcap: float | None
    planes: Planes

    def attention(
        self,
        q: Float[Tensor, "batch kv_head group row coordinate"] | None = None,
        k: Float[Tensor, "batch kv_head key coordinate"] | None = None,
    ) -> tuple[Float[Tensor, "batch kv_head group row key"], Tensor]:
        """A, the attention that is left to the keys, and its entropy (nats) by row.

        Of other queries and keys in place of these, where they are given.
        """
        scores = _product(self.q if q is None else q, self.k if k is None else k)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores += self.hidden
        attention = scores.softmax(-1)
        return attention, log_norm(scores, attention) - torch.linalg.vecdot(attention, scores)

    def scores(
        self, weights: Parts, slot: Int[Tensor, " batch"], *, content: bool, offsets: bool
    ) -> Float[Tensor, "batch kv_head group row key"]:
        """log P_i(j) + log Z_i of every key: with contents, with offsets, or without.

        Sequence b has the weights of `slot[b]`.
        """
        like = self.k_still
        if content:
            beta = weights.plane[slot].to(like.device, like.dtype)[..., None, :]
            scores = _product(self.q_still * beta[..., term_of(self.planes)], like)
        else:
            scores = like.new_zeros(*self.q.shape[:-1], like.shape[2])
        sigma = pad(weights.sink[slot].to(like.device, like.dtype), (1, 0))
        of_sinks = sigma.gather(-1, self.kind[..., 0, :])[..., None, :]
        if offsets:
            scores += self._kernel_windows(weights.offset.to(like.device, like.dtype), slot)
            bins = self.sink_bins.flatten(1)[:, None, None].expand(*scores.shape[:3], -1)
            tau = weights.sink_offset[slot].to(like.device, like.dtype).gather(-1, bins)
            of_sinks = of_sinks + tau.unflatten(-1, self.sink_bins.shape[1:]) * (self.kind > 0)
        scores[..., self.columns] += of_sinks
        return scores.add_(self.hidden)

    def sums(
        self,
        attention: Float[Tensor, "batch kv_head group row key"],
        slot: Int[Tensor, " batch"],
        *,
        slots: int,
        content: bool = True,
        offsets: bool = True,
    ) -> Float[Tensor, "slot kv_head group part"]:
        """The sums of any attention that the `Parts` of the model multiply, flat, in float64.

        Weighted, over the rows of the sequences of each slot; 0 for what is left out.
        """
        batch, kv_heads, group = self.q.shape[:3]
        weighted = attention * self.weight[:, None, None, :, None]
        on_sinks = weighted[..., self.columns].sum(-2)
        sink = on_sinks.new_zeros(batch, kv_heads, group, 1 + len(SINKS))
        sink = sink.scatter_add_(-1, self.kind[..., 0, :], on_sinks)[..., 1:]
        plane = sink.new_zeros(batch, kv_heads, group, self.planes.terms)
        if content:
            read = (weighted.flatten(2, 3) @ self.k_still).view_as(self.q)
            plane = self.planes.sum_coordinates((self.q_still * read).sum(-2))
        slot = slot.to(self.k.device)
        first = torch.cat([plane, sink], dim=-1).double()
        total = first.new_zeros(slots, *first.shape[1:]).index_add_(0, slot, first)
        keys = torch.arange(self.low, self.low + self.k.shape[2], device=self.k.device)
        offset = (self.position[..., None] - keys).clamp(min=0)
        sizes = self.context, self.bins
        by_offset = [first.new_zeros(slots, kv_heads, group, size) for size in sizes]
        if offsets:
            at_sinks = weighted[..., self.columns] * (self.kind > 0)
            by_offset = [
                _sum_by(offset, weighted, slot, slots, self.context),
                _sum_by(self.sink_bins, at_sinks, slot, slots, self.bins),
            ]
        return torch.cat([total, *by_offset], dim=-1).cpu()

    def weigh(self, per_row: Float[Tensor, "*batch row"]) -> Float[Tensor, "*batch"]:
        """Weighted sum over the rows of each sequence, in float64."""
        return (per_row * self.weight[:, None, None]).sum(-1).to("cpu", torch.float64)

    def log_keys(self) -> Float[Tensor, "batch row"]:
        """Logarithm of the number of keys that each row sees."""
        return (self.hidden[:, 0, 0] == 0).sum(-1).to(self.k.dtype).log()

    def features(self, sequence: int) -> Float[Tensor, "kv_head group row key part"]:
        """What beta and sigma multiply at every cell of one sequence."""
        q, k = self.q_still[sequence], self.k_still[sequence]
        by_plane = self.planes.sum_coordinates(q[..., None, :] * k[:, None, None])
        sinks = by_plane.new_zeros(*by_plane.shape[:4], 1 + len(SINKS))
        kind = self.kind[sequence].expand(-1, -1, by_plane.shape[2], -1)
        sinks[..., self.columns, :] = one_hot(kind, 1 + len(SINKS)).to(sinks.dtype)
        return torch.cat([by_plane, sinks[..., 1:]], dim=-1)

    def _kernel_windows(
        self, kernel: Float[Tensor, "slot kv_head group offset"], slot: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch kv_head group row key"]:
        """kernel(i - j) of every row i and key j: backwards, a row's is one stretch of it."""
        slots, kv_heads, group, context = kernel.shape
        slot = slot.to(kernel.device)
        backwards = pad(kernel.flip(-1), (0, context)).permute(1, 2, 0, 3)
        line = backwards.reshape(kv_heads * group, slots * 2 * context)
        begin = slot[:, None] * 2 * context + context - 1 - self.position + self.low
        windows = line.unfold(-1, self.k.shape[2], 1)[:, begin.flatten()]
        return windows.view(kv_heads, group, *begin.shape, -1).permute(2, 0, 1, 3, 4)


def blocks(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    *,
    kv_heads: slice = slice(None),
) -> Iterator[Cells]:
    """The rows of a call in blocks, for the query heads of some kv heads.

    `sinks` says of which of the `SINKS` each key is (1, 2, ...; 0 of none), in one row for all
    heads or in one for each.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    device = call.key.device
    heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    k = call.key[:, kv_heads].to(dtype)
    q = call.query.unflatten(1, (heads, group))[:, kv_heads].to(dtype) * call.scale
    everywhere = torch.arange(k.shape[2], device=device)
    of_keys = planes.of_keys(heads)
    if of_keys.inv_freq.ndim == 2:
        of_keys = replace(of_keys, inv_freq=of_keys.inv_freq[kv_heads])
    of_queries = replace(of_keys, inv_freq=of_keys.inv_freq.unsqueeze(-2))
    here = everywhere if call.at is None else call.at
    q_still, k_still = unrotate(q, here, of_queries), unrotate(k, everywhere, of_keys)
    kind = sinks.unflatten(1, (heads, group)) if sinks.shape[1] > 1 else sinks[:, :, None]
    kind = kind.expand(-1, heads, group, -1)[:, kv_heads, :, None].to(device)
    position, start = rows.position.to(device), call.start.to(device)
    edges = offset_edges(k.shape[2]).to(device)
    for part in row_blocks(rows, per_cell=len(k) * k.shape[1] * group, device=device.type):
        at = position[:, part]
        low, high = int(start[at].min()), int(at.max()) + 1
        key = everywhere[low:high]
        seen = (key <= at[..., None]) & (key >= start[at][..., None])
        index = call.row_at(at)[:, None, None, :, None].expand(
            -1, *q.shape[1:3], -1, q.shape[-1]
        )
        own = kind[..., low:high]
        columns = own.flatten(0, -2).any(0).nonzero()[:, 0]
        yield Cells(
            position=at,
            weight=rows.weight[:, part].to(device, dtype),
            low=low,
            context=k.shape[2],
            q=q.gather(3, index),
            k=k[:, :, low:high],
            q_still=q_still.gather(3, index),
            k_still=k_still[:, :, low:high],
            hidden=torch.where(seen, 0.0, HIDDEN).to(dtype)[:, None, None],
            columns=columns,
            sink_bins=bin_of((at[..., None] - low - columns).clamp(min=0), edges),
            bins=len(edges) - 1,
            kind=own[..., columns],
            softcap=call.softcap,
            planes=planes,
        )


def row_blocks(rows: Rows, *, per_cell: int, device: str) -> Iterator[slice]:
    """Ranges of rows whose scores fill about one block, `per_cell` scores for a row and key.

    At least 16 rows, for products of few run far below a processor's speed; of many at most an
    eighth, for a block computes the keys of its last row for all.
    """
    count = rows.position.shape[1]
    last = rows.position.amax(0) + 1
    few = count * int(last.max()) * per_cell <= FEW_ELEMENTS
    most = count if few else max(16, -(-count // 8))
    begin = 0
    while begin < count:
        end = min(count, begin + most)
        while (
            end - begin > 16
            and (end - begin) * int(last[end - 1]) * per_cell > BLOCK_ELEMENTS[device]
        ):
            end = begin + (end - begin + 1) // 2
        yield slice(begin, end)
        begin = end


def log_norm(
    scores: Float[Tensor, "*batch key"], softmax: Float[Tensor, "*batch key"]
) -> Float[Tensor, "*batch"]:
    """log sum_j exp(score_j). A row's largest weight is at least 1 / keys: its log is exact."""
    return scores.amax(-1) - softmax.amax(-1).log()


def term_of(planes: Planes) -> Int[Tensor, " coordinate"]:
    """The term that each coordinate of a head belongs to."""
    term = torch.full((planes.head_dim,), planes.terms - 1)
    term[planes.first] = term[planes.second] = torch.arange(planes.rotary_dim // 2)
    return term


def bin_of(offset: Int[Tensor, "*shape"], edges: Int[Tensor, " edge"]) -> Int[Tensor, "*shape"]:
    """The bin that each offset lies in."""
    return torch.bucketize(offset.contiguous(), edges, right=True) - 1


def _sum_by(
    place: Int[Tensor, "batch row key"],
    weighted: Float[Tensor, "batch kv_head group row key"],
    slot: Int[Tensor, " batch"],
    slots: int,
    places: int,
) -> Float[Tensor, "slot kv_head group place"]:
    """Sum over the rows of each slot of what stands at each place, in float64."""
    heads = weighted.shape[1:3]
    by_head = weighted.permute(1, 2, 0, 3, 4).reshape(heads.numel(), -1)
    sums = by_head.new_zeros(len(by_head), slots * places)
    sums.index_add_(1, (slot[:, None, None] * places + place).flatten(), by_head)
    return sums.view(*heads, slots, places).permute(2, 0, 1, 3).double()


def _product(
    q: Float[Tensor, "batch kv_head group row coordinate"],
    k: Float[Tensor, "batch kv_head key coordinate"],
) -> Float[Tensor, "batch kv_head group row key"]:
    """q k of every row and key: one product serves all the heads of a kv head."""
    return (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])
