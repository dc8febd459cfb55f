"""Running sums over a corpus: what a profile is made of, and how two of them add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.statistics.attention import SequenceSums
from ropelens.statistics.bins import offset_edges, sum_bins
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.groups import GROUPS
from ropelens.statistics.intervals import mean_and_error
from ropelens.statistics.variables import Statistic


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer by the names of the statistics, in their units.

    `start[i]` is the first key that the row at position i sees, `scale` that of the scores.
    What is by offset is summed over the offsets of each bin.
    """

    start: Int[Tensor, " position"]
    scale: float
    sums: dict[str, Float[Tensor, "_ ..."]]

    @classmethod
    def of(
        cls, sums: SequenceSums, call: AttentionCall, statistics: Sequence[Statistic]
    ) -> LayerSums:
        """Sums of a batch of sequences."""
        edges, sums = offset_edges(len(call.start)), dict(sums)
        for row in statistics:
            if row.over == "offsets":
                sums[row.name] = sum_bins(sums[row.name], edges)
        pooled = {name: x.sum(0) for name, x in sums.items()}
        return cls(start=call.start, scale=call.scale, sums=pooled)

    def __add__(self, other: LayerSums) -> LayerSums:
        """The sums of both corpora; the longer context sets the bins."""
        longer = self if len(self.start) >= len(other.start) else other
        shorter = other if longer is self else self
        assert torch.equal(longer.start[: len(shorter.start)], shorter.start)
        return replace(
            longer,
            sums={name: _add(x, shorter.sums[name]) for name, x in longer.sums.items()},
        )


@dataclass(frozen=True)
class Sums:
    """Everything a profile is computed from; sums of two corpora add.

    `row_weight[g, i]` is the weight of the rows at position i in the sequences of group
    g, the same for every layer; `tokens` counts those that are not padding. `group_loss`
    (nats) is the summed loss of the `group_predicted` tokens of each group; `scores` are those
    of the budget's models by layer, on the rows that these are scored on.
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


def mean_loss(
    loss: Float[Tensor, " group"], predicted: Float[Tensor, " group"]
) -> tuple[float, float]:
    """Loss per predicted token, and its standard error over the groups that have any.

    From the summed `loss` (nats) of the `predicted` tokens of each group.
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
    """Sum of two arrays of which either may end earlier along its last axis."""
    missing = longer.shape[-1] - shorter.shape[-1]
    return pad(longer, (0, max(-missing, 0))) + pad(shorter, (0, max(missing, 0)))


def _merged(one: dict[int, Any], other: dict[int, Any]) -> dict[int, Any]:
    """What both have of a layer is added."""
    return one | {layer: one[layer] + x if layer in one else x for layer, x in other.items()}
