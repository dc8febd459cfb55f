"""The attention budget's model of a head: a conditional logit of the keys that a row picks.

    log P_i(j) = sigma [j is a sink] + kappa(i - j) + tau(i - j) [j is a sink]
                 + sum_f beta_f c~_ijf - log Z_i
    c~_ijf     = s Re(q~_if conj(k~_jf)), plane f's score with the rotation taken off

The log-likelihood sum_j A_ij log P_i(j) is concave in the weights. Its gradient is the
difference of the same sums under A and under P: the mass on sinks, the mass by offset, and

    sum_j A_ij c~_ijf = s Re(q~_if conj(sum_j A_ij k~_jf))

so that an evaluation costs two matrix products, as attention does. Four nested models:

    S  sigma                P  sigma, kappa, tau
    C  sigma, beta          B  all

Each kind of sink has its sigma. kappa has a weight for every offset, tau one for each bin of
offsets. Where a soft-cap squashes the scores, c~ is the score before it. The unrotated
coordinates of a head are one more plane.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.rope.planes import Planes
from ropelens.statistics.budget.cells import SINKS, Cells, blocks, log_norm, split
from ropelens.statistics.budget.offsets import OffsetRows, fit_offsets, offset_curvature
from ropelens.statistics.budget.solver import Divide, Minimum, fit_log_linear
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.kernel import offset_edges
from ropelens.statistics.labels import GAINS
from ropelens.statistics.memory import BLOCK_ELEMENTS, products
from ropelens.statistics.rows import Rows

MODELS = ("sink", "position", "content", "both")
"""S, P, C and B."""

SCORES = ("weight", "information", "uniform", *MODELS)
"""Sums over rows: their number, and in nats sum_j A_ij log A_ij and sum_j A_ij log P_i(j)."""

RIDGE = 0.03
"""Weight of half the squared weights beside a sum over rows: as nats of one row in all."""

TOLERANCE = 5e-4
"""Share of a head's information that a fit may miss."""

CURVATURE_ROWS = 32
"""Rows whose scores by plane show how the likelihood curves in beta."""

CURVATURE_AT = (0, 8, 24)
"""Steps of a fit at which that is computed."""


def log_weights(
    cells: Cells, weights: Float[Tensor, "part kv_head group variable"]
) -> Float[Tensor, "batch kv_head group row key"]:
    """log P_i(j) + log Z_i of every key; the weights of C are beta and sigma alone."""
    weights = weights[cells.part].to(cells.k.device, cells.k.dtype)
    beta, sigma, kappa, tau = split(weights, cells.planes.terms, cells.context)
    scores = products(cells.q_still * beta[..., None, cells.planes.term_of], cells.k_still)
    of_sinks = pad(sigma, (1, 0)).gather(-1, cells.kind[..., 0, :])[..., None, :]
    if kappa.shape[-1]:
        scores += _at(kappa, cells.offset)
        of_sinks = of_sinks + _at(tau, cells.sink_bin) * (cells.kind > 0)
    scores[..., cells.columns] += of_sinks
    return scores.add_(cells.hidden)


