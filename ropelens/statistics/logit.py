"""The conditional logit of a head: what sinks, offsets and contents say of the keys it picks.

    log P_i(j) = sigma [j is a sink] + kappa(i - j) + tau(i - j) [j is a sink]
                 + sum_f beta_f c~_ijf - log Z_i
    c~_ijf     = s Re(q~_if conj(k~_jf)), plane f's score with the rotation taken off

Four nested models: S has sigma alone, P also kappa and tau, C sigma and beta, B all. Each kind
of sink has its sigma; kappa has a weight for every offset, tau one for each bin of offsets:
how much a sink takes may depend on how far back it stands in another way than for keys. The
log-likelihood sum_j A_ij log P_i(j) is concave in the weights, and its gradient the
difference of two sums, those of A and those of P: the mass on sinks, the mass by offset, and
sum_j A_ij c~_ijf = s Re(q~_if conj(sum_j A_ij k~_jf)). So an evaluation costs two matrix
products, as attention does.

Where a soft-cap squashes the scores, c~ is what the score was before it. The unrotated
coordinates of a head are one more plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.rope.planes import Planes
from ropelens.statistics.bins import offset_edges
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.cells import (
    BLOCK_ELEMENTS,
    SINKS,
    Cells,
    Parts,
    blocks,
    log_norm,
)
from ropelens.statistics.offsets import (
    OffsetRows,
    fit_offsets,
    fit_sinks,
    offset_curvature,
)
from ropelens.statistics.rows import Rows
from ropelens.statistics.solver import Divide, Minimum, fit_log_linear

RIDGE = 0.03
"""Weight of half the squared weights beside a sum over rows: as nats of one row in all."""

TOLERANCE = 5e-4
"""Share of a head's information that a fit may miss."""

