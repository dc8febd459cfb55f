"""What offsets and sinks alone say of a row: no scores are needed, and no row x key table.

The weight of a key is exp(kappa(i - j)), times exp(sigma + tau(bin of i - j)) at a sink. Rows
see stretches of offsets, so a running sum over the weights gives every row's norm, and the
cost grows with the context and not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.statistics.bins import offset_edges
from ropelens.statistics.cells import SINKS, bin_of
from ropelens.statistics.rows import Rows
from ropelens.statistics.solver import SMOOTH, Divide, Minimum, fit_log_linear

TOGETHER = 2**18
"""Weights that are fitted at once, of many heads."""


@dataclass(frozen=True)
class OffsetRows:
    """How many offsets each row of some sequences sees, and which of them are sinks'.

    A row sees the offsets 0 ... seen - 1. Its sinks are listed in tables, one for all heads
    or one for each: the `kind` of each (1, 2, ...; 0 where a list is filled up), its `offset`
    and the `bin` of that.
    """

    seen: Int[Tensor, " row"]
    weight: Float[Tensor, " row"]
    kind: Int[Tensor, "shared row sink"]
    offset: Int[Tensor, "shared row sink"]
    bin: Int[Tensor, "shared row sink"]
    context: int

    @classmethod
    def of(
        cls,
        rows: Rows,
        start: Int[Tensor, " position"],
        sinks: Int[Tensor, "batch shared position"],
    ) -> OffsetRows:
        """The rows of all sequences in turn."""
        position = rows.position.flatten()
        first = start.cpu()[position]
        # Of few keys: a table of all rows and keys is large, and one of all heads larger.
        is_sink = (sinks > 0).flatten(0, 1).any(0)
        is_sink[0] = True
        key = is_sink.nonzero()[:, 0]
        visible = (key <= position[:, None]) & (key >= first[:, None])
        kind = sinks[..., key].repeat_interleave(rows.position.shape[1], dim=0)
        kind = kind.transpose(0, 1) * visible
        listed = kind.topk(max(1, int((kind > 0).sum(-1).max())), dim=-1)
        offset = (position[:, None] - key[listed.indices]).clamp(min=0)
        return cls(
            seen=position - first + 1,
            weight=rows.weight.flatten().double(),
            kind=listed.values,
            offset=offset,
            bin=bin_of(offset, offset_edges(len(start))),
            context=len(start),
        )

    def of_heads(self, heads: Int[Tensor, " head"]) -> OffsetRows:
        """The same for some of the heads, or for some of them several times."""
        if len(self.kind) == 1:
            return self
        tables = {name: vars(self)[name][heads] for name in ("kind", "offset", "bin")}
        return replace(self, **tables)

    def to(self, dtype: torch.dtype) -> OffsetRows:
        """The same with weights, and so all results, of another precision."""
        return replace(self, weight=self.weight.to(dtype))

    @property
    def uniform(self) -> Float[Tensor, ""]:
        """Sum over rows of log P where every key that a row sees weighs the same."""
        return -(self.seen.to(self.weight.dtype).log() @ self.weight)

    @property
    def reach(self) -> Float[Tensor, " offset"]:
        """Weight of the rows that see each offset."""
        ends = self.weight.new_zeros(self.context + 1)
        return _from_here_on(ends.index_add_(0, self.seen, self.weight))[1:]

    def log_norms(self, weights: Float[Tensor, "head variable"]) -> Float[Tensor, "head row"]:
        """log Z of every row: of the sum of the weights of the keys that it sees.

        `weights` are sigma, kappa and tau side by side. Infinite where those of all keys are
        too small beside the largest.
        """
        return self._seen(weights).log_norms

    def expect(
        self, weights: Float[Tensor, "head variable"]
    ) -> tuple[Float[Tensor, " head"], Float[Tensor, "head variable"]]:
        """Sum over rows of log Z; modelled masses by kind of sink, offset, bin to sinks."""
        seen = self._seen(weights)
        rate = self.weight / seen.norms
        ends = rate.new_zeros(len(rate), self.context + 1).index_add_(1, self.seen, rate)
        as_keys = (rate[..., None] * (self.kind > 0)).flatten(1)
        taken = _add_at(torch.zeros_like(seen.kernel), self.offset, as_keys)
        mass = (rate[..., None] * seen.sinks).flatten(1)
        by_kind = _add_at(rate.new_zeros(len(rate), 1 + len(SINKS)), self.kind, mass)
        by_offset = seen.kernel * (_from_here_on(ends)[:, 1:] - taken)
        _add_at(by_offset, self.offset, mass)
        bins = weights.shape[1] - len(SINKS) - self.context
        by_bin = _add_at(rate.new_zeros(len(rate), bins), self.bin, mass)
        masses = torch.cat([by_kind[:, 1:], by_offset, by_bin], dim=-1)
        return seen.log_norms @ self.weight, masses

    def _seen(self, weights: Float[Tensor, "head variable"]) -> _Seen:
        """The weights of the keys that each row sees, beside the largest there could be."""
        sizes = [len(SINKS), self.context, len(offset_edges(self.context)) - 1]
        sigma, kappa, tau = weights.split(sizes, dim=-1)
        level = (kappa.amax(-1) + (sigma.amax(-1) + tau.amax(-1)).clamp(min=0))[:, None]
        kernel = (kappa - level).exp()
        as_keys = _at(kernel, self.offset) * (self.kind > 0)
        log_factor = _at(pad(sigma, (1, 0)), self.kind) + _at(tau, self.bin)
        sinks = (_at(kappa - level, self.offset) + log_factor).exp() * (self.kind > 0)
        below = pad(kernel.cumsum(-1), (1, 0)).index_select(1, self.seen)
        norms = (below - as_keys.sum(-1)).clamp(min=0) + sinks.sum(-1)
        log_norms = torch.where(norms > 0, norms.log(), torch.inf) + level
        return _Seen(kernel, norms, log_norms, sinks)


@dataclass(frozen=True)
class _Seen:
    """Weights over one level: of offsets, of each row's keys in all, and of its sinks."""

    kernel: Float[Tensor, "head offset"]
    norms: Float[Tensor, "head row"]
    log_norms: Float[Tensor, "head row"]
    sinks: Float[Tensor, "head row sink"]


