"""The models S and P, which need no scores but only the number of keys and sinks of each row.

The weight of a key is exp(kappa(i - j)), times exp(sigma + tau(bin of i - j)) for a sink. A row
sees consecutive offsets, so a running sum over the weights gives log Z of every row. The cost
grows with the context and not with its square.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility, bin_of, offset_edges
from ropelens.budget.solver import (
    ByProblem,
    ByVariable,
    Curvature,
    Minimum,
    Moments,
    fit_log_linear,
)
from ropelens.caches import on_device
from ropelens.text.text import SINKS

TOGETHER = {"cpu": 2**18, "cuda": 2**21}
"""Number of weights that are fitted at once: caches, and memory."""

EVERY_OFFSET = 512
"""Longest context, in tokens, in which surrogates read every offset."""

READ_OFFSETS = 128
"""In a longer context they read the offsets below it, then this number in two octaves."""

FEW_ROWS = 10.0  # the first step of P adds this number of ridges to masses


@dataclass(frozen=True)
class Samples:
    """Offsets at which keys are read, and the number of offsets that each represents."""

    table: Int[Tensor, "2 sample"]

    def __len__(self) -> int:
        return self.table.shape[1]

    @property
    def offset(self) -> Int[Tensor, " sample"]:
        return self.table[0]

    @property
    def size(self) -> Int[Tensor, " sample"]:
        return self.table[1]

    def on(self, device: torch.device) -> "Samples":
        return Samples(on_device(self.table, device))


def sampled_offsets(context: int, *, generator: torch.Generator) -> Samples:
    """One offset from each stretch of a long context, and the lengths of the stretches."""
    edges = torch.arange(context + 1, device="cpu")
    if context > EVERY_OFFSET:
        count = READ_OFFSETS * math.ceil(math.log2(context))
        octaves = torch.arange(count, dtype=torch.float32, device="cpu")
        octaves = octaves * 2 / READ_OFFSETS
        far = (READ_OFFSETS * 2**octaves).long()
        edges = torch.cat([edges[:READ_OFFSETS], far]).clamp(max=context).unique()
    size = edges.diff()
    share = torch.rand(
        len(size), generator=generator, dtype=torch.float32, device="cpu"
    )
    within = (share * size).long()
    return Samples(torch.stack([edges[:-1] + within, size]))


@dataclass(frozen=True)
class OffsetCounts:
    """Number of keys that each row sees at each of `number` offsets or sampled offsets.

    A row sees the keys at offsets 0, 1, ..., `seen` - 1. Otherwise `keys` has the number of
    keys at each offset: under a mask, where keys ahead of their row count at offset 0, and if
    an offset is sampled and represents several.
    """

    seen: Int[Tensor, " row"]
    number: int
    keys: Float[Tensor, "row offset"] | None = None

    @classmethod
    def of(cls, visibility: Visibility, context: int) -> "OffsetCounts":
        """The counts of rows in one table."""
        keys = None
        if visibility.mask is not None:
            keys = visibility.count_by_offset()[0]
            keys[:, 0] += keys.sum(-1) == 0  # a hidden row, whose weight is 0
        return cls(visibility.count[0], context, keys)

    def at(self, samples: Samples) -> "OffsetCounts":
        """The counts of sampled offsets, for rows that see consecutive offsets."""
        sees = samples.offset < self.seen[:, None]
        keys = (sees * samples.size).double()
        return OffsetCounts(keys.sum(-1).long(), len(samples), keys)

    def float(self) -> "OffsetCounts":
        keys = None if self.keys is None else self.keys.float()
        return replace(self, keys=keys)

    def sum_over_keys(
        self, kernel: Float[Tensor, "problem offset"]
    ) -> Float[Tensor, "problem row"]:
        if self.keys is not None:
            return kernel @ self.keys.mT
        return kernel.cumsum(-1).index_select(1, self.seen - 1)

    def sum_over_rows(
        self, rate: Float[Tensor, "problem row"]
    ) -> Float[Tensor, "problem offset"]:
        if self.keys is not None:
            return rate @ self.keys
        ends = rate.new_zeros(len(rate), self.number)
        ends.index_add_(1, self.seen - 1, rate)
        return ends.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class RowSinks:
    """Lists of the sinks that each row sees, in common for all heads or by head.

    A list has the `kind` of each sink (0 fills the list up), its position `key`, and `within`,
    the number of keys at its offset that it stands for. `variables` are the indices of its
    weights in sigma, kappa and tau. `by_kind` is the number of sinks of each kind.
    """

    kind: Int[Tensor, "shared row sink"]
    key: Int[Tensor, "shared row sink"]
    variables: Int[Tensor, "shared 3 row sink"]
    within: Float[Tensor, "shared row sink"]
    by_kind: Float[Tensor, "shared row kind"]

    @classmethod
    def of(
        cls, sampled: SampledCall, visibility: Visibility, samples: Samples | None
    ) -> "RowSinks":
        """The sinks of all sequences, whose rows are in one table of `visibility`."""
        listed = _list_sinks(sampled).to(sampled.k.device)
        kind, key = listed
        context = sampled.k.shape[2]
        offset = (visibility.position[0][:, None] - key).clamp(min=0)
        within = (kind > 0).double()
        bins = bin_of(offset, offset_edges(context))
        number = context
        if samples is not None:
            number = len(samples)
            sample = torch.searchsorted(samples.size.cumsum(0), offset, right=True)
            within *= samples.size[sample] * (samples.offset[sample] == offset)
            offset = sample
        kinds = len(SINKS)
        variables = ((kind - 1).clamp(min=0), kinds + offset, kinds + number + bins)
        each_kind = torch.arange(1, 1 + kinds, device=kind.device)
        by_kind = (kind[..., None] == each_kind).sum(2).double()
        return cls(kind, key, torch.stack(variables, 1), within, by_kind)

    def of_heads(self, heads: Int[Tensor, " head"]) -> "RowSinks":
        """The lists of each of the heads."""
        if len(self.kind) == 1:
            return self
        heads = heads % len(self.kind)
        return RowSinks(
            kind=self.kind[heads],
            key=self.key[heads],
            variables=self.variables[heads],
            within=self.within[heads],
            by_kind=self.by_kind[heads],
        )

    def float(self) -> "RowSinks":
        return replace(self, within=self.within.float(), by_kind=self.by_kind.float())

    def index(self, problems: int) -> Int[Tensor, "problem variable_of_sink"]:
        """`variables` of each problem, side by side."""
        return self.variables.flatten(1).expand(problems, -1)


def _list_sinks(sampled: SampledCall) -> Int[Tensor, "2 shared row sink"]:
    """The kinds and positions of the sinks that each row sees; kind 0 fills a list up."""
    sinks = sampled.sinks
    rows = sampled.position.shape[1]
    visibility = sampled.visibility.flatten(len(sinks))
    # A table of all rows and keys is large, and a table of all heads larger: use few keys.
    is_sink = (sinks > 0).flatten(0, 1).any(0)
    is_sink[0] = True
    key = is_sink.nonzero()[:, 0]
    of_rows = sinks[..., key].repeat_interleave(rows, dim=0).transpose(0, 1)
    kind = of_rows * visibility.sees(key)[0].cpu()
    most = max(1, int((kind > 0).sum(-1).max()))
    listed = kind.topk(most, dim=-1)
    return torch.stack([listed.values, key[listed.indices]])


@dataclass(frozen=True)
class OffsetRows:
    """What S and P know of the rows of a call: the number of keys, and the sinks, by offset.

    `weight` has the weights of the rows in each fold, and `size` is the number of variables of
    P: sigma, kappa and tau side by side.
    """

    weight: Float[Tensor, "fold row"]
    counts: OffsetCounts
    sinks: RowSinks
    size: int

    @classmethod
    def of(
        cls, sampled: SampledCall, samples: Samples | None = None, folds: int = 1
    ) -> "OffsetRows":
        """The rows of all sequences in turn; without a mask, `sampled_offsets` may be given."""
        context = sampled.k.shape[2]
        visibility = sampled.device_visibility.flatten(len(sampled.sinks))
        counts = OffsetCounts.of(visibility, context)
        if samples is not None and len(samples) < context:
            samples = samples.on(sampled.k.device)
            counts = counts.at(samples)
        else:
            samples = None
        return cls(
            weight=_weight_by_fold(sampled, folds),
            counts=counts,
            sinks=RowSinks.of(sampled, visibility, samples),
            size=len(SINKS) + counts.number + len(offset_edges(context)) - 1,
        )

    def float(self) -> "OffsetRows":
        """The rows in single precision."""
        return OffsetRows(
            weight=self.weight.float(),
            counts=self.counts.float(),
            sinks=self.sinks.float(),
            size=self.size,
        )

    def of_problems(
        self, problems: Int[Tensor, " problem"], number: int
    ) -> "OffsetRows":
        """The tables of some of `number` problems, which are the heads of each fold in turn."""
        weight = self.weight
        if len(weight) > 1:
            weight = weight[problems // (number // len(weight))]
        return replace(self, weight=weight, sinks=self.sinks.of_heads(problems))

    @property
    def others(self) -> Float[Tensor, "shared row"]:
        """Number of keys that each row sees and that are not sinks."""
        return self.counts.seen - self.sinks.within.sum(-1)

    @property
    def log_keys(self) -> Float[Tensor, "shared row"]:
        """Logarithm of the number of keys that each row sees, of at least 1."""
        sinks = (self.sinks.kind > 0).sum(-1)
        return (self.others + sinks).clamp(min=1).log()

    @property
    def uniform(self) -> Float[Tensor, "fold shared"]:
        """Mean of log P_i(j) under uniform attention, with the opposite sign (nats)."""
        return self.weight @ self.log_keys.mT

    def moments(self, weights: ByVariable, *, curvature: bool = True) -> Moments:
        """Mean log Z of P, the masses that P expects, and the diagonal of its Hessian.

        `weights` are sigma, kappa and tau side by side, and the masses are on sinks by kind, by
        offset, and on sinks by bin. The diagonal is the masses minus the squared masses. log Z
        is infinite if no key of a row has weight compared with the largest possible weight.
        """
        of_keys = self._weights_of_keys(weights)
        kernel = of_keys.kernel
        at_sinks = of_keys.as_sink
        replaced = of_keys.as_key * self.sinks.within
        others = self.counts.sum_over_keys(kernel) - replaced.sum(-1)
        norms = others.clamp_(min=0) + at_sinks.sum(-1)
        log_norms = norms.log().nan_to_num_(neginf=torch.inf) + of_keys.log_largest
        rate = self.weight / norms
        expected = self._masses(kernel, at_sinks, replaced, rate)
        log_z = vecdot(log_norms, self.weight)
        if not curvature:
            return Moments(log_z, expected)
        squares = self._masses(
            kernel.square(), at_sinks.square(), replaced * of_keys.as_key, rate / norms
        )
        return Moments(log_z, expected, Curvature(expected - squares))

    def _weights_of_keys(self, weights: ByVariable) -> "KeyWeights":
        parts = split_weights(weights, terms=0, context=self.counts.number)
        most_at_sinks = (parts.sigma.amax(-1) + parts.tau.amax(-1)).clamp_(min=0)
        log_largest = (parts.kappa.amax(-1) + most_at_sinks)[:, None]
        by_variable = weights.gather(1, self.sinks.index(len(weights)))
        at_sinks = by_variable.view(-1, *self.sinks.variables.shape[1:])
        as_sink = (at_sinks.sum(1) - log_largest[..., None]).exp_()
        return KeyWeights(
            log_largest=log_largest,
            kernel=(parts.kappa - log_largest).exp_(),
            as_key=(at_sinks[:, 1] - log_largest[..., None]).exp_(),
            as_sink=as_sink * (self.sinks.kind > 0),
        )

    def _masses(
        self,
        kernel: Float[Tensor, "problem offset"],
        at_sinks: Float[Tensor, "problem row sink"],
        replaced: Float[Tensor, "problem row sink"],
        rate: Float[Tensor, "problem row"],
    ) -> ByVariable:
        """Masses of P by variable. Sinks have weights `at_sinks` instead of `replaced`."""
        by_offset = kernel * self.counts.sum_over_rows(rate)
        rate = rate[..., None]
        return self.with_sinks(by_offset, rate * at_sinks, replaced=rate * replaced)

    def with_sinks(
        self,
        by_offset: Float[Tensor, "problem offset"],
        on_sinks: Float[Tensor, "problem row sink"],
        *,
        replaced: Float[Tensor, "problem row sink"] | None = None,
    ) -> ByVariable:
        """Masses on sinks by kind, by offset, and on sinks by bin.

        `by_offset` does not contain the sinks, but the masses `replaced`.
        """
        by_variable = on_sinks[:, None].repeat(1, 3, 1, 1)
        if replaced is not None:
            by_variable[:, 1] -= replaced
        kinds = len(SINKS)
        total = pad(by_offset, (kinds, self.size - kinds - self.counts.number))
        index = self.sinks.index(len(total))
        return total.scatter_add_(1, index, by_variable.flatten(1))

    def sink_moments(self, sigma: ByVariable) -> Moments:
        """`moments` of S, whose kappa and tau are 0."""
        mass = self.sinks.by_kind * sigma.exp()[:, None]
        norm = self.others + mass.sum(-1)
        mass /= norm[..., None]
        expected = self._mean_over_rows(mass)
        squares = self._mean_over_rows(mass.square())
        log_z = vecdot(norm.log(), self.weight)
        return Moments(log_z, expected, Curvature(expected - squares))

    def sigma_of_means(self, masses: ByVariable, few: Tensor) -> ByVariable:
        """About sigma of S: its value if all rows had the mean numbers of keys and sinks."""
        number = self._mean_over_rows(self.sinks.by_kind)
        others = self._mean_over_rows(self.others[..., None])
        rest = 1 - masses.sum(-1, keepdim=True)
        sigma = (masses + few).log() - (number + few).log()
        of_others = ((rest + few) / (others + few)).log()
        return (sigma - of_others).where(number > 0, 0.0)

    def _mean_over_rows(
        self, x: Float[Tensor, "_ row value"]
    ) -> Float[Tensor, "_ value"]:
        return (self.weight[:, None] @ x)[:, 0]


@dataclass(frozen=True)
class KeyWeights:
    """Weights of keys in P, relative to the largest weight that a key could have.

    `kernel` has the weights of keys that are not sinks. `as_sink` has the weight of each listed
    sink, and `as_key` the weight that it would have otherwise.
    """

    log_largest: Float[Tensor, "problem 1"]
    kernel: Float[Tensor, "problem offset"]
    as_key: Float[Tensor, "problem row sink"]
    as_sink: Float[Tensor, "problem row sink"]


def _weight_by_fold(sampled: SampledCall, folds: int) -> Float[Tensor, "fold row"]:
    """The weights of the rows in each fold; sequences belong to the folds in turn."""
    weight = sampled.weight.flatten().double()
    if folds == 1:
        return weight[None]
    device = weight.device
    sequence = torch.arange(len(weight), device=device) // sampled.position.shape[1]
    fold = torch.arange(folds, device=device)[:, None]
    return weight * (sequence % folds == fold)


@dataclass(frozen=True)
class OffsetModels:
    """S and P of each problem."""

    sink: Minimum
    position: Minimum


def fit_offsets(
    observed: ByVariable, table: OffsetRows, *, ridge: ByProblem, tolerance: ByProblem
) -> OffsetModels:
    """Fit S and P of every problem. Problems are the heads of each fold or draw in turn.

    `observed` are mean masses on sinks by kind, by offset, and on sinks by bin. P starts
    from S.
    """
    number, size = observed.shape
    together = max(1, TOGETHER[observed.device.type] // size)
    parts = []
    for some in torch.arange(number, device=observed.device).split(together):
        of_some = table.of_problems(some, number)
        parts.append(
            _fit_together(observed[some], of_some, ridge[some], tolerance[some])
        )
    sink = _concatenate([part.sink for part in parts])
    position = _concatenate([part.position for part in parts])
    sink_point = pad(sink.point, (0, size - len(SINKS)))
    return OffsetModels(Minimum(sink_point, sink.value), position)


def _concatenate(minima: Sequence[Minimum]) -> Minimum:
    return Minimum(
        point=torch.cat([x.point for x in minima]),
        value=torch.cat([x.value for x in minima]),
    )


def _fit_together(
    observed: ByVariable, table: OffsetRows, ridge: ByProblem, tolerance: ByProblem
) -> OffsetModels:
    """`fit_offsets` of problems that fit into memory together."""
    evaluation = _Evaluation(table, len(observed))
    kinds = len(SINKS)
    on_sinks = observed[:, :kinds]
    sink = fit_log_linear(
        evaluation.of_sink,
        on_sinks,
        ridge=ridge,
        smooth=slice(0, 0),
        start=table.sigma_of_means(on_sinks, ridge[:, None]),
        tolerance=tolerance / 10,
    )
    offsets = slice(kinds, kinds + table.counts.number)
    start = pad(sink.point, (0, observed.shape[1] - kinds))
    expected = table.moments(start, curvature=False).expected
    few = FEW_ROWS * ridge[:, None]
    start[:, offsets] += ((observed + few) / (expected + few)).log()[:, offsets]
    position = fit_log_linear(
        evaluation.of_position,
        observed,
        ridge=ridge,
        smooth=offsets,
        start=start,
        tolerance=tolerance,
    )
    return OffsetModels(sink, position)


class _Evaluation:
    """S and P for the solver. The tables of the problems in its batch change rarely."""

    def __init__(self, table: OffsetRows, number: int) -> None:
        self.table = table
        self.number = number
        self.problems: Int[Tensor, " problem"] | None = None
        self.of_problems = table

    def of_sink(self, sigma: ByVariable, problems: Tensor, _: Tensor) -> Moments:
        return self._table_of(problems).sink_moments(sigma)

    def of_position(self, weights: ByVariable, problems: Tensor, _: Tensor) -> Moments:
        return self._table_of(problems).moments(weights)

    def _table_of(self, problems: Int[Tensor, " problem"]) -> OffsetRows:
        if problems is not self.problems:
            self.problems = problems
            self.of_problems = self.table.of_problems(problems, self.number)
        return self.of_problems


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model, or the sums that they multiply."""

    beta: Float[Tensor, "*head term"]
    sigma: Float[Tensor, "*head kind"]
    kappa: Float[Tensor, "*head offset"]
    tau: Float[Tensor, "*head bin"]


def split_weights(
    x: Float[Tensor, "*head variable"], terms: int, context: int
) -> ModelWeights:
    """Split variables that are side by side. Models without content have no `terms`."""
    first = terms + len(SINKS)
    return ModelWeights(*x.tensor_split((terms, first, first + context), dim=-1))
