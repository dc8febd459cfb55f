"""Running sums over a corpus, how two of them add, and the means of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.rope.planes import Planes, plane_norms
from ropelens.statistics.attention import SequenceSums
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import GROUPS
from ropelens.statistics.intervals import mean_and_error
from ropelens.statistics.kernel import offset_edges, sum_bins
from ropelens.statistics.variables import Statistic


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer by the names of the statistics, in their units.

    `start[i]` is the first key that the row at position i sees, `scale` that of the scores.
    Sums by offset are sums by bin of offsets.
    """

    start: Int[Tensor, " position"]
    scale: float
    sums: dict[str, Float[Tensor, "_ ..."]]

    @classmethod
    def of(
        cls, sums: SequenceSums, call: AttentionCall, statistics: Sequence[Statistic]
    ) -> LayerSums:
        """Sums of a batch of sequences."""
        edges = offset_edges(len(call.start))
        by_offset = [row.name for row in statistics if row.over == "offsets"]
        binned = {name: sum_bins(sums[name], edges) for name in by_offset}
        pooled = {name: x.sum(0) for name, x in (sums | binned).items()}
        return cls(start=call.start, scale=call.scale, sums=pooled)

    def __add__(self, other: LayerSums) -> LayerSums:
        """The sums of both corpora; the longer context sets the bins."""
        longer, shorter = self, other
        if len(longer.start) < len(shorter.start):
            longer, shorter = other, self
        assert torch.equal(longer.start[: len(shorter.start)], shorter.start)
        sums = {name: _add(x, shorter.sums[name]) for name, x in longer.sums.items()}
        return replace(longer, sums=sums)


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
    scores: dict[int, Float[Tensor, "group head score"]] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            row_weight=_add(self.row_weight, other.row_weight),
            group_loss=self.group_loss + other.group_loss,
            group_predicted=self.group_predicted + other.group_predicted,
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            layers=_merged(self.layers, other.layers),
            scores=_merged(self.scores, other.scores),
        )

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
        self.edges: Int[Tensor, " edge"] = offset_edges(len(sums.start))

    def __getitem__(self, name: str) -> Float[Tensor, " head *value"]:
        """The mean of a statistic over tokens or rows."""
        count = self.whole.tokens if self._over[name] == "tokens" else self.row_weight.sum()
        return self.sums.sums[name] / count

    def plane_norms(self, x: Float[Tensor, "*batch coordinate"]) -> Tensor:
        """Length of each plane of `x`."""
        return plane_norms(x, self.planes)

    @cached_property
    def offset_share(self) -> Float[Tensor, " bin"]:
        """Share of rows that see each bin's first offset at a key other than position 0."""
        start = self.sums.start
        choices = torch.arange(len(start)) - start.clamp(min=1) + 1
        reached = choices[:, None] > self.edges[:-1]
        return (self.row_weight @ reached.double()) / self.row_weight.sum()


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


def _add(longer: Tensor, shorter: Tensor) -> Tensor:
    """Sum of two arrays, the shorter along the last axis filled up with 0."""
    missing = longer.shape[-1] - shorter.shape[-1]
    return pad(longer, (0, max(-missing, 0))) + pad(shorter, (0, max(missing, 0)))


def _merged(one: dict[int, Any], other: dict[int, Any]) -> dict[int, Any]:
    """The union of both, with a sum for each layer that both have."""
    return one | {layer: one[layer] + x if layer in one else x for layer, x in other.items()}
