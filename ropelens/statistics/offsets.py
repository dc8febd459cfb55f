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

TOGETHER = 240
"""Heads that are fitted at once: in fewer batches if they are many, for memory's sake."""


@dataclass(frozen=True)
class OffsetRows:
    """Which bins of offsets each row of some sequences sees, and which keys are its sinks.

    A row sees the bins before `last` whole, and the first `part` offsets of that one; `width`
    are the offsets of each bin. Its sinks are listed in tables, one for all heads or one for
    each: the `kind` of each (1, 2, ...; 0 where a list is filled up) and its offset's `bin`.
    """

    last: Int[Tensor, " row"]
    part: Float[Tensor, " row"]
    keys: Float[Tensor, " row"]
    weight: Float[Tensor, " row"]
    width: Float[Tensor, " bin"]
    kind: Int[Tensor, "shared row sink"]
    bin: Int[Tensor, "shared row sink"]

    @classmethod
    def of(
        cls,
        rows: Rows,
        start: Int[Tensor, " position"],
        sinks: Int[Tensor, "batch shared position"],
        *,
        edges: Int[Tensor, " edge"] | None = None,
    ) -> OffsetRows:
        """The rows of all sequences in turn; a bin for each offset without `edges`."""
        edges = torch.arange(len(start) + 1) if edges is None else edges
        position = rows.position.flatten()
        first = start.cpu()[position]
        key = torch.arange(len(start))
        visible = (key <= position[:, None]) & (key >= first[:, None])
        kind = sinks.repeat_interleave(rows.position.shape[1], dim=0).transpose(0, 1) * visible
        listed = kind.topk(max(1, int((kind > 0).sum(-1).max())), dim=-1)
        offset = (position[:, None] - listed.indices).clamp(min=0)
        seen = position - first + 1
        last = torch.bucketize(seen, edges, right=True) - 1
        return cls(
            last=last,
            part=(seen - edges[last]).double(),
            keys=seen.double(),
            weight=rows.weight.flatten().double(),
            width=edges.diff().double(),
            kind=listed.values,
            bin=torch.bucketize(offset, edges, right=True) - 1,
        )

    def of_heads(self, heads: Int[Tensor, " head"]) -> OffsetRows:
        """The same for some of the heads, or for some of them several times."""
        if len(self.kind) == 1:
            return self
        return replace(self, kind=self.kind[heads], bin=self.bin[heads])

    def to(self, dtype: torch.dtype) -> OffsetRows:
        """The same with weights, and so all results, of another precision."""
        part, keys, weight, width = (
            x.to(dtype) for x in (self.part, self.keys, self.weight, self.width)
        )
        return replace(self, part=part, keys=keys, weight=weight, width=width)

    def in_one_bin(self) -> OffsetRows:
        """The same with all offsets in one bin."""
        return replace(
            self,
            last=torch.zeros_like(self.last),
            part=self.keys,
            width=self.width.sum()[None],
            bin=torch.zeros_like(self.bin),
        )

    @property
    def reach(self) -> Float[Tensor, " bin"]:
        """Weight of the rows that see an offset of each bin."""
        ends = self.width.new_zeros(len(self.width) + 1)
        whole = _from_here_on(ends.index_add(0, self.last, self.weight))[1:]
        in_part = ends.index_add(0, self.last, self.weight * (self.part > 0))[:-1]
        return whole + in_part

    def log_norms(
        self, sigma: Float[Tensor, "head kind"], kappa: Float[Tensor, "head bin"]
    ) -> Float[Tensor, "head row"]:
        """log Z of every row: of the sum of the weights of the keys that it sees.

        Infinite where the weights of all of them are too small beside the largest.
        """
        return self._seen(sigma, kappa).log_norms

    def expect(
        self, sigma: Float[Tensor, "head kind"], kappa: Float[Tensor, "head bin"]
    ) -> tuple[Float[Tensor, " head"], Float[Tensor, "head variable"]]:
        """Sum over rows of log Z, and the modelled masses on sinks of each kind and by bin."""
        seen = self._seen(sigma, kappa)
        rate = self.weight / seen.norms
        ends = rate.new_zeros(len(rate), len(self.width) + 1)
        whole = _from_here_on(ends.index_add(1, self.last, rate))[:, 1:]
        in_part = ends.index_add(1, self.last, rate * self.part)[:, :-1]
        as_keys = (rate[..., None] * (self.kind > 0)).flatten(1)
        taken = torch.zeros_like(kappa).scatter_add_(1, seen.bin, as_keys)
        mass = (rate[..., None] * seen.sinks).flatten(1)
        by_bin = seen.kernel * (whole * self.width + in_part - taken)
        by_bin = by_bin.scatter_add(1, seen.bin, mass)
        by_kind = rate.new_zeros(len(rate), 1 + sigma.shape[1]).scatter_add_(1, seen.kind, mass)
        return seen.log_norms @ self.weight, torch.cat([by_kind[:, 1:], by_bin], dim=-1)

    def _seen(
        self, sigma: Float[Tensor, "head kind"], kappa: Float[Tensor, "head bin"]
    ) -> _Seen:
        """The weights of the keys that each row sees, beside the largest there could be."""
        level = (kappa.amax(-1) + sigma.amax(-1).clamp(min=0))[:, None]
        kernel = (kappa - level).exp()
        below = pad((kernel * self.width).cumsum(-1), (1, 0))[:, self.last]
        below += pad(kernel, (0, 1))[:, self.last] * self.part
        bins, kind = (
            table.expand(len(kappa), -1, -1).flatten(1) for table in (self.bin, self.kind)
        )
        as_keys = kernel.gather(1, bins)
        factor = pad(sigma, (1, 0), value=-torch.inf).exp().gather(1, kind)
        as_keys, sinks = (
            x.unflatten(1, self.kind.shape[1:])
            for x in (as_keys * (kind > 0), as_keys * factor)
        )
        norms = (below - as_keys.sum(-1)).clamp(min=0) + sinks.sum(-1)
        log_norms = torch.where(norms > 0, norms.log(), torch.inf) + level
        return _Seen(kernel, norms, log_norms, sinks, bins, kind)


