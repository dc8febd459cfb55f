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
        first, position = (
            mask.byte().argmax(-1).cpu(),
            torch.arange(rows.start, rows.stop),
        )
        interval = cls(position[None], first, range(mask.shape[2]))
        is_padding = ~mask.any(-1, keepdim=True)
        if not bool(((mask == interval.sees().to(mask.device)) | is_padding).all()):
            return replace(interval, mask=mask)
        return (
            replace(interval, first=first[:1])
            if (first == first[0]).all()
            else interval
        )

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
        return self if self.position.device == device else self._copy(device)

    @kept()
    def _copy(self, device: torch.device) -> "Visibility":
        position, first = on_device(self.position, device), self.first
        if not first.any():  # without a copy to the device
            first = torch.zeros(first.shape, dtype=torch.long, device=device)
        return Visibility(position, on_device(first, device), self.keys, self.mask)

    def index_of(self, position: Int[Tensor, "_ some"]) -> Int[Tensor, "_ some"]:
        if int(self.position[0, -1]) == len(self.position[0]) - 1:
            return position  # the rows are 0, 1, 2, ...
        return torch.searchsorted(self.position[0], position.contiguous())

    def at(self, position: Int[Tensor, "_ some"]) -> "Visibility":
        return replace(self.rows(self.index_of(position)), position=position)

    def of_sequences(
        self, chosen: slice | Bool[Tensor, " batch"] | Int[Tensor, " some"]
    ) -> "Visibility":
        return self._map(lambda table: table if len(table) == 1 else table[chosen])

    def flatten(self, batch: int) -> "Visibility":
        """The rows of all `batch` sequences in one table."""
        return self._map(lambda x: x.expand(batch, *x.shape[1:]).flatten(0, 1)[None])

    @kept()
    def block(self, begin: int, end: int, keys: range | None = None) -> "Visibility":
        """Some consecutive rows, and the `keys` that they see; by default these are found.

        Start one key before the first key that any row sees, if there is one. This extra key
        has weight 0 in every row.
        """
        block = self._map(lambda table: table[:, begin:end])
        if self.mask is None and keys is None:
            first, last = int(block.first.min()), int(block.position.max())
            keys = range(max(first - 1, 0), last + 1)
        return replace(block, keys=keys or self.keys)

    def append(self, later: "Visibility") -> "Visibility":
        """These rows, followed by rows of the next chunk of the same sequences."""
        if self.mask is not None or later.mask is not None:
            raise UnsupportedModel(
                "Sequences that run in chunks need rows that see all keys up to their own.",
                seen="a mask with gaps, or with keys ahead of their row",
                hint="sequences that are short enough to run in one pass",
            )
        batch = max(len(self.first), len(later.first))
        first = torch.cat([x.first.expand(batch, -1) for x in (self, later)], dim=1)
        return Visibility(
            torch.cat([self.position, later.position], 1), first, later.keys
        )

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
            first, last = (end[:, None, :, None] for end in (self.first, self.position))
            return (key[..., None, :] >= first) & (key[..., None, :] <= last)
        mask = self.mask[:, None].expand(*key.shape[:-1], *self.mask.shape[1:])
        index = (key - self.keys.start).clamp(min=0)[..., None, :].expand(mask.shape)
        return mask.gather(-1, index) & (key >= 0)[..., None, :]

    def agrees(self, other: "Visibility") -> bool:
        """Whether the rows of two calls over the same tokens see the same keys."""
        if self.mask is None or other.mask is None:
            return self.mask is other.mask
        return torch.equal(self.mask, other.mask)

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
        if self.seen_by_all[0] > 0:
            before = fast_products.take_rows(total, (self.first - 1).clamp(min=0))
            sums -= before * (self.first > 0).to(k.device)[:, None, :, None]
        return sums

    @kept()
    def penalties(self, first: int, last: int) -> list[tuple[slice, Tensor]]:
        """Numbers to add to scores that hide keys; all rows see keys `first` to `last` - 1."""
        low, penalties = self.keys.start, []
        for begin, end in ((low, first), (last, self.keys.stop)):
            if begin < end:
                key = torch.arange(begin, end, device=self.position.device)
                hidden = self.sees(key).logical_not()
                penalty = (hidden * fast_products.HIDDEN)[:, None, None]
                penalties.append((slice(begin - low, end - low), penalty))
        return penalties

    @cached_property
    def seen_by_all(self) -> tuple[int, int]:
        """First and end position of the keys that all rows see."""
        if self.mask is not None:
            return self.keys.start, self.keys.start
        return int(self.first.max()), int(self.position.min()) + 1

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
        """Weight of the rows that see each offset, for any key and for keys other than 0."""
        weight = weight.double()
        total = weight.new_zeros(2, len(self.keys))
        if self.mask is None:
            for nearest, by_offset in enumerate(total):
                offset = (self.position - self.first.clamp(min=nearest)).expand(
                    weight.shape
                )
                by_offset.index_add_(0, offset.flatten(), weight.flatten())
            return total.flip(1).cumsum(1).flip(1)
        offset = self.position[..., None] - torch.arange(len(self.keys))
        seen = weight[..., None] * (self.mask.cpu() & (offset >= 0))
        offset = offset.clamp(min=0).expand(seen.shape)
        for part, by_offset in zip((slice(None), slice(1, None)), total, strict=True):
            by_offset.index_add_(
                0, offset[..., part].flatten(), seen[..., part].flatten()
            )
        return total


@lru_cache(maxsize=2)  # all layers of a pass share their tables
def _causal(rows: range, window: int | None, inference: bool) -> Visibility:
    position = torch.arange(rows.start, rows.stop)[None]
    first = (position - (window or rows.stop) + 1).clamp_min(0)
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
    return torch.tensor(edges)


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
