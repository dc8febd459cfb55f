"""Sums over the attention of a layer, for one call and for a text, and the means of a text."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import Block, ByRow, blocks_of
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.errors import BadArgument
from ropelens.intervals import mean_and_error
from ropelens.rope.planes import Planes
from ropelens.schema.rows import Statistic, stack
from ropelens.text.text import GROUPS

# One for each group. It is never changed in place.
ZERO = torch.zeros(GROUPS, dtype=torch.float64, device="cpu")

SequenceSums = dict[str, Float[Tensor, "batch _ ..."]]
"""Sums over the tokens or rows of each sequence, by the names of the statistics, in float64."""

Key = TypeVar("Key")
Summand = TypeVar("Summand")


def sum_attention(
    sampled: SampledCall, statistics: Sequence[Statistic]
) -> SequenceSums:
    """Sums, or maxima, of one attention call over its tokens and rows, without padding."""
    over_tokens = [x for x in statistics if x.over == "tokens"]
    over_rows = [x for x in statistics if x.over != "tokens"]
    sums = _CallSums(sampled)
    sums.add_tokens(over_tokens)
    if over_rows:
        for block in blocks_of(sampled):
            sums.add_block(block, over_rows)
    return sums.on_host()


@dataclass
class _CallSums:
    """Running sums of one call. They stay on its device until all blocks are added.

    `over_tokens` and `maxima` (over rows) are [batch, head, ...], by the names of the
    statistics. `over_rows` has the other sums over rows, by the query heads of the blocks.
    """

    sampled: SampledCall
    over_tokens: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    over_rows: dict[range, "_SideBySide"] = field(default_factory=dict)

    def add_tokens(self, statistics: Sequence[Statistic]) -> None:
        for statistic in statistics:
            by_token = statistic.values(self.sampled)
            if self.sampled.padding is not None:
                padding = self.sampled.padding[:, None, :, None]
                by_token = by_token.masked_fill(padding, 0)
            self.over_tokens[statistic.name] = by_token.sum(2)

    def add_block(self, block: Block, statistics: Sequence[Statistic]) -> None:
        # All functions run first, because sums by offset set the first key of values to 0.
        values = {x.name: _row_values(x, block) for x in statistics}
        sums: dict[str, Tensor] = {}
        for statistic in statistics:
            by_row = values[statistic.name]
            if statistic.pool == "max":
                self._raise_maximum(statistic.name, by_row, block)
            else:
                sums[statistic.name] = _sum_over_rows(statistic, by_row, block)
        if not sums:
            return
        query_heads = range(block.query_heads.start, block.query_heads.stop)
        if query_heads in self.over_rows:
            self.over_rows[query_heads].add(sums)
        else:
            self.over_rows[query_heads] = _SideBySide.of(sums)

    def _raise_maximum(self, name: str, by_row: ByRow, block: Block) -> None:
        if name not in self.maxima:
            shape = self.sampled.q.shape[:2]
            self.maxima[name] = by_row.new_full(shape, -torch.inf, dtype=torch.float64)
        without_weight = block.weight[:, None, None] == 0
        largest = by_row.masked_fill(without_weight, -torch.inf).amax(-1)
        of_heads = self.maxima[name][:, block.query_heads]
        torch.maximum(of_heads, largest.flatten(1, 2), out=of_heads)

    def on_host(self) -> SequenceSums:
        of_all_heads = self.over_tokens | self.maxima
        of_some_heads = [x.values for x in self.over_rows.values()]
        arrays = _to_host([*of_all_heads.values(), *of_some_heads])
        sums = dict(zip(of_all_heads, arrays, strict=False))
        moved = zip(self.over_rows.items(), arrays[len(sums) :], strict=True)
        for (query_heads, on_device), array in moved:
            heads = slice(query_heads.start, query_heads.stop)
            for name, values in on_device.split(array).items():
                if name not in sums:
                    shape = (*self.sampled.q.shape[:2], *values.shape[2:])
                    sums[name] = values.new_zeros(shape)
                sums[name][:, heads] += values
        return sums


@dataclass
class _SideBySide:
    """Sums of several statistics next to each other, so that one operation adds them all.

    `shapes` has the shape [batch, kv_head, group, ...] of each statistic by name.
    """

    values: Float[Tensor, "batch entry"]
    shapes: dict[str, torch.Size]

    @classmethod
    def of(cls, sums: Mapping[str, Tensor]) -> "_SideBySide":
        shapes = {name: x.shape for name, x in sums.items()}
        return cls(_join(sums).double(), shapes)

    def add(self, sums: Mapping[str, Tensor]) -> None:
        self.values += _join(sums)

    def split(self, values: Float[Tensor, "batch entry"]) -> SequenceSums:
        """Take `values` apart: a copy of these sums, for example on the host."""
        sizes = [shape[1:].numel() for shape in self.shapes.values()]
        pieces = values.split(sizes, dim=1)
        return {
            name: piece.view(self.shapes[name]).flatten(1, 2)
            for name, piece in zip(self.shapes, pieces, strict=True)
        }


def _join(sums: Mapping[str, Tensor]) -> Float[Tensor, "batch entry"]:
    return torch.cat([x.flatten(1) for x in sums.values()], dim=1)


def _to_host(
    arrays: Sequence[Float[Tensor, "batch _ ..."]],
) -> list[Float[Tensor, "batch _ ..."]]:
    """All arrays in float64. They move together, because a GPU has to wait for each move."""
    if not arrays:
        return []
    flat = [x.flatten(1) for x in arrays]
    sizes = [x.shape[1] for x in flat]
    moved = torch.cat(flat, dim=1).double().cpu().split(sizes, dim=1)
    return [piece.view(x.shape) for piece, x in zip(moved, arrays, strict=True)]


def _row_values(statistic: Statistic, block: Block) -> Tensor:
    values = statistic.values(block)
    wanted: tuple[int, ...] = block.q.shape[:4]
    if statistic.over == "offsets":
        wanted = (*wanted, len(block.keys))
    if values.shape[: len(wanted)] != wanted or values.ndim > 5:
        raise BadArgument(
            f"The statistic {statistic.name!r} has no value for every row.",
            seen=f"shape {tuple(values.shape)}; a block has {tuple(wanted)}",
            hint="values [batch, kv_head, group, row], over offsets [..., row, key]",
        )
    return values


def _sum_over_rows(
    statistic: Statistic, values: Tensor, block: Block
) -> Float[Tensor, "batch kv_head group *value"]:
    if statistic.over == "offsets":
        sums = block.sum_by_offset(values)
        missing = block.call.key.shape[2] - sums.shape[-1]
        return pad(sums, (0, missing)) if missing else sums
    if values.ndim == 4:
        return (values @ block.weight[:, None, :, None])[..., 0]
    sums = (block.weight[:, None, None, None] @ values)[..., 0, :]
    scale = block.call.scale if statistic.dims[-1] == "coordinate" else 1
    return scale * sums


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer by the names of the statistics, in their units.

    `scale` is the scale of the scores, and `farthest` the farthest offset that any row sees.
    `offset_weight[0]` is the weight of the rows that see each offset. `offset_weight[1]` is the
    same weight for keys other than position 0. Sums by offset are by bin; `maxima` over rows.
    """

    scale: float
    farthest: int
    offset_weight: Float[Tensor, "2 offset"]
    sums: dict[str, Float[Tensor, "_ ..."]]
    maxima: dict[str, Float[Tensor, " head"]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sums: SequenceSums,
        sampled: SampledCall,
        statistics: Sequence[Statistic],
        farthest: int,
    ) -> "LayerSums":
        """Sums of a batch of sequences, by the names of the `statistics`."""
        edges = offset_edges(sampled.k.shape[2])
        totals: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for statistic in statistics:
            by_sequence = sums[statistic.name]
            if statistic.pool == "max":
                maxima[statistic.name] = by_sequence.amax(0)
            elif statistic.over == "offsets":
                totals[statistic.name] = sum_bins(by_sequence.sum(0), edges)
            else:
                totals[statistic.name] = by_sequence.sum(0)
        weight = sampled.visibility.offset_weight(sampled.rows.weight)
        return cls(sampled.call.scale, farthest, weight, sums=totals, maxima=maxima)

    def __add__(self, other: "LayerSums") -> "LayerSums":
        """Sums over both texts. The longer context sets the bins."""
        return LayerSums(
            scale=self.scale,
            farthest=max(self.farthest, other.farthest),
            offset_weight=_add_padded(self.offset_weight, other.offset_weight),
            sums=_merge(self.sums, other.sums, _add_padded),
            maxima=_merge(self.maxima, other.maxima, torch.maximum),
        )