def _at(
    x: Float[Tensor, "head place"], table: Int[Tensor, "shared row sink"]
) -> Float[Tensor, "head row sink"]:
    """What each head has at the places of a table, which one of may serve all heads."""
    if len(table) == 1:
        return x.index_select(1, table[0].flatten()).view(len(x), *table.shape[1:])
    return x.gather(1, table.flatten(1)).view(table.shape)


def _add_at(
    into: Float[Tensor, "head place"],
    table: Int[Tensor, "shared row sink"],
    values: Float[Tensor, "head entry"],
) -> Float[Tensor, "head place"]:
    """`into`, with values added at the places of a table."""
    if len(table) == 1:
        return into.index_add_(1, table[0].flatten(), values)
    return into.scatter_add_(1, table.flatten(1), values)


def fit_sinks(
    observed: Float[Tensor, "part head variable"],
    rows: list[OffsetRows],
    *,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
) -> Minimum:
    """sigma of every head, with kappa and tau 0: see `fit_offsets`."""
    parts, heads, size = observed.shape
    kinds = len(SINKS)
    counts = [
        torch.stack([(part.kind == 1 + kind).sum(-1) for kind in range(kinds)], dim=-1).to(
            part.weight.dtype
        )
        for part in rows
    ]
    ridges = ridge.repeat_interleave(heads)[:, None]

    def expect(point: Tensor) -> tuple[Tensor, Tensor]:
        norms, sums = [], []
        weights = point.unflatten(0, (parts, -1))
        for part, count, sigma in zip(rows, counts, weights, strict=True):
            factor = sigma.exp()[..., None]
            others = part.seen - count.sum(-1)
            norm = others + (count @ factor)[..., 0]
            rate = part.weight / norm
            norms.append(norm.log() @ part.weight)
            sums.append(factor[..., 0] * (rate[:, None] @ count)[:, 0])
        return torch.cat(norms), torch.cat(sums)

    def curvature(_: Tensor, modelled: Tensor) -> Divide:
        share = modelled.clamp(0, 1)
        return lambda values: values / (share * (1 - share) + ridges)

    sinks = observed[..., :kinds].flatten(0, 1)
    found = fit_log_linear(
        expect,
        sinks,
        has=sinks.new_ones(kinds),
        ridge=ridges,
        smooth=slice(0),
        curvature=curvature,
        start=torch.zeros_like(sinks),
        tolerance=tolerance.flatten(),
    )
    return replace(found, point=pad(found.point, (0, size - kinds)))


