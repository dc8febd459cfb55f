"""What offsets and sinks alone say of a row: no scores are needed, and no row x key table.

The weight of a key is exp(kappa(i - j)), times exp(sigma) at a sink. Rows see stretches of
offsets, so a running sum over the weights gives every row's norm, and the cost grows with
the context and not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.statistics.rows import Rows
from ropelens.statistics.solver import Divide, Minimum, fit_log_linear


@dataclass(frozen=True)
class OffsetRows:
    """How many offsets each row of some sequences sees, and which of them are sinks'.

    A row sees the offsets 0 ... seen - 1. Its sinks are listed in tables, one for all heads
    or one for each: the `kind` of each (1, 2, ...; 0 where a list is filled up) and its
    `offset`.
    """

    seen: Int[Tensor, " row"]
    weight: Float[Tensor, " row"]
    kind: Int[Tensor, "shared row sink"]
    offset: Int[Tensor, "shared row sink"]
    context: int

    @classmethod
    def of(
        cls,
        rows: Rows,
        start: Int[Tensor, " position"],
        sinks: Int[Tensor, "batch shared position"],
    ) -> OffsetRows:
        """The rows of all sequences, one after another."""
        position = rows.position.flatten()
        first = start.cpu()[position]
        key = torch.arange(len(start))
        visible = (key <= position[:, None]) & (key >= first[:, None])
        kind = sinks.repeat_interleave(rows.position.shape[1], dim=0).transpose(0, 1) * visible
        listed = kind.topk(max(1, int((kind > 0).sum(-1).max())), dim=-1)
        return cls(
            seen=position - first + 1,
            weight=rows.weight.flatten().double(),
            kind=listed.values,
            offset=(position[:, None] - listed.indices).clamp(min=0),
            context=len(start),
        )

    def of_heads(self, heads: Int[Tensor, " head"]) -> OffsetRows:
        """The same for some of the heads, or for some of them several times."""
        if len(self.kind) == 1:
            return self
        return replace(self, kind=self.kind[heads], offset=self.offset[heads])

    @property
    def reach(self) -> Float[Tensor, " offset"]:
        """Weight of the rows that see each offset."""
        ends = torch.zeros(self.context + 1, dtype=torch.float64)
        return _from_here_on(ends.index_add_(0, self.seen, self.weight))[1:]

    def log_norms(
        self, sigma: Float[Tensor, "head kind"], kappa: Float[Tensor, "head offset"]
    ) -> Float[Tensor, "head row"]:
        """log Z of every row: of the sum of the weights of the keys that it sees.

        Infinite where the weights of all of them are too small beside the largest.
        """
        level = _level(sigma, kappa)
        keys, sinks = self._weights(sigma, kappa, level)
        norms = keys + sinks.sum(-1)
        return torch.where(norms > 0, norms.log(), torch.inf) + level

    def expected(
        self, sigma: Float[Tensor, "head kind"], kappa: Float[Tensor, "head offset"]
    ) -> tuple[Float[Tensor, "head kind"], Float[Tensor, "head offset"]]:
        """Sums over rows of the modelled mass on sinks of each kind, and at each offset."""
        level = _level(sigma, kappa)
        keys, sinks = self._weights(sigma, kappa, level)
        rate = self.weight / (keys + sinks.sum(-1))
        ends = rate.new_zeros(len(rate), self.context + 1).index_add_(1, self.seen, rate)
        offset, kind = (
            table.expand(len(rate), -1, -1).flatten(1) for table in (self.offset, self.kind)
        )
        as_keys = (rate[..., None] * (self.kind > 0)).flatten(1)
        taken = torch.zeros_like(kappa).scatter_add_(1, offset, as_keys)
        mass = (rate[..., None] * sinks).flatten(1)
        by_offset = (kappa - level).exp() * (_from_here_on(ends)[:, 1:] - taken)
        by_kind = rate.new_zeros(len(rate), 1 + sigma.shape[1]).scatter_add_(1, kind, mass)
        return by_kind[:, 1:], by_offset.scatter_add(1, offset, mass)

    def _weights(
        self,
        sigma: Float[Tensor, "head kind"],
        kappa: Float[Tensor, "head offset"],
        level: Float[Tensor, "head 1"],
    ) -> tuple[Float[Tensor, "head row"], Float[Tensor, "head row sink"]]:
        """Of the keys that each row sees, over exp(level): all but sinks in one, and sinks'."""
        below = pad((kappa - level).exp().cumsum(-1), (1, 0))[:, self.seen]
        offset, kind = (
            table.expand(len(kappa), -1, -1).flatten(1) for table in (self.offset, self.kind)
        )
        of_offset = kappa.gather(1, offset) - level
        of_kind = pad(sigma, (1, 0), value=-torch.inf).gather(1, kind)
        taken = (of_offset.exp() * (kind > 0)).unflatten(1, self.kind.shape[1:])
        keys = (below - taken.sum(-1)).clamp(min=0)
        return keys, (of_offset + of_kind).exp().unflatten(1, self.kind.shape[1:])


def _level(
    sigma: Float[Tensor, "head kind"], kappa: Float[Tensor, "head offset"]
) -> Float[Tensor, "head 1"]:
    """A logarithm that no key's weight exceeds, for weights to be taken beside it."""
    return (kappa.amax(-1) + sigma.amax(-1).clamp(min=0))[:, None]


def fit_offsets(
    observed: Float[Tensor, "part head variable"],
    rows: list[OffsetRows],
    *,
    offsets: bool,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
    start: Float[Tensor, "part head variable"] | None = None,
) -> Minimum:
    """sigma and, with `offsets`, kappa of every head, fitted to the rows of each part.

    `observed` are the masses on sinks of each kind, then by offset, in the mean over the rows
    of the part, whose weights add up to one. Problems are parts, and heads within them.
    """
    parts, heads, size = observed.shape
    kinds = size - rows[0].context
    has = torch.ones(size, dtype=torch.float64)
    has[kinds:] = offsets
    reach = torch.stack([part.reach for part in rows]).repeat_interleave(heads, dim=0)
    ridges = ridge.repeat_interleave(heads)[:, None]

    def expect(point: Tensor) -> tuple[Tensor, Tensor]:
        norms, sums = [], []
        for own, weights in zip(rows, point.unflatten(0, (parts, heads)), strict=True):
            sigma, kappa = weights[:, :kinds], weights[:, kinds:]
            norms.append(own.log_norms(sigma, kappa) @ own.weight)
            sums.append(torch.cat(own.expected(sigma, kappa), dim=-1))
        return torch.cat(norms), torch.cat(sums)

    def curvature(_: Tensor, modelled: Tensor) -> Divide:
        share, mass = modelled[:, :kinds].clamp(0, 1), modelled[:, kinds:]
        of_sinks = share * (1 - share) + ridges

        def divide(values: Tensor) -> Tensor:
            rest = values[:, kinds:]
            if offsets:
                rest = divide_by_curvature(rest, mass=mass, reach=reach, ridge=ridges)
            return torch.cat([values[:, :kinds] / of_sinks, rest], dim=-1)

        return divide

    return fit_log_linear(
        expect,
        observed.flatten(0, 1),
        has=has,
        ridge=ridges,
        curvature=curvature,
        start=torch.zeros_like(observed).flatten(0, 1)
        if start is None
        else start.flatten(0, 1),
        tolerance=tolerance.flatten(),
    )


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
