"""What offsets and sinks alone say of a row: no scores are needed, and no row x key table.

The weight of a key is exp(kappa(i - j)), times exp(sigma) at a sink. Rows see stretches of
offsets, so a running sum over the weights gives every row's norm, and the cost grows with
the context and not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.statistics.rows import Rows


@dataclass(frozen=True)
class OffsetRows:
    """How many offsets each row of some sequences sees, and at which of them stand sinks.

    A row sees the offsets 0 ... seen - 1. `sink_offset` lists those of its sinks, in one table
    for all heads or in one for each; `is_sink` is 0 where a list is filled up, else 1.
    """

    seen: Int[Tensor, " row"]
    weight: Float[Tensor, " row"]
    sink_offset: Int[Tensor, "shared row sink"]
    is_sink: Float[Tensor, "shared row sink"]
    context: int

    @classmethod
    def of(
        cls,
        rows: Rows,
        start: Int[Tensor, " position"],
        sinks: Bool[Tensor, "batch shared position"],
    ) -> OffsetRows:
        """The rows of all sequences, one after another."""
        position = rows.position.flatten()
        first = start.cpu()[position]
        key = torch.arange(len(start))
        visible = (key <= position[:, None]) & (key >= first[:, None])
        mask = sinks.repeat_interleave(rows.position.shape[1], dim=0).transpose(0, 1) & visible
        most = max(1, int(mask.sum(-1).max()))
        found = mask.byte().topk(most, dim=-1)
        return cls(
            seen=position - first + 1,
            weight=rows.weight.flatten().double(),
            sink_offset=(position[:, None] - found.indices).clamp(min=0),
            is_sink=found.values.double(),
            context=len(start),
        )

    def of_heads(self, heads: slice) -> OffsetRows:
        """The same for some of the heads."""
        if len(self.sink_offset) == 1:
            return self
        return replace(self, sink_offset=self.sink_offset[heads], is_sink=self.is_sink[heads])

    @property
    def reach(self) -> Float[Tensor, " offset"]:
        """Weight of the rows that see each offset."""
        ends = torch.zeros(self.context + 1, dtype=torch.float64)
        return _from_here_on(ends.index_add_(0, self.seen, self.weight))[1:]

    def log_norms(
        self, sigma: Float[Tensor, " head"], kappa: Float[Tensor, "head offset"]
    ) -> Float[Tensor, "head row"]:
        """log Z of every row: of the sum of the weights of the keys that it sees.

        Infinite where the weights of all of them are too small beside the largest.
        """
        level = kappa.amax(-1, keepdim=True)
        norms = self._norms((kappa - level).exp(), sigma)
        return torch.where(norms > 0, norms.log(), torch.inf) + level

    def expected(
        self, sigma: Float[Tensor, " head"], kappa: Float[Tensor, "head offset"]
    ) -> tuple[Float[Tensor, " head"], Float[Tensor, "head offset"]]:
        """Sums over rows of the modelled mass on sinks, and of that at each offset."""
        weight = (kappa - kappa.amax(-1, keepdim=True)).exp()
        rate = self.weight / self._norms(weight, sigma)
        ends = rate.new_zeros(len(rate), self.context + 1).index_add_(1, self.seen, rate)
        of_sinks = (rate[..., None] * self.is_sink).flatten(1)
        place = self.sink_offset.expand(len(rate), -1, -1).flatten(1)
        sink_rate = rate.new_zeros(weight.shape).scatter_add_(1, place, of_sinks)
        sink_mass = sigma.exp()[:, None] * weight * sink_rate
        other_mass = weight * (_from_here_on(ends)[:, 1:] - sink_rate)
        return sink_mass.sum(-1), sink_mass + other_mass

    def _norms(
        self, weight: Float[Tensor, "head offset"], sigma: Float[Tensor, " head"]
    ) -> Float[Tensor, "head row"]:
        """Sum over the keys that each row sees of the weight of their offset, and of sinks."""
        seen = pad(weight.cumsum(-1), (1, 0))[:, self.seen]
        place = self.sink_offset.expand(len(weight), -1, -1).flatten(1)
        at_sinks = weight.gather(1, place).unflatten(1, self.sink_offset.shape[1:])
        at_sinks = (at_sinks * self.is_sink).sum(-1)
        return (seen - at_sinks).clamp(min=0) + sigma.exp()[:, None] * at_sinks


def divide_by_curvature(
    values: Float[Tensor, "problem offset"],
    *,
    mass: Float[Tensor, "problem offset"],
    reach: Float[Tensor, "problem offset"],
    ridge: Float[Tensor, "problem 1"],
) -> Float[Tensor, "problem offset"]:
    """`values` divided by the curvature of sum log Z in kappa, about, for a modelled `mass`.

    Rows see nested stretches of offsets, so the curvature is diagonal in the logits of the
    hazards: the share of an offset in what stands there or nearer (the product-limit
    estimate; Lynden-Bell 1971, MNRAS 155:95). Both changes of variables are running sums.
    Exact where no key is a sink and all rows of a length are alike.
    """
    farther = mass.sum(-1, keepdim=True) - mass.cumsum(-1)
    hazard = (mass / (reach - farther).clamp(min=1e-300)).clamp(0, 1)
    others = torch.arange(mass.shape[-1] - 1, -1, -1)
    diagonal = mass * (1 - hazard) + ridge * (1 + hazard**2 * others)
    beyond = values.sum(-1, keepdim=True) - values.cumsum(-1)
    by_hazard = (values + hazard * beyond) / diagonal
    passed_on = hazard * by_hazard
    return by_hazard + passed_on.cumsum(-1) - passed_on


def _from_here_on(x: Float[Tensor, "*head offset"]) -> Float[Tensor, "*head offset"]:
    """Sum of each entry and all after it."""
    return x.flip(-1).cumsum(-1).flip(-1)
