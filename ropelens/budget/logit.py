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
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ropelens.attention.block import Block, SampledCall
from ropelens.attention.fast_products import BLOCK_ELEMENTS, products, softmax
from ropelens.attention.offset_bins import offset_edges
from ropelens.budget.labels import GAINS
from ropelens.budget.offsets import OffsetRows, fit_offsets, split
from ropelens.budget.solver import Minimum, fit_log_linear
from ropelens.text.rows import Rows
from ropelens.text.text import SINKS

MODELS = ("sink", "position", "content", "both")  # S, P, C and B

SCORES = ("weight", "information", "uniform", *MODELS)
"""Sums over rows: their number, and in nats sum_j A_ij log A_ij and sum_j A_ij log P_i(j)."""

RIDGE = 0.03  # weight of half the squared weights beside a sum over rows: nats of one row
TOLERANCE = 1e-4  # share of the information that sinks leave, which a fit may miss
CURVATURE_ROWS = 64  # rows whose scores by plane show how the likelihood curves in beta
CURVATURE_KEYS = 64  # keys of such a row
CURVATURE_AT = (0, 8, 24)  # evaluations of a fit at which that is computed


def log_weights(
    block: Block, weights: Float[Tensor, "kv_head group variable"], *, content: bool = True
) -> Float[Tensor, "batch kv_head group row key"]:
    """log P_i(j) + log Z_i of every key; models without kappa and tau have weights for less."""
    beta, sigma, kappa, tau = split(
        weights.to(block.q), block.planes.terms, block.call.key.shape[2]
    )
    scores, kind = block.buffer("model"), block.sink_kind
    of_sinks = _at(pad(sigma, (1, 0)), kind)
    if kappa.shape[-1]:
        kappa, at = kappa[:, :, None].expand(*scores.shape[:4], -1), block.offset[:, None, None]
        torch.gather(kappa, -1, at.expand_as(scores), out=scores)
        of_sinks = of_sinks + _at(tau, block.sink_bins[:, None, None]) * (kind > 0)
    elif not content:
        scores.zero_()
    if content:
        q = block.q_still * (block.call.scale * beta)[..., None, block.planes.term_of]
        products(q, block.k_still, out=scores, add=kappa.shape[-1] > 0)
    scores[..., block.sinks] += of_sinks
    return block.hide(scores)


def sums(
    block: Block,
    attention: Float[Tensor, "batch kv_head group row key"],
    *,
    offsets: bool = True,
) -> Float[Tensor, "kv_head group sum"]:
    """What the weights multiply in the log-likelihood of any attention, in float64.

    sum_j A_ij c~_ijf by plane, and the masses on sinks by kind, by offset, and on sinks by bin
    of offsets: sums over the weighted rows. With `offsets` those of squared masses follow, by
    offset and on sinks by bin.
    """
    weight = block.weight[:, None, None, :, None]
    read = (attention.flatten(2, 3) @ block.k_still).view_as(block.q)
    of_planes = (block.q_still * read * weight).sum(-2)
    total = [block.call.scale * block.planes.sum_coordinates(of_planes)]
    on_sinks = attention[..., block.sinks]
    kind = block.sink_kind.expand(*on_sinks.shape[:3], 1, -1)[..., 0, :]
    by_kind = on_sinks.new_zeros(*on_sinks.shape[:3], 1 + len(SINKS))
    total.append(by_kind.scatter_add_(-1, kind, (on_sinks * weight).sum(-2))[..., 1:])
    if offsets:
        context = block.call.key.shape[2]
        column = block.offset[:, None, None].expand_as(attention)
        at_offset = torch.gather(attention, -1, column, out=block.buffer("by offset"))
        if block.of_call.visible is not None:
            number = torch.arange(len(block.keys)).to(block.self_column)
            at_offset *= number <= block.self_column[:, None, None, :, None]
        on_sinks *= block.sink_kind > 0
        bins = block.sink_bins[:, None, None].expand_as(on_sinks).flatten(-2)
        for _ in ("masses", "squares"):
            by_offset = (weight.mT @ at_offset)[..., 0, :]
            by_bin = on_sinks.new_zeros(*on_sinks.shape[:3], len(offset_edges(context)) - 1)
            by_bin.scatter_add_(-1, bins, (on_sinks * weight).flatten(-2))
            total += [pad(by_offset, (0, context - by_offset.shape[-1])), by_bin]
            at_offset, on_sinks = at_offset.square_(), on_sinks.square_()
        if block.of_call.visible is not None:  # on keys ahead: rows sum to one
            total[2][..., 0] += block.weight.sum(-1)[:, None, None] - total[2].sum(-1)
    return torch.cat(total, dim=-1).to("cpu", torch.float64).sum(0)


