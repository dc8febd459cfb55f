"""The attention budget's model of a head: a conditional logit of the keys that a row picks.

    log P_i(j) = sigma [j is a sink] + kappa(i - j) + tau(i - j) [j is a sink]
                 + sum_f beta_f c~_ijf - log Z_i
    c~_ijf     = s Re(q~_if conj(k~_jf)), the score of plane f with the rotation removed

The log-likelihood sum_j A_ij log P_i(j) is concave in the weights. The gradient is the
difference of the same sums under A and under P: the mass on sinks, the mass by offset, and

    sum_j A_ij c~_ijf = s Re(q~_if conj(sum_j A_ij k~_jf))

so that an evaluation costs two matrix products, as attention does. Four nested models:

    S  sigma                P  sigma, kappa, tau
    C  sigma, beta          B  all

Each kind of sink has its own sigma. kappa has a weight for every offset, and tau has a weight
for each bin of offsets. If the model has a soft-cap, c~ is the score before it. The unrotated
coordinates of a head are one more plane.
"""

import math
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ropelens.attention.block import Block, ByKey, blocks_of
from ropelens.attention.fast_products import BLOCK_ELEMENTS, products, softmax
from ropelens.attention.formulas import GAINS, information
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges
from ropelens.budget.offsets import OffsetRows, fit_offsets, split_weights
from ropelens.budget.solver import Minimum, fit_log_linear
from ropelens.text.rows import Rows
from ropelens.text.text import SINKS

MODELS = ("sink", "position", "content", "both")  # S, P, C and B

SCORES = ("weight", "information", "uniform", *MODELS)
"""Sums over rows: the weight, and in nats sum_j A_ij log A_ij and sum_j A_ij log P_i(j)."""

RIDGE = 0.03  # strength of the ridge, in units of the log-likelihood of one row
TOLERANCE = 1e-4  # error that is allowed, as a share of the information that sinks leave
CURVATURE_ROWS = 64  # rows whose scores by plane give the curvature of the likelihood in beta
CURVATURE_KEYS = 64  # keys of such a row
CURVATURE_EVALUATIONS = (0, 8, 24)  # evaluations of a fit that compute this curvature


ByVariable = Float[Tensor, "kv_head group variable"]


def log_weights(block: Block, weights: ByVariable, *, content: bool = True) -> ByKey:
    """log P_i(j) + log Z_i of every key. `weights` of S and C end before kappa and tau."""
    beta, sigma, kappa, tau = split_weights(
        weights.to(block.q), block.planes.terms, block.call.key.shape[2]
    )
    scores, kind = block.buffer("model"), block.sink_kind
    of_sinks = _look_up_keys(pad(sigma, (1, 0)), kind)
    if kappa.shape[-1]:
        kappa = kappa[:, :, None].expand(*scores.shape[:4], -1)
        torch.gather(kappa, -1, block.offset[:, None, None].expand_as(scores), out=scores)
        tau = _look_up_keys(tau, block.sink_bins[:, None, None])
        of_sinks = of_sinks + tau * (kind > 0)
    elif not content:
        scores.zero_()
    if content:
        q = block.q_still * (block.call.scale * beta)[..., None, block.planes.term_of]
        products(q, block.k_still, out=scores, add=kappa.shape[-1] > 0)
    scores[..., block.sinks] += of_sinks
    return block.hide(scores)


