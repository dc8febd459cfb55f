"""Fits of the models S, P, C and B of every head to the rows of both folds.

S and P need no scores (see offsets.py). C and B compute the scores of all keys in every
evaluation. All heads and folds are one batch of problems.
"""

from copy import copy
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import count

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import Block, blocks_of, sparse_rows
from ropelens.attention.fast_products import BLOCK_ELEMENTS, softmax
from ropelens.attention.formulas import information
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges
from ropelens.budget.logit import (
    MODELS,
    RIDGE,
    HeadWeights,
    fit_tolerance,
    head_weights,
    log_weights,
    normalize_weights,
    sum_folds,
    sum_heads,
)
from ropelens.budget.offsets import OffsetRows, fit_offsets
from ropelens.budget.solver import ByVariable, Minimum, Moments, fit_log_linear
from ropelens.caches import kept, on_device
from ropelens.text.rows import Rows
from ropelens.text.text import SINKS

CURVATURE_ROWS = (
    64  # rows whose scores by plane give the curvature of the likelihood in beta
)
CURVATURE_KEYS = 64  # keys of such a row
CURVATURE_EVALUATIONS = (0, 8, 24)  # evaluations of a fit that compute this curvature


@torch.no_grad()
def fit_models(
    sampled: SampledCall, folds: int = 1
) -> Float[Tensor, "model fold head variable"]:
    """The weights of S, P, C and B of every head, fitted to the rows of each fold.

    The sequences belong to the folds in turn. Each model starts from the models that it
    contains, and has weight 0 for variables of other models. The ridge keeps a weight finite if
    no row constrains it; for 64 rows of 8 sequences it costs less than 0.01 of the bits.
    """
    (kv_heads, group), context = sampled.row_q.shape[1:3], sampled.k.shape[2]
    terms, first = sampled.planes.terms, sampled.planes.terms + len(SINKS)
    size = first + context + len(offset_edges(context)) - 1
    sampled, number = normalize_weights(sampled, folds)
    rows = ((x.heads, x, information(x), x.attention) for x in blocks_of(sampled))
    sums = sum_heads(sampled, rows, sampled.row_q.shape[:3], folds=folds).flatten(0, 2)
    explained, observed = sums[:, 0], sums[:, 1:]
    table = OffsetRows.of(sampled, folds=folds)
    ridge = (RIDGE / number).to(observed.device).repeat_interleave(kv_heads * group)
    tolerance = (
        fit_tolerance(explained) / 10
    )  # S and P cost little, and S may leave little
    sink, position = fit_offsets(
        observed[:, terms:], table, ridge=ridge, tolerance=tolerance
    )
    uniform = table.uniform.expand(folds, kv_heads * group).flatten()
    tolerance = fit_tolerance(explained + sink.value - uniform)
    fit = partial(
        _fit_content, _parts_of(sampled, folds), ridge=ridge, tolerance=tolerance
    )
    start = pad(sink.point[:, : len(SINKS)], (terms, 0))
    content = fit(observed[:, :first], start, slice(0, 0))
    points = [pad(model.point, (terms, 0)) for model in (sink, position)]
    points.append(pad(content.point, (0, size - first)))
    # Start B from the better of P and C, plus half of the step from S to the other model.
    ahead = (position.value < content.value)[:, None]
    start = (
        torch.where(ahead, points[1], points[2]) + points[1] + points[2] - points[0]
    ) / 2
    points.append(fit(observed, start, slice(first, first + context)).point)
    return torch.stack(points).view(len(MODELS), folds, -1, size)


