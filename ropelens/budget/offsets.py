"""The models S and P, which need no scores but only the number of keys and sinks of each row.

The weight of a key is exp(kappa(i - j)), times exp(sigma + tau(bin of i - j)) for a sink. A row
sees consecutive offsets, so a running sum over the weights gives log Z of every row. The cost
grows with the context and not with its square.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import bin_of, offset_edges
from ropelens.budget.solver import ByVariable, Minimum, Moments, fit_log_linear
from ropelens.caches import on_device
from ropelens.text.text import SINKS

TOGETHER = {
    "cpu": 2**18,
    "cuda": 2**21,
}  # weights that are fitted at once: caches, and memory
EVERY_OFFSET = 512  # longest context, in tokens, in which surrogates read every offset
READ_OFFSETS = (
    128  # otherwise they read the offsets below it, then this number in two octaves
)
FEW_ROWS = 10.0  # the first step of P adds this number of ridges to masses

Samples = Int[Tensor, "2 sample"]
"""Offsets at which keys are read, and the number of offsets that each represents."""


def sampled_offsets(context: int, *, generator: torch.Generator) -> Samples:
    """One offset from each stretch of a long context, and the lengths of the stretches."""
    edges = torch.arange(context + 1)
    if context > EVERY_OFFSET:
        steps = (
            torch.arange(READ_OFFSETS * math.ceil(math.log2(context)))
            * 2
            / READ_OFFSETS
        )
        edges = torch.cat([edges[:READ_OFFSETS], (READ_OFFSETS * 2**steps).long()])
        edges = edges.clamp(max=context).unique()
    size = edges.diff()
    offset = edges[:-1] + (torch.rand(len(size), generator=generator) * size).long()
    return torch.stack([offset, size])


@dataclass(frozen=True)
class OffsetRows:
    """Number of keys that each row sees, and the sinks among them, by offset.

    A row sees the keys at offsets 0, 1, ..., `seen` - 1. Under a mask, `keys` has the number of
    keys at each offset, and keys ahead of their row count at offset 0. Tables list the sinks of
    each row, in common for all heads or by head: the `kind` of a sink (0 fills a list up), its
    position `key`, and `within`, the number of keys at its offset that it stands for.
    `variables` are the indices of its weights in sigma, kappa and tau. If offsets are sampled,
    `context` is the number of samples. `weight` has the weights of the rows in each fold.
    """

    seen: Int[Tensor, " row"]
    weight: Float[Tensor, "fold row"]
    kind: Int[Tensor, "shared row sink"]
    key: Int[Tensor, "shared row sink"]
    variables: Int[Tensor, "shared 3 row sink"]
    within: Float[Tensor, "shared row sink"]
    sinks_by_kind: Float[Tensor, "shared row kind"]
    context: int
    size: int
    keys: Float[Tensor, "row offset"] | None = None

    @classmethod
    def of(
        cls,
        sampled: SampledCall,
        samples: Samples | None = None,
        folds: int = 1,
    ) -> "OffsetRows":
        """The rows of all sequences in turn; without a mask, `sampled_offsets` may be given."""
        batch, sinks, context = len(sampled.sinks), sampled.sinks, sampled.k.shape[2]
        first, rows, device = len(SINKS), sampled.position.shape[1], sampled.k.device
        visibility = sampled.visibility.flatten(batch)
        # A table of all rows and keys is large, and a table of all heads larger: use few keys.
        is_sink = (sinks > 0).flatten(0, 1).any(0)
        is_sink[0] = True
        key = is_sink.nonzero()[:, 0]
        kind = sinks[..., key].repeat_interleave(rows, dim=0)
        kind = kind.transpose(0, 1) * visibility.sees(key)[0].cpu()
        listed = kind.topk(max(1, int((kind > 0).sum(-1).max())), dim=-1)
        kind, key = torch.stack([listed.values, key[listed.indices]]).to(device)
        visibility = sampled.device_visibility.flatten(batch)
        position, seen = visibility.position[0], visibility.count[0]
        keys = None
        if visibility.mask is not None:
            keys = visibility.count_by_offset()[0]
            keys[:, 0] += keys.sum(-1) == 0  # a hidden row, whose weight is 0
        offset, within = (position[:, None] - key).clamp(min=0), (kind > 0).double()
        bins = bin_of(offset, offset_edges(context))
        size = first + context + len(offset_edges(context)) - 1
        if samples is not None and samples.shape[1] < context:
            samples, length = on_device(samples, device)
            keys = ((samples < seen[:, None]) * length).double()
            size += len(length) - context
            seen, context = keys.sum(-1).long(), len(length)
            sample = torch.searchsorted(length.cumsum(0), offset, right=True)
            within *= length[sample] * (samples[sample] == offset)
            offset = sample
        variables = ((kind - 1).clamp(min=0), first + offset, first + context + bins)
        weight = sampled.weight.flatten().double()
        if folds > 1:
            fold = torch.arange(len(weight), device=device) // rows % folds
            weight = weight * (fold == torch.arange(folds, device=device)[:, None])
        kinds = torch.arange(1, 1 + first, device=device)
        by_kind = (kind[..., None] == kinds).sum(2).double()
        tables = (kind, key, torch.stack(variables, 1), within, by_kind)
        return cls(seen, weight.view(-1, len(seen)), *tables, context, size, keys)

    def float(self) -> "OffsetRows":
        tables: Any = {
            name: x for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        wide = (name for name, x in tables.items() if x.is_floating_point())
        return replace(self, **{name: tables[name].float() for name in wide})

    def of_problems(
        self, problems: Int[Tensor, " problem"], number: int
    ) -> "OffsetRows":
        """The tables of some of `number` problems, which are the heads of each fold in turn."""
        parts: dict[str, Any] = {}
        if len(self.weight) > 1:
            parts["weight"] = self.weight[problems // (number // len(self.weight))]
        if len(self.kind) > 1:
            names = ("kind", "key", "variables", "within", "sinks_by_kind")
            parts |= {
                name: vars(self)[name][problems % len(self.kind)] for name in names
            }
        return replace(self, **parts)

    @property
    def others(self) -> Float[Tensor, "shared row"]:
        """Number of keys that each row sees and that are not sinks."""
        return self.seen - self.within.sum(-1)

    @property
    def log_keys(self) -> Float[Tensor, "shared row"]:
        """Logarithm of the number of keys that each row sees, of at least 1."""
        return (self.others + (self.kind > 0).sum(-1)).clamp(min=1).log()

    @property
    def uniform(self) -> Float[Tensor, "fold shared"]:
        """Mean of log P_i(j) under uniform attention, with the opposite sign (nats)."""
        return self.weight @ self.log_keys.mT

    def log_z_and_moments(
        self, weights: ByVariable, *, curvature: bool = True
    ) -> Moments:
        """Mean log Z [problem], the masses that P expects, and the diagonal of its Hessian.

        `weights` are sigma, kappa and tau side by side, and the masses are on sinks by kind, by
        offset, and on sinks by bin. The diagonal is the masses minus the squared masses. log Z
        is infinite if no key of a row has weight compared with the largest possible weight.
        """
        _, sigma, kappa, tau = split_weights(weights, 0, self.context)
        # Weights of keys are relative to the largest that a key could have.
        level = (kappa.amax(-1) + (sigma.amax(-1) + tau.amax(-1)).clamp_(min=0))[
            :, None
        ]
        kernel = (kappa - level).exp_()
        index = self.variables.flatten(1).expand(len(weights), -1)
        at_sinks = weights.gather(1, index).view(-1, *self.variables.shape[1:])
        as_key = (at_sinks[:, 1] - level[..., None]).exp_()
        sinks = (at_sinks.sum(1) - level[..., None]).exp_() * (self.kind > 0)
        keys = as_key * self.within
        norms = self._sum_over_keys(kernel) - keys.sum(-1)
        norms = norms.clamp_(min=0) + sinks.sum(-1)
        log_norms = norms.log().nan_to_num_(neginf=torch.inf) + level

        def masses(kernel: Tensor, keys: Tensor, sinks: Tensor, rate: Tensor) -> Tensor:
            by_offset = kernel * self._sum_over_rows(rate)
            rate = rate[..., None]
            return self.with_sinks(by_offset, rate * sinks, keys=rate * keys)

        rate = self.weight / norms
        expected = masses(kernel, keys, sinks, rate)
        diagonal: tuple[Tensor, ...] = ()
        if curvature:
            squares = kernel.square(), keys * as_key, sinks.square(), rate / norms
            diagonal = (expected - masses(*squares),)
        return vecdot(log_norms, self.weight), expected, diagonal

    def _sum_over_keys(self, kernel: Float[Tensor, "problem offset"]) -> Tensor:
        if self.keys is not None:
            return kernel @ self.keys.mT
        return kernel.cumsum(-1).index_select(1, self.seen - 1)

    def _sum_over_rows(self, rate: Float[Tensor, "problem row"]) -> Tensor:
        if self.keys is not None:
            return rate @ self.keys
        ends = rate.new_zeros(len(rate), self.context).index_add_(
            1, self.seen - 1, rate
        )
        return ends.flip(-1).cumsum(-1).flip(-1)

    def with_sinks(
        self,
        by_offset: Float[Tensor, "problem offset"],
        on_sinks: Float[Tensor, "problem row sink"],
        *,
        keys: Float[Tensor, "problem row sink"] | None = None,
    ) -> ByVariable:
        """Masses on sinks by kind, by offset (without `keys`), and on sinks by bin."""
        by_variable = on_sinks[:, None].repeat(1, 3, 1, 1)
        if keys is not None:
            by_variable[:, 1] -= keys
        first = len(SINKS)
        total = pad(by_offset, (first, self.size - first - self.context))
        index = self.variables.flatten(1).expand(len(total), -1)
        return total.scatter_add_(1, index, by_variable.flatten(1))

    def sink_log_z_and_moments(self, sigma: ByVariable) -> Moments:
        """`log_z_and_moments` of S, whose kappa and tau are 0."""
        mass = self.sinks_by_kind * sigma.exp()[:, None]
        norm = self.others + mass.sum(-1)
        mass /= norm[..., None]
        weight = self.weight[:, None]
        expected, squares = ((weight @ x)[:, 0] for x in (mass, mass.square()))
        return vecdot(norm.log(), self.weight), expected, (expected - squares,)

    def sigma_of_means(self, masses: ByVariable, few: Tensor) -> ByVariable:
        """About sigma of S: its value if all rows had the mean numbers of keys and sinks."""
        weight = self.weight[:, None]
        tables = self.sinks_by_kind, self.others[..., None]
        number, others = ((weight @ x)[:, 0] for x in tables)
        rest = 1 - masses.sum(-1, keepdim=True)
        sigma = (masses + few).log() - (number + few).log()
        return (sigma - ((rest + few) / (others + few)).log()).where(number > 0, 0.0)


def fit_offsets(
    observed: ByVariable,
    table: OffsetRows,
    *,
    ridge: Float[Tensor, " problem"],
    tolerance: Float[Tensor, " problem"],
) -> tuple[Minimum, Minimum]:
    """Fit S and P of every problem. Problems are the heads of each fold or draw in turn.

    `observed` are mean masses on sinks by kind, by offset, and on sinks by bin. P starts
    from S.
    """
    number, size = observed.shape
    together = max(1, TOGETHER[observed.device.type] // size)
    parts = []
    for chosen in torch.arange(number, device=observed.device).split(together):
        own = table.of_problems(chosen, number)
        parts.append(
            _fit_together(observed[chosen], own, ridge[chosen], tolerance[chosen])
        )
    models = zip(*parts, strict=True)
    sink, position = (Minimum(*map(torch.cat, zip(*x, strict=True))) for x in models)
    return sink._replace(point=pad(sink.point, (0, size - len(SINKS)))), position


def _fit_together(
    observed: ByVariable, table: OffsetRows, ridge: Tensor, tolerance: Tensor
) -> tuple[Minimum, Minimum]:
    """`fit_offsets` of problems that fit into memory together."""
    rows = lru_cache(maxsize=1)(
        lambda problems: table.of_problems(problems, len(observed))
    )
    kinds = len(SINKS)
    masses, few = observed[:, :kinds], FEW_ROWS * ridge[:, None]
    sink = fit_log_linear(
        lambda point, problems, _: rows(problems).sink_log_z_and_moments(point),
        masses,
        ridge=ridge,
        smooth=slice(0, 0),
        start=table.sigma_of_means(masses, ridge[:, None]),
        tolerance=tolerance / 10,
    )
    offsets = slice(kinds, kinds + table.context)
    start = pad(sink.point, (0, observed.shape[1] - kinds))
    _, expected, _ = table.log_z_and_moments(start, curvature=False)
    start[:, offsets] += ((observed + few) / (expected + few)).log()[:, offsets]
    position = fit_log_linear(
        lambda point, problems, _: rows(problems).log_z_and_moments(point),
        observed,
        ridge=ridge,
        smooth=offsets,
        start=start,
        tolerance=tolerance,
    )
    return sink, position


def split_weights(
    x: Float[Tensor, "*head variable"], terms: int, context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split variables (or the sums that they multiply) into beta, sigma, kappa and tau."""
    first = terms + len(SINKS)
    beta, sigma, kappa, tau = x.tensor_split((terms, first, first + context), dim=-1)
    return beta, sigma, kappa, tau