CURVATURE_ROWS = 32
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

    def upto(self, context: int) -> Fits:
        """The same for rows of shorter sequences, which see the first offsets alone."""
        weights = {name: parts.upto(context) for name, parts in self.weights.items()}
        return replace(self, weights=weights)

    @property
    def in_float32(self) -> Fits:
        """The same in half of the memory."""
        weights = {
            name: Parts(*(x.float() for x in vars(parts).values()))
            for name, parts in self.weights.items()
        }
        return replace(self, weights=weights)


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
    kv_heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    rows = averaged(rows, part, parts)
    offset_rows = by_part(rows, call.start, sinks, part, parts)
    found: dict[str, list[Parts]] = {name: [] for name in MODELS}
    evaluations = dict.fromkeys(MODELS, 0)
    cells = rows.position.numel() * len(call.start) * group
    together = max(1, BLOCK_ELEMENTS[call.key.device.type] // cells)
    for few in torch.arange(kv_heads).split(together):
        chosen = slice(int(few[0]), int(few[-1]) + 1)
        heads = torch.arange(chosen.start * group, chosen.stop * group)
        own = [table.of_heads(heads) for table in offset_rows]
        sample = _Sample.of(call, rows, planes, sinks, chosen, part, own, ridge)
        for name, minimum in sample.fit_all().items():
            evaluations[name] += minimum.evaluations
            found[name].append(sample.unflatten(minimum.point))
    weights = {
        name: Parts.of(
            torch.cat([one.flat for one in each], dim=1),
            terms=planes.terms,
            context=len(call.start),
        )
        for name, each in found.items()
    }
    return Fits(weights, evaluations)


@dataclass(frozen=True)
class _Sample:
    """The rows that the heads of some kv heads are fitted to; a problem is a part and a head.

    `observed` are the sums of A that the likelihood multiplies its weights with, `few` some
    of the rows, `ridge` the ridge beside a mean over rows, `tolerance` nats.
    """

    blocks: list[Cells]
    few: list[Cells]
    offset_rows: list[OffsetRows]
    part: Int[Tensor, " batch"]
    terms: int
    kv_heads: int
    observed: Float[Tensor, "problem part"]
    ridge: Float[Tensor, " slot"]
    tolerance: Float[Tensor, " problem"]

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        rows: Rows,
        planes: Planes,
        sinks: Int[Tensor, "batch shared position"],
        kv_heads: slice,
        part: Int[Tensor, " batch"],
        offset_rows: list[OffsetRows],
        ridge: float,
    ) -> _Sample:
        """Lay the rows out in blocks and sum their attention."""
        parts, group = len(offset_rows), call.query.shape[1] // call.key.shape[1]
        count = kv_heads.stop - kv_heads.start
        cells = list(blocks(call, rows, planes, sinks, kv_heads=kv_heads))
        few = averaged(_some(rows, -(-CURVATURE_ROWS * parts // len(part))), part, parts)
        context = len(call.start)
        size = planes.terms + len(SINKS) + context + len(offset_edges(context)) - 1
        observed = torch.zeros(parts, count, group, size).double()
        information = torch.zeros(parts, count, group).double()
        for block in cells:
            attention, entropy = block.attention()
            observed += block.sums(attention, part, slots=parts)
            information.index_add_(
                0, part, block.weigh(block.log_keys()[:, None, None] - entropy)
            )
        return cls(
            blocks=cells,
            few=list(blocks(call, few, planes, sinks, kv_heads=kv_heads)),
            offset_rows=offset_rows,
            part=part,
            terms=planes.terms,
            kv_heads=count,
            observed=observed.flatten(0, 2),
            ridge=ridge / count_rows(rows, part, parts),
            tolerance=tolerance(information.flatten()),
        )

    def unflatten(self, points: Float[Tensor, "problem part"]) -> Parts:
        """The weights [part, kv_head, group, ...] of all problems."""
        flat = points.unflatten(0, (len(self.offset_rows), self.kv_heads, -1))
        return Parts.of(flat, terms=self.terms, context=self.offset_rows[0].context)

    def fit_all(self) -> dict[str, Minimum]:
        """Every model, each from the best that it contains."""
        sink, position = self._fit_offsets()
        content = self._fit_content(MODELS["content"], start=sink.point)
        better = torch.where(
            (position.value < content.value)[:, None], position.point, content.point
        )
        both = self._fit_content(MODELS["both"], start=better)
        return {"sink": sink, "position": position, "content": content, "both": both}

    def _fit_offsets(self) -> list[Minimum]:
        """S and P: from sums over offsets alone."""
        parts = len(self.offset_rows)
        observed = self.observed[:, self.terms :].unflatten(0, (parts, -1))
        given = {"ridge": self.ridge, "tolerance": self.tolerance.unflatten(0, (parts, -1))}
        sink = fit_sinks(observed, self.offset_rows, **given)
        start = sink.point.view_as(observed)
        position = fit_offsets(observed, self.offset_rows, start=start, **given)
        return [
            replace(found, point=pad(found.point, (self.terms, 0)))
            for found in (sink, position)
        ]

    def _fit_content(self, model: Model, *, start: Float[Tensor, "problem part"]) -> Minimum:
        """A model with content: every evaluation makes the scores of all rows."""
        first = self.terms + len(SINKS)
        has = torch.ones_like(self.observed[0])
        has[first:] = model.offsets
        heads = len(self.observed) // len(self.offset_rows)
        reach = torch.stack([part.reach for part in self.offset_rows])
        reach = reach.repeat_interleave(heads, dim=0)
        ridge = self.ridge.repeat_interleave(heads)[:, None]
        planes = _PlaneCurvature(self, model, ridge)

        def expect(point: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.unflatten(point)
            norm, sums = torch.zeros_like(weights.sink[..., 0]), torch.zeros_like(weights.flat)
            for block in self.blocks:
                scores = block.scores(weights, self.part, content=True, offsets=model.offsets)
                modelled = scores.softmax(-1)
                norm.index_add_(0, self.part, block.weigh(log_norm(scores, modelled)))
                sums += block.sums(modelled, self.part, slots=len(norm), offsets=model.offsets)
            return norm.flatten(), sums.flatten(0, 2)

        def curvature(point: Tensor, modelled: Tensor) -> Divide:
            divide_planes = planes.at(point)
            divide_offsets = offset_curvature(modelled[:, first:], reach=reach, ridge=ridge)

            def divide(values: Tensor) -> Tensor:
                rest = values[:, first:]
                rest = divide_offsets(rest) if model.offsets else torch.zeros_like(rest)
                return torch.cat([divide_planes(values[:, :first]), rest], dim=-1)

            return divide

        return fit_log_linear(
            expect,
            self.observed,
            has=has,
            ridge=ridge,
            smooth=slice(first, first + reach.shape[1]),
            curvature=curvature,
            start=start,
            tolerance=self.tolerance,
        )


class _PlaneCurvature:
    """How the likelihood curves in sigma and beta, from some rows; renewed now and then."""

    def __init__(self, sample: _Sample, model: Model, ridge: Tensor) -> None:
        self._sample, self._model, self._ridge = sample, model, ridge
        self._asked = 0

    def at(self, point: Float[Tensor, "problem part"]) -> Divide:
        """Division by the curvature at a point of each problem."""
        if self._asked in (0, 8, 24):
            self._factor = torch.linalg.cholesky(self._curvature(point))
        self._asked += 1
        factor = self._factor
        return lambda values: torch.cholesky_solve(values[..., None], factor)[..., 0]

    def _curvature(self, point: Float[Tensor, "problem part"]) -> Tensor:
        sample = self._sample
        weights = sample.unflatten(point)
        parts, kv_heads, group, terms = weights.plane.shape
        first = terms + len(SINKS)
        total = point.new_zeros(parts, kv_heads, group, first, first)
        for block in sample.few:
            modelled = block.scores(
                weights, sample.part, content=True, offsets=self._model.offsets
            ).softmax(-1)
            for sequence in range(len(modelled)):
                features, share = block.features(sequence), modelled[sequence]
                # about each row's mean, or rounding would leave more than a sharp head has
                features = features - share[..., None, :] @ features
                weighted = share * block.weight[sequence][:, None]
                covariance = (features * weighted[..., None]).flatten(2, 3).mT
                product = (covariance @ features.flatten(2, 3)).to("cpu", torch.float64)
                total[sample.part[sequence]] += product
        total = total.flatten(0, 2)
        size = total.diagonal(dim1=-2, dim2=-1)
        floor = self._ridge + 1e-6 * size.amax(-1, keepdim=True)
        return total + torch.diag_embed(floor.expand_as(size))


def averaged(rows: Rows, part: Int[Tensor, " batch"], parts: int) -> Rows:
    """The rows with weights that add up to one in each part."""
    weight = rows.weight.double()
    total = weight.new_zeros(parts).index_add_(0, part, weight.sum(1)).clamp(min=1e-300)
    return Rows(rows.position, (weight / total[part, None]).float(), rows.length, dense=False)


def count_rows(rows: Rows, part: Int[Tensor, " batch"], parts: int) -> Float[Tensor, " slot"]:
    """Number of rows of the sequences of each part, at least 1."""
    count = (rows.weight > 0).sum(1).double()
    return count.new_zeros(parts).index_add_(0, part, count).clamp(min=1)


def tolerance(information: Float[Tensor, "*head"]) -> Float[Tensor, "*head"]:
    """How many nats a fit may miss of a head with that much `information` over uniform."""
    return TOLERANCE * information + 1e-6


def by_part(
    rows: Rows,
    start: Int[Tensor, " position"],
    sinks: Int[Tensor, "batch shared position"],
    part: Int[Tensor, " batch"],
    parts: int,
) -> list[OffsetRows]:
    """The offsets and sinks that the rows of each part see."""
    return [
        OffsetRows.of(sequences_of(rows, part == p), start, sinks[part == p])
        for p in range(parts)
    ]


def sequences_of(rows: Rows, chosen: Bool[Tensor, " batch"]) -> Rows:
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
