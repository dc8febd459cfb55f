"""Sums over the attention of a layer, for one call and for a text, and the means of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.errors import BadArgument
from ropelens.intervals import mean_and_error
from ropelens.rope.planes import Planes
from ropelens.schema import Statistic, stack
from ropelens.text.text import GROUPS

ZERO = torch.zeros(GROUPS, dtype=torch.float64)  # of each group; never changed in place

SequenceSums = dict[str, Float[Tensor, "batch _ ..."]]
"""Sums over the tokens or rows of each sequence, by the names of the statistics, in float64."""


def sum_attention(
    sampled: SampledCall, statistics: Sequence[Statistic]
) -> SequenceSums:
    """Sums, or maxima, of one attention call over its tokens and rows, without padding."""
    over_rows = [row for row in statistics if row.over != "tokens"]
    # Sums of some heads side by side, by the slice of these heads, or () of all tokens; maxima.
    flat: dict[tuple[Any, ...], Tensor] = {}
    shapes: dict[tuple[Any, ...], dict[str, torch.Size]] = {}
    for name in (row.name for row in over_rows if row.pool == "max"):
        flat[name,] = sampled.q.new_full(
            sampled.q.shape[:2], -torch.inf, dtype=torch.float64
        )
        shapes[name,] = {name: flat[name,][:, None].shape}

    def add(heads: tuple[int, ...], parts: Mapping[str, Tensor]) -> None:
        if parts:
            joined = torch.cat([x.flatten(1) for x in parts.values()], dim=1)
            flat[heads] = flat[heads].add_(joined) if heads in flat else joined.double()
            shapes[heads] = {name: x.shape for name, x in parts.items()}

    over_tokens = (row for row in statistics if row.over == "tokens")
    add((), {row.name: _sum_over_tokens(row, sampled)[:, None] for row in over_tokens})
    for block in blocks_of(sampled) if over_rows else ():
        # All functions run first, because sums by offset set the first key of values to 0.
        values = [(row, _row_values(row, block)) for row in over_rows]
        for row, x in values:
            if row.pool == "max":
                by_row = x.masked_fill(
                    block.weight[:, None, None] == 0, -torch.inf
                ).amax(-1)
                of_heads = flat[row.name,][:, block.query_heads]
                torch.maximum(of_heads, by_row.flatten(1, 2), out=of_heads)
        summed = [(row, x) for row, x in values if row.pool != "max"]
        parts = {row.name: _sum_over_rows(row, x, block) for row, x in summed}
        add((block.query_heads.start, block.query_heads.stop), parts)
    if not flat:
        return {}
    on_host = torch.cat(list(flat.values()), dim=1).cpu()  # the only wait for a GPU
    rows = [(heads, *row) for heads, parts in shapes.items() for row in parts.items()]
    pieces = on_host.split([shape[1:].numel() for *_, shape in rows], dim=1)
    sums: SequenceSums = {}
    for (heads, name, shape), piece in zip(rows, pieces, strict=True):
        part = piece.view(shape).flatten(1, 2)
        if len(heads) < 2:
            sums[name] = part
            continue
        zeros = part.new_zeros(len(part), sampled.q.shape[1], *part.shape[2:])
        sums.setdefault(name, zeros)[:, slice(*heads)] += part
    return sums


def _sum_over_tokens(
    row: Statistic, sampled: SampledCall
) -> Float[Tensor, "batch head value"]:
    by_token = row.values(sampled)
    if sampled.padding is not None:
        by_token = by_token.masked_fill(sampled.padding[:, None, :, None], 0)
    return by_token.sum(2)


def _row_values(statistic: Statistic, block: Block) -> Tensor:
    values, keys = (
        statistic.values(block),
        [len(block.keys)] * (statistic.over == "offsets"),
    )
    wanted = (*block.q.shape[:4], *keys)
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
    scale = block.call.scale if statistic.dims[-1] == "coordinate" else 1
    return scale * (block.weight[:, None, None, None] @ values)[..., 0, :]


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
        rows: Sequence[Statistic],
        farthest: int,
    ) -> "LayerSums":
        """Sums of a batch of sequences. `rows` are the rows of the table of statistics."""
        edges = offset_edges(sampled.k.shape[2])
        maxima = {row.name: sums[row.name].amax(0) for row in rows if row.pool == "max"}
        pooled = {name: x.sum(0) for name, x in sums.items() if name not in maxima}
        for row in rows:
            if row.over == "offsets":
                pooled[row.name] = sum_bins(pooled[row.name], edges)
        weight = sampled.visibility.offset_weight(sampled.rows.weight)
        return cls(sampled.call.scale, farthest, weight, sums=pooled, maxima=maxima)

    def __add__(self, other: "LayerSums") -> "LayerSums":
        """Sums over both texts. The longer context sets the bins."""
        weight = _add(self.offset_weight, other.offset_weight)
        farthest = max(self.farthest, other.farthest)
        maxima = {
            name: x.maximum(other.maxima[name]) for name, x in self.maxima.items()
        }
        return LayerSums(
            self.scale, farthest, weight, _add(self.sums, other.sums), maxima
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
        return Sums(**_add(vars(self), vars(other)))

    @property
    def loss(self) -> tuple[float, float]:
        """Loss per predicted token (nats), and its standard error over groups."""
        return mean_loss(self.group_loss, self.group_predicted)


class LayerMeans:
    """Means of a layer by the names of its statistics: `layer["entropy"]`."""

    def __init__(
        self,
        sums: LayerSums,
        total: Sums,
        planes: Planes,
        statistics: Sequence[Statistic],
    ) -> None:
        self.sums, self.total, self.planes, self.scale = sums, total, planes, sums.scale
        self._over = {row.name: row.over for row in statistics}
        self.row_weight = total.row_weight.sum(0)
        self.edges: Int[Tensor, " edge"] = offset_edges(sums.offset_weight.shape[1])

    def __getitem__(self, name: str) -> Float[Tensor, " head *value"]:
        """The mean of a statistic over tokens or rows, or its maximum."""
        if name in self.sums.maxima:
            return self.sums.maxima[name]
        count = (
            self.total.tokens if self._over[name] == "tokens" else self.row_weight.sum()
        )
        return self.sums.sums[name] / count

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
    empty = example[(slice(0),) * example.ndim]
    return torch.from_numpy(stack(arrays.get(layer, empty) for layer in range(layers)))


def _add(left: Any, right: Any) -> Any:
    """Sum of two values. The shorter array is filled up with 0, and dicts are merged."""
    if isinstance(left, dict):
        both = {key: _add(x, right[key]) for key, x in left.items() if key in right}
        return left | right | both
    if isinstance(left, Tensor):
        missing = left.shape[-1] - right.shape[-1]
        return pad(left, (0, max(-missing, 0))) + pad(right, (0, max(missing, 0)))
    return left + right