def _fit_content(
    parts: list["_Part"],
    observed: ByVariable,
    start: ByVariable,
    offsets: slice,
    *,
    ridge: Float[Tensor, " problem"],
    tolerance: Float[Tensor, " problem"],
) -> Minimum:
    """Fit B, or C if no variables belong to `offsets`. Problems are heads by fold."""
    number, size = start.shape
    model = "both" if offsets.stop else "content"
    first, evaluations = offsets.start or size, count()

    def evaluate(point: Tensor, problems: Tensor, alive: Tensor) -> Moments:
        nonlocal parts
        curvature = next(evaluations) in CURVATURE_EVALUATIONS
        weights = start.new_zeros(number, size).index_copy_(0, problems, point)
        moments = start.new_zeros(number, 1 + size + (size - first) * curvature)
        joint = start.new_zeros(number * curvature, first, first)
        parts = [part for part in (part.of(alive) for part in parts) if part.blocks]
        for part in parts:
            index = on_device(part.problems, start.device)
            of_heads = head_weights(weights[index], part.blocks[0], model)
            moments.index_copy_(
                0, index.flatten(), part.moments(of_heads, squares=curvature)
            )
            if curvature:
                joint.index_add_(0, index.flatten(), part.covariance(of_heads))
        log_z, expected, squares = moments[problems].tensor_split((1, 1 + size), dim=-1)
        if not curvature:
            return log_z[:, 0], expected, ()
        diagonal = expected.clone()
        diagonal[:, first:] -= squares
        return (
            log_z[:, 0],
            expected,
            (diagonal, _cholesky(joint[problems], ridge[problems])),
        )

    fit = partial(fit_log_linear, evaluate, observed, start=start, smooth=offsets)
    return fit(ridge=ridge, tolerance=tolerance, divide=_divide)


def _divide(
    vectors: Float[Tensor, "problem any variable"],
    diagonal: Float[Tensor, "problem variable"],
    factor: Float[Tensor, "problem first first"],
) -> Float[Tensor, "problem any variable"]:
    first = factor.shape[-1]
    beta_and_sigma = torch.cholesky_solve(vectors[..., :first].mT, factor).mT
    return torch.cat(
        [beta_and_sigma, vectors[..., first:] / diagonal[:, None, first:]], -1
    )


@dataclass(frozen=True)
class _Part:
    """Blocks of some heads of some folds, and blocks of the rows that give the curvature."""

    problems: Int[Tensor, "fold kv_head group"]
    blocks: list[Block]
    few: list[Block]

    def of(self, alive: Int[Tensor, " problem"]) -> "_Part":
        """The part without most of the heads that have no problem in `alive`."""
        is_alive = torch.isin(self.problems, alive)
        heads, members = is_alive.any(2).any(0), is_alive.any(0).any(0)
        have, need = is_alive[0].numel(), int(heads.sum() * members.sum())
        if need == have or (
            need and len(heads) > 1 and 2 * need > have
        ):  # keys are copied
            return self
        if not need:
            return _Part(self.problems, [], [])
        device = self.blocks[0].q.device
        index = [on_device(x.nonzero()[:, 0], device) for x in (heads, members)]
        blocks, few = (
            [_of_heads(x, *index) for x in y] for y in (self.blocks, self.few)
        )
        return _Part(self.problems[:, heads][:, :, members], blocks, few)

    def moments(
        self, weights: HeadWeights, *, squares: bool
    ) -> Float[Tensor, "problem moment"]:
        """log Z, the expected sums, and with `squares` the expected squares by offset."""
        model = ((x, *softmax(log_weights(x, weights))) for x in self.blocks)
        rows = ((slice(None), x, log_norm, modelled) for x, modelled, log_norm in model)
        sampled, shape = self.blocks[0].sampled, self.blocks[0].q.shape[:3]
        with_offsets = weights.kappa is not None
        options = {"offsets": with_offsets, "squares": squares and with_offsets}
        return sum_heads(
            sampled, rows, shape, folds=len(self.problems), **options
        ).flatten(0, 2)

    def covariance(self, weights: HeadWeights) -> Float[Tensor, "problem first first"]:
        blocks = (
            sum_folds(covariance(x, weights), len(self.problems)) for x in self.few
        )
        return reduce(torch.add, blocks).flatten(0, 2)