def sufficient_statistics(
    block: Block, attention: ByKey, *, offsets: bool = True
) -> Float[Tensor, "kv_head group sum"]:
    """The sums that the weights multiply in the log-likelihood of any attention, in float64.

    They are sums over the weighted rows: sum_j A_ij c~_ijf by plane, and the masses on sinks by
    kind, by offset, and on sinks by bin of offsets. With `offsets`, the sums of squared masses
    by offset and on sinks by bin follow.
    """
    weight = block.weight[:, None, None, :, None]
    read = (attention.flatten(2, 3) @ block.k_still).view_as(block.q)
    by_coordinate = (block.q_still * read * weight).sum(-2)
    total = [block.call.scale * block.planes.sum_coordinates(by_coordinate)]
    on_sinks = attention[..., block.sinks]
    kind = block.sink_kind.expand(*on_sinks.shape[:3], 1, -1)[..., 0, :]
    by_kind = on_sinks.new_zeros(*on_sinks.shape[:3], 1 + len(SINKS))
    total.append(by_kind.scatter_add_(-1, kind, (on_sinks * weight).sum(-2))[..., 1:])
    if offsets:
        context = block.call.key.shape[2]
        at_offset = block.by_offset(attention)
        on_sinks *= block.sink_kind > 0
        bins = block.sink_bins[:, None, None].expand_as(on_sinks).flatten(-2)
        for _ in ("masses", "squares"):
            by_offset = (weight.mT @ at_offset)[..., 0, :]
            by_bin = on_sinks.new_zeros(*on_sinks.shape[:3], len(offset_edges(context)) - 1)
            by_bin.scatter_add_(-1, bins, (on_sinks * weight).flatten(-2))
            total += [pad(by_offset, (0, context - by_offset.shape[-1])), by_bin]
            at_offset, on_sinks = at_offset.square_(), on_sinks.square_()
        if block.visibility.mask is not None:  # keys ahead get the rest of the attention
            total[2][..., 0] += block.weight.sum(-1)[:, None, None] - total[2].sum(-1)
    return torch.cat(total, dim=-1).to("cpu", torch.float64).sum(0)