@torch.no_grad()
def fit(rows: SampledCall, *, fold: int = 0) -> Float[Tensor, "model head variable"]:
    """The weights of S, P, C and B of every head, fitted to `rows`.

    Each model starts from those that it contains. Weights that a model does not have are 0. The
    ridge keeps weights finite that no row speaks of; with 64 rows of 8 sequences it costs less
    than 0.01 of the bits. Folds take other rows for their curvature. One block is in memory.
    """
    (kv_heads, group), context = rows.row_q.shape[1:3], rows.k.shape[2]
    terms, first = rows.planes.terms, rows.planes.terms + len(SINKS)
    size = first + context + len(offset_edges(context)) - 1
    rows, number = normalize_weights(rows)
    observed = torch.zeros(kv_heads, group, size).double()
    information = torch.zeros(kv_heads, group).double()
    for block in rows.blocks():
        information[block.heads] += block.weigh(block.information)
        observed[block.heads] += sums(block, block.attention)[..., :size]
    observed, information = observed.flatten(0, 1), information.flatten()
    table, ridge = OffsetRows.of(rows), RIDGE / number
    allowed = tolerance(information) / 10  # S and P cost little, and S may leave little
    fits = fit_offsets(observed[:, terms:], table, ridge=ridge, tolerance=allowed)
    allowed = tolerance(information + fits[0].value - table.count.log() @ table.weight)
    weights = observed.new_zeros(len(MODELS), *observed.shape)
    weights[:2, :, terms:] = torch.stack([model.point for model in fits])
    some, _ = normalize_weights(rows.with_rows(_some(rows.rows, fold)))
    cells = rows.weight.numel() * context * group
    together = max(1, BLOCK_ELEMENTS[rows.k.device.type] // 2 // cells)
    for begin in range(0, kv_heads, together):
        heads = slice(begin, min(begin + together, kv_heads))
        own = slice(heads.start * group, heads.stop * group)
        given = list(rows.blocks(heads)), list(some.blocks(heads)), observed[own]
        sink, position, content, both = weights[:, own]
        fitted = _fit_content(*given, sink[:, :first], ridge=ridge, tolerance=allowed[own])
        content[:, :first] = fitted.point
        # B starts from the better one, and half of what the other adds to S
        ahead = (fits[1].value[own] < fitted.value)[:, None]
        start = (torch.where(ahead, position, content) + position + content - sink) / 2
        both[:] = _fit_content(*given, start, ridge=ridge, tolerance=allowed[own]).point
    return weights


def _fit_content(
    blocks: list[Block],
    some: list[Block],
    observed: Float[Tensor, "head variable"],
    start: Float[Tensor, "head _"],
    *,
    ridge: float,
    tolerance: Float[Tensor, " head"],
) -> Minimum:
    """B, or C where the start ends with sigma; every evaluation makes all scores."""
    shape, has = blocks[0].q.shape[1:3], start.shape[1]
    first = blocks[0].planes.terms + len(SINKS)
    of_offsets = slice(first, first + blocks[0].call.key.shape[2])
    evaluation, factor = count(), start

    def expect(point: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal factor
        if next(evaluation) in CURVATURE_AT:
            joint = covariance(some, point.view(*shape, has)).flatten(0, 1)
            of_each = joint.diagonal(dim1=-2, dim2=-1)
            of_each += ridge + 1e-6 * of_each.amax(-1, keepdim=True)
            factor = torch.linalg.cholesky(joint)
        norm, total = torch.zeros(shape).double(), torch.zeros(*shape, 2 * has - first).double()
        members = active.view(shape).any(0).nonzero()[:, 0]
        weights = point.view(*shape, has)[:, members]
        for block in blocks:
            part = _members(block, members)
            modelled, log_norm = softmax(log_weights(part, weights))
            norm[:, members] += part.weigh(log_norm)
            total[:, members] += sums(part, modelled, offsets=has > first)
        expected, squares = total.flatten(0, 1).split((has, has - first), dim=-1)
        diagonal = expected.clone()
        diagonal[:, first:] -= squares
        return norm.flatten(), expected, diagonal

    def divide(values: Tensor, diagonal: Tensor) -> Tensor:
        of_planes = torch.cholesky_solve(values[:, :first, None], factor)[..., 0]
        return torch.cat([of_planes, values[:, first:] / diagonal[:, first:]], dim=-1)

    given: dict[str, Any] = {"ridge": ridge, "start": start, "tolerance": tolerance}
    return fit_log_linear(expect, observed[:, :has], smooth=of_offsets, divide=divide, **given)


def _members(block: Block, members: Int[Tensor, " member"]) -> Block:
    """The block of some members of each group of heads that read the same keys."""
    if len(members) == block.q.shape[2]:
        return block
    part = copy(block)
    part.q, part.q_still = block.q[:, :, members], block.q_still[:, :, members]
    if block.sink_kind.shape[2] > 1:
        part.sink_kind = block.sink_kind[:, :, members]
    return part


def covariance(
    blocks: list[Block], weights: Float[Tensor, "kv_head group variable"]
) -> Float[Tensor, "kv_head group first first"]:
    """How log Z curves in beta and sigma: the covariance under P of what they multiply.

    It is that of `CURVATURE_KEYS` keys a row, at equal steps of the running sum of P + U: so
    those that hold much of P are among them, each with its share of P over that of P + U.
    """
    first = blocks[0].planes.terms + len(SINKS)
    total = weights.new_zeros(*weights.shape[:2], first, first)
    for block in blocks:
        share, _ = softmax(log_weights(block, weights))
        seen = share > 0
        drawn = share + seen / seen.sum(-1, keepdim=True)
        running = drawn.cumsum(-1)
        steps = (torch.arange(CURVATURE_KEYS, device=share.device) + 0.5) / CURVATURE_KEYS
        key = torch.searchsorted(running, running[..., -1:] * steps)
        part = share.gather(-1, key) / drawn.gather(-1, key)
        part /= part.sum(-1, keepdim=True)
        features = _features(block, key)
        # about each row's mean, or rounding would leave more than a sharp head has
        features = features - part[..., None, :] @ features
        weighted = features * (part * block.weight[:, None, None, :, None])[..., None]
        product = weighted.flatten(3, 4).mT @ features.flatten(3, 4)
        total += product.to("cpu", torch.float64).sum(0)
    return total


def _features(
    block: Block, key: Int[Tensor, "batch kv_head group row drawn"]
) -> Float[Tensor, "batch kv_head group row drawn first"]:
    """What beta and sigma multiply at some keys of each row."""
    k = block.k_still[:, :, None, None].expand(*key.shape[:4], -1, -1)
    k = k.gather(-2, key[..., None].expand(*key.shape, k.shape[-1]))
    by_plane = block.planes.sum_coordinates(
        (block.call.scale * block.q_still)[..., None, :] * k
    )
    kind = key.new_zeros(*key.shape[:3], len(block.keys))
    kind[..., block.sinks] = block.sink_kind[..., 0, :].expand(*key.shape[:3], -1)
    kind = one_hot(kind.gather(-1, key.flatten(-2)).view_as(key), 1 + len(SINKS))
    return torch.cat([by_plane, kind[..., 1:].to(by_plane.dtype)], dim=-1)


@torch.no_grad()
def score(
    rows: SampledCall,
    weights: Float[Tensor, "model head variable"],
    sets: Bool[Tensor, "batch set position"] | None = None,
) -> Float[Tensor, "batch set head score"]:
    """The `SCORES` of each sequence under models of these weights, over rows of each set.

    By default there is one set, of all rows.
    """
    batch, heads, context = *rows.q.shape[:2], rows.k.shape[2]
    sets = torch.ones(batch, 1, context, dtype=torch.bool) if sets is None else sets
    scores = torch.zeros(batch, sets.shape[1], heads, len(SCORES), dtype=torch.float64)
    weights = weights.unflatten(1, (rows.k.shape[1], -1))
    first = rows.planes.terms + len(SINKS)
    for block in rows.blocks():
        log_keys = block.log_keys.expand(block.q.shape[:4])
        likelihoods = [torch.ones_like(log_keys), block.information - log_keys, -log_keys]
        for name, model in zip(MODELS, weights[:, block.heads], strict=True):
            has = model if name in ("position", "both") else model[..., :first]
            modelled = log_weights(block, has, content=name in ("content", "both"))
            picked = torch.linalg.vecdot(block.attention, modelled)
            likelihoods.append(picked - softmax(modelled)[1])
        by_row = torch.stack(likelihoods, dim=-1)
        at = block.position[:, None].expand(*sets.shape[:2], -1)
        weight = sets.gather(2, at.to(sets.device)).to(block.weight) * block.weight[:, None]
        sums = (weight[:, :, None, None, None] @ by_row[:, None])[..., 0, :]
        scores[:, :, block.query_heads] += sums.flatten(2, 3).to("cpu", torch.float64)
    return scores


def gains(scores: Float[Tensor, "*head score"]) -> dict[str, Float[Tensor, "*head"]]:
    """Bits per row over uniform attention, by the names of `GAINS`; NaN without rows."""
    weight, information, uniform, *models = scores.unbind(-1)
    nats = zip(GAINS, (information, *models), strict=True)
    return {name: (one - uniform) / (weight * math.log(2)) for name, one in nats}


def normalize_weights(rows: SampledCall) -> tuple[SampledCall, int]:
    """The rows with weights that sum to one, and their number, at least 1."""
    weight = rows.rows.weight.double()
    mean = (weight / weight.sum().clamp(min=1e-300)).float()
    count = max(1, int((weight > 0).sum()))
    return rows.with_rows(replace(rows.rows, weight=mean)), count


def tolerance(information: Float[Tensor, "*head"]) -> Float[Tensor, "*head"]:
    """How many nats a fit may miss of so many that are to be explained."""
    return TOLERANCE * information + 1e-6


def _at(
    x: Float[Tensor, "kv_head group place"],
    places: Int[Tensor, "shared shared_kv_head shared_group row key"],
) -> Float[Tensor, "shared kv_head group row key"]:
    """The entry of each head at the place of each row and key."""
    index = places.expand(-1, *x.shape[:2], -1, -1)
    x = x.expand(len(places), *x.shape)
    return x.gather(-1, index.flatten(-2)).view(index.shape)


def _some(rows: Rows, fold: int) -> Rows:
    """A few rows of each sequence, spread over all, not the same of each."""
    batch, have = rows.position.shape
    count = min(-(-CURVATURE_ROWS // batch), have)
    step = torch.arange(count) * have // count
    shift = (2 * torch.arange(batch) + fold) % max(1, have // count)
    pick = step + shift[:, None]
    position, weight = rows.position.gather(1, pick), rows.weight.gather(1, pick)
    return replace(rows, position=position, weight=weight, dense=False)