@dataclass(frozen=True)
class Sums:
    """The sums from which a profile is computed. The sums of two texts can be added.

    `row_weight[g, i]` is the weight of the rows at position i in the sequences of group g,
    which all layers share. `tokens` is the number of tokens without padding. `group_loss`
    (nats) is the summed loss of the `group_predicted` tokens of each group. `scores` are the
    scores of the budget's models by layer.
    """

    row_weight: Float[Tensor, "group position"] = ZERO[:, None][:, :0]
    group_loss: Float[Tensor, " group"] = ZERO
    group_predicted: Float[Tensor, " group"] = ZERO
    tokens: int = 0
    sequences: int = 0
    layers: dict[int, LayerSums] = field(default_factory=dict)
    scores: dict[int, Float[Tensor, "group set head score"]] = field(
        default_factory=dict
    )

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            row_weight=_add_padded(self.row_weight, other.row_weight),
            group_loss=self.group_loss + other.group_loss,
            group_predicted=self.group_predicted + other.group_predicted,
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            layers=_merge(self.layers, other.layers, operator.add),
            scores=_merge(self.scores, other.scores, operator.add),
        )

    @property
    def loss(self) -> tuple[float, float]:
        """Loss per predicted token (nats), and its standard error over groups."""
        return mean_loss(self.group_loss, self.group_predicted)


