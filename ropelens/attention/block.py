"""A block of rows of an attention call, with scores, attention, and sums over keys.

A `Block` has the quantities of docs/measures.md that formulas.py combines: L, A, A K, U K. Each
is computed when it is first read. At most one block of rows is in memory, and only the lower
triangle is computed.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention import fast_products
from ropelens.attention.sampled_call import SampledCall, sink_positions
from ropelens.attention.visibility import Visibility, bin_of, offset_edges
from ropelens.caches import kept, on_device
from ropelens.text.text import SINKS

ByKey = Float[Tensor, "batch kv_head group row key"]
ByRow = Float[Tensor, "batch kv_head group row"]


def blocks_of(
    sampled: SampledCall, heads: slice | None = None, *, share: float = 1.0
) -> Iterator["Block"]:
    """All rows of a call, in blocks of about `BLOCK_ELEMENTS` scores but at least 16 rows.

    A block has some key-value heads. If `heads` are given, it has these heads and half of the
    scores, because models of heads need the rest of the memory. `share` is the size of a block
    compared with `BLOCK_ELEMENTS`.
    """
    batch, kv_heads, group = sampled.row_q.shape[:3]
    device = sampled.k.device.type
    area = int(share * fast_products.BLOCK_ELEMENTS[device]) // (batch * group)
    chosen = slice(0, kv_heads)
    if heads is not None:
        chosen = heads
        area //= 2 * (heads.stop - heads.start)
    for rows in _split_rows(sampled, area):
        together = kv_heads
        if heads is None:
            together = max(1, area // _scores_of(rows, sampled.rows.ends))
        for first in range(chosen.start, chosen.stop, together):
            of_block = slice(first, min(first + together, chosen.stop))
            yield Block(sampled, rows, of_block)


def _split_rows(sampled: SampledCall, area: int) -> Iterator[slice]:
    """Split the rows so that a block of one head has about `area` scores."""
    device = sampled.k.device.type
    count = sampled.position.shape[1]
    ends = sampled.rows.ends
    most = fast_products.BLOCK_ROWS[device]
    if not sampled.rows.dense:
        # In a block of many distant rows, most rows see few of the keys.
        fits_into_block = count * max(ends) <= area // 4
        most = count if fits_into_block else sparse_rows(count, device)
    begin = 0
    while begin < count:
        rows = slice(begin, min(begin + most, count))
        size = rows.stop - begin
        while size > fast_products.FEWEST_ROWS and _scores_of(rows, ends) > area:
            size = (size + 1) // 2
            rows = slice(begin, begin + size)
        yield rows
        begin = rows.stop


def _scores_of(rows: slice, ends: Sequence[int]) -> int:
    """Number of scores of a block with these rows and one head."""
    return (rows.stop - rows.start) * ends[rows.stop - 1]


def sparse_rows(count: int, device: str) -> int:
    """Largest number of rows of a block, for `count` sampled rows of each sequence."""
    blocks = fast_products.SPARSE_BLOCKS[device]
    return max(fast_products.FEWEST_ROWS, -(-count // blocks))


class Block:
    """Some rows of an attention call and all keys that they see, for some key-value heads.

    Scores are in nats. `visibility` has the positions of the rows and keys. `weight`
    [batch, row] are the weights of the rows. `q` [batch, kv_head, group, row, coordinate] and
    `k` [batch, kv_head, key, coordinate] carry their rotation. `tokens`
    [batch, key] are the ids of the keys. Blocks of one call share memory: the matrices of a
    block are overwritten by the next block.
    """

    def __init__(self, sampled: SampledCall, rows: slice, heads: slice) -> None:
        self.sampled = sampled
        self.call = sampled.call
        self.planes = sampled.planes
        self.heads = heads
        self.rows = rows
        self.visibility = sampled.visibility.block(rows.start, rows.stop)
        self.keys = self.visibility.keys
        self.columns = slice(self.keys.start, self.keys.stop)
        all_rows = sampled.device_visibility
        self.device_visibility = all_rows.block(rows.start, rows.stop, self.keys)
        self.position = sampled.position[:, rows]
        self.weight = sampled.weight[:, rows]
        self.q = sampled.row_q[:, heads, :, rows]
        self.k = sampled.k[:, heads, self.columns]
        self.tokens = sampled.tokens[:, self.columns]
        group = self.q.shape[2]
        self.query_heads = slice(heads.start * group, heads.stop * group)
        self._scores: ByKey | None = None

    def of_heads(
        self, heads: Int[Tensor, " some"], members: Int[Tensor, " member"]
    ) -> "Block":
        """Queries and unrotated keys of some heads, and of some members of their groups."""
        part = copy(self)
        with suppress(AttributeError):  # it was not needed before
            del part.sink_variables
        part.q = self.q[:, heads][:, :, members]
        part.q_still = self.q_still[:, heads][:, :, members]
        if len(heads) < self.q.shape[1]:
            part.k_still = self.k_still[:, heads]
        if self.sampled.sinks.shape[1] > 1:
            part.sink_kind = self.sink_kind[:, heads][:, :, members]
        return part

    @cached_property
    def self_column(self) -> Int[Tensor, "shared row"]:
        """The column of each row's own key."""
        return self.device_visibility.position - self.keys.start

    @cached_property
    def q_still(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """q~ of the rows."""
        return self.sampled.row_q_still[:, self.heads, :, self.rows]

    @cached_property
    def k_still(self) -> Float[Tensor, "batch kv_head key coordinate"]:
        """k~ of the keys."""
        return self.sampled.k_still[:, self.heads, self.columns]

    @property
    def scores(self) -> ByKey:
        """L_ij = s q_i k_j after a soft-cap; about `HIDDEN` if row i does not see key j."""
        if self._scores is None:
            self._scores = self._write_scores(self.buffer("scores"))
        return self._scores

    def _write_scores(self, out: ByKey) -> ByKey:
        fast_products.products(self.q, self.k, scale=self.call.scale, out=out)
        return self.hide(self.call.squash(out))

    @property
    def attention(self) -> ByKey:
        """A_i: the softmax of L_i over the keys that row i sees."""
        return self._softmax.weights

    @property
    def log_norm(self) -> ByRow:
        """log sum_j exp(L_ij)."""
        return self._softmax.log_norm

    @cached_property
    def _softmax(self) -> fast_products.Softmax:
        out = self.buffer("attention")
        if self.call.softcap is None and self._scores is None:
            # One matrix in the caches, not two.
            return fast_products.softmax(self._write_scores(out))
        return fast_products.softmax(self.scores, out=out)

    def expect(self, values: ByKey) -> ByRow:
        """sum_j A_ij x_ij for `values` x."""
        return torch.linalg.vecdot(self.attention, values)

    @property
    def expected_score(self) -> ByRow:
        """sum_j A_ij L_ij, which is s q_i (A K)_i without a soft-cap."""
        if self.call.softcap is None:
            return self.call.scale * torch.linalg.vecdot(self.q, self.attended_key)
        return self.expect(self.scores)

    @cached_property
    def attended_key(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """A K: sum_j A_ij k_j."""
        return (self.attention.flatten(2, 3) @ self.k).view_as(self.q)

    @property
    def sum_of_keys(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        return self.sampled.sum_of_keys[:, self.heads, :, self.rows]

    @cached_property
    def count(self) -> Float[Tensor, "shared 1 1 row"]:
        """Number of keys that each row sees."""
        return self.device_visibility.count[:, None, None].to(self.q.dtype)

    @cached_property
    def sinks(self) -> Int[Tensor, " sink"]:
        """The columns of the block in which some head has a sink."""
        return _sink_columns(self.device_visibility, self.sampled.sinks)

    @cached_property
    def sink_kind(self) -> Int[Tensor, "batch shared_kv_head shared_group 1 sink"]:
        """The kind of sink in these columns (0: none), for all heads or by head."""
        kind = self.sampled.sink_kind[..., None, self.columns][..., self.sinks]
        return kind if kind.shape[1] == 1 else kind[:, self.heads]

    @cached_property
    def sink_attention(self) -> Float[Tensor, "batch kv_head group row sink"]:
        """A_ij in these columns; 0 if the head has no sink there."""
        return self.attention[..., self.sinks] * self.visible_sinks

    @cached_property
    def visible_sinks(
        self,
    ) -> Float[Tensor, "batch shared_kv_head shared_group row sink"]:
        """1 if the row sees a sink of the head in a column, otherwise 0."""
        seen = self.device_visibility.sees(self.sinks + self.keys.start)
        return (seen[:, None, None] & (self.sink_kind > 0)).to(self.k)

    @property
    def sees_all_behind(self) -> bool:
        """Whether each row sees all keys of the block up to its own, and no other keys."""
        visible = self.visibility
        return visible.mask is None and visible.seen_by_all.start <= self.keys.start

    def hide(self, scores: ByKey) -> ByKey:
        """`scores`, changed in place: a row gets weight 0 for keys that it does not see."""
        seen_by_all = self.visibility.seen_by_all  # read on the host
        for penalty in self.device_visibility.penalties(seen_by_all):
            scores[..., penalty.columns].add_(penalty.number)
        return scores

    @cached_property
    def sink_variables(self) -> Int[Tensor, "batch kv_head group entry"]:
        """The kind of each sink and, after all kinds, the bin of its offset; 0 for no sink."""
        offset = (self.self_column[..., None] - self.sinks).clamp(min=0)
        bins = bin_of(offset, offset_edges(self.call.key.shape[2]))[:, None, None]
        shape = (*self.q.shape[:4], len(self.sinks))
        kind = self.sink_kind.expand(shape)
        bins = (bins + 1 + len(SINKS)).expand(shape)
        return torch.stack([kind, bins * (kind > 0)], dim=-1).flatten(-3)

    def from_offsets(
        self, x: Float[Tensor, "fold kv_head group column"], *, out: ByKey
    ) -> ByKey:
        """The value of each key, from values for the farthest offset, ..., 1, 0, -1, ..."""
        begin = self._windows.from_offsets
        begin = _begin_in_folds(begin, len(out), len(x), x[0].numel())
        return fast_products.windows(x, begin, out=out)

    def by_offset(
        self, values: ByKey
    ) -> Float[Tensor, "batch kv_head group row offset"]:
        """The value of the key at each offset, from the farthest offset of the block to 0.

        It is 0 if there is no such key. Values of hidden keys must be 0.
        """
        # A window ends with the row's own key. It begins with hidden keys of the row above if
        # the row has too few keys; only first rows have no row above that sees fewer keys.
        beyond = self._windows.beyond
        out = self.buffer("by offset")
        at_offset = fast_products.windows(values, self._windows.by_offset, out=out)
        first = at_offset[..., 0, :].masked_fill_(beyond[..., 0, :], 0)
        own = int(self.position[0, 0]) - self.keys.start  # the first row in memory
        first[0, 0, 0, -own - 1 :] = values[0, 0, 0, 0, : own + 1]
        if self.visibility.mask is not None:
            at_offset.masked_fill_(beyond, 0)
        return at_offset

    @property
    def _windows(self) -> "Windows":
        context = self.call.key.shape[2]
        return _find_windows(self.device_visibility, self.q.shape[:4], context)

    def sum_by_offset(
        self, values: ByKey
    ) -> Float[Tensor, "batch kv_head group offset"]:
        """Weighted sum over the rows at each offset. Sets values of the first key to 0."""
        values = values.contiguous()
        values[..., 0] = 0
        if self.sampled.rows.dense and self.visibility.mask is None:
            return fast_products.sum_diagonals(values, self.weight)
        weight = self.weight[:, None, None, None]
        return (weight @ self.by_offset(values))[..., 0, :].flip(-1)

    def sum_over_sets(
        self,
        by_row: Float[Tensor, "batch kv_head group row value"],
        sets: Bool[Tensor, "batch set position"],
    ) -> Float[Tensor, "batch set head value"]:
        """Weighted sums over the rows of each set of positions, in float64."""
        position = self.device_visibility.position[:, None].expand(*sets.shape[:2], -1)
        in_sets = on_device(sets, self.k.device).gather(2, position)
        weight = in_sets.to(self.weight) * self.weight[:, None]
        sums = (weight[:, :, None, None, None] @ by_row[:, None])[..., 0, :]
        return sums.flatten(2, 3).double()

    def buffer(self, name: str, *lead: int) -> Float[Tensor, "*lead group row key"]:
        """A matrix of this block, in memory that all blocks share: fresh pages cost more."""
        shape = (*lead, *self.q.shape[:4], len(self.keys))
        size = math.prod(shape)
        buffers = self.sampled.buffers
        if name not in buffers or len(buffers[name]) < size:
            buffers[name] = self.k.new_empty(size)
        return buffers[name][:size].view(shape)


@kept(most=2)
def _sink_columns(visible: Visibility, sinks: Tensor) -> Int[Tensor, " sink"]:
    position = sink_positions(sinks)
    ends = torch.tensor(
        [visible.keys.start, visible.keys.stop], dtype=torch.long, device="cpu"
    )
    first, last = torch.searchsorted(position, ends).tolist()
    here = on_device(position, visible.position.device)[first:last]
    return here - visible.keys.start


@dataclass(frozen=True)
class Windows:
    """Where the windows of `from_offsets` and `by_offset` begin in memory.

    `beyond` marks the offsets of each row that are beyond the first key of the block.
    """

    from_offsets: Int[Tensor, "batch row_of_heads"]
    by_offset: Int[Tensor, " row_of_all"]
    beyond: Bool[Tensor, "shared 1 1 row key"]


@kept()
def _find_windows(visible: Visibility, shape: torch.Size, context: int) -> Windows:
    count = len(visible.keys)
    own = visible.position - visible.keys.start
    far = torch.arange(count - 1, -1, -1, device=own.device)
    beyond = far > own[:, None, None, :, None]
    own = own[:, None, None].expand(shape)
    heads = shape[1:3]
    row = torch.arange(own.numel(), device=own.device).view(shape)
    head = torch.arange(heads.numel(), device=own.device).view(heads)
    from_offsets = 2 * context * head[..., None] + context - 1 - own
    by_offset = (row * count + own - (count - 1)).clamp(min=0)
    return Windows(from_offsets.flatten(1), by_offset.flatten(), beyond)


@kept()
def _begin_in_folds(
    begin: Int[Tensor, "batch row"], batch: int, folds: int, size: int
) -> Int[Tensor, " row_of_all"]:
    fold = torch.arange(batch, device=begin.device) % folds
    return (begin + fold[:, None] * size).flatten()
