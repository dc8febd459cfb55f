"""What a statistic reads: the vectors of an attention call, and blocks of its rows.

A block has the formulas of docs/measures.md as properties, each computed when it is first
asked for: scores, softmax, A K, and the scores without rotation. Nothing larger than a block
of rows is ever held, and only the lower triangle is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, plane_norms, unrotate
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.memory import Hidden, Scratch, pick, products, running_sum
from ropelens.statistics.rows import Rows

BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores held at once; on a CPU a block should stay in its caches."""

BLOCK_ROWS = {"cpu": 128, "cuda": 1024}
"""Rows of a block where they fit: products of few rows run far below a processor's speed."""


@dataclass(frozen=True)
class Vectors:
    """Queries and keys of one call in float32 or wider, with their rotation and without.

    `tokens` are the ids of the batch, whose keys these are; `sinks` says which of these are
    sinks (more than 0), in one row for all heads or in one for each.
    """

    call: AttentionCall
    planes: Planes
    tokens: Int[Tensor, "batch position"]
    q: Float[Tensor, "batch head row coordinate"]
    k: Float[Tensor, "batch kv_head position coordinate"]
    q_still: Float[Tensor, "batch head row coordinate"]
    k_still: Float[Tensor, "batch kv_head position coordinate"]
    sinks: Int[Tensor, "batch shared position"]

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        planes: Planes,
        tokens: Int[Tensor, "batch position"],
        sinks: Int[Tensor, "batch shared position"],
        *,
        first: int = 0,
    ) -> Vectors:
        """Those of a call whose layer rotates in `planes`; its first key stands at `first`."""
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        q, k = call.query.to(dtype), call.key.to(dtype)
        position = torch.arange(first, first + k.shape[2], device=k.device)
        of_queries = position if call.at is None else call.at
        of_keys = planes.of_keys(k.shape[1])
        still = unrotate(q, of_queries, planes), unrotate(k, position, of_keys)
        return cls(call, planes, tokens.to(k.device), q, k, *still, sinks)

    def plane_norms(
        self, x: Float[Tensor, "*batch coordinate"]
    ) -> Float[Tensor, "*batch term"]:
        """Length of each plane of `x`."""
        return plane_norms(x, self.planes)