def fit_offsets(
    observed: Float[Tensor, "part head variable"],
    rows: list[OffsetRows],
    *,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
    start: Float[Tensor, "part head variable"],
) -> Minimum:
    """sigma, kappa and tau of every head, fitted to the rows of each part.

    `observed` are the masses on sinks of each kind, by offset, and on sinks by bin of offsets,
    in the mean over the rows of the part, whose weights add up to one. Problems are parts, and
    heads in them. Most heads take a few evaluations, so those that take more go on alone.
    """
    shape = tolerance.shape
    point, value = start.clone(), torch.zeros_like(tolerance)
    done = torch.zeros_like(tolerance, dtype=torch.bool)
    evaluations = 0
    for some in torch.arange(shape[1]).split(max(1, TOGETHER // observed.shape[-1])):
        for more in (6, 12, 80):
            heads = some[~done[:, some].all(0)]
            if not len(heads):
                break
            found = _fit(
                observed[:, heads],
                [part.of_heads(heads) for part in rows],
                ridge=ridge,
                tolerance=tolerance[:, heads],
                start=point[:, heads],
                max_evaluations=more,
            )
            own = (shape[0], len(heads))
            point[:, heads] = found.point.unflatten(0, own)
            value[:, heads], done[:, heads] = found.value.view(own), found.done.view(own)
            evaluations += found.evaluations
    return Minimum(point.flatten(0, 1), value.flatten(), done.flatten(), evaluations)


def _fit(
    observed: Float[Tensor, "part head variable"],
    rows: list[OffsetRows],
    *,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
    start: Float[Tensor, "part head variable"],
    max_evaluations: int,
) -> Minimum:
    """`fit_offsets` of heads that go on together."""
    parts, heads, size = observed.shape
    reach = torch.stack([part.reach for part in rows]).repeat_interleave(heads, dim=0)
    ridges = ridge.repeat_interleave(heads)[:, None]
    kinds = len(SINKS)

    def expect(point: Tensor) -> tuple[Tensor, Tensor]:
        weights = point.unflatten(0, (parts, heads))
        each = [own.expect(part) for own, part in zip(rows, weights, strict=True)]
        norms, sums = zip(*each, strict=True)
        return torch.cat(norms), torch.cat(sums)

    def curvature(_: Tensor, modelled: Tensor) -> Divide:
        share = modelled[:, :kinds].clamp(0, 1)
        of_sinks = share * (1 - share) + ridges
        divide_offsets = offset_curvature(modelled[:, kinds:], reach=reach, ridge=ridges)

        def divide(values: Tensor) -> Tensor:
            rest = divide_offsets(values[:, kinds:])
            return torch.cat([values[:, :kinds] / of_sinks, rest], dim=-1)

        return divide

    return fit_log_linear(
        expect,
        observed.flatten(0, 1),
        has=observed.new_ones(size),
        ridge=ridges,
        smooth=slice(kinds, kinds + rows[0].context),
        curvature=curvature,
        start=start.flatten(0, 1),
        tolerance=tolerance.flatten(),
        max_evaluations=max_evaluations,
        memory=1,
    )


def offset_curvature(
    masses: Float[Tensor, "problem variable"],
    *,
    reach: Float[Tensor, "problem offset"],
    ridge: Float[Tensor, "problem 1"],
) -> Divide:
    """Division by the curvature of sum log Z in kappa and tau, about, for modelled masses.

    Rows see nested stretches of offsets, so the curvature in kappa is diagonal in the logits
    of the hazards: the share of an offset in what stands there or nearer (the product-limit
    estimate; Lynden-Bell 1971, MNRAS 155:95). Both changes of variables are running sums.
    Exact where no key is a sink and all rows of a length are alike.
    """
    context = reach.shape[1]
    mass, of_bins = masses[:, :context], masses[:, context:] + ridge
    farther = mass.sum(-1, keepdim=True) - mass.cumsum(-1)
    hazard = (mass / (reach - farther).clamp(min=1e-30)).clamp(0, 1)
    others = torch.arange(context - 1, -1, -1)
    held = ridge * (1 + 2 * SMOOTH)
    diagonal = mass * (1 - hazard) + held + ridge * hazard**2 * others

    def divide(values: Tensor) -> Tensor:
        of_offsets = values[:, :context]
        beyond = of_offsets.sum(-1, keepdim=True) - of_offsets.cumsum(-1)
        by_hazard = (of_offsets + hazard * beyond) / diagonal
        passed_on = hazard * by_hazard
        kappa = by_hazard + passed_on.cumsum(-1) - passed_on
        return torch.cat([kappa, values[:, context:] / of_bins], dim=-1)

    return divide


def _from_here_on(x: Float[Tensor, "*head offset"]) -> Float[Tensor, "*head offset"]:
    """Sum of each entry and all after it."""
    return x.flip(-1).cumsum(-1).flip(-1)