@torch.no_grad()
def fit_models(sampled: SampledCall, *, fold: int = 0) -> Float[Tensor, "model head variable"]:
    """The weights of S, P, C and B of every head, fitted to the rows of `sampled`.

    Each model starts from the models that it contains, and has weight 0 for variables of other
    models. The ridge keeps a weight finite if no row constrains it; for 64 rows of 8 sequences
    it costs less than 0.01 of the bits. The folds use different rows for their curvature.
    """
    (kv_heads, group), context = sampled.row_q.shape[1:3], sampled.k.shape[2]
    terms, first = sampled.planes.terms, sampled.planes.terms + len(SINKS)
    size = first + context + len(offset_edges(context)) - 1
    sampled, number = normalize_weights(sampled)
    observed = torch.zeros(kv_heads, group, size).double()
    explained = torch.zeros(kv_heads, group).double()
    for block in blocks_of(sampled):
        explained[block.heads] += block.weigh(information(block))
        observed[block.heads] += sufficient_statistics(block, block.attention)[..., :size]
    observed, explained = observed.flatten(0, 1), explained.flatten()
    table, ridge = OffsetRows.of(sampled), RIDGE / number
    tolerance = fit_tolerance(explained) / 10  # S and P cost little, and S may leave little
    fits = fit_offsets(observed[:, terms:], table, ridge=ridge, tolerance=tolerance)
    tolerance = fit_tolerance(explained + fits[0].value - table.count.log() @ table.weight)
    weights = observed.new_zeros(len(MODELS), *observed.shape)
    weights[:2, :, terms:] = torch.stack([model.point for model in fits])
    few, _ = normalize_weights(sampled.with_rows(_curvature_rows(sampled.rows, fold)))
    cells = sampled.weight.numel() * context * group
    together = max(1, BLOCK_ELEMENTS[sampled.k.device.type] // 2 // cells)
    for begin in range(0, kv_heads, together):
        heads = slice(begin, min(begin + together, kv_heads))
        chosen = slice(heads.start * group, heads.stop * group)
        data = list(blocks_of(sampled, heads)), list(blocks_of(few, heads)), observed[chosen]
        options: dict[str, Any] = {"ridge": ridge, "tolerance": tolerance[chosen]}
        sink, position, content, both = weights[:, chosen]
        fitted = _fit_content(*data, sink[:, :first], **options)
        content[:, :first] = fitted.point
        # Start B from the better of P and C, plus half of what the worse model adds to S.
        ahead = (fits[1].value[chosen] < fitted.value)[:, None]
        start = (torch.where(ahead, position, content) + position + content - sink) / 2
        both[:] = _fit_content(*data, start, **options).point
    return weights


def _fit_content(
    blocks: list[Block],
    few: list[Block],
    observed: Float[Tensor, "head variable"],
    start: Float[Tensor, "head _"],
    **options: Any,
) -> Minimum:
    """Fit B, or C if `start` ends with sigma. The rows in `few` give the curvature."""
    shape, size = blocks[0].q.shape[1:3], start.shape[1]
    first = blocks[0].planes.terms + len(SINKS)
    smooth = slice(first, first + blocks[0].call.key.shape[2])
    evaluation, factor = count(), start

    def log_z_and_moments(point: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal factor
        if next(evaluation) in CURVATURE_EVALUATIONS:
            joint = covariance(few, point.view(*shape, size)).flatten(0, 1)
            factor = _cholesky(joint, options["ridge"])
        norm = torch.zeros(shape).double()
        total = torch.zeros(*shape, 2 * size - first).double()
        members = active.view(shape).any(0).nonzero()[:, 0]
        weights = point.view(*shape, size)[:, members]
        for block in blocks:
            part = _members(block, members)
            modelled, log_norm = softmax(log_weights(part, weights))
            norm[:, members] += part.weigh(log_norm)
            total[:, members] += sufficient_statistics(part, modelled, offsets=size > first)
        expected, squares = total.flatten(0, 1).split((size, size - first), dim=-1)
        diagonal = expected.clone()
        diagonal[:, first:] -= squares
        return norm.flatten(), expected, diagonal

    def divide(values: Tensor, diagonal: Tensor) -> Tensor:
        beta_and_sigma = torch.cholesky_solve(values[:, :first, None], factor)[..., 0]
        return torch.cat([beta_and_sigma, values[:, first:] / diagonal[:, first:]], dim=-1)

    options = {**options, "start": start, "smooth": smooth, "divide": divide}
    return fit_log_linear(log_z_and_moments, observed[:, :size], **options)


def _cholesky(
    curvature: Float[Tensor, "problem first first"], ridge: float
) -> Float[Tensor, "problem first first"]:
    """Cholesky factor of each curvature, or of its diagonal if it is indefinite by rounding."""
    variance = curvature.diagonal(dim1=-2, dim2=-1)
    if not variance.isfinite().all():
        raise torch.linalg.LinAlgError
    variance += ridge + 1e-6 * variance.amax(-1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(curvature)
    diagonal = torch.diag_embed(variance.clamp(min=ridge).sqrt())
    return torch.where(failed[:, None, None] > 0, diagonal, factor)


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
    blocks: list[Block], weights: ByVariable
) -> Float[Tensor, "kv_head group first first"]:
    """Hessian of log Z in beta and sigma: the covariance under P of what these multiply.

    It is computed from `CURVATURE_KEYS` keys of each row, at equal steps of the running sum of
    P + U. These keys include the keys with a large P. Each key is weighted by P / (P + U).
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
        # Subtract row means, or rounding could exceed the variance of a sharp head.
        features = features - part[..., None, :] @ features
        weighted = features * (part * block.weight[:, None, None, :, None])[..., None]
        product = weighted.flatten(3, 4).mT @ features.flatten(3, 4)
        total += product.to("cpu", torch.float64).sum(0)
    return total


def _features(
    block: Block, key: Int[Tensor, "batch kv_head group row drawn"]
) -> Float[Tensor, "batch kv_head group row drawn first"]:
    k = block.k_still[:, :, None, None].expand(*key.shape[:4], -1, -1)
    k = k.gather(-2, key[..., None].expand(*key.shape, k.shape[-1]))
    q = (block.call.scale * block.q_still)[..., None, :]
    by_plane = block.planes.sum_coordinates(q * k)
    kind = key.new_zeros(*key.shape[:3], len(block.keys))
    kind[..., block.sinks] = block.sink_kind[..., 0, :].expand(*key.shape[:3], -1)
    kind = one_hot(kind.gather(-1, key.flatten(-2)).view_as(key), 1 + len(SINKS))
    return torch.cat([by_plane, kind[..., 1:].to(by_plane.dtype)], dim=-1)


@torch.no_grad()
def score_models(
    sampled: SampledCall,
    weights: Float[Tensor, "model head variable"],
    sets: Bool[Tensor, "batch set position"] | None = None,
) -> Float[Tensor, "batch set head score"]:
    """The `SCORES` of each sequence under models with these weights, over the rows of each set.

    By default there is one set, which has all rows.
    """
    batch, heads, context = *sampled.q.shape[:2], sampled.k.shape[2]
    sets = torch.ones(batch, 1, context, dtype=torch.bool) if sets is None else sets
    scores = torch.zeros(batch, sets.shape[1], heads, len(SCORES), dtype=torch.float64)
    weights = weights.unflatten(1, (sampled.k.shape[1], -1))
    first = sampled.planes.terms + len(SINKS)
    for block in blocks_of(sampled):
        log_keys = block.count.log().expand(block.q.shape[:4])
        likelihoods = [torch.ones_like(log_keys), information(block) - log_keys, -log_keys]
        for name, model in zip(MODELS, weights[:, block.heads], strict=True):
            variables = model if name in ("position", "both") else model[..., :first]
            modelled = log_weights(block, variables, content=name in ("content", "both"))
            likelihoods.append(block.expect(modelled) - softmax(modelled)[1])
        by_row = torch.stack(likelihoods, dim=-1)
        scores[:, :, block.query_heads] += block.sum_over_sets(by_row, sets)
    return scores


def gains(scores: Float[Tensor, "*head score"]) -> dict[str, Float[Tensor, "*head"]]:
    """Bits per row over uniform attention, by the names of `GAINS`; NaN without rows."""
    weight, total, uniform, *models = scores[..., : len(SCORES)].unbind(-1)
    nats = zip(GAINS, (total, *models), strict=True)
    return {name: (gain - uniform) / (weight * math.log(2)) for name, gain in nats}


def normalize_weights(sampled: SampledCall) -> tuple[SampledCall, int]:
    """The rows with weights that sum to one, and the number of rows, at least 1."""
    weight = sampled.rows.weight.double()
    mean = (weight / weight.sum().clamp(min=1e-300)).float()
    number = max(1, int((weight > 0).sum()))
    return sampled.with_rows(replace(sampled.rows, weight=mean)), number


def fit_tolerance(nats: Float[Tensor, "*head"]) -> Float[Tensor, "*head"]:
    """Convergence tolerance in nats of a fit that should explain `nats`."""
    return TOLERANCE * nats + 1e-6


def _look_up_keys(
    x: Float[Tensor, "kv_head group entry"],
    index: Int[Tensor, "shared shared_kv_head shared_group row key"],
) -> Float[Tensor, "shared kv_head group row key"]:
    index = index.expand(-1, *x.shape[:2], -1, -1)
    x = x.expand(len(index), *x.shape)
    return x.gather(-1, index.flatten(-2)).view(index.shape)


def _curvature_rows(rows: Rows, fold: int) -> Rows:
    """A few rows of each sequence, spread evenly and different for each sequence."""
    batch, have = rows.position.shape
    number = min(-(-CURVATURE_ROWS // batch), have)
    step = torch.arange(number) * have // number
    shift = (2 * torch.arange(batch) + fold) % max(1, have // number)
    pick = step + shift[:, None]
    position, weight = rows.position.gather(1, pick), rows.weight.gather(1, pick)
    return replace(rows, position=position, weight=weight, dense=False)
