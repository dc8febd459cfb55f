"""The models S and P, which need no scores but only the number of keys and sinks of each row.

The weight of a key is exp(kappa(i - j)), times exp(sigma + tau(bin of i - j)) for a sink. A row
sees consecutive offsets, so a running sum over the weights gives log Z of every row. The cost
grows with the context and not with its square.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import bin_of, offset_edges
from ropelens.budget.solver import LogZAndMoments, Minimum, fit_log_linear
from ropelens.text.text import SINKS

TOGETHER = 2**18  # weights of many heads that are fitted at once
EVERY_OFFSET = 512  # longest context, in tokens, in which surrogates read every offset
READ_OFFSETS = 128  # otherwise they read the offsets below it, then this number in two octaves


HeadVariables = Float[Tensor, "head variable"]
Samples = tuple[Int[Tensor, " sample"], Int[Tensor, " sample"]]


def sampled_offsets(context: int, *, generator: torch.Generator) -> Samples:
    """One offset from each stretch of a long context, and the lengths of the stretches."""
    edges = torch.arange(context + 1)
    if context > EVERY_OFFSET:
        steps = torch.arange(READ_OFFSETS * math.ceil(math.log2(context))) * 2 / READ_OFFSETS
        edges = torch.cat([edges[:READ_OFFSETS], (READ_OFFSETS * 2**steps).long()])
        edges = edges.clamp(max=context).unique()
    size = edges.diff()
    return edges[:-1] + (torch.rand(len(size), generator=generator) * size).long(), size


@dataclass(frozen=True)
class OffsetRows:
    """Number of keys that each row sees, and the sinks among them, by offset.

    A row sees the keys at offsets 0, 1, ..., `seen` - 1. Under a mask, `keys` has the number of
    keys at each offset, and keys ahead of their row count at offset 0. Tables list the sinks of
    each row, in common for all heads or by head: the `kind` of a sink (0 fills a list up), its
    position `key`, its `offset`, the `bin` of the offset, and `within`, the number of keys at
    this offset that it stands for. If offsets are sampled, `context` is the number of samples
    and `offset` is the index of a sample.
    """

    seen: Int[Tensor, " row"]
    weight: Float[Tensor, " row"]
    kind: Int[Tensor, "shared row sink"]
    key: Int[Tensor, "shared row sink"]
    offset: Int[Tensor, "shared row sink"]
    bin: Int[Tensor, "shared row sink"]
    within: Float[Tensor, "shared row sink"]
    context: int
    keys: Float[Tensor, "row offset"] | None = None

    @classmethod
    def of(cls, sampled: SampledCall, offsets: Samples | None = None) -> "OffsetRows":
        """The rows of all sequences in turn; without a mask, `sampled_offsets` may be given."""
        batch, sinks, context = len(sampled.sinks), sampled.sinks.cpu(), sampled.k.shape[2]
        visibility = sampled.visibility.flatten(batch)
        position, seen = visibility.position[0], visibility.count[0].cpu()
        keys = None if visibility.mask is None else visibility.count_by_offset()[0]
        # A table of all rows and keys is large, and a table of all heads larger: use few keys.
        is_sink = (sinks > 0).flatten(0, 1).any(0)
        is_sink[0] = True
        key = is_sink.nonzero()[:, 0]
        kind = sinks[..., key].repeat_interleave(sampled.position.shape[1], dim=0)
        kind = kind.transpose(0, 1) * visibility.sees(key)[0].cpu()
        listed = kind.topk(max(1, int((kind > 0).sum(-1).max())), dim=-1)
        key = key[listed.indices]
        offset, within = (position[:, None] - key).clamp(min=0), (listed.values > 0).double()
        bins = bin_of(offset, offset_edges(context))
        if offsets is not None and len(offsets[0]) < context:
            samples, size = offsets
            keys = ((samples < seen[:, None]) * size).double()
            seen, context = keys.sum(-1).long(), len(size)
            sample = torch.searchsorted(size.cumsum(0), offset, right=True)
            within *= size[sample] * (samples[sample] == offset)
            offset = sample
        weight = sampled.weight.flatten().cpu().double()
        return cls(seen, weight, listed.values, key, offset, bins, within, context, keys)

    def of_heads(self, heads: Int[Tensor, " head"]) -> "OffsetRows":
        """The tables of these heads."""
        if len(self.kind) == 1:
            return self
        names = ("kind", "key", "offset", "bin", "within")
        tables: dict[str, Any] = {name: vars(self)[name][heads] for name in names}
        return replace(self, **tables)

    @property
    def others(self) -> Float[Tensor, "shared row"]:
        """Number of keys that each row sees and that are not sinks."""
        return self.seen - self.within.sum(-1)

    @property
    def count(self) -> Float[Tensor, "shared row"]:
        """Number of keys that each row sees, at least 1."""
        return (self.others + (self.kind > 0).sum(-1)).clamp(min=1)

    def _sum_over_rows(self, rate: Float[Tensor, "head row"]) -> Float[Tensor, "head offset"]:
        if self.keys is not None:
            return rate @ self.keys.to(rate)
        ends = rate.new_zeros(len(rate), self.context + 1).index_add_(1, self.seen, rate)
        return ends.flip(-1).cumsum(-1).flip(-1)[:, 1:]

    def log_z_and_moments(
        self, weights: HeadVariables
    ) -> tuple[Tensor, HeadVariables, HeadVariables]:
        """Mean log Z [head], the masses that P expects, and the diagonal of its Hessian.

        `weights` are sigma, kappa and tau side by side, and the masses are on sinks by kind, by
        offset, and on sinks by bin. The diagonal is the masses minus the squared masses. log Z
        is infinite if no key of a row has weight compared with the largest possible weight.
        """
        _, sigma, kappa, tau = split_weights(weights, 0, self.context)
        # Weights of keys are relative to the largest that a key could have.
        level = (kappa.amax(-1) + (sigma.amax(-1) + tau.amax(-1)).clamp(min=0))[:, None]
        kernel, is_sink = (kappa - level).exp(), self.kind > 0
        as_keys = _look_up(kernel, self.offset) * self.within
        log_factor = _look_up(pad(sigma, (1, 0)), self.kind) + _look_up(tau, self.bin)
        sinks = (_look_up(kappa - level, self.offset) + log_factor).exp() * is_sink
        if self.keys is None:
            total = pad(kernel.cumsum(-1), (1, 0)).index_select(1, self.seen)
        else:
            total = kernel @ self.keys.to(kernel).mT
        norms = (total - as_keys.sum(-1)).clamp(min=0) + sinks.sum(-1)
        log_norms = torch.where(norms > 0, norms.log(), torch.inf) + level

        def masses(kernel: Tensor, sinks: Tensor, rate: Tensor) -> Tensor:
            as_keys = (rate[..., None] * self.within).flatten(1)
            on_sinks = _add_to(torch.zeros_like(kernel), self.offset, as_keys)
            by_offset = kernel * (self._sum_over_rows(rate) - on_sinks)
            return self.with_sinks(by_offset, rate[..., None] * sinks, bins=tau.shape[-1])

        rate = self.weight / norms
        expected = masses(kernel, sinks, rate)
        squares = masses(kernel.square(), sinks.square(), rate / norms)
        return log_norms @ self.weight, expected, expected - squares

    def with_sinks(
        self,
        by_offset: Float[Tensor, "head offset"],
        on_sinks: Float[Tensor, "head row sink"],
        *,
        bins: int,
    ) -> HeadVariables:
        """Masses on sinks by kind, by offset, and on sinks by bin; changes `by_offset`."""
        mass = on_sinks.flatten(1)
        by_kind = _add_to(mass.new_zeros(len(mass), 1 + len(SINKS)), self.kind, mass)[:, 1:]
        by_offset = _add_to(by_offset, self.offset, mass)
        by_bin = _add_to(mass.new_zeros(len(mass), bins), self.bin, mass)
        return torch.cat([by_kind, by_offset, by_bin], dim=-1)

    def sink_log_z_and_moments(
        self, sigma: Float[Tensor, "head kind"]
    ) -> tuple[Tensor, Float[Tensor, "head kind"], Float[Tensor, "head kind"]]:
        """`log_z_and_moments` of S, whose kappa and tau are 0."""
        kinds = range(1, 1 + len(SINKS))
        count = torch.stack([(self.kind == kind).sum(-1) for kind in kinds], dim=-1)
        mass = count.to(sigma) * sigma.exp()[:, None]
        norm = self.others + mass.sum(-1)
        mass /= norm[..., None]
        expected, squares = (self.weight @ x for x in (mass, mass.square()))
        return norm.log() @ self.weight, expected, expected - squares


def fit_offsets(
    observed: HeadVariables,
    table: OffsetRows,
    *,
    ridge: float,
    tolerance: Float[Tensor, " head"],
) -> tuple[Minimum, Minimum]:
    """Fit S and P of every head.

    `observed` are the masses on sinks of each kind, by offset, and on sinks by bin of offsets.
    They are means over the rows, whose weights sum to one. S has only sigma, and P starts from
    S. Heads that have not converged after a few evaluations continue by themselves.
    """
    (heads, size), kinds = observed.shape, len(SINKS)
    options: dict[str, Any] = {"ridge": ridge, "smooth": slice(kinds, kinds + table.context)}
    by_kind = observed[:, :kinds]
    start = {"start": torch.zeros_like(by_kind), "tolerance": tolerance / 10, **options}
    sink = fit_log_linear(_for_all(table.sink_log_z_and_moments), by_kind, **start)
    point = pad(sink.point, (0, size - kinds))
    sink = replace(sink, point=point.clone())
    value, done = torch.zeros_like(tolerance), torch.zeros_like(tolerance, dtype=torch.bool)
    for together in torch.arange(heads).split(max(1, TOGETHER // size)):
        for evaluations in (10, 20, 80):
            active = together[~done[together]]
            if not len(active):
                break
            position = fit_log_linear(
                _for_all(table.of_heads(active).log_z_and_moments),
                observed[active],
                start=point[active],
                tolerance=tolerance[active],
                max_evaluations=evaluations,
                memory=8,
                **options,
            )
            point[active], value[active], done[active] = vars(position).values()
    return sink, Minimum(point, value, done)


def _for_all(evaluate: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> LogZAndMoments:
    return lambda point, _: evaluate(point)  # also finished problems, which cost little here


def split_weights(
    x: Float[Tensor, "*head variable"], terms: int, context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split variables into beta, sigma, kappa and tau, or the sums that these multiply.

    They belong to the terms of a score, kinds of sinks, offsets, and bins of offsets. The parts
    that a model does not have are at the end, and empty.
    """
    first = terms + len(SINKS)
    beta, sigma, kappa, tau = x.tensor_split((terms, first, first + context), dim=-1)
    return beta, sigma, kappa, tau


def _look_up(
    x: Float[Tensor, "head entry"], table: Int[Tensor, "shared row sink"]
) -> Float[Tensor, "head row sink"]:
    index = table.flatten(1).expand(len(x), -1)
    return x.gather(1, index).view(len(x), *table.shape[1:])


def _add_to(
    into: Float[Tensor, "head entry"],
    table: Int[Tensor, "shared row sink"],
    values: Float[Tensor, "head value"],
) -> Float[Tensor, "head entry"]:
    return into.scatter_add_(1, table.flatten(1).expand(len(into), -1), values)
