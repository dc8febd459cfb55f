"""The sums of an attention that the weights of a head's model multiply in its likelihood."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.attention.block import Block, ByKey, ByRow
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges
from ropelens.text.text import SINKS


class HeadSums:
    """Sums over the weighted rows of an attention, which may be the attention of a model.

    `shape` [batch, kv_head, group] has the heads. `values` are sums of a value of each row, and
    `by_coordinate` sums of q~_i sum_j A_ij k~_j. `masses` are the attention on sinks and by
    offset, and `squares` the squares of the same masses, or None.
    """

    def __init__(
        self,
        sampled: SampledCall,
        shape: tuple[int, ...],
        *,
        offsets: bool = True,
        squares: bool = False,
    ) -> None:
        self.sampled = sampled
        zeros = sampled.k.new_zeros
        self.values = zeros(shape, dtype=torch.float64)
        self.by_coordinate = zeros(*shape, sampled.k.shape[3])
        self.masses = Masses.zeros(sampled, shape, offsets=offsets)
        self.squares: Masses | None = None
        if squares:
            self.squares = Masses.zeros(sampled, shape, offsets=offsets)

    def add(self, block: Block, values: ByRow, attention: ByKey, heads: slice) -> None:
        """Add the rows of a block, whose heads are the `heads` of the sums."""
        weighted = values * block.weight[:, None, None]
        self.values[:, heads] += weighted.sum(-1).double()
        read = (attention.flatten(2, 3) @ block.k_still).view_as(block.q)
        self.by_coordinate[:, heads] += _sum_rows(block, block.q_still * read)
        at_sinks = attention.index_select(-1, block.sinks)
        self.masses.add_at_sinks(block, at_sinks, heads)
        if self.masses.by_offset is None:
            return
        at_offset = block.by_offset(attention)
        by_offset = _sum_rows(block, at_offset)
        if block.visibility.mask is not None:  # the rest is on keys ahead of their row
            everything = block.weight.sum(-1)[:, None, None]
            by_offset[..., -1] += everything - by_offset.sum(-1)
        self.masses.add_by_offset(by_offset, heads)
        if self.squares is not None:
            self.squares.add_at_sinks(block, at_sinks.square(), heads)
            self.squares.add_by_offset(_sum_rows(block, at_offset.square_()), heads)

    def by_fold(self, folds: int) -> Float[Tensor, "fold kv_head group sum"]:
        """The sums over the rows of each fold side by side, in float64.

        They are the value, sum_j A_ij c~_ijf by plane, and the masses on sinks by kind, by
        offset, and on sinks by bin of offsets. The squares by offset and by bin follow.
        """
        by_plane = self.sampled.planes.sum_coordinates(self.by_coordinate)
        content = self.sampled.call.scale * by_plane
        sums = [self.values[..., None], content, self.masses.by_kind]
        for masses in (self.masses, self.squares):
            if masses is not None and masses.by_offset is not None:
                sums += [masses.by_offset.flip(-1), masses.by_bin]
        return sum_folds(torch.cat(sums, dim=-1), folds)


@dataclass(frozen=True)
class Masses:
    """Masses of an attention, or their squares, summed over the weighted rows.

    `at_sinks` has a number without meaning, the mass on sinks by kind, and the mass on sinks by
    bin of offsets (see `Block.sink_variables`). `by_offset` begins with the farthest offset; it
    is None for models without offsets.
    """

    at_sinks: Float[Tensor, "batch kv_head group kind_or_bin"]
    by_offset: Float[Tensor, "batch kv_head group offset"] | None

    @classmethod
    def zeros(
        cls, sampled: SampledCall, shape: tuple[int, ...], *, offsets: bool
    ) -> "Masses":
        context = sampled.k.shape[2]
        entries = len(SINKS) + len(offset_edges(context))
        at_sinks = sampled.k.new_zeros(*shape, entries)
        by_offset = sampled.k.new_zeros(*shape, context) if offsets else None
        return cls(at_sinks, by_offset)

    def add_at_sinks(
        self,
        block: Block,
        at_sinks: Float[Tensor, "batch kv_head group row sink"],
        heads: slice,
    ) -> None:
        weighted = at_sinks * block.weight[:, None, None, :, None]
        # Each sink counts twice: for its kind, and for the bin of its offset.
        twice = weighted[..., None].expand(*at_sinks.shape, 2).flatten(-3)
        self.at_sinks[:, heads].scatter_add_(-1, block.sink_variables, twice)

    def add_by_offset(
        self, by_offset: Float[Tensor, "batch kv_head group near"], heads: slice
    ) -> None:
        """Add masses from the farthest offset of a block to 0."""
        assert self.by_offset is not None
        self.by_offset[:, heads, :, -by_offset.shape[-1] :] += by_offset

    @property
    def by_kind(self) -> Float[Tensor, "batch kv_head group kind"]:
        """Mass on sinks by kind."""
        return self.at_sinks[..., 1 : 1 + len(SINKS)]

    @property
    def by_bin(self) -> Float[Tensor, "batch kv_head group bin"]:
        """Mass on sinks by bin of offsets."""
        return self.at_sinks[..., 1 + len(SINKS) :]


def _sum_rows(
    block: Block, values: Float[Tensor, "batch kv_head group row value"]
) -> Float[Tensor, "batch kv_head group value"]:
    """Weighted sum over the rows of a block."""
    return (block.weight[:, None, None, None] @ values)[..., 0, :]


def sum_folds(
    x: Float[Tensor, " batch *value"], folds: int
) -> Float[Tensor, " fold *value"]:
    """Sum over the sequences of each fold. The sequences belong to the folds in turn."""
    return x.unflatten(0, (-1, folds)).sum(0)