def sums(
    cells: Cells,
    attention: Float[Tensor, "batch kv_head group row key"],
    *,
    content: bool = True,
    offsets: bool = True,
) -> Float[Tensor, "part kv_head group variable"]:
    """What the weights multiply in the log-likelihood of any attention, in float64.

    sum_j A_ij c~_ijf by plane, and the masses on sinks by kind, by offset, and on sinks by bin
    of offsets, each where it is asked for: sums over the weighted rows of each part.
    """
    weighted = attention * cells.weight[:, None, None, :, None]
    on_sinks = weighted[..., cells.columns]
    sink = on_sinks.new_zeros(*cells.q.shape[:3], 1 + len(SINKS))
    sink.scatter_add_(-1, cells.kind[..., 0, :], on_sinks.sum(-2))
    first = [sink[..., 1:]]
    if content:
        read = (weighted.flatten(2, 3) @ cells.k_still).view_as(cells.q)
        first.insert(0, cells.planes.sum_coordinates((cells.q_still * read).sum(-2)))
    total = [cells.by_part(torch.cat(first, dim=-1))]
    if offsets:
        bins = len(offset_edges(cells.context)) - 1
        total.append(cells.sum_at(cells.offset, weighted, cells.context))
        total.append(cells.sum_at(cells.sink_bin, on_sinks * (cells.kind > 0), bins))
    return torch.cat(total, dim=-1)


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
) -> Float[Tensor, "model part head variable"]:
    """The weights of S, P, C and B of every head, fitted to `rows` of each part alone.

    Weights that a model does not have are 0. `ridge` keeps weights finite that no row speaks
    of; with 64 rows of 8 sequences it costs less than 0.01 of the bits. Nothing larger than a
    block of scores is in memory.
    """
    kv_heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    rows, count = averaged(rows, part, parts)
    few, _ = averaged(_some(rows, -(-CURVATURE_ROWS * parts // len(part))), part, parts)
    cells = rows.position.numel() * len(call.start) * group
    together = max(1, BLOCK_ELEMENTS[call.key.device.type] // 2 // cells)
    weights = []
    for first in range(0, kv_heads, together):
        some = slice(first, min(first + together, kv_heads))
        of_some, turns, sinks_of = _of_kv_heads(call, planes, sinks, some)
        heads = torch.arange(of_some.query.shape[1])
        tables = []
        for number in range(parts):
            of_part = part == number
            table = OffsetRows.of(sequences_of(rows, of_part), call.start, sinks_of[of_part])
            tables.append(table.of_heads(heads))
        of_rows, of_few = (
            list(blocks(of_some, x, turns, sinks_of, part=part, parts=parts))
            for x in (rows, few)
        )
        weights.append(_fit_heads(of_rows, of_few, tables, ridge=ridge / count))
    return torch.cat(weights, dim=2)


def _fit_heads(
    cells: list[Cells],
    few: list[Cells],
    tables: list[OffsetRows],
    *,
    ridge: Float[Tensor, " part"],
) -> Float[Tensor, "model part head variable"]:
    """The models of the heads that stand together in `cells`, each from those it contains.

    `few` has some of the rows, `tables` the offsets and sinks of the rows of each part.
    """
    observed, information = observe(cells)
    terms, size = cells[0].planes.terms, observed.shape[-1]
    allowed = tolerance(information).flatten(1, 2)
    masses = observed[..., terms:].flatten(1, 2)
    fits = fit_offsets(masses, tables, ridge=ridge, tolerance=allowed)
    sink, position = (pad(each.point, (terms, 0)) for each in fits)
    given = {"ridge": ridge, "tolerance": allowed.flatten()}
    start = sink[:, : terms + len(SINKS)]
    content = _fit_content(cells, few, tables, observed, start, **given)
    points = [sink, position, pad(content.point, (0, size - start.shape[1]))]
    better = torch.where((fits[1].value < content.value)[:, None], points[1], points[2])
    points.append(_fit_content(cells, few, tables, observed, better, **given).point)
    return torch.stack([point.unflatten(0, masses.shape[:2]) for point in points])


def _fit_content(
    cells: list[Cells],
    few: list[Cells],
    tables: list[OffsetRows],
    observed: Float[Tensor, "part kv_head group variable"],
    start: Float[Tensor, "problem _"],
    *,
    ridge: Float[Tensor, " part"],
    tolerance: Float[Tensor, " problem"],
) -> Minimum:
    """B, or C where the start ends with sigma; every evaluation makes all scores."""
    shape, has = observed.shape[:3], start.shape[1]
    heads, context = shape[1:].numel(), cells[0].context
    first = cells[0].planes.terms + len(SINKS)
    reach = torch.stack([table.reach for table in tables]).repeat_interleave(heads, dim=0)
    ridge = ridge.repeat_interleave(heads)[:, None]
    factor = torch.empty(0)

    def expect(point: Tensor) -> tuple[Tensor, Tensor]:
        weights = point.view(*shape, has)
        norm, expected = torch.zeros(shape).double(), torch.zeros_like(weights)
        for block in cells:
            scores = log_weights(block, weights)
            modelled = scores.softmax(-1)
            norm += block.weigh(log_norm(scores, modelled))
            expected += sums(block, modelled, offsets=has > first)
        return norm.flatten(), expected.flatten(0, 2)

    def curvature(step: int, point: Tensor, expected: Tensor) -> Divide:
        nonlocal factor
        if step in CURVATURE_AT:
            total = covariance(few, point.view(*shape, has)).flatten(0, 2)
            size = total.diagonal(dim1=-2, dim2=-1)
            floor = ridge + 1e-6 * size.amax(-1, keepdim=True)
            factor = torch.linalg.cholesky(total + torch.diag_embed(floor.expand_as(size)))
        of_offsets = offset_curvature(expected[:, first:], reach=reach, ridge=ridge)

        def divide(values: Tensor) -> Tensor:
            of_planes = torch.cholesky_solve(values[:, :first, None], factor)[..., 0]
            return torch.cat([of_planes, of_offsets(values[:, first:])], dim=-1)

        return divide

    return fit_log_linear(
        expect,
        curvature,
        observed[..., :has].flatten(0, 2),
        ridge=ridge,
        smooth=slice(first, first + context),
        start=start,
        tolerance=tolerance,
    )


def observe(
    cells: list[Cells],
) -> tuple[Float[Tensor, "part kv_head group variable"], Float[Tensor, "part kv_head group"]]:
    """The sums of A over all rows, and its information over uniform attention, in nats."""
    observed, information = [], []
    for block in cells:
        attention, entropy = block.attention()
        observed.append(sums(block, attention))
        information.append(block.weigh(block.log_keys - entropy))
    return torch.stack(observed).sum(0), torch.stack(information).sum(0)


def covariance(
    cells: list[Cells], weights: Float[Tensor, "part kv_head group variable"]
) -> Float[Tensor, "part kv_head group first first"]:
    """How log Z curves in beta and sigma: the covariance under P of what they multiply."""
    first = cells[0].planes.terms + len(SINKS)
    total = weights.new_zeros(*weights.shape[:3], first, first)
    for block in cells:
        modelled = log_weights(block, weights).softmax(-1)
        for sequence, part in enumerate(block.part.tolist()):
            features, share = block.features(sequence), modelled[sequence]
            # about each row's mean, or rounding would leave more than a sharp head has
            features = features - share[..., None, :] @ features
            weighted = share * block.weight[sequence][:, None]
            product = (features * weighted[..., None]).flatten(2, 3).mT @ features.flatten(2, 3)
            total[part] += product.to("cpu", torch.float64)
    return total


@torch.no_grad()
def score(
    call: AttentionCall,
    rows: Rows,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    weights: Float[Tensor, "model part head variable"],
    *,
    by: Int[Tensor, " batch"],
) -> Float[Tensor, "batch head score"]:
    """The `SCORES` of each sequence: b under the models of part `by[b]`."""
    every, kv_heads = torch.arange(len(by)), call.key.shape[1]
    models = dict(zip(MODELS, weights[:, by].unflatten(2, (kv_heads, -1)), strict=True))
    models["content"] = models["content"][..., : planes.terms + len(SINKS)]
    nats = {name: torch.zeros(models["sink"].shape[:3]).double() for name in SCORES}
    nats["weight"] += rows.weight.double().sum(1)[:, None, None]
    for block in blocks(call, rows, planes, sinks, part=every, parts=len(by)):
        attention, entropy = block.attention()
        observed = sums(block, attention)
        nats["information"] -= block.weigh(entropy)
        nats["uniform"] -= block.weigh(block.log_keys)
        for name, model in models.items():
            nats[name] += (observed[..., : model.shape[-1]] * model).sum(-1)
        for name in ("content", "both"):
            nats[name] -= block.weigh(log_weights(block, models[name]).logsumexp(-1))
    for part in by.unique():
        of_part = by == part
        table = OffsetRows.of(sequences_of(rows, of_part), call.start, sinks[of_part])
        table = table.of_heads(torch.arange(call.query.shape[1]))
        for name, model in zip(MODELS[:2], weights, strict=False):
            per_row = table.log_norms(model[part, :, planes.terms :]) * table.weight
            norms = per_row.unflatten(1, (int(of_part.sum()), -1)).sum(-1)
            nats[name][of_part] -= norms.mT.unflatten(1, (kv_heads, -1))
    return torch.stack(list(nats.values()), dim=-1).flatten(1, 2)


def gains(scores: Float[Tensor, "*head score"]) -> dict[str, Float[Tensor, "*head"]]:
    """Bits per row over uniform attention, by the names of `GAINS`; NaN without rows."""
    weight, information, uniform, *models = scores.unbind(-1)
    nats = zip(GAINS, (information, *models), strict=True)
    return {name: (one - uniform) / (weight * math.log(2)) for name, one in nats}


def averaged(
    rows: Rows, part: Int[Tensor, " batch"], parts: int
) -> tuple[Rows, Float[Tensor, " part"]]:
    """The rows with weights that sum to one in each part, and their number, at least 1."""
    weight = rows.weight.double()
    by_sequence = torch.stack([weight.sum(1), (weight > 0).sum(1)], dim=1)
    total, count = weight.new_zeros(parts, 2).index_add_(0, part, by_sequence).unbind(1)
    weight = weight / total.clamp(min=1e-300)[part, None]
    return Rows(rows.position, weight.float(), rows.length, dense=False), count.clamp(min=1)


def tolerance(information: Float[Tensor, "*head"]) -> Float[Tensor, "*head"]:
    """How many nats a fit may miss of a head with that much `information` over uniform."""
    return TOLERANCE * information + 1e-6


def sequences_of(rows: Rows, chosen: Bool[Tensor, " batch"]) -> Rows:
    """The rows of some of the sequences."""
    return Rows(rows.position[chosen], rows.weight[chosen], rows.length[chosen], rows.dense)


def _of_kv_heads(
    call: AttentionCall,
    planes: Planes,
    sinks: Int[Tensor, "batch shared position"],
    some: slice,
) -> tuple[AttentionCall, Planes, Int[Tensor, "batch _ position"]]:
    """The call of some kv heads and the query heads that read them, their planes and sinks."""
    group = call.query.shape[1] // call.key.shape[1]
    heads = slice(some.start * group, some.stop * group)
    of_some = replace(
        call,
        query=call.query[:, heads],
        key=call.key[:, some],
        value=call.value[:, some],
        output=call.output[:, :, heads],
        sink_logits=None if call.sink_logits is None else call.sink_logits[heads],
    )
    if planes.inv_freq.ndim == 2:
        planes = replace(planes, inv_freq=planes.inv_freq[heads])
    return of_some, planes, sinks if sinks.shape[1] == 1 else sinks[:, heads]


def _at(
    x: Float[Tensor, "batch kv_head group place"], places: Int[Tensor, "batch row key"]
) -> Float[Tensor, "batch kv_head group row key"]:
    """The entry of each head at the place of each row and key."""
    index = places.flatten(1)[:, None].expand(-1, x.shape[1] * x.shape[2], -1)
    return x.flatten(1, 2).gather(-1, index).view(*x.shape[:3], *places.shape[1:])


def _some(rows: Rows, count: int) -> Rows:
    """`count` rows of each sequence, spread over all, not the same of each."""
    batch, have = rows.position.shape
    count = min(count, have)
    step = torch.arange(count) * have // count
    pick = step + torch.arange(batch)[:, None] % max(1, have // count)
    position, weight = rows.position.gather(1, pick), rows.weight.gather(1, pick)
    return Rows(position, weight, rows.length, dense=False)
