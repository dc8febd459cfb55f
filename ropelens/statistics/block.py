"""An attention call as statistics read it: its rows, and blocks of them with their softmax.

A `Block` has the formulas of docs/measures.md as properties, each computed when it is first
read: L, A, A K, U K. Nothing larger than a block of rows is in memory, and only the lower
triangle is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, plane_norms, unrotate
from ropelens.statistics.call import AttentionCall, sees
from ropelens.statistics.memory import (
    BLOCK_ELEMENTS,
    BLOCK_ROWS,
    Scratch,
    hide_unseen,
    pick,
    products,
    row_blocks,
    running_sum,
)
from ropelens.statistics.rows import Rows


class CallRows:
    """An attention call whose layer rotates in `planes`, and the rows of it that are looked at.

    `q` [batch, head, row, coordinate] and `k` [batch, kv_head, position, coordinate] are the
    queries and keys in float32 or wider; `q_still` and `k_still` have their rotation taken off.
    `position` [shared, row] and `weight` [batch, row] are those of `rows`; `shared` is 1 where
    all sequences have the same rows. `sinks` [batch, shared, position] is more than 0 where a
    key is a sink, in one row for all heads or in one for each (without it, position 0).
    `tokens` [batch, position] are the ids of the keys. The first key stands at `first`, where
    a call has only a part of a sequence.
    """

    def __init__(
        self,
        call: AttentionCall,
        rows: Rows,
        planes: Planes,
        *,
        tokens: Int[Tensor, "batch position"] | None = None,
        sinks: Int[Tensor, "batch shared position"] | None = None,
        first: int = 0,
    ) -> None:
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.call, self.planes = call, planes
        self.q, self.k = call.query.to(dtype), call.key.to(dtype)
        self.places = torch.arange(first, first + self.k.shape[2], device=self.k.device)
        self.dense = rows.dense
        self.position = rows.position[:1] if rows.dense else rows.position
        self.weight = rows.weight.to(self.k.device, dtype)
        self.tokens = None if tokens is None else tokens.to(self.k.device)
        beginning = (self.places == 0).expand(len(self.k), 1, -1)
        self.sinks = beginning if sinks is None else sinks > 0
        self.scratch = Scratch(self.k)

    @cached_property
    def q_still(self) -> Float[Tensor, "batch head row coordinate"]:
        """q~: the queries with their rotation taken off."""
        return unrotate(
            self.q, self.places if self.call.at is None else self.call.at, self.planes
        )

    @cached_property
    def k_still(self) -> Float[Tensor, "batch kv_head position coordinate"]:
        """k~: the keys with their rotation taken off."""
        return unrotate(self.k, self.places, self.planes.of_keys(self.k.shape[1]))

    def plane_norms(
        self, x: Float[Tensor, "*batch coordinate"]
    ) -> Float[Tensor, "*batch term"]:
        """Length of each plane of `x`."""
        return plane_norms(x, self.planes)

    @cached_property
    def row_q(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """The queries of the rows, beside the kv head that they read; of all rows a view."""
        if self.dense and self.call.at is None:
            rows = self.q[:, :, 1 : self.position.shape[1] + 1]
        else:
            rows = pick(self.q, self.call.row_at(self.position))
        return rows.unflatten(1, (self.k.shape[1], -1))

    @cached_property
    def k_scaled(self) -> Float[Tensor, "batch kv_head position coordinate"]:
        """s k."""
        return self.k if self.call.scale == 1 else self.k * self.call.scale

    @cached_property
    def mean_key(self) -> Float[Tensor, "batch kv_head row coordinate"]:
        """U K: the mean of the keys that each row sees."""
        count = self.position + 1 - self.call.start[self.position]
        total = self._sum_seen(self.k)
        return total.div_(count.to(total.device)[:, None, :, None])

    @cached_property
    def mean_other_key(self) -> Float[Tensor, "batch kv_head shared_group row coordinate"]:
        """The mean of the keys that each row sees and that are no sinks; 0 without any."""
        other = ~self.is_sink[..., None]
        count = self._sum_seen(other.to(self.k.dtype).flatten(1, 2)).clamp(min=1)
        total = self._sum_seen((self.k[:, :, None] * other).flatten(1, 2))
        return total.unflatten(1, (self.k.shape[1], -1)) / count.unflatten(1, other.shape[1:3])

    def _sum_seen(
        self, x: Float[Tensor, "batch any_head position value"]
    ) -> Float[Tensor, "batch any_head row value"]:
        """Sum over the keys that each row sees, from their running sum."""
        start = self.call.start[self.position]
        total = running_sum(x)
        seen = pick(total, self.position)
        if start.any():
            before = pick(total, (start - 1).clamp(min=0))
            seen -= before * (start > 0).to(x.device)[:, None, :, None]
        return seen

    @cached_property
    def is_sink(self) -> Bool[Tensor, "batch shared_kv_head shared_group position"]:
        """Whether each key is a sink, of all heads or of each."""
        one_for_all = self.sinks.shape[1] == 1
        shape = (1, 1) if one_for_all else (self.k.shape[1], -1)
        return self.sinks.unflatten(1, shape).to(self.k.device)

    @cached_property
    def sink_positions(self) -> Int[Tensor, " sink"]:
        """The positions at which some head has a sink."""
        return self.sinks.flatten(0, 1).any(0).nonzero()[:, 0].cpu()

    def blocks(self) -> Iterator[Block]:
        """All rows of all heads, in blocks of about `BLOCK_ELEMENTS` scores."""
        batch, kv_heads, group = self.row_q.shape[:3]
        device = self.k.device.type
        area = BLOCK_ELEMENTS[device] // (batch * group)
        for rows, keys in row_blocks(self.position, area=area, most=BLOCK_ROWS[device]):
            heads = max(1, area // ((rows.stop - rows.start) * keys))
            for first in range(0, kv_heads, heads):
                yield Block(self, rows, slice(first, min(first + heads, kv_heads)))


class Block:
    """Some rows of an attention call beside all keys that they see, for some kv heads.

    Scores are in nats. `position` [shared, row] and `weight` [batch, row] are those of the
    rows; `keys` are the positions of the keys: the first is 0, or one that no row sees. `q`
    [batch, kv_head, group, row, coordinate] and `k` [batch, kv_head, key, coordinate] carry
    their rotation.
    """

    def __init__(self, rows: CallRows, part: slice, heads: slice) -> None:
        self.call, self.planes = rows.call, rows.planes
        self._rows, self._part, self._heads = rows, part, heads
        self.position, self.weight = rows.position[:, part], rows.weight[:, part]
        self._first = self.call.start[self.position]
        # One key more than any row sees, where there is one: its weight is 0 in every row.
        low, high = max(int(self._first.min()) - 1, 0), int(self.position.max()) + 1
        self.keys, self._columns = range(low, high), slice(low, high)
        self.q = rows.row_q[:, heads, :, part]
        self.k = rows.k[:, heads, self._columns]

    @cached_property
    def scores(self) -> Float[Tensor, "batch kv_head group row key"]:
        """L_ij = s q_i k_j, after a soft-cap; so low where row i does not see j that A is 0."""
        return self._scores("scores")

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
        """A and its logarithmic norm; A takes the memory of scores that nobody else reads."""
        scores = self._scores("attention") if self.call.softcap is None else self.scores
        largest = scores.amax(-1)
        attention = torch.softmax(scores, -1, out=self._memory("attention"))
        # A row's largest weight is at least 1 / keys, so its logarithm is exact.
        return attention, largest - attention.amax(-1).log()

    def _scores(self, name: str) -> Float[Tensor, "batch kv_head group row key"]:
        k = self._rows.k_scaled[:, self._heads, self._columns]
        scores = self.call.squash(products(self.q, k, out=self._memory(name)))
        return hide_unseen(scores, self._first, self.position, self.keys)

    def _memory(self, name: str) -> Float[Tensor, "batch kv_head group row key"]:
        """A matrix of this block, in memory that serves every block."""
        return self._rows.scratch.take(name, *self.q.shape[:4], len(self.keys))

    @cached_property
    def read(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """A K: sum_j A_ij k_j."""
        return (self.attention.flatten(2, 3) @ self.k).unflatten(2, self.q.shape[2:4])

    @property
    def mean_key(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        """U K: the mean of the keys that each row sees."""
        return self._rows.mean_key[:, self._heads, None, self._part]

    @property
    def mean_other_key(self) -> Float[Tensor, "batch kv_head shared_group row coordinate"]:
        """The mean of the keys that each row sees and that are no sinks."""
        return self._rows.mean_other_key[:, self._heads, :, self._part]

    @cached_property
    def sink_attention(self) -> Float[Tensor, "batch kv_head group row sink"]:
        """A_ij on those of the block's keys that are a sink of some head."""
        is_sink = self._rows.is_sink[..., self._sinks + self.keys.start]
        if is_sink.shape[1] > 1:
            is_sink = is_sink[:, self._heads]
        return self.attention[..., self._sinks] * is_sink[..., None, :]

    @property
    def sink_read(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """sum_j A_ij k_j over sinks."""
        sinks = self.sink_attention.flatten(2, 3) @ self.k[:, :, self._sinks]
        return sinks.unflatten(2, self.q.shape[2:4])

    @cached_property
    def _sinks(self) -> Int[Tensor, " sink"]:
        """The columns of the block in which some head has a sink."""
        at = self._rows.sink_positions
        here = at[(at >= self.keys.start) & (at < self.keys.stop)]
        return (here - self.keys.start).to(self.k.device)

    @cached_property
    def expected_score(self) -> Float[Tensor, "batch kv_head group row"]:
        """sum_j A_ij L_ij, which without a soft-cap is s q_i (A K)_i."""
        if self.call.softcap is None:
            return self.call.scale * torch.linalg.vecdot(self.q, self.read)
        return torch.linalg.vecdot(self.attention, self.scores)

    @property
    def sink_logits(self) -> Float[Tensor, "kv_head group 1"] | None:
        """The sink logit of each head, where a model has them."""
        if self.call.sink_logits is None:
            return None
        by_head = self.call.sink_logits.to(self.q.dtype).unflatten(0, (-1, self.q.shape[2]))
        return by_head[self._heads, :, None]

    @property
    def query_heads(self) -> slice:
        """Which query heads of the layer these are."""
        group = self.q.shape[2]
        return slice(self._heads.start * group, self._heads.stop * group)

    @property
    def seen(self) -> Bool[Tensor, "shared row key"]:
        """Which keys each row sees."""
        key = torch.arange(self.keys.start, self.keys.stop)
        return sees(self._first, self.position, key).to(self.k.device)

    @property
    def own(self) -> Int[Tensor, "shared row"]:
        """The column of each row's own key."""
        return (self.position - self.keys.start).to(self.k.device)

    @property
    def sequence(self) -> Int[Tensor, "batch position"]:
        """The ids of all tokens, also of those that no row of the block sees."""
        assert self._rows.tokens is not None, "what reads tokens is given them"
        return self._rows.tokens

    @property
    def tokens(self) -> Int[Tensor, "batch key"]:
        """The ids of the keys."""
        return self.sequence[:, self._columns]