class RowsOfCall:
    """The rows of a call that are looked at, laid out for blocks.

    Query heads stand by the kv head that they read. `position` has batch 1 where all
    sequences have the same rows.
    """

    def __init__(self, vectors: Vectors, rows: Rows) -> None:
        k = vectors.k
        self.vectors, self.call = vectors, vectors.call
        self.dense, self.context = rows.dense, k.shape[2]
        self.position = rows.position[:1] if rows.dense else rows.position
        self.weight = rows.weight.to(k.device, k.dtype)
        self.q = self._of_rows(vectors.q)
        self.k_scaled = k * self.call.scale
        self.scratch = Scratch(k)
        sinks, kv_heads = vectors.sinks, k.shape[1]
        by_head = sinks.unflatten(1, (kv_heads, -1)) if sinks.shape[1] > 1 else sinks[:, None]
        self.is_sink = (by_head > 0).to(k.device)
        self.sink_columns = (sinks > 0).flatten(0, 1).any(0).nonzero()[:, 0]

    def _of_rows(
        self, x: Float[Tensor, "batch head position coordinate"]
    ) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """Queries of these rows; of all rows a view, no copy."""
        if self.dense and self.call.at is None:
            rows = x[:, :, 1 : self.position.shape[1] + 1]
        else:
            rows = pick(x, self.call.row_at(self.position))
        return rows.unflatten(1, (self.vectors.k.shape[1], -1))

    @cached_property
    def mean_key(self) -> Float[Tensor, "batch kv_head row coordinate"]:
        """Mean of the keys that each row sees, from their running sum."""
        count = self.position + 1 - self.call.start[self.position]
        total = self._sum_seen(self.vectors.k)
        return total.div_(count.to(total.device)[:, None, :, None])

    @cached_property
    def mean_other_key(
        self,
    ) -> Float[Tensor, "batch kv_head shared_group row coordinate"]:
        """Mean of the keys that are no sinks among those that each row sees; 0 without any."""
        k = self.vectors.k
        other = ~self.is_sink[..., None]
        count = self._sum_seen(other.to(k.dtype).flatten(1, 2)).clamp(min=1)
        total = self._sum_seen((k[:, :, None] * other).flatten(1, 2))
        return total.unflatten(1, (k.shape[1], -1)) / count.unflatten(1, other.shape[1:3])

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

    def blocks(self) -> Iterator[Block]:
        """All rows of all heads, in blocks of about BLOCK_ELEMENTS scores."""
        batch, kv_heads, group, rows, _ = self.q.shape
        device = self.q.device.type
        area = BLOCK_ELEMENTS[device] // (batch * group)
        keys = self.position.amax(0) + 1  # that some sequence's row may see
        begin = 0
        while begin < rows:
            step = min(BLOCK_ROWS[device], rows - begin)
            while step > 16 and step * int(keys[begin : begin + step].max()) > area:
                step = (step + 1) // 2
            end = begin + step
            heads = max(1, area // (step * int(keys[begin:end].max())))
            for first in range(0, kv_heads, heads):
                last = min(first + heads, kv_heads)
                yield Block(self, slice(begin, end), slice(first, last))
            begin = end


class Block:
    """Some rows of an attention call beside all keys that they see, for some kv heads.

    Scores are in nats. `position`, which may have batch 1 for all sequences, and `weight`
    are those of the rows; `keys` are the positions of the keys: the first is 0, or one that
    no row sees. `q` [batch, kv_head, group, row, coordinate] and `k` [batch, kv_head, key,
    coordinate] carry their rotation. `tokens` [batch, key] are the ids of the keys.
    """

    def __init__(self, rows: RowsOfCall, part: slice, heads: slice) -> None:
        self._rows, self._part, self._heads = rows, part, heads
        self.call, self.planes = rows.call, rows.vectors.planes
        self.position, self.weight = rows.position[:, part], rows.weight[:, part]
        first = self.call.start[self.position]
        # One key more than any row sees, where there is one: its weight is 0 in every row.
        self.keys = range(max(int(first.min()) - 1, 0), int(self.position.max()) + 1)
        columns = self._columns = slice(self.keys.start, self.keys.stop)
        self.q = rows.q[:, heads, :, part]
        self.k = rows.vectors.k[:, heads, columns]
        self.tokens = rows.vectors.tokens[:, columns]

    @property
    def query_heads(self) -> slice:
        """Which query heads of the layer these are."""
        group = self.q.shape[2]
        return slice(self._heads.start * group, self._heads.stop * group)

    @property
    def sequence(self) -> Int[Tensor, "batch position"]:
        """The ids of all tokens, also of those that no row of the block sees."""
        return self._rows.vectors.tokens

    @property
    def seen(self) -> Bool[Tensor, "shared row key"]:
        """Which keys each row sees."""
        position = self.position.to(self.k.device)[..., None]
        start = self.call.start.to(self.k.device)[position]
        key = torch.arange(self.keys.start, self.keys.stop, device=self.k.device)
        return (key <= position) & (key >= start)

    @property
    def own(self) -> Int[Tensor, "shared row"]:
        """The column of each row's own key."""
        return (self.position - self.keys.start).to(self.k.device)

    @cached_property
    def scores(self) -> Float[Tensor, "batch kv_head group row key"]:
        """L_ij = s q_i k_j, after a soft-cap; so low where row i does not see j that A is 0."""
        return self._scores(self._memory("scores"))

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
        """A and its logarithmic norm, in memory that held scores which have no name."""
        memory = self._memory("attention")
        scores = self._scores(memory) if self.call.softcap is None else self.scores
        largest = scores.amax(-1)
        attention = torch.softmax(scores, -1, out=memory)
        # A row's largest weight is at least 1 / keys, so its logarithm is exact.
        return attention, largest - attention.amax(-1).log()

    def _scores(
        self, memory: Float[Tensor, "batch kv_head group row key"]
    ) -> Float[Tensor, "batch kv_head group row key"]:
        k = self._rows.k_scaled[:, self._heads, self._columns]
        first = self.call.start[self.position]
        hidden = Hidden(first, self.position, self.keys, self.k.device)
        return hidden.hide(self._capped(products(self.q, k, out=memory)))

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
        at = self._sinks
        is_sink = self._rows.is_sink[..., at + self.keys.start]
        if is_sink.shape[1] > 1:
            is_sink = is_sink[:, self._heads]
        return self.attention_on(at) * is_sink[..., None, :]

    def attention_on(
        self, columns: Int[Tensor, " column"]
    ) -> Float[Tensor, "batch kv_head group row column"]:
        """A_ij on some of the block's keys."""
        return self.attention[..., columns]

    @property
    def sink_read(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """sum_j A_ij k_j over sinks."""
        sinks = self.sink_attention.flatten(2, 3) @ self.k[:, :, self._sinks]
        return sinks.unflatten(2, self.q.shape[2:4])

    @property
    def _sinks(self) -> Int[Tensor, " sink"]:
        """The columns of the block in which some head has a sink."""
        all_of = self._rows.sink_columns
        here = all_of[(all_of >= self.keys.start) & (all_of < self.keys.stop)]
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

    def _memory(self, name: str) -> Float[Tensor, "batch kv_head group row key"]:
        """A matrix of this block, in memory that serves every block."""
        return self._rows.scratch.take(name, *self.q.shape[:4], len(self.keys))

    def _capped(
        self, scores: Float[Tensor, "batch kv_head group row key"]
    ) -> Float[Tensor, "batch kv_head group row key"]:
        """`scores`, changed in place: squashed where the model does so."""
        cap = self.call.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
