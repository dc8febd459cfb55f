"""The keys that each row of an attention call sees, their offsets, and bins of offsets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention import fast_products
from ropelens.caches import kept, on_device
from ropelens.errors import UnsupportedModel

EXACT_OFFSETS = 64
BINS_PER_OCTAVE = 8

SequenceIndex = slice | Bool[Tensor, " batch"] | Int[Tensor, " some"]
"""Some of the sequences of a batch."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """The keys that each row of an attention call or block sees.

    `position` has the positions of the rows in ascending order, and `keys` the positions of the
    keys. Each row sees the keys from `first` to its own position: 0 to i under full causal
    attention, i - window + 1 to i under a sliding window. If some row sees other keys (a mask
    with gaps, a prefix, the top k keys), `mask` states the keys of all rows. Each table has one
    entry for all sequences, or one for each sequence.
    """

    position: Int[Tensor, "_ row"]
    first: Int[Tensor, "_ row"]
    keys: range
    mask: Bool[Tensor, "_ row key"] | None = None

    @staticmethod
    def causal(rows: range, *, window: int | None = None) -> "Visibility":
        """Rows that see all keys up to their own position, or only the last `window` keys."""
        return _causal(rows, window, torch.is_inference_mode_enabled())

    @classmethod
    def from_mask(
        cls, mask: Bool[Tensor, "batch row key"], rows: range
    ) -> "Visibility":
        """The visibility that a mask states. Rows of padding, which see no key, are ignored."""
        first = mask.byte().argmax(-1).cpu()
        position = torch.arange(rows.start, rows.stop, device="cpu")
        interval = cls(position[None], first, range(mask.shape[2]))
        is_padding = ~mask.any(-1, keepdim=True)
        agrees = mask == interval.sees().to(mask.device)
        if not bool((agrees | is_padding).all()):
            return replace(interval, mask=mask)
        if (first == first[0]).all():
            return replace(interval, first=first[:1])
        return interval

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Visibility":
        mask = None if self.mask is None else change(self.mask)
        return Visibility(change(self.position), change(self.first), self.keys, mask)

    def rows(self, index: Int[Tensor, "_ some"]) -> "Visibility":
        """The rows with these indices, which all sequences share or each sequence has."""

        def take(table: Tensor) -> Tensor:
            sequence = torch.arange(len(table), device=table.device)[:, None]
            return table[sequence, index.to(table.device)]

        return self._map(take)

    def on(self, device: torch.device) -> "Visibility":
        """The same with its tables on a device, except the mask."""
        if self.position.device == device:
            return self
        return self._copy(device)

    @kept()
    def _copy(self, device: torch.device) -> "Visibility":
        if self.first.any():
            first = on_device(self.first, device)
        else:  # without a copy to the device
            first = torch.zeros(self.first.shape, dtype=torch.long, device=device)
        position = on_device(self.position, device)
        return Visibility(position, first, self.keys, self.mask)

    def index_of(self, position: Int[Tensor, "_ some"]) -> Int[Tensor, "_ some"]:
        if int(self.position[0, -1]) == len(self.position[0]) - 1:
            return position  # the rows are 0, 1, 2, ...
        return torch.searchsorted(self.position[0], position.contiguous())

    def at(self, position: Int[Tensor, "_ some"]) -> "Visibility":
        return replace(self.rows(self.index_of(position)), position=position)

    def of_sequences(self, index: SequenceIndex) -> "Visibility":
        return self._map(lambda table: table if len(table) == 1 else table[index])

    def flatten(self, batch: int) -> "Visibility":
        """The rows of all `batch` sequences in one table."""

        def in_one(table: Tensor) -> Tensor:
            by_sequence = table.expand(batch, *table.shape[1:])
            return by_sequence.flatten(0, 1)[None]

        return self._map(in_one)

    @kept()
    def block(self, begin: int, end: int, keys: range | None = None) -> "Visibility":
        """Some consecutive rows, and the `keys` that they see; by default these are found.

        Start one key before the first key that any row sees, if there is one. This extra key
        has weight 0 in every row.
        """
        block = self._map(lambda table: table[:, begin:end])
        if keys is not None:
            return replace(block, keys=keys)
        if self.mask is not None:
            return block
        first = int(block.first.min())
        last = int(block.position.max())
        return replace(block, keys=range(max(first - 1, 0), last + 1))

    def append(self, later: "Visibility") -> "Visibility":
        """These rows, followed by rows of the next chunk of the same sequences."""
        if self.mask is not None or later.mask is not None:
            raise UnsupportedModel(
                "Sequences that run in chunks need rows that see all keys up to their own.",
                seen="a mask with gaps, or with keys ahead of their row",
                hint="sequences that are short enough to run in one pass",
            )
        batch = max(len(self.first), len(later.first))
        both = [self.first.expand(batch, -1), later.first.expand(batch, -1)]
        position = torch.cat([self.position, later.position], dim=1)
        return Visibility(position, torch.cat(both, dim=1), later.keys)

    @kept()
    def key_position(self, device: torch.device) -> Int[Tensor, " key"]:
        return torch.arange(self.keys.start, self.keys.stop, device=device)

    @cached_property
    def position_of_heads(self) -> Int[Tensor, "_ 1 row"]:
        """`position` with an axis for heads, as one object whose waves can be kept."""
        return self.position[:, None]

    def sees(
        self, key: Int[Tensor, " some"] | None = None
    ) -> Bool[Tensor, "_ row some"]:
        """Which of the keys at these positions, by default of all keys, each row sees."""
        if key is None:
            key = self.key_position(self.position.device)
        if self.mask is not None:
            return self.mask[:, :, (key - self.keys.start).to(self.mask.device)]
        return (key >= self.first[..., None]) & (key <= self.position[..., None])

    def sees_each(
        self, key: Int[Tensor, "*lead batch head key"]
    ) -> Bool[Tensor, "*lead batch head row key"]:
        """Whether each row sees the keys at these positions; -1 is never seen."""
        if self.mask is None:
            first = self.first[:, None, :, None]
            last = self.position[:, None, :, None]
            return (key[..., None, :] >= first) & (key[..., None, :] <= last)
        mask = self.mask[:, None].expand(*key.shape[:-1], *self.mask.shape[1:])
        index = (key - self.keys.start).clamp(min=0)[..., None, :].expand(mask.shape)
        return mask.gather(-1, index) & (key >= 0)[..., None, :]

    def agrees(self, other: "Visibility") -> bool:
        """Whether the rows of two calls over the same tokens see the same keys."""
        if self.mask is not None and other.mask is not None:
            return torch.equal(self.mask, other.mask)
        has_one_mask = self.mask is not None or other.mask is not None
        return not has_one_mask and torch.equal(self.first, other.first)

    @cached_property
    def count(self) -> Int[Tensor, "_ row"]:
        """Number of keys that each row sees, at least 1."""
        if self.mask is not None:
            return self.mask.sum(-1).clamp(min=1)
        return self.position + 1 - self.first

    def sum_keys(
        self, k: Float[Tensor, "batch kv_head key coordinate"]
    ) -> Float[Tensor, "batch kv_head row coordinate"]:
        if self.mask is not None:
            mask = self.mask.expand(len(k), -1, -1).to(k)
            return torch.einsum("brk,bhkc->bhrc", mask, k)
        total = fast_products.running_sum(k)
        sums = fast_products.take_rows(total, self.position)
        if self.seen_by_all.start > 0:
            before = fast_products.take_rows(total, (self.first - 1).clamp(min=0))
            sums -= before * (self.first > 0).to(k.device)[:, None, :, None]
        return sums

    @kept()
    def penalties(self, seen_by_all: range) -> list["Penalty"]:
        """Numbers to add to the scores of the keys that some rows do not see."""
        penalties = []
        before = range(self.keys.start, seen_by_all.start)
        after = range(seen_by_all.stop, self.keys.stop)
        for keys in (before, after):
            if keys:
                penalties.append(self._hide(keys))
        return penalties

    def _hide(self, keys: range) -> "Penalty":
        key = torch.arange(keys.start, keys.stop, device=self.position.device)
        hidden = self.sees(key).logical_not()
        number = (hidden.float() * fast_products.HIDDEN)[:, None, None]
        first = self.keys.start
        return Penalty(slice(keys.start - first, keys.stop - first), number)

    @cached_property
    def seen_by_all(self) -> range:
        """Positions of the keys that all rows see; it may end before it starts."""
        if self.mask is not None:
            return range(self.keys.start, self.keys.start)
        return range(int(self.first.max()), int(self.position.min()) + 1)

    @cached_property
    def farthest(self) -> int:
        return int((self.position - self.first).max())

    def count_by_offset(self) -> Float[Tensor, "_ row offset"]:
        """Number of keys that each row sees at each offset; keys ahead of it are at 0."""
        seen = self.sees().double()
        key = torch.arange(len(self.keys), device=seen.device)
        offset = (self.position[..., None] - key).clamp(min=0)
        return torch.zeros_like(seen).scatter_add_(-1, offset.expand(seen.shape), seen)

    @kept(most=2)
    def offset_weight(
        self, weight: Float[Tensor, "batch row"]
    ) -> Float[Tensor, "2 offset"]:
        """Weight of the rows that see each offset, for any key and for keys other than 0.

        Rows at position 0 see one key only, and may not be among the rows.
        """
        weight = weight.double()
        if self.mask is not None:
            return self._offset_weight_by_mask(weight)
        ends = weight.new_zeros(2, len(self.keys))  # rows by the farthest offset
        for first_key in (0, 1):
            farthest = self.position - self.first.clamp(min=first_key)
            index = farthest.expand(weight.shape).flatten()
            ends[first_key].index_add_(0, index, weight.flatten())
        return ends.flip(1).cumsum(1).flip(1)

    def _offset_weight_by_mask(
        self, weight: Float[Tensor, "batch row"]
    ) -> Float[Tensor, "2 offset"]:
        """As `offset_weight`, for rows whose keys a mask states. Tensors are on the host.

        Keys begin at position 0. Keys ahead of their row do not count.
        """
        assert self.mask is not None
        offset = self.position[..., None] - torch.arange(len(self.keys), device="cpu")
        weight_of_key = weight[..., None] * (self.mask.cpu() & (offset >= 0))
        offset = offset.clamp(min=0).expand(weight_of_key.shape)
        total = weight.new_zeros(2, len(self.keys))
        for first_key in (0, 1):
            index = offset[..., first_key:].flatten()
            weights = weight_of_key[..., first_key:].flatten()
            total[first_key].index_add_(0, index, weights)
        return total


@dataclass(frozen=True)
class Penalty:
    """Numbers to add to the scores of some columns: `HIDDEN` for keys that a row hides."""

    columns: slice
    number: Float[Tensor, "_ 1 1 row column"]


@lru_cache(maxsize=2)  # all layers of a pass share their tables
def _causal(rows: range, window: int | None, inference: bool) -> Visibility:
    position = torch.arange(rows.start, rows.stop, device="cpu")[None]
    seen = window or rows.stop
    first = (position - seen + 1).clamp_min(0)
    return Visibility(position, first, range(rows.stop))


@cache
def offset_edges(context: int) -> Int[Tensor, " edge"]:
    """Edges of the offset bins, in tokens. Bin b holds offsets edges[b] to edges[b + 1] - 1.

    Below 64 each bin has one offset; an octave above has 8 bins. A longer context only appends
    edges, so results of different contexts can be added.
    """
    edges = list(range(EXACT_OFFSETS + 1))
    step = EXACT_OFFSETS // BINS_PER_OCTAVE
    while edges[-1] < context:
        octave = (edges[-1] // EXACT_OFFSETS).bit_length() - 1
        edges.append(edges[-1] + (step << octave))
    return torch.tensor(edges, dtype=torch.long, device="cpu")


def sum_bins(mass: torch.Tensor, edges: Int[Tensor, " edge"]) -> torch.Tensor:
    """Sum of `mass` [..., offset] over the offsets of each bin: [..., bin]."""
    bins = bin_of(torch.arange(mass.shape[-1], device=mass.device), edges)
    sums = mass.new_zeros(*mass.shape[:-1], len(edges) - 1)
    return sums.index_add_(-1, bins, mass)


def bin_of(
    offset: Int[Tensor, "*shape"], edges: Int[Tensor, " edge"]
) -> Int[Tensor, "*shape"]:
    edges = on_device(edges, offset.device)
    return torch.bucketize(offset.contiguous(), edges, right=True) - 1
