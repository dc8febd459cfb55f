"""Running sums over the attention of a layer: of one call, of a corpus, and their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import Block, SampledCall
from ropelens.attention.call import AttentionCall
from ropelens.attention.offset_bins import offset_edges, sum_bins
from ropelens.attention.variables import Statistic, stack
from ropelens.errors import BadArgument
from ropelens.intervals import mean_and_error
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows
from ropelens.text.text import GROUPS

SequenceSums = dict[str, Float[Tensor, "batch _ ..."]]
"""Sums over the tokens or rows of each sequence, by the names of the statistics, in float64."""


def sum_attention(rows: SampledCall, statistics: Sequence[Statistic]) -> SequenceSums:
    """The sums of one attention call over its tokens and `rows`; padding has no weight.

    Raises `BadArgument` for a statistic that has no value for every row of a block.
    """
    sums: SequenceSums = {}
    padding = rows.places >= rows.rows.length.to(rows.places.device)[:, None]
    if rows.rows.hidden is not None:
        padding = padding | rows.rows.hidden.to(padding.device)
    for statistic in statistics:
        if statistic.over == "tokens":
            of_tokens = statistic.values(rows)
            if padding.any():
                of_tokens = of_tokens.masked_fill(padding[:, None, :, None], 0)
            sums[statistic.name] = of_tokens.sum(2).double()
    by_row = [statistic for statistic in statistics if statistic.over != "tokens"]
    heads, keys = rows.q.shape[1], rows.k.shape[2]
    for block in rows.blocks() if by_row else ():
        # All functions have run before sums by offset set the first key of their values to 0.
        values = {row.name: _values(row, block) for row in by_row}
        for row in by_row:
            part = _sum_rows(row, values[row.name], block)
            if row.over == "offsets":
                part = pad(part, (0, keys - part.shape[-1]))
            if row.name not in sums:
                shape = (len(part), heads, *part.shape[3:])
                sums[row.name] = part.new_zeros(shape, dtype=torch.float64)
            sums[row.name][:, block.query_heads] += part.flatten(1, 2)
    return {name: x.cpu() for name, x in sums.items()}  # once: a GPU does not wait for blocks


def _values(statistic: Statistic, block: Block) -> Tensor:
    """The values of a statistic on a block, which must be there for every row."""
    values, keys = statistic.values(block), [len(block.keys)] * (statistic.over == "offsets")
    wanted = (*block.q.shape[:4], *keys)
    if values.shape[: len(wanted)] != wanted or values.ndim > 5:
        raise BadArgument(
            f"The statistic {statistic.name!r} has no value for every row.",
            seen=f"shape {tuple(values.shape)}; a block has {tuple(wanted)}",
            hint="values [batch, kv_head, group, row], over offsets [..., row, key]",
        )
    return values


def _sum_rows(
    statistic: Statistic, values: Tensor, block: Block
) -> Float[Tensor, "batch kv_head group *value"]:
    if statistic.over == "offsets":
        return block.sum_by_offset(values)
    if values.ndim == 4:
        return (values @ block.weight[:, None, :, None])[..., 0]
    scale = block.call.scale if statistic.dims[-1] == "coordinate" else 1
    return scale * (block.weight[:, None, None, None] @ values)[..., 0, :]


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer by the names of the statistics, in their units.

    `scale` is the scale of the scores. Rows see offsets up to `farthest`. `offset_weight[0]` is
    the weight of the rows that see each offset. `offset_weight[1]` is the same weight for keys
    other than position 0. Sums by offset are sums by bin of offsets.
    """

    scale: float
    farthest: int
    offset_weight: Float[Tensor, "2 offset"]
    sums: dict[str, Float[Tensor, "_ ..."]]

    @classmethod
    def of(
        cls, sums: SequenceSums, rows: SampledCall, statistics: Sequence[Statistic]
    ) -> LayerSums:
        """Sums of a batch of sequences."""
        edges = offset_edges(rows.k.shape[2])
        by_offset = [row.name for row in statistics if row.over == "offsets"]
        binned = {name: sum_bins(sums[name], edges) for name in by_offset}
        pooled = {name: x.sum(0) for name, x in (sums | binned).items()}
        return cls(
            rows.call.scale, rows.call.farthest, offset_weight=rows.offset_weight, sums=pooled
        )

    def __add__(self, other: LayerSums) -> LayerSums:
        """The sums of both corpora; the longer context sets the bins."""
        return LayerSums(
            self.scale,
            farthest=max(self.farthest, other.farthest),
            offset_weight=_add(self.offset_weight, other.offset_weight),
            sums=_add(self.sums, other.sums),
        )


@dataclass(frozen=True)
class Sums:
    """The sums that a profile is computed from; those of two corpora add.

    `row_weight[g, i]` is the weight of the rows at position i in the sequences of group g, the
    same for every layer; `tokens` counts those that are not padding. `group_loss` (nats) is the
    summed loss of the `group_predicted` tokens of each group; `scores` are those of the
    budget's models by layer.
    """

    row_weight: Float[Tensor, "group position"]
    group_loss: Float[Tensor, " group"]
    group_predicted: Float[Tensor, " group"]
    tokens: int = 0
    sequences: int = 0
    layers: dict[int, LayerSums] = field(default_factory=dict)
    scores: dict[int, Float[Tensor, "group set head score"]] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        return Sums(**_add(vars(self), vars(other)))

    @property
    def loss(self) -> tuple[float, float]:
        """Loss per predicted token (nats), and its standard error over groups."""
        return mean_loss(self.group_loss, self.group_predicted)


