"""The models S and P, which need no scores: only how many keys and which sinks a row sees.

The weight of a key is exp(kappa(i - j)), times exp(sigma + tau(bin of i - j)) at a sink. A row
sees a stretch of offsets, so a running sum over the weights gives log Z of every row, and the
cost grows with the context and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import SampledCall
from ropelens.attention.call import sees
from ropelens.attention.offset_bins import bin_of, offset_edges
from ropelens.budget.solver import Expect, Minimum, fit_log_linear
from ropelens.text.text import SINKS

TOGETHER = 2**18  # weights that are fitted at once, of many heads


@dataclass(frozen=True)
class OffsetRows:
    """The number of keys that each row sees, and its sinks.

    They stand at offsets from 0 on; else `keys` has their number at each offset, and keys ahead
    of their row count at offset 0. The sinks of a row are listed in tables, one for all heads
    or one for each: the `kind` of each (0 fills a list up), its `key`, its `offset` and the
    `bin` of that; `within` is how many of the keys at that offset it stands for.

    Of sampled offsets, which stand for others, `context` is the number and `offset` the place.
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
    def of(
        cls,
        rows: SampledCall,
        sampled: tuple[Int[Tensor, " sample"], Int[Tensor, " sample"]] | None = None,
    ) -> OffsetRows:
        """The rows of all sequences in turn; without a mask they may have `sampled_offsets`."""
        batch, sinks, context = len(rows.sinks), rows.sinks.cpu(), rows.k.shape[2]
        position, count = (x.expand(batch, -1).flatten() for x in (rows.position, rows.count))
        # Of few keys: a table of all rows and keys is large, and one of all heads larger.
        is_sink = (sinks > 0).flatten(0, 1).any(0)
        is_sink[0] = True
        key = is_sink.nonzero()[:, 0]
        kind = sinks[..., key].repeat_interleave(rows.position.shape[1], dim=0)
        keys = None
        if rows.visible is None:
            seen = sees(rows.first.expand(batch, -1).flatten(), position, key)
        else:
            mask = rows.visible.flatten(0, 1).cpu()
            offset = (position[:, None] - torch.arange(context)).clamp(min=0)
            keys = torch.zeros(mask.shape).double().scatter_add_(1, offset, mask.double())
            seen = mask[:, key]
        kind = kind.transpose(0, 1) * seen
        listed = kind.topk(max(1, int((kind > 0).sum(-1).max())), dim=-1)
        key, count = key[listed.indices], count.cpu()
        offset, within = (position[:, None] - key).clamp(min=0), (listed.values > 0).double()
        bins = bin_of(offset, offset_edges(context))
        if sampled is not None and len(sampled[0]) < context:
            samples, size = sampled
            keys = ((samples < count[:, None]) * size).double()
            count, context = keys.sum(-1).long(), len(size)
            place = torch.searchsorted(size.cumsum(0), offset, right=True)
            within *= size[place] * (samples[place] == offset)
            offset = place
        return cls(
            seen=count,
            weight=rows.weight.flatten().cpu().double(),
            kind=listed.values,
            key=key,
            offset=offset,
            bin=bins,
            within=within,
            context=context,
            keys=keys,
        )

    def of_heads(self, heads: Int[Tensor, " head"]) -> OffsetRows:
        """The tables of these heads."""
        if len(self.kind) == 1:
            return self
        tables = {
            name: vars(self)[name][heads] for name in ("kind", "key", "offset", "bin", "within")
        }
        return replace(self, **tables)

    @property
    def others(self) -> Float[Tensor, "shared row"]:
        """How many keys each row sees that are no sinks."""
        return self.seen - self.within.sum(-1)

    @property
    def count(self) -> Float[Tensor, "shared row"]:
        """How many keys each row sees, 1 at least."""
        return (self.others + (self.kind > 0).sum(-1)).clamp(min=1)

    def _of_rows(self, kernel: Float[Tensor, "head offset"]) -> Float[Tensor, "head row"]:
        """The sum of a kernel over the offsets that each row sees."""
        if self.keys is not None:
            return kernel @ self.keys.to(kernel).mT
        return pad(kernel.cumsum(-1), (1, 0)).index_select(1, self.seen)

    def _at_offsets(self, rate: Float[Tensor, "head row"]) -> Float[Tensor, "head offset"]:
        """The sum over the rows that see each offset."""
        if self.keys is not None:
            return rate @ self.keys.to(rate)
        ends = rate.new_zeros(len(rate), self.context + 1).index_add_(1, self.seen, rate)
        return ends.flip(-1).cumsum(-1).flip(-1)[:, 1:]

    def expect(
        self, weights: Float[Tensor, "head variable"]
    ) -> tuple[Tensor, Float[Tensor, "head variable"], Float[Tensor, "head variable"]]:
        """Mean log Z [head], the masses that P expects, and these less the squared masses.

        Masses are on sinks, by offset, and on sinks by bin; the last says how log Z curves in
        each of `weights`: sigma, kappa and tau side by side. log Z is infinite where no key of
        a row has weight beside the largest.
        """
        _, sigma, kappa, tau = split(weights, 0, self.context)
        # Weights of keys are relative to the largest that a key could have.
        level = (kappa.amax(-1) + (sigma.amax(-1) + tau.amax(-1)).clamp(min=0))[:, None]
        kernel, is_sink = (kappa - level).exp(), self.kind > 0
        as_keys = _at(kernel, self.offset) * self.within
        log_factor = _at(pad(sigma, (1, 0)), self.kind) + _at(tau, self.bin)
        sinks = (_at(kappa - level, self.offset) + log_factor).exp() * is_sink
        norms = (self._of_rows(kernel) - as_keys.sum(-1)).clamp(min=0) + sinks.sum(-1)
        log_norms = torch.where(norms > 0, norms.log(), torch.inf) + level

        def masses(kernel: Tensor, sinks: Tensor, rate: Tensor) -> Tensor:
            as_keys = (rate[..., None] * self.within).flatten(1)
            taken = _add_at(torch.zeros_like(kernel), self.offset, as_keys)
            by_offset = kernel * (self._at_offsets(rate) - taken)
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
    ) -> Float[Tensor, "head variable"]:
        """Masses on sinks by kind, by offset (`by_offset` on other keys), on sinks by bin."""
        mass = on_sinks.flatten(1)
        by_kind = _add_at(mass.new_zeros(len(mass), 1 + len(SINKS)), self.kind, mass)[:, 1:]
        by_offset = _add_at(by_offset, self.offset, mass)
        by_bin = _add_at(mass.new_zeros(len(mass), bins), self.bin, mass)
        return torch.cat([by_kind, by_offset, by_bin], dim=-1)

    def expect_sinks(
        self, sigma: Float[Tensor, "head kind"]
    ) -> tuple[Tensor, Float[Tensor, "head kind"], Float[Tensor, "head kind"]]:
        """`expect` of S, whose kappa and tau are 0."""
        kinds = range(1, 1 + len(SINKS))
        count = torch.stack([(self.kind == kind).sum(-1) for kind in kinds], dim=-1)
        taken = count.to(sigma) * sigma.exp()[:, None]
        norm = self.others + taken.sum(-1)
        taken /= norm[..., None]
        expected, squares = (self.weight @ x for x in (taken, taken.square()))
        return norm.log() @ self.weight, expected, expected - squares


