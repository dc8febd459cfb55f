"""The attention budget: how much of a head's choice the sink and the offset explain.

Two models of attention are fitted to running sums: P_i(j) proportional to a weight on
position 0 and one common weight elsewhere (the sink model), and the same with a weight
for each offset (the position model). Both are multinomials whose rows are cut at what a
row sees; their log-likelihood is concave in the log weights, and its maximum over
uniform attention is the information that the sink and the offset hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.statistics.split import split_bits

TOLERANCE = 1e-7
"""Largest difference, per row, between a bin's mass and what the fitted model expects.

Float32 attention sums to one within about this."""

MAX_UPDATES = 1000
"""Trained heads take about 20. A head on position 1 may still miss 0.003 bits here."""

SMALLEST = 1e-300
"""Weight, beside a total of one, below which an offset with any attention never falls."""


@dataclass(frozen=True)
class Sight:
    """How many rows see how much: the part of a budget that all heads of a layer share.

    A row at position i sees `choices[i]` keys other than position 0, at offsets
    0 ... choices[i] - 1, and position 0 where `sees_sink[i]`.
    """

    choices: Int[Tensor, " position"]
    sees_sink: Bool[Tensor, " position"]

    @classmethod
    def of(cls, start: Int[Tensor, " position"]) -> Sight:
        """From the first key that each row sees."""
        position = torch.arange(len(start))
        return cls(position - start.clamp(min=1) + 1, start == 0)

    @property
    def log_keys(self) -> Float[Tensor, " position"]:
        """Logarithm of the number of keys that each row sees, in nats."""
        return (self.choices + self.sees_sink).double().log()


class OffsetBins:
    """Bins of offsets, with the sums over what a row sees of them in linear time.

    A row that sees offsets 0 ... n - 1 sees the bins below its own whole and a part of
    the bin that n falls in, so a cumulative sum serves all rows.
    """

    def __init__(self, edges: Int[Tensor, " edge"], sight: Sight) -> None:
        self.width = edges.diff().double()
        self.sight = sight
        self._own = torch.bucketize(sight.choices, edges, right=True) - 1
        self._part = (sight.choices - edges[self._own]).double()

    def norms(
        self, kernel: Float[Tensor, "head bin"], sink: Float[Tensor, " head"]
    ) -> Float[Tensor, "head position"]:
        """Z_i: the sum of the weights of the keys that each row sees."""
        below = pad((kernel * self.width).cumsum(-1), (1, 0))[:, self._own]
        own = pad(kernel, (0, 1))[:, self._own] * self._part
        return below + own + sink[:, None] * self.sight.sees_sink

    def sums_over_rows(
        self, values: Float[Tensor, "head position"]
    ) -> Float[Tensor, "head bin"]:
        """Sum over rows of `values` times the number of offsets of each bin they see."""
        empty = values.new_zeros(len(values), len(self.width) + 1)
        whole = empty.index_add(1, self._own, values)
        part = empty.index_add(1, self._own, values * self._part)
        # Summed from the far end: 1 / Z_i may fall by 100 orders of magnitude with the
        # offset, and a difference of two sums from the near end would be rounding alone.
        above = whole[:, 1:].flip(-1).cumsum(-1).flip(-1)
        return above * self.width + part[:, :-1]


@dataclass(frozen=True)
class KernelFit:
    """A position model: the weight of one offset of each bin, and that of position 0.

    Scaled so that a row which sees every bin and position 0 sums to one. `log_norm[h, i]`
    is the logarithm of the sum over the keys that a row at position i sees.
    """

    kernel: Float[Tensor, "head bin"]
    sink: Float[Tensor, " head"]
    log_norm: Float[Tensor, "head position"]

    def log_likelihood(
        self,
        offset_mass: Float[Tensor, "*group head bin"],
        sink_mass: Float[Tensor, "*group head"],
        row_weight: Float[Tensor, "*group position"],
    ) -> Float[Tensor, "*group head"]:
        """Sum over rows of sum_j A_ij log P_ij, in nats, for any sums of the same heads."""
        chosen = torch.xlogy(offset_mass, self.kernel).sum(-1)
        return chosen + torch.xlogy(sink_mass, self.sink) - row_weight @ self.log_norm.mT


def fit_kernel(
    offset_mass: Float[Tensor, "head bin"],
    sink_mass: Float[Tensor, " head"],
    row_weight: Float[Tensor, " position"],
    sight: Sight,
    edges: Int[Tensor, " edge"],
) -> KernelFit:
    """The position model of highest likelihood, for every head at once.

    Each update sets a weight to its mass over the sum of 1 / Z_i among the rows that
    see it: generalized iterative scaling (Darroch & Ratcliff 1972), which never lowers
    the likelihood. `offset_mass` and `sink_mass` are sums over rows; the row of position
    0 has no weight. It starts from the product-limit estimate, already the answer where
    bins hold one offset each and every row sees position 0.
    """
    bins = OffsetBins(edges, sight)
    rows = row_weight.sum()
    kernel, sink = _product_limit(offset_mass, sink_mass, row_weight, sight, edges)
    row_seen = row_weight > 0
    for _ in range(MAX_UPDATES):
        norms = torch.where(row_seen, bins.norms(kernel, sink), 1.0)
        per_weight = row_weight / norms
        expected = bins.sums_over_rows(per_weight)
        expected_sink = per_weight @ sight.sees_sink.double()
        miss = (kernel * expected - offset_mass).abs().amax() / rows
        if miss < TOLERANCE:
            break
        kernel = _ratio(offset_mass, expected)
        sink = _ratio(sink_mass, expected_sink)
        total = kernel @ bins.width + sink
        kernel, sink = kernel / total[:, None], sink / total
        kernel = torch.where(offset_mass > 0, kernel.clamp(min=SMALLEST), 0.0)
    log_norm = torch.where(row_seen, bins.norms(kernel, sink), 1.0).log()
    return KernelFit(kernel, sink, log_norm)


def _product_limit(
    offset_mass: Float[Tensor, "head bin"],
    sink_mass: Float[Tensor, " head"],
    row_weight: Float[Tensor, " position"],
    sight: Sight,
    edges: Int[Tensor, " edge"],
) -> tuple[Float[Tensor, "head bin"], Float[Tensor, " head"]]:
    """Weights of offsets and sink by the product-limit estimate of truncated data.

    Rows see position 0 and the offsets up to one of their own, so sight is nested: the odds
    of a bin against all nearer keys, among the rows that reach it, follow from the sums
    alone (Lynden-Bell 1971, MNRAS 155:95). Iterating from equal weights would take forever
    where weights grow fast with the offset: a head on position 1, or on its window's edge.
    """
    reach = row_weight @ (sight.choices[:, None] > edges[:-1]).double()
    offsets = OffsetBins(edges, sight).sums_over_rows(row_weight[None])[0]
    nearer = sink_mass[:, None] + offset_mass.cumsum(-1) - offset_mass
    nearer = nearer - (row_weight.sum() - reach)  # rows that end nearer have all theirs there
    odds = offset_mass / nearer.clamp(min=1e-300)
    odds = odds.clamp(max=math.exp(500 / len(reach)))  # so that no product overflows
    odds = _ratio(odds * reach, offsets.expand_as(odds))  # of one offset
    log_total = pad((odds * edges.diff()).log1p().cumsum(-1), (1, 0))
    scale = log_total[:, -1:]
    return odds * (log_total[:, :-1] - scale).exp(), (-scale[:, 0]).exp()


def _ratio(mass: Float[Tensor, "*shape"], seen: Float[Tensor, "*shape"]) -> Tensor:
    """mass / seen, and 0 where no row sees anything."""
    return torch.where(seen > 0, mass / seen.clamp(min=1e-300), 0.0)


@dataclass(frozen=True)
class Budget:
    """Where the information in each head's choice of keys comes from, in bits per row.

    `total` = `sink` + `position` + `content`; with the position model and the sums that
    the bootstrap resamples: for every group of sequences, the sums over its rows of the
    information (`total`), the gains of the sink and the position model, and that of the
    head's own attention without rotation (`still`).
    """

    sink: Float[Tensor, " head"]
    position: Float[Tensor, " head"]
    content: Float[Tensor, " head"]
    fit: KernelFit
    groups: dict[str, Float[Tensor, "group head"]]

    @property
    def total(self) -> Float[Tensor, " head"]:
        """Bits per row in the head's choice: mean over rows of KL(A || uniform)."""
        return self.sink + self.position + self.content


