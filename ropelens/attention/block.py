"""An attention call as statistics and models read it: its rows, and blocks of them.

A `Block` has the formulas of docs/measures.md as properties, each computed when it is first
read: L, A, A K, U K. Nothing larger than a block of rows is in memory, and only the lower
triangle is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ropelens.attention import fast_products
from ropelens.attention.call import AttentionCall, sees
from ropelens.attention.offset_bins import bin_of, offset_edges
from ropelens.rope.planes import Planes, unrotate
from ropelens.text.rows import Rows


class SampledCall:
    """An attention call whose layer rotates in `planes`, and the `rows` that are looked at.

    `q` [batch, head, row, coordinate] and `k` [batch, kv_head, position, coordinate] are the
    queries and keys in float32 or wider; `q_still` and `k_still` have their rotation taken off.
    `position` [shared, row] and `weight` [batch, row] are those of `rows`; `shared` is 1 where
    all sequences have the same rows. `sinks` [batch, shared, position] is the kind of sink of
    each key (0: none), in one row for all heads or in one for each; without it, position 0 is
    one. `tokens` [batch, position] are the ids of the keys. The first key stands at `first`,
    where a call has only a part of a sequence.
    """

    def __init__(
        self,
        call: AttentionCall,
        rows: Rows,
        planes: Planes,
        *,
        sinks: Int[Tensor, "batch shared position"] | None = None,
        tokens: Int[Tensor, "batch token"] | None = None,
        first: int = 0,
    ) -> None:
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.call, self.rows, self.planes = call, rows, planes
        self.q, self.k = call.query.to(dtype), call.key.to(dtype).contiguous()
        self.k_scaled = self.k if call.scale == 1 else self.k * call.scale
        self.places = torch.arange(first, first + self.k.shape[2], device=self.k.device)
        self.position = rows.position[:1] if rows.dense else rows.position
        self.weight = rows.weight.to(self.k.device, dtype)
        none = torch.empty(len(self.k), 0, dtype=torch.long)
        self.tokens = (none if tokens is None else tokens).to(self.k.device)
        sinks = (self.places == 0).expand(len(self.k), 1, -1) if sinks is None else sinks
        self.sinks = sinks.long().to(self.k.device)
        shape = (1, 1) if sinks.shape[1] == 1 else (self.k.shape[1], -1)
        self.sink_kind = self.sinks.unflatten(1, shape)
        self.buffers: dict[str, Tensor] = {}

    def with_rows(self, rows: Rows) -> SampledCall:
        """Other rows of the same call."""
        other = SampledCall(self.call, rows, self.planes, sinks=self.sinks, tokens=self.tokens)
        if "k_still" in vars(self):
            other.k_still = self.k_still
        return other

    def of_sequences(self, chosen: slice | Bool[Tensor, " batch"]) -> SampledCall:
        """The rows of some of the sequences."""
        of_each = {name: vars(self.call)[name] for name in ("query", "key", "value", "output")}
        if self.call.visible is not None:
            of_each["visible"] = self.call.visible.expand(len(self.q), -1, -1)
        call = replace(self.call, **{name: x[chosen] for name, x in of_each.items()})
        of_rows = vars(self.rows).items()
        parts: dict[str, Any] = {n: x[chosen] for n, x in of_rows if isinstance(x, Tensor)}
        rows = replace(self.rows, **parts)
        sinks, tokens = self.sinks[chosen], self.tokens[chosen]
        return SampledCall(call, rows, self.planes, sinks=sinks, tokens=tokens)

    @cached_property
    def q_still(self) -> Float[Tensor, "batch head row coordinate"]:
        """q~: the queries with their rotation taken off."""
        at = self.places if self.call.at is None else self.call.at
        return unrotate(self.q, at, self.planes)

    @cached_property
    def k_still(self) -> Float[Tensor, "batch kv_head position coordinate"]:
        """k~: the keys with their rotation taken off."""
        return unrotate(self.k, self.places, self.planes.of_keys(self.k.shape[1]))

    @cached_property
    def row_q(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """The queries of the rows, beside the kv head that they read."""
        return self._of_rows(self.q).unflatten(1, (self.k.shape[1], -1))

    @cached_property
    def row_q_still(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """q~ of the rows."""
        at = self.places[self.position.to(self.places.device)]
        still = unrotate(self._of_rows(self.q), at[:, None], self.planes)
        return still.unflatten(1, (self.k.shape[1], -1))

    def _of_rows(self, x: Shaped[Tensor, "batch head _ value"]) -> Tensor:
        at = self.position
        if self.call.at is not None:
            return fast_products.take_rows(
                x, torch.searchsorted(self.call.at.cpu(), at.contiguous())
            )
        return (
            x[:, :, 1 : at.shape[1] + 1] if self.rows.dense else fast_products.take_rows(x, at)
        )

    @cached_property
    def visible(self) -> Bool[Tensor, "batch row key"] | None:
        """Which keys each row sees; None where they are those from `first` to its own."""
        mask = self.call.visible
        if mask is None:
            return None
        return self._of_rows(mask.expand(len(self.q), -1, -1)[:, None])[:, 0]

    @cached_property
    def first(self) -> Int[Tensor, "shared row"]:
        """The first key that rows may see."""
        if self.visible is not None:
            return torch.zeros_like(self.position)
        return self.call.start[self.position]

    @cached_property
    def count(self) -> Int[Tensor, "shared row"]:
        """How many keys each row sees."""
        if self.visible is not None:
            return self.visible.sum(-1).clamp(min=1)
        return self.position + 1 - self.first

    @property
    def offset_weight(self) -> Float[Tensor, "2 offset"]:
        """Weight of the rows that see each offset, at any key, and at one but the first."""
        weight = self.rows.weight.double()
        total = weight.new_zeros(2, self.k.shape[2])
        if self.visible is None:
            for nearest, at in enumerate(total):
                farthest = self.position - self.first.clamp(min=nearest)
                at.index_add_(0, farthest.expand(weight.shape).flatten(), weight.flatten())
            return total.flip(1).cumsum(1).flip(1)
        offset = self.position[..., None] - torch.arange(self.k.shape[2])
        seen = weight[..., None] * (self.visible.cpu() & (offset >= 0))
        for nearest, at in enumerate(total):
            keys = slice(nearest, None)
            here = offset.clamp(min=0).expand(seen.shape)[..., keys].flatten()
            at.index_add_(0, here, seen[..., keys].flatten())
        return total

    @cached_property
    def sum_of_keys(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        """The sum of the keys that each row sees, from running sums."""
        if self.visible is not None:
            mask = self.visible.to(self.k)
            return torch.einsum("brk,bhkc->bhrc", mask, self.k)[:, :, None]
        total = fast_products.running_sum(self.k)
        seen = fast_products.take_rows(total, self.position)
        if self.first.any():
            before = fast_products.take_rows(total, (self.first - 1).clamp(min=0))
            seen -= before * (self.first > 0).to(self.k.device)[:, None, :, None]
        return seen[:, :, None]

    @cached_property
    def sink_positions(self) -> Int[Tensor, " sink"]:
        """The positions at which some head has a sink."""
        return self.sink_kind.flatten(0, 2).any(0).nonzero()[:, 0].cpu()

    def blocks(self, heads: slice | None = None) -> Iterator[Block]:
        """All rows, in blocks of about `BLOCK_ELEMENTS` scores, but 16 rows at least.

        A block has some kv heads, or these `heads` and half as many scores: models of them
        need as much again.
        """
        batch, kv_heads, group = self.row_q.shape[:3]
        device, count = self.k.device.type, self.position.shape[1]
        area = fast_products.BLOCK_ELEMENTS[device] // (batch * group)
        if heads is not None:
            area //= 2 * (heads.stop - heads.start)
        most = fast_products.BLOCK_ROWS[device]
        if not self.rows.dense:  # rows apart: a block of many has keys that most do not see
            few = count * int(self.position.max() + 1) <= area // 4
            most = count if few else max(fast_products.FEWEST_ROWS, -(-count // 8))
        chosen, keys, begin = heads or slice(0, kv_heads), self.position.amax(0) + 1, 0
        while begin < count:
            rows = min(most, count - begin)
            while (
                rows > fast_products.FEWEST_ROWS and rows * int(keys[begin + rows - 1]) > area
            ):
                rows = (rows + 1) // 2
            size = rows * int(keys[begin + rows - 1])
            together = kv_heads if heads else max(1, area // size)
            for first in range(chosen.start, chosen.stop, together):
                part = slice(first, min(first + together, chosen.stop))
                yield Block(self, slice(begin, begin + rows), part)
            begin += rows


class Block:
    """Some rows of an attention call beside all keys that they see, for some kv heads.

    Scores are in nats. `position` [shared, row] and `weight` [batch, row] are those of the
    rows; `keys` are the positions of the keys: the first is 0, or one that no row sees. `q`
    [batch, kv_head, group, row, coordinate] and `k` [batch, kv_head, key, coordinate] carry
    their rotation. `self_column` [shared, row] is the column of each row's own key, `tokens`
    [batch, key] are the ids of the keys. Blocks of one call share memory: what one computed
    ends with the next.
    """

    def __init__(self, rows: SampledCall, part: slice, heads: slice) -> None:
        self.of_call, self.call, self.planes = rows, rows.call, rows.planes
        self.heads, self._part = heads, part
        self.position, self.weight = rows.position[:, part], rows.weight[:, part]
        self._first = rows.first[:, part]
        # One key more than any row sees, where there is one: its weight is 0 in every row.
        low, high = max(int(self._first.min()) - 1, 0), int(self.position.max()) + 1
        high = high if rows.visible is None else rows.k.shape[2]
        self.keys, self._columns = range(low, high), slice(low, high)
        self.q = rows.row_q[:, heads, :, part]
        self.k = rows.k[:, heads, self._columns]
        self.tokens = rows.tokens[:, self._columns]
        self.self_column = (self.position - low).to(self.k.device)
        group = self.q.shape[2]
        self.query_heads = slice(heads.start * group, heads.stop * group)

    @cached_property
    def q_still(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """q~ of the rows."""
        return self.of_call.row_q_still[:, self.heads, :, self._part]

    @cached_property
    def k_still(self) -> Float[Tensor, "batch kv_head key coordinate"]:
        """k~ of the keys."""
        return self.of_call.k_still[:, self.heads, self._columns]

    @cached_property
    def scores(self) -> Float[Tensor, "batch kv_head group row key"]:
        """L_ij = s q_i k_j, after a soft-cap; so low where row i does not see j that A is 0."""
        return self._scores(self.buffer("scores"))

    def _scores(self, out: Float[Tensor, "batch kv_head group row key"]) -> Tensor:
        k = self.of_call.k_scaled[:, self.heads, self._columns]  # s k
        return self.hide(self.call.squash(fast_products.products(self.q, k, out=out)))

    @property
    def attention(self) -> Float[Tensor, "batch kv_head group row key"]:
        """A_i: the softmax of L_i over the keys that row i sees."""
        return self._softmax[0]

    @property
    def log_norm(self) -> Float[Tensor, "batch kv_head group row"]:
        """log sum_j exp(L_ij)."""
        return self._softmax[1]

    @cached_property
    def _softmax(self) -> tuple[Tensor, Tensor]:
        out = self.buffer("attention")
        if self.call.softcap is None and "scores" not in vars(self):
            return fast_products.softmax(self._scores(out))  # one matrix in the caches, not two
        return fast_products.softmax(self.scores, out=out)

    @cached_property
    def attended_key(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """A K: sum_j A_ij k_j."""
        return (self.attention.flatten(2, 3) @ self.k).view_as(self.q)

    @property
    def mean_key(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        """U K: the mean of the keys that each row sees."""
        return self._sum_of_keys / self._count[..., None]

    @property
    def _sum_of_keys(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        return self.of_call.sum_of_keys[:, self.heads, :, self._part]

    @property
    def expected_score(self) -> Float[Tensor, "batch kv_head group row"]:
        """sum_j A_ij L_ij, which without a soft-cap is s q_i (A K)_i."""
        if self.call.softcap is None:
            return self.call.scale * torch.linalg.vecdot(self.q, self.attended_key)
        return torch.linalg.vecdot(self.attention, self.scores)

    @property
    def information(self) -> Float[Tensor, "batch kv_head group row"]:
        """KL(A_i || U_i): log of the keys that row i sees, less the entropy of A_i."""
        scores = self.scores  # before A, which then leaves them as they are
        expected = torch.linalg.vecdot(self.attention, scores)
        return self.log_keys - (self.log_norm - expected)

    @property
    def log_keys(self) -> Float[Tensor, "shared 1 1 row"]:
        """Logarithm of the number of keys that each row sees."""
        return self._count.log()

    @property
    def _count(self) -> Float[Tensor, "shared 1 1 row"]:
        return self.of_call.count[:, None, None, self._part].to(self.q)

    # sinks

    @cached_property
    def sinks(self) -> Int[Tensor, " sink"]:
        """The columns of the block in which some head has a sink."""
        at = self.of_call.sink_positions
        here = at[(at >= self.keys.start) & (at < self.keys.stop)]
        return (here - self.keys.start).to(self.k.device)

    @cached_property
    def sink_kind(self) -> Int[Tensor, "batch shared_kv_head shared_group 1 sink"]:
        """The kind of sink that is in these columns, of all heads or of each; 0: none."""
        kind = self.of_call.sink_kind[..., None, self.sinks + self.keys.start]
        return kind if kind.shape[1] == 1 else kind[:, self.heads]

    @cached_property
    def sink_attention(self) -> Float[Tensor, "batch kv_head group row sink"]:
        """A_ij in the columns of sinks; 0 where the head has none."""
        return self.attention[..., self.sinks] * (self.sink_kind > 0)

    @property
    def sink_read(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """sum_j A_ij k_j over sinks."""
        return (self.sink_attention.flatten(2, 3) @ self.k[:, :, self.sinks]).view_as(self.q)

    @property
    def mean_other_key(self) -> Float[Tensor, "batch kv_head shared_group row coordinate"]:
        """The mean of the keys that each row sees and that are no sinks; 0 without any."""
        seen = self._sees(self.sinks.cpu() + self.keys.start)[:, None, None]
        seen = (seen & (self.sink_kind > 0)).to(self.k)
        others = self._sum_of_keys - seen @ self.k[:, :, None, self.sinks]
        count = (self._count - seen.sum(-1))[..., None]
        return others.masked_fill_(count == 0, 0) / count.clamp(min=1)

    # keys and offsets

    @property
    def seen(self) -> Bool[Tensor, "shared row key"]:
        """Which keys each row sees."""
        return self._sees(torch.arange(self.keys.start, self.keys.stop))

    def _sees(self, key: Int[Tensor, " key"]) -> Bool[Tensor, "shared row key"]:
        if self.of_call.visible is not None:
            return self.of_call.visible[:, self._part, key.to(self.k.device)]
        return sees(self._first, self.position, key).to(self.k.device)

    def hide(
        self, scores: Float[Tensor, "batch kv_head group row key"]
    ) -> Float[Tensor, "batch kv_head group row key"]:
        """`scores`, changed in place: `HIDDEN` at the keys that a row does not see."""
        for columns, penalty in self._hidden:
            scores[..., columns] += penalty
        return scores

    @cached_property
    def _hidden(self) -> list[tuple[slice, Tensor]]:
        """The columns that some row does not see, and what hides them from it."""
        low, hidden = self.keys.start, []
        seen_by_all = int(self._first.max()), int(self.position.min()) + 1
        if self.of_call.visible is not None:
            seen_by_all = low, low
        for begin, end in ((low, seen_by_all[0]), (seen_by_all[1], self.keys.stop)):
            if begin < end:
                penalty = torch.where(
                    self._sees(torch.arange(begin, end)), 0.0, fast_products.HIDDEN
                )
                hidden.append((slice(begin - low, end - low), penalty[:, None, None]))
        return hidden

    @cached_property
    def offset(self) -> Int[Tensor, "shared row key"]:
        """How many tokens each key is behind the row."""
        # Keys ahead have 0 if some row sees them, else the offsets at which the row has no key:
        # then the key at an offset is in the column that has the key's offset.
        count = len(self.keys)
        offset = torch.arange(count - 1, -count, -1, device=self.k.device)
        offset = offset % count if self.of_call.visible is None else offset.clamp(min=0)
        own = count - 1 - self.self_column
        return offset.unfold(0, count, 1).index_select(0, own.flatten()).view(*own.shape, -1)

    @cached_property
    def sink_bins(self) -> Int[Tensor, "shared row sink"]:
        """The bin of the offset of each sink."""
        return bin_of(self.offset[..., self.sinks], offset_edges(self.call.key.shape[2]))

    def sum_by_offset(
        self, values: Float[Tensor, "batch kv_head group row key"]
    ) -> Float[Tensor, "batch kv_head group offset"]:
        """Weighted sum over the rows at each offset, without the first key: it is set to 0."""
        dense = self.of_call.rows.dense and self.of_call.visible is None
        return fast_products.sum_by_offset(values, self.weight, None if dense else self.offset)

    def weigh(
        self, by_row: Float[Tensor, "batch kv_head group row"]
    ) -> Float[Tensor, "kv_head group"]:
        """Weighted sum over the rows of all sequences, in float64."""
        weighted = by_row * self.weight[:, None, None]
        return weighted.sum(-1).to("cpu", torch.float64).sum(0)

    def buffer(self, name: str) -> Float[Tensor, "batch kv_head group row key"]:
        """A matrix of this block, in memory that serves every block: fresh pages cost more."""
        shape = (*self.q.shape[:4], len(self.keys))
        size, buffers = math.prod(shape), self.of_call.buffers
        if name not in buffers or len(buffers[name]) < size:
            buffers[name] = self.k.new_empty(size)
        return buffers[name][:size].view(shape)