def fit_offsets(
    observed: Float[Tensor, "head variable"],
    table: OffsetRows,
    *,
    ridge: float,
    tolerance: Float[Tensor, " head"],
) -> tuple[Minimum, Minimum]:
    """S and P of every head.

    `observed` are the masses on sinks of each kind, by offset, and on sinks by bin of offsets,
    means over the rows, whose weights sum to one. S has sigma alone. P starts from S. Most
    heads take few evaluations, so those that take more go on without the others.
    """
    (heads, size), kinds = observed.shape, len(SINKS)
    given: dict[str, Any] = {"ridge": ridge, "smooth": slice(kinds, kinds + table.context)}
    first = observed[:, :kinds]
    of_sinks = {"start": torch.zeros_like(first), "tolerance": tolerance / 10, **given}
    sink = fit_log_linear(_of_all(table.expect_sinks), first, **of_sinks)
    point = pad(sink.point, (0, size - kinds))
    sink = replace(sink, point=point.clone())
    value, done = torch.zeros_like(tolerance), torch.zeros_like(tolerance, dtype=torch.bool)
    for together in torch.arange(heads).split(max(1, TOGETHER // size)):
        for more in (10, 20, 80):
            some = together[~done[together]]
            if not len(some):
                break
            position = fit_log_linear(
                _of_all(table.of_heads(some).expect),
                observed[some],
                start=point[some],
                tolerance=tolerance[some],
                max_evaluations=more,
                memory=8,
                **given,
            )
            point[some], value[some], done[some] = vars(position).values()
    return sink, Minimum(point, value, done)


def _of_all(expect: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> Expect:
    """`expect` of all problems: those that are done cost little."""
    return lambda point, _: expect(point)


def split(
    x: Float[Tensor, "*head variable"], terms: int, context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """beta, sigma, kappa and tau, or the sums that they multiply, which stand side by side.

    They belong to the terms of a score, kinds of sinks, offsets, and bins of offsets. What a
    model does not have is left out at the end.
    """
    first = terms + len(SINKS)
    beta, sigma, kappa, tau = x.tensor_split((terms, first, first + context), dim=-1)
    return beta, sigma, kappa, tau


def _at(
    x: Float[Tensor, "head place"], table: Int[Tensor, "shared row sink"]
) -> Float[Tensor, "head row sink"]:
    """The entries of `x` at the places of a table, which may be one for all heads."""
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