@dataclass(frozen=True)
class _Seen:
    """Weights over one level: of an offset of each bin, of each row's keys, of its sinks."""

    kernel: Float[Tensor, "head bin"]
    norms: Float[Tensor, "head row"]
    log_norms: Float[Tensor, "head row"]
    sinks: Float[Tensor, "head row sink"]
    bin: Int[Tensor, "head entry"]
    kind: Int[Tensor, "head entry"]


def fit_sinks(
    observed: Float[Tensor, "part head variable"],
    rows: list[OffsetRows],
    *,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
) -> Minimum:
    """sigma of every head, and kappa 0: see `fit_offsets`."""
    bins = len(rows[0].width)
    kinds = observed.shape[-1] - bins
    one = torch.cat(
        [observed[..., :kinds], observed[..., kinds:].sum(-1, keepdim=True)], dim=-1
    )
    has = one.new_ones(kinds + 1)
    has[kinds] = 0
    found = _fit(
        one,
        [part.in_one_bin() for part in rows],
        has=has,
        ridge=ridge,
        tolerance=tolerance,
        start=torch.zeros_like(one),
        max_evaluations=100,
    )
    return replace(found, point=pad(found.point, (0, bins - 1)))


def fit_offsets(
    observed: Float[Tensor, "part head variable"],
    rows: list[OffsetRows],
    *,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
    start: Float[Tensor, "part head variable"],
) -> Minimum:
    """sigma and kappa of every head, fitted to the rows of each part.

    `observed` are the masses on sinks of each kind, then by bin of offsets, in the mean over
    the rows of the part, whose weights add up to one. Problems are parts, and heads in them.
    Most heads take a few evaluations, so those that take more go on alone.
    """
    shape = tolerance.shape
    point, value = start.clone(), torch.zeros_like(tolerance)
    done = torch.zeros_like(tolerance, dtype=torch.bool)
    evaluations = 0
    for some in torch.arange(shape[1]).split(TOGETHER):
        for more in (6, 12, 80):
            heads = some[~done[:, some].all(0)]
            if not len(heads):
                break
            found = _fit(
                observed[:, heads],
                [part.of_heads(heads) for part in rows],
                has=observed.new_ones(observed.shape[-1]),
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
    has: Float[Tensor, " variable"],
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, "part head"],
    start: Float[Tensor, "part head variable"],
    max_evaluations: int,
) -> Minimum:
    """The weights that a model of sinks and offsets has, fitted to the rows of each part."""
    parts, heads, size = observed.shape
    kinds = size - len(rows[0].width)
    reach = torch.stack([part.reach for part in rows]).repeat_interleave(heads, dim=0)
    ridges = ridge.repeat_interleave(heads)[:, None]

    def expect(point: Tensor) -> tuple[Tensor, Tensor]:
        each = [
            own.expect(weights[:, :kinds], weights[:, kinds:])
            for own, weights in zip(rows, point.unflatten(0, (parts, heads)), strict=True)
        ]
        norms, sums = zip(*each, strict=True)
        return torch.cat(norms), torch.cat(sums)

    def curvature(_: Tensor, modelled: Tensor) -> Divide:
        share, mass = modelled[:, :kinds].clamp(0, 1), modelled[:, kinds:]
        of_sinks = share * (1 - share) + ridges

        def divide(values: Tensor) -> Tensor:
            rest = divide_by_curvature(values[:, kinds:], mass=mass, reach=reach, ridge=ridges)
            return torch.cat([values[:, :kinds] / of_sinks, rest], dim=-1)

        return divide

    return fit_log_linear(
        expect,
        observed.flatten(0, 1),
        has=has,
        ridge=ridges,
        curvature=curvature,
        start=start.flatten(0, 1),
        tolerance=tolerance.flatten(),
        max_evaluations=max_evaluations,
        memory=1,
    )


def divide_by_curvature(
    values: Float[Tensor, "problem bin"],
    *,
    mass: Float[Tensor, "problem bin"],
    reach: Float[Tensor, "problem bin"],
    ridge: Float[Tensor, "problem 1"],
) -> Float[Tensor, "problem bin"]:
    """`values` divided by the curvature of sum log Z in kappa, about, for a modelled `mass`.

    Rows see nested stretches of offsets, so the curvature is diagonal in the logits of the
    hazards: the share of an offset in what stands there or nearer (the product-limit
    estimate; Lynden-Bell 1971, MNRAS 155:95). Both changes of variables are running sums.
    Exact where bins hold one offset, no key is a sink and all rows of a length are alike.
    """
    farther = mass.sum(-1, keepdim=True) - mass.cumsum(-1)
    hazard = (mass / (reach - farther).clamp(min=1e-30)).clamp(0, 1)
    others = torch.arange(mass.shape[-1] - 1, -1, -1)
    diagonal = mass * (1 - hazard) + ridge * (1 + hazard**2 * others)
    beyond = values.sum(-1, keepdim=True) - values.cumsum(-1)
    by_hazard = (values + hazard * beyond) / diagonal
    passed_on = hazard * by_hazard
    return by_hazard + passed_on.cumsum(-1) - passed_on


def _from_here_on(x: Float[Tensor, "*head bin"]) -> Float[Tensor, "*head bin"]:
    """Sum of each entry and all after it."""
    return x.flip(-1).cumsum(-1).flip(-1)