def _parts_of(sampled: SampledCall, folds: int) -> list[_Part]:
    """All folds together on a GPU; on a CPU, parts that fit into its caches."""
    (kv_heads, group), device, parts = (
        sampled.row_q.shape[1:3],
        sampled.k.device.type,
        [],
    )
    step = folds if device == "cpu" else 1
    few = sampled.with_rows(_curvature_rows(sampled.rows, folds))
    few, _ = normalize_weights(few, folds)
    problems = torch.arange(folds * kv_heads * group).view(-1, kv_heads, group)
    for own in (slice(fold, None, step) for fold in range(step)):
        some = [x.of_sequences(own) for x in (sampled, few)]
        batch, count = some[0].weight.shape
        cells = batch * group * sparse_rows(count, device) * sampled.k.shape[2]
        together = max(1, BLOCK_ELEMENTS[device] // 2 // cells)
        for begin in range(0, kv_heads, together):
            heads = slice(begin, min(begin + together, kv_heads))
            blocks, of_few = (list(blocks_of(x, heads)) for x in some)
            parts.append(_Part(problems[own, heads], blocks, of_few))
    return parts


def _of_heads(block: Block, heads: Tensor, members: Tensor) -> Block:
    """The part of a block that has some key-value heads, and some members of their groups."""
    part = copy(block)
    vars(part).pop("sink_variables", None)
    part.q, part.q_still = (
        x[:, heads][:, :, members] for x in (block.q, block.q_still)
    )
    if len(heads) < block.q.shape[1]:
        part.k_still = block.k_still[:, heads]
    if block.sampled.sinks.shape[1] > 1:
        part.sink_kind = block.sink_kind[:, heads][:, :, members]
    return part


def _cholesky(
    curvature: Float[Tensor, "problem first first"], ridge: Float[Tensor, " problem"]
) -> Float[Tensor, "problem first first"]:
    """Cholesky factor of each curvature, or its diagonal if rounding made it indefinite."""
    variance = curvature.diagonal(dim1=-2, dim2=-1)
    variance += ridge[:, None] + 1e-6 * variance.amax(-1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex(curvature)
    diagonal = torch.diag_embed(variance.maximum(ridge[:, None]).sqrt())
    infinite = 0 * variance.sum(-1)[:, None, None]  # NaN, which ends the fit
    return torch.where(failed[:, None, None] > 0, diagonal, factor) + infinite


def covariance(
    block: Block, weights: HeadWeights
) -> Float[Tensor, "batch kv_head group first first"]:
    """Hessian of log Z in beta and sigma: the covariance under P of what these multiply.

    It is computed from `CURVATURE_KEYS` keys of each row, at equal steps of the running sum of
    P + U. These keys include the keys with a large P. Each key is weighted by P / (P + U).
    """
    share, _ = softmax(log_weights(block, weights))
    seen = share > 0
    drawn = share + seen / seen.sum(-1, keepdim=True)
    running = drawn.cumsum(-1)
    steps = (torch.arange(CURVATURE_KEYS, device=share.device) + 0.5) / CURVATURE_KEYS
    key = torch.searchsorted(running, running[..., -1:] * steps)
    key.clamp_(max=len(block.keys) - 1)  # NaN ends the fit
    part = share.gather(-1, key) / drawn.gather(-1, key)
    part /= part.sum(-1, keepdim=True)
    features = _features(block, key)
    # Subtract row means, or rounding could exceed the variance of a sharp head.
    features -= part[..., None, :] @ features
    weighted = features * (part * block.weight[:, None, None, :, None])[..., None]
    return (weighted.flatten(3, 4).mT @ features.flatten(3, 4)).double()


def _features(
    block: Block, key: Int[Tensor, "batch kv_head group row drawn"]
) -> Float[Tensor, "batch kv_head group row drawn first"]:
    batch, kv_heads, keys, coordinates = block.k_still.shape
    head = torch.arange(batch * kv_heads, device=key.device).view(
        batch, kv_heads, 1, 1, 1
    )
    k = block.k_still.reshape(-1, coordinates).index_select(
        0, (key + head * keys).flatten()
    )
    q = (block.call.scale * block.q_still)[..., None, :]
    by_plane = block.planes.sum_coordinates(q * k.view(*key.shape, coordinates))
    kind = key.new_zeros(*key.shape[:3], keys)
    kind[..., block.sinks] = block.sink_kind[..., 0, :].expand(*key.shape[:3], -1)
    kind = kind.gather(-1, key.flatten(-2)).view(*key.shape, 1)
    kinds = torch.arange(1, 1 + len(SINKS), device=key.device)
    return torch.cat([by_plane, (kind == kinds).to(by_plane.dtype)], dim=-1)


@kept()
def _curvature_rows(rows: Rows, folds: int) -> Rows:
    """A few rows of each sequence, spread evenly and different for each sequence."""
    batch, have = rows.position.shape
    number = min(-(-CURVATURE_ROWS * folds // batch), have)
    step, sequence = torch.arange(number) * have // number, torch.arange(batch)
    shift = (2 * (sequence // folds) + sequence % folds) % max(1, have // number)
    pick = step + shift[:, None]
    position, weight = rows.position.gather(1, pick), rows.weight.gather(1, pick)
    return replace(rows, position=position, weight=weight, dense=False)