class LayerMeans:
    """Means of a layer by the names of its statistics: `layer["entropy"]`.

    `whole` has the rows, tokens and losses by group, which all layers share.
    """

    def __init__(
        self, sums: LayerSums, whole: Sums, planes: Planes, statistics: Sequence[Statistic]
    ) -> None:
        self.sums, self.whole, self.planes, self.scale = sums, whole, planes, sums.scale
        self._over = {row.name: row.over for row in statistics}
        self.row_weight = whole.row_weight.sum(0)
        self.edges: Int[Tensor, " edge"] = offset_edges(sums.offset_weight.shape[1])

    def __getitem__(self, name: str) -> Float[Tensor, " head *value"]:
        """The mean of a statistic over tokens or rows."""
        count = self.whole.tokens if self._over[name] == "tokens" else self.row_weight.sum()
        return self.sums.sums[name] / count

    @property
    def offset_share(self) -> Float[Tensor, " bin"]:
        """Share of rows that see each bin's first offset at a key other than position 0."""
        reach = pad(self.sums.offset_weight[1], (0, int(self.edges[-1])))
        return reach[self.edges[:-1]] / self.row_weight.sum()


def mean_loss(
    loss: Float[Tensor, " group"], predicted: Float[Tensor, " group"]
) -> tuple[float, float]:
    """Loss per predicted token, and its standard error over the groups that have any.

    `loss` (nats) is the sum over the `predicted` tokens of each group.
    """
    some = predicted > 0
    weight = predicted[some].numpy()
    mean, error, _ = mean_and_error(loss[some].numpy() / weight, weight)
    return mean, error


def no_sums() -> Sums:
    """Sums over nothing."""
    nothing = torch.zeros(GROUPS, dtype=torch.float64)
    return Sums(nothing.new_zeros(GROUPS, 0), group_loss=nothing, group_predicted=nothing)


def by_group(
    values: Shaped[Tensor, " batch *value"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " group *value"]:
    """Values of each sequence, summed over the sequences of each group."""
    values = values.double().cpu()
    return values.new_zeros(GROUPS, *values.shape[1:]).index_add_(0, group, values)


def by_layer(arrays: Mapping[int, Tensor], layers: int) -> Tensor:
    """Arrays of some layers stacked along a new first axis; NaN for the other layers."""
    some = next(iter(arrays.values()))
    nothing = some[(slice(0),) * some.ndim]
    return torch.from_numpy(stack(arrays.get(layer, nothing) for layer in range(layers)))


def _add(one: Any, other: Any) -> Any:
    """The sum: the shorter array is filled up with 0, and dicts are merged."""
    if isinstance(one, dict):
        return one | {key: _add(one[key], x) if key in one else x for key, x in other.items()}
    if isinstance(one, Tensor):
        missing = one.shape[-1] - other.shape[-1]
        return pad(one, (0, max(-missing, 0))) + pad(other, (0, max(missing, 0)))
    return one + other


def attention_change(
    before: AttentionCall,
    after: AttentionCall,
    rows: Rows,
    sets: Bool[Tensor, "batch set position"],
) -> Float[Tensor, "set head"]:
    """Sum over `rows` of each set of KL(A_before || A_after), in nats, by their weights.

    The divergence between the weights of a row over the keys that it sees, the same in both
    calls: after soft-cap and mask, with the weight of a learned sink as one key more. Exactly 0
    where both calls have the same queries and keys. As torch.distributions.kl_divergence of two
    `Categorical`s. NaN where rows see other keys in both calls.
    """
    still = Planes(torch.zeros(0), after.query.shape[-1], "none")
    total = torch.zeros(sets.shape[1], after.query.shape[1], dtype=torch.float64)
    masks = [call.visible for call in (before, after) if call.visible is not None]
    if masks and not (len(masks) == 2 and torch.equal(*masks)):
        return total + torch.nan
    sides = [SampledCall(call, rows, still) for call in (before, after)]
    blocks = (side.blocks(slice(0, side.k.shape[1])) for side in sides)
    for pair in zip(*blocks, strict=True):
        before_log, after_log = map(_log_weights, pair)
        # Where chances are 0 so is the term: hidden keys have the same finite score twice.
        ratio = before_log - after_log
        divergence = before_log.exp_().mul_(ratio).sum(-1)
        at = pair[0].position[:, None].expand(*sets.shape[:2], -1)
        weight = sets.gather(2, at.to(sets.device)) * pair[0].weight[:, None].to(sets.device)
        moved = torch.einsum("bsr,bhr->sh", weight.to(divergence), divergence)
        total += moved.to("cpu", torch.float64)
    return total


def _log_weights(block: Block) -> Float[Tensor, "batch head row key"]:
    """Logarithms of the weights of the rows; a learned sink comes last."""
    scores = block.scores.flatten(1, 2)
    if block.call.sink_logits is not None:
        sink = block.call.sink_logits.to(scores)[None, :, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1)
    return scores.log_softmax(-1)
