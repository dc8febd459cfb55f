"""The conditional logit of a head: what sinks, offsets and contents say of the keys it picks.

    log P_i(j) = sigma [j is a sink] + kappa(i - j) + sum_f beta_f c~_ijf - log Z_i
    c~_ijf     = s Re(q~_if conj(k~_jf)), plane f's score with the rotation taken off

Four nested models: S has sigma alone, P sigma and kappa, C sigma and beta, B all three. The
log-likelihood sum_j A_ij log P_i(j) is concave in the weights, and its gradient the
difference of two sums, those of A and those of P: the mass on sinks, the mass by offset, and
sum_j A_ij c~_ijf = s Re(q~_if conj(sum_j A_ij k~_jf)). So an evaluation costs two matrix
products, as attention does.

Where a soft-cap squashes the scores, c~ is what the score was before it. The unrotated
coordinates of a head are one more plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.cells import SINKS, Block, Parts, blocks, log_norm
from ropelens.statistics.offsets import OffsetRows, divide_by_curvature
from ropelens.statistics.rows import Rows
from ropelens.statistics.solver import Divide, Minimum, minimize

RIDGE = 0.03
"""Weight of half the squared weights beside a sum over rows: as nats of one row in all."""

TOLERANCE = 2e-4
"""Share of a head's information that a fit may miss."""

MAX_EVALUATIONS = 100

CURVATURE_ROWS = 64
"""Rows whose scores by plane show how the likelihood curves in beta."""


@dataclass(frozen=True)
class Model:
    """Which weights a model has beside sigma."""

    content: bool
    offsets: bool


MODELS = {
    "sink": Model(content=False, offsets=False),
    "position": Model(content=False, offsets=True),
    "content": Model(content=True, offsets=False),
    "both": Model(content=True, offsets=True),
}
"""S, P, C and B."""


@dataclass(frozen=True)
class Fits:
    """The weights of every model for each part of the sequences that it was fitted on.

    `weights[name]` are [part, kv_head, group, ...], 0 for what the model has not;
    `evaluations` counts what the fits took.
    """

    weights: dict[str, Parts]
    evaluations: dict[str, int]


@torch.no_grad()
def fit(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    *,
    part: Int[Tensor, " batch"],
    parts: int = 2,
    ridge: float = RIDGE,
) -> Fits:
    """S, P, C and B of every head, fitted to `rows` of the sequences of each part apart.

    A part is what the models of another are scored on: give `score` the sequences of part 1
    with `by` 0. Models are nested, and each starts from the best that it contains. `ridge`
    keeps weights finite that no row speaks of; with 64 rows of 8 sequences it costs less
    than 0.01 of the bits. Nothing larger than a block of scores is held.
    """
    group = call.query.shape[1] // call.key.shape[1]
    rows = _averaged(rows, part, parts)
    offset_rows = [
        OffsetRows.of(_sequences(rows, part == p), call.start, sinks[part == p])
        for p in range(parts)
    ]
    found: dict[str, list[Parts]] = {name: [] for name in MODELS}
    evaluations = dict.fromkeys(MODELS, 0)
    for head in range(call.key.shape[1]):
        heads = slice(head, head + 1)
        own = [o.of_heads(slice(head * group, (head + 1) * group)) for o in offset_rows]
        sample = _Sample.of(call, rows, planes, sinks, heads, part, own, ridge)
        minima: dict[str, Minimum] = {}
        for name, model in MODELS.items():
            minima[name] = sample.fit(model, start=_start(name, minima))
            evaluations[name] += minima[name].evaluations
            found[name].append(sample.unflatten(minima[name].point))
    weights = {
        name: Parts(*(torch.cat(p, dim=1) for p in zip(*(vars(f).values() for f in each), strict=True)))
        for name, each in found.items()
    }
    return Fits(weights, evaluations)


def _start(name: str, minima: dict[str, Minimum]) -> Tensor | None:
    """Where the fit of a model begins: at S, or for B at the better of P and C."""
    if name == "sink":
        return None
    if name != "both":
        return minima["sink"].point
    better = minima["position"].value < minima["content"].value
    return torch.where(better[:, None], minima["position"].point, minima["content"].point)