@dataclass(frozen=True)
class LayerMeans:
    """Means of a layer by the names of its statistics: `layer["entropy"]`.

    `sums` are the sums of the layer, and `total` the sums of the text.
    """

    sums: LayerSums
    total: Sums
    planes: Planes
    statistics: Sequence[Statistic]

    def __getitem__(self, name: str) -> Float[Tensor, " head *value"]:
        """The mean of a statistic over tokens or rows, or its maximum."""
        if name in self.sums.maxima:
            return self.sums.maxima[name]
        if name in self._over_tokens:
            return self.sums.sums[name] / self.total.tokens
        return self.sums.sums[name] / self.row_weight.sum()

    @cached_property
    def _over_tokens(self) -> set[str]:
        return {x.name for x in self.statistics if x.over == "tokens"}

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return self.sums.scale

    @cached_property
    def row_weight(self) -> Float[Tensor, " position"]:
        """Weight of the rows at each position."""
        return self.total.row_weight.sum(0)

    @property
    def edges(self) -> Int[Tensor, " edge"]:
        """Edges of the offset bins, in tokens."""
        return offset_edges(self.sums.offset_weight.shape[1])

    @property
    def offset_share(self) -> Float[Tensor, " bin"]:
        """Share of rows that see the first offset of each bin, at a key other than 0."""
        weight = pad(self.sums.offset_weight[1], (0, int(self.edges[-1])))
        return weight[self.edges[:-1]] / self.row_weight.sum()


def mean_loss(
    loss: Float[Tensor, " group"], predicted: Float[Tensor, " group"]
) -> tuple[float, float]:
    """Loss (nats) per predicted token, and its standard error over groups with such tokens."""
    not_empty = predicted > 0
    weight = predicted[not_empty].numpy()
    mean, error, _ = mean_and_error(loss[not_empty].numpy() / weight, weight)
    return mean, error


def by_group(
    values: Shaped[Tensor, " batch *value"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " group *value"]:
    """Values of each sequence, summed over the sequences of each group."""
    values = values.double().cpu()
    return values.new_zeros(GROUPS, *values.shape[1:]).index_add_(0, group, values)


def by_layer(arrays: Mapping[int, Tensor], layers: int) -> Tensor:
    """Arrays by layer, stacked along a new first axis; NaN for layers without an array."""
    example = next(iter(arrays.values()))
    empty = example.new_zeros([0] * example.ndim)
    stacked = stack(arrays.get(layer, empty) for layer in range(layers))
    return torch.from_numpy(stacked)


def _merge(
    left: Mapping[Key, Summand],
    right: Mapping[Key, Summand],
    add: Callable[[Summand, Summand], Summand],
) -> dict[Key, Summand]:
    """Both dicts; values with a key in both are added."""
    merged = {**left, **right}
    for key, value in left.items():
        if key in right:
            merged[key] = add(value, right[key])
    return merged


def _add_padded(
    left: Float[Tensor, "*shape _"], right: Float[Tensor, "*shape _"]
) -> Float[Tensor, "*shape _"]:
    """The sum of two arrays. The shorter array is filled up with 0."""
    size = max(left.shape[-1], right.shape[-1])
    return pad(left, (0, size - left.shape[-1])) + pad(
        right, (0, size - right.shape[-1])
    )