def attention_budget(
    *,
    offset_mass: Float[Tensor, "group head bin"],
    sink_mass: Float[Tensor, "group head"],
    entropy: Float[Tensor, "group head"],
    content: Float[Tensor, "group head"],
    row_weight: Float[Tensor, "group position"],
    sight: Sight,
    edges: Int[Tensor, " edge"],
) -> Budget:
    """The budget of every head of a layer, from sums over rows by group of sequences.

    The models are fitted to the sums over all groups and scored on each, so that the
    bootstrap only adds: the fit maximises the likelihood, so to first order resampled
    sums have it too.
    """
    mass, sinks, rows = offset_mass.sum(0), sink_mass.sum(0), row_weight.sum(0)
    one_bin = torch.stack([edges[0], edges[-1]])
    sink_fit = fit_kernel(mass.sum(-1, keepdim=True), sinks, rows, sight, one_bin)
    position_fit = fit_kernel(mass, sinks, rows, sight, edges)

    log_keys = torch.where(rows > 0, sight.log_keys, 0.0)
    uniform = -(row_weight @ log_keys)[:, None]
    by_sink = sink_fit.log_likelihood(offset_mass.sum(-1, keepdim=True), sink_mass, row_weight)
    by_position = position_fit.log_likelihood(offset_mass, sink_mass, row_weight)
    bits = 1 / math.log(2)
    groups = {
        "total": (-entropy - uniform) * bits,
        "sink": (by_sink - uniform) * bits,
        "position": (by_position - by_sink) * bits,
        "still": (content - by_sink) * bits,
    }
    total, sink, position, still = (x.sum(0) / rows.sum() for x in groups.values())
    sink, position, content_bits = split_bits(total, sink, position, still)
    return Budget(sink, position, content_bits, position_fit, groups)
