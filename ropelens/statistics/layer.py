"""What the sums of one layer say: means, and the bins of offsets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, plane_norms
from ropelens.statistics.bins import offset_edges
from ropelens.statistics.sums import LayerSums, Sums
from ropelens.statistics.variables import Statistic


class LayerMeans:
    """Means of a layer by the names of its statistics, `layer["entropy"]`, and what follows.

    `whole` has what is the same for all layers: rows, tokens and losses by group.
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

    def plane_norms(
        self, x: Float[Tensor, "*batch coordinate"]
    ) -> Float[Tensor, "*batch term"]:
        """Length of each plane of `x`."""
        return plane_norms(x, self.planes)

    @property
    def group_rows(self) -> Float[Tensor, " group"]:
        """Rows of each group of sequences."""
        return self.whole.row_weight.sum(1)

    @cached_property
    def offset_share(self) -> Float[Tensor, " bin"]:
        """Share of rows that see each bin's first offset at a key other than position 0."""
        start = self.sums.start
        choices = torch.arange(len(start)) - start.clamp(min=1) + 1
        reached = choices[:, None] > self.edges[:-1]
        return (self.row_weight @ reached.double()) / self.row_weight.sum()