@dataclass(frozen=True)
class _Sample:
    """The rows that the heads of one kv head are fitted to; a problem is a part and a head.

    `observed` are the sums of A that the likelihood multiplies its weights with, `few` some
    of the rows, `ridge` the ridge beside a mean over rows, `tolerance` nats.
    """

    blocks: list[Block]
    few: list[Block]
    offset_rows: list[OffsetRows]
    reach: Float[Tensor, "problem offset"]
    part: Int[Tensor, " batch"]
    terms: int
    observed: Float[Tensor, "problem part"]
    ridge: Float[Tensor, "problem 1"]
    tolerance: Float[Tensor, " problem"]

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        rows: Rows,
        planes: Planes,
        sinks: Int[Tensor, "batch shared position"],
        heads: slice,
        part: Int[Tensor, " batch"],
        offset_rows: list[OffsetRows],
        ridge: float,
    ) -> _Sample:
        """Lay the rows out in blocks and sum their attention."""
        parts, group = len(offset_rows), call.query.shape[1] // call.key.shape[1]
        cells = list(blocks(call, rows, planes, sinks, kv_heads=heads))
        few = _averaged(_some(rows, -(-CURVATURE_ROWS * parts // len(part))), part, parts)
        size = len(SINKS) + planes.terms + len(call.start)
        observed = torch.zeros(parts, 1, group, size).double()
        information = torch.zeros(parts, 1, group).double()
        for block in cells:
            attention, entropy = block.attention()
            observed += block.sums(attention, part, slots=parts)
            information.index_add_(0, part, block.weigh(block.log_keys()[:, None, None] - entropy))
        rows_of = torch.zeros(parts).index_add_(0, part, (rows.weight > 0).sum(1).float())
        per_problem = torch.arange(parts).repeat_interleave(group)
        return cls(
            blocks=cells,
            few=list(blocks(call, few, planes, sinks, kv_heads=heads)),
            offset_rows=offset_rows,
            reach=torch.stack([o.reach for o in offset_rows])[per_problem],
            part=part,
            terms=planes.terms,
            observed=observed.flatten(0, 2),
            ridge=ridge / rows_of.clamp(min=1).double()[per_problem, None],
            tolerance=TOLERANCE * information.flatten() + 1e-6,
        )

    def unflatten(self, points: Float[Tensor, "problem part"]) -> Parts:
        """The weights [part, 1, group, ...] of all problems."""
        flat = points.unflatten(0, (len(self.offset_rows), 1, -1))
        return Parts.of(flat, terms=self.terms)

    def fit(self, model: Model, start: Float[Tensor, "problem part"] | None) -> Minimum:
        """The weights of highest likelihood, less the ridge."""
        has = torch.zeros_like(self.observed[0])
        first = len(SINKS) + self.terms
        has[: len(SINKS)] = 1
        has[len(SINKS) : first] = model.content
        has[first:] = model.offsets
        observed, expected = self.observed * has, torch.zeros_like(self.observed)
        planes = _PlaneCurvature(self, model)

        def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
            norm, modelled = self._expect(point, model)
            expected.copy_(modelled)
            penalty = self.ridge * point
            value = norm - (observed * point).sum(-1) + (penalty * point).sum(-1) / 2
            return value, modelled * has - observed + penalty

        def curvature(point: Tensor) -> Divide:
            divide_first = planes.at(point) if model.content else self._divide_sink(expected)
            mass = expected[:, first:].clone()

            def divide(values: Tensor) -> Tensor:
                rest = values[:, first:]
                if model.offsets:
                    rest = divide_by_curvature(
                        rest, mass=mass, reach=self.reach, ridge=self.ridge
                    )
                return torch.cat([divide_first(values[:, :first]), rest], dim=-1)

            return divide

        start = torch.zeros_like(observed) if start is None else start
        return minimize(
            evaluate, curvature, start, tolerance=self.tolerance, max_evaluations=MAX_EVALUATIONS
        )

    def _expect(
        self, point: Float[Tensor, "problem part"], model: Model
    ) -> tuple[Float[Tensor, " problem"], Float[Tensor, "problem part"]]:
        """Mean over rows of log Z, and the sums of P in place of those of A."""
        weights = self.unflatten(point)
        if not model.content:
            return self._expect_of_offsets(weights)
        norm, sums = torch.zeros_like(weights.sink[..., 0]), torch.zeros_like(weights.flat)
        for block in self.blocks:
            scores = block.scores(weights, self.part, content=True, offsets=model.offsets)
            modelled = scores.softmax(-1)
            norm.index_add_(0, self.part, block.weigh(log_norm(scores, modelled)))
            sums += block.sums(modelled, self.part, slots=len(norm), offsets=model.offsets)
        return norm.flatten(), sums.flatten(0, 2)

    def _expect_of_offsets(self, weights: Parts) -> tuple[Tensor, Tensor]:
        """The same without content: from running sums over offsets alone."""
        norms, sums = [], []
        for rows, sigma, kappa in zip(
            self.offset_rows, weights.sink[:, 0], weights.offset[:, 0], strict=True
        ):
            norms.append(rows.log_norms(sigma, kappa) @ rows.weight)
            of_sinks, by_offset = rows.expected(sigma, kappa)
            nothing = by_offset.new_zeros(len(by_offset), self.terms)
            sums.append(torch.cat([of_sinks, nothing, by_offset], dim=-1))
        return torch.cat(norms), torch.cat(sums)

    def _divide_sink(self, expected: Float[Tensor, "problem part"]) -> Divide:
        """By the curvature in sigma: at most that of the same share in every row."""
        share = expected[:, : len(SINKS)].clamp(0, 1)
        curvature = share * (1 - share) + self.ridge

        def divide(values: Tensor) -> Tensor:
            return torch.cat([values[:, : len(SINKS)] / curvature, values[:, len(SINKS) :]], -1)

        return divide


class _PlaneCurvature:
    """How the likelihood curves in sigma and beta, from some rows; renewed now and then."""

    def __init__(self, sample: _Sample, model: Model) -> None:
        self._sample, self._model = sample, model
        self._asked = 0

    def at(self, point: Float[Tensor, "problem part"]) -> Divide:
        """Division by the curvature at a point of each problem."""
        if self._asked in (0, 1, 2, 4, 8, 16, 32):
            self._factor = torch.linalg.cholesky(self._curvature(point))
        self._asked += 1
        factor = self._factor
        return lambda values: torch.cholesky_solve(values[..., None], factor)[..., 0]

    def _curvature(self, point: Float[Tensor, "problem part"]) -> Tensor:
        sample = self._sample
        weights = sample.unflatten(point)
        parts, _, group, terms = weights.plane.shape
        first = len(SINKS) + terms
        total = point.new_zeros(parts, group, first, first)
        for block in sample.few:
            modelled = block.scores(
                weights, sample.part, content=True, offsets=self._model.offsets
            ).softmax(-1)
            for sequence in range(len(modelled)):
                features = block.features(sequence)
                share = modelled[sequence, 0]
                # about each row's mean, or rounding would leave more than a sharp head has
                features = features - share[..., None, :] @ features
                weighted = share * block.weight[sequence][:, None]
                covariance = (features * weighted[..., None]).flatten(1, 2).mT
                total[sample.part[sequence]] += covariance @ features.flatten(1, 2)
        total = total.flatten(0, 1)
        size = total.diagonal(dim1=-2, dim2=-1)
        floor = sample.ridge + 1e-6 * size.amax(-1, keepdim=True)
        return total + torch.diag_embed(floor.expand_as(size))


@dataclass(frozen=True)
class Scores:
    """Sums over the rows of each slot, in nats: what attention and its models say of its keys.

    `information` is sum_j A_ij log A_ij; the others are sum_j A_ij log P_i(j), P uniform, S,
    P, C and B. `weight` counts the rows. Scores of two sets of sequences add.
    """

    weight: Float[Tensor, "*slot"]
    information: Float[Tensor, "*slot head"]
    uniform: Float[Tensor, "*slot head"]
    sink: Float[Tensor, "*slot head"]
    position: Float[Tensor, "*slot head"]
    content: Float[Tensor, "*slot head"]
    both: Float[Tensor, "*slot head"]

    def __add__(self, other: Scores) -> Scores:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Scores(*(a + b for a, b in pairs))


@torch.no_grad()
def score(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    fits: Fits,
    *,
    by: Int[Tensor, " batch"],
    slot: Int[Tensor, " batch"],
    slots: int,
) -> Scores:
    """The likelihood of `rows` under models fitted elsewhere: sequence b by those of `by[b]`.

    Sums over the sequences of each slot (a document, say).
    """
    batch, group = len(by), call.query.shape[1] // call.key.shape[1]
    like = torch.zeros(batch, call.key.shape[1], group, dtype=torch.float64)
    sums = {name: like.clone() for name in ("information", "uniform", *MODELS)}
    every = torch.arange(batch)
    for block in blocks(call, rows, planes, sinks):
        attention, entropy = block.attention()
        observed = block.sums(attention, every, slots=batch)
        sums["information"] -= block.weigh(entropy)
        sums["uniform"] -= block.weigh(block.log_keys()[:, None, None])
        for name, model in MODELS.items():
            sums[name] += (observed * fits.weights[name].flat[by]).sum(-1)
            if model.content:
                weights = fits.weights[name]
                scores = block.scores(weights, by, content=True, offsets=model.offsets)
                sums[name] -= block.weigh(scores.logsumexp(-1))
    for name in ("sink", "position"):
        sums[name] -= _offset_norms(call, rows, sinks, fits.weights[name], by)
    weight = torch.zeros(slots, dtype=torch.float64)
    return Scores(
        weight.index_add_(0, slot, rows.weight.double().sum(1)),
        *(
            values.new_zeros(slots, *values.shape[1:]).index_add_(0, slot, values).flatten(1)
            for values in sums.values()
        ),
    )


def _offset_norms(
    call: AttentionCall,
    rows: Rows,
    sinks: Int[Tensor, "batch shared position"],
    weights: Parts,
    by: Int[Tensor, " batch"],
) -> Float[Tensor, "batch kv_head group"]:
    """Sum over the rows of each sequence of log Z, where contents have no weight."""
    norms = torch.zeros(len(by), *weights.sink.shape[1:3], dtype=torch.float64)
    for part in by.unique().tolist():
        own = by == part
        table = OffsetRows.of(_sequences(rows, own), call.start, sinks[own])
        per_row = table.log_norms(weights.sink[part].flatten(0, 1), weights.offset[part].flatten(0, 1))
        per_row = (per_row * table.weight).unflatten(1, (int(own.sum()), -1)).sum(-1)
        norms[own] = per_row.mT.unflatten(1, norms.shape[1:])
    return norms


@dataclass(frozen=True)
class Budget:
    """Where the bits in a head's choice of keys come from, per row; all at least 0.

    `sink` + `position` + `content` + `interaction` = `total`. `position_gain` is what the
    offset explains by itself: P.
    """

    total: Float[Tensor, "*slot head"]
    sink: Float[Tensor, "*slot head"]
    position: Float[Tensor, "*slot head"]
    content: Float[Tensor, "*slot head"]
    interaction: Float[Tensor, "*slot head"]
    position_gain: Float[Tensor, "*slot head"]


def budget(scores: Scores) -> Budget:
    """Bits per row, from sums over rows.

    A model that says less than one that it contains, which happens out of sample, counts as
    that one: gains are at least 0, and B's at least those of P and C.
    """
    sink = torch.maximum(scores.sink, scores.uniform)
    position, content = (torch.maximum(x, sink) for x in (scores.position, scores.content))
    both = torch.maximum(scores.both, torch.maximum(position, content))
    # A cannot be told better than by itself; float32 may say so by a rounding.
    whole = torch.maximum(scores.information, both)
    rows_in_bits = scores.weight[..., None] * math.log(2)
    return Budget(
        total=(whole - scores.uniform) / rows_in_bits,
        sink=(sink - scores.uniform) / rows_in_bits,
        position=(both - content) / rows_in_bits,
        content=(content - sink) / rows_in_bits,
        interaction=(whole - both) / rows_in_bits,
        position_gain=(position - sink) / rows_in_bits,
    )


def _averaged(rows: Rows, part: Int[Tensor, " batch"], parts: int) -> Rows:
    """The rows with weights that add up to one in each part."""
    weight = rows.weight.double()
    total = weight.new_zeros(parts).index_add_(0, part, weight.sum(1)).clamp(min=1e-300)
    return Rows(rows.position, (weight / total[part, None]).float(), rows.length, dense=False)


def _sequences(rows: Rows, chosen: Bool[Tensor, " batch"]) -> Rows:
    """The rows of some of the sequences."""
    return Rows(rows.position[chosen], rows.weight[chosen], rows.length[chosen], rows.dense)


def _some(rows: Rows, count: int) -> Rows:
    """`count` rows of each sequence, spread over all, not the same of each."""
    batch, have = rows.position.shape
    count = min(count, have)
    step = torch.arange(count) * have // count
    shift = torch.arange(batch)[:, None] % max(1, have // count)
    pick = step + shift
    position, weight = rows.position.gather(1, pick), rows.weight.gather(1, pick)
    return Rows(position, weight, rows.length, dense=False)
