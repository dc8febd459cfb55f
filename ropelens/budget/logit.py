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
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import Block, ByKey, ByRow, blocks_of
from ropelens.attention.fast_products import HIDDEN, products, softmax
from ropelens.attention.formulas import GAINS
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges
from ropelens.budget.offsets import split_weights
from ropelens.caches import kept, on_device
from ropelens.text.rows import Rows
from ropelens.text.text import SINKS

MODELS = ("sink", "position", "content", "both")  # S, P, C and B

SCORES = ("weight", "information", "uniform", *MODELS)
"""Sums over rows: the weight, and in nats sum_j A_ij log A_ij and sum_j A_ij log P_i(j)."""

RIDGE = 0.03  # strength of the ridge, in units of the log-likelihood of one row
TOLERANCE = (
    5e-4  # error that a step promises to mend, as a share of the information left by S
)


class HeadWeights(NamedTuple):
    """The weights of a model for some heads, in the order in which blocks use them.

    `beta` [fold, kv_head, group, 1, coordinate] has the scale; it is None without content.
    `of_sinks` has 0, sigma by kind, and tau by bin. `kappa` begins with the farthest offset and
    ends with offsets of keys ahead of their row; it is None for S and C. Sequences belong to
    the folds in turn.
    """

    beta: Tensor | None
    of_sinks: Float[Tensor, "fold kv_head group kind_or_bin"]
    kappa: Float[Tensor, "fold kv_head group column"] | None


def head_weights(
    weights: Float[Tensor, "fold kv_head group variable"], block: Block, model: str
) -> HeadWeights:
    """The weights of a model for the heads of a block; a model ignores variables of others."""
    context, planes = block.call.key.shape[2], block.planes
    beta, sigma, kappa, tau = split_weights(weights.to(block.q), planes.terms, context)
    by_coordinate = None
    if model in ("content", "both"):
        by_coordinate = planes.by_coordinate(block.call.scale * beta)[..., None, :]
    if model in ("sink", "content"):
        of_sinks = pad(sigma, (1, len(offset_edges(context)) - 1))
        return HeadWeights(by_coordinate, of_sinks, None)
    masked = block.visibility.mask is not None
    ahead = kappa[..., :1] if masked else torch.full_like(kappa[..., :1], HIDDEN)
    kappa = torch.cat([kappa.flip(-1), ahead.expand_as(kappa)], dim=-1)
    return HeadWeights(
        by_coordinate, torch.cat([pad(sigma, (1, 0)), tau], dim=-1), kappa
    )


def log_weights(block: Block, weights: HeadWeights) -> ByKey:
    """log P_i(j) + log Z_i of every key."""
    scores, hidden = block.buffer("model"), False
    if weights.kappa is not None:
        block.from_offsets(weights.kappa, out=scores)
        hidden = block.sees_all_behind
    elif weights.beta is None:
        scores.zero_()
    if weights.beta is not None:
        q = (
            block.q_still.unflatten(0, (-1, len(weights.beta))) * weights.beta
        ).flatten(0, 1)
        products(q, block.k_still, out=scores, add=weights.kappa is not None)
    of_sinks, folds = weights.of_sinks, len(weights.of_sinks)
    if folds < len(scores):
        of_sinks = of_sinks.repeat(len(scores) // folds, 1, 1, 1)
    of_sinks = of_sinks.gather(-1, block.sink_variables)
    of_sinks = of_sinks.view(*scores.shape[:4], -1, 2).sum(-1)
    scores.index_add_(-1, block.sinks, of_sinks)
    return scores if hidden else block.hide(scores)


def sum_heads(
    sampled: SampledCall,
    rows: Iterable[tuple[slice, Block, ByRow, ByKey]],
    shape: tuple[int, ...],
    *,
    folds: int,
    offsets: bool = True,
    squares: bool = False,
) -> Float[Tensor, "fold kv_head group sum"]:
    """The sums that the weights multiply in the log-likelihood of an attention of some heads.

    `rows` have the place of their heads in `shape` [batch, kv_head, group], the block, a value
    of each row, and the attention. The result has the sums over the weighted rows of each fold
    side by side, in float64: the value, sum_j A_ij c~_ijf by plane, and the masses on sinks by
    kind, by offset (with `offsets`), and on sinks by bin of offsets. With `squares`, the sums
    of squared masses by offset and on sinks by bin follow.
    """
    context, zeros, powers = sampled.k.shape[2], sampled.k.new_zeros, 1 + squares
    values = zeros(shape, dtype=torch.float64)
    by_coordinate = zeros(*shape, sampled.k.shape[3])
    on_sinks = zeros(powers, *shape, len(SINKS) + len(offset_edges(context)))
    by_offset = zeros(powers, *shape, context * offsets)
    for heads, block, value, attention in rows:
        values[:, heads] += (value * block.weight[:, None, None]).sum(-1).double()
        weight = block.weight[:, None, None, None]
        read = (attention.flatten(2, 3) @ block.k_still).view_as(block.q)
        by_coordinate[:, heads] += (weight @ (block.q_still * read))[..., 0, :]
        at_sinks = attention.index_select(-1, block.sinks)
        at_offset = block.by_offset(attention) if offsets else attention
        for power in range(powers):
            if power:
                at_sinks, at_offset = at_sinks.square(), at_offset.square_()
            twice = (
                (at_sinks * weight.mT)[..., None].expand(*at_sinks.shape, 2).flatten(-3)
            )
            on_sinks[power, :, heads].scatter_add_(-1, block.sink_variables, twice)
            if offsets:
                masses = (weight @ at_offset)[..., 0, :]
                if not power and block.visibility.mask is not None:  # the rest is ahead
                    masses[..., -1] += block.weight.sum(-1)[:, None, None] - masses.sum(
                        -1
                    )
                by_offset[power, :, heads, :, -masses.shape[-1] :] += masses
    sums = [
        values[..., None],
        sampled.call.scale * sampled.planes.sum_coordinates(by_coordinate),
    ]
    for power in range(powers):
        by_kind, by_bin = on_sinks[power, ..., 1:].tensor_split((len(SINKS),), dim=-1)
        sums += [by_kind] * (not power)
        sums += [by_offset[power].flip(-1), by_bin] * offsets
    return sum_folds(torch.cat([x.double() for x in sums], dim=-1), folds)


def sum_folds(
    x: Float[Tensor, " batch *value"], folds: int
) -> Float[Tensor, " fold *value"]:
    """Sum over the sequences of each fold. The sequences belong to the folds in turn."""
    return x.unflatten(0, (-1, folds)).sum(0)


@torch.no_grad()
def score_models(
    sampled: SampledCall,
    weights: Float[Tensor, "model shared head variable"],
    sets: Bool[Tensor, "batch set position"] | None = None,
) -> Float[Tensor, "batch set head score"]:
    """The `SCORES` of each sequence and set; the weights are for all sequences or for each."""
    batch, heads, context = *sampled.q.shape[:2], sampled.k.shape[2]
    sets = torch.ones(batch, 1, context, dtype=torch.bool) if sets is None else sets
    shape, device = (batch, sets.shape[1], heads, len(SCORES)), sampled.k.device
    scores = torch.zeros(shape, dtype=torch.float64, device=device)
    weights = on_device(weights, device).unflatten(2, (sampled.k.shape[1], -1))
    models: dict[tuple[int, int], list[HeadWeights]] = {}  # by the first and last head
    for block in blocks_of(sampled):
        part = block.heads.start, block.heads.stop
        if part not in models:
            own = zip(weights[:, :, block.heads], MODELS, strict=True)
            models[part] = [head_weights(x, block, model) for x, model in own]
        expected = block.expect(
            block.scores
        )  # read before A, which could overwrite them
        log_keys = block.count.log().expand_as(expected)
        likelihoods = [torch.ones_like(log_keys), expected - block.log_norm, -log_keys]
        for model in models[part]:
            modelled = log_weights(block, model)
            likelihoods.append(block.expect(modelled) - softmax(modelled)[1])
        by_row = torch.stack(likelihoods, dim=-1)
        scores[:, :, block.query_heads].add_(block.sum_over_sets(by_row, sets))
    return scores


def gains(scores: Float[Tensor, "*head score"]) -> dict[str, Float[Tensor, "*head"]]:
    """Bits per row over uniform attention, by the names of `GAINS`; NaN without rows."""
    weight, total, uniform, *models = scores[..., : len(SCORES)].unbind(-1)
    nats = zip(GAINS, (total, *models), strict=True)
    return {name: (gain - uniform) / (weight * math.log(2)) for name, gain in nats}


def normalize_weights(
    sampled: SampledCall, folds: int = 1
) -> tuple[SampledCall, Float[Tensor, " fold"]]:
    """The rows with weights that sum to one in each fold, and their number, at least 1."""
    rows, number = _normalized(sampled.rows, folds)
    return sampled.with_rows(rows), number


@kept()
def _normalized(rows: Rows, folds: int) -> tuple[Rows, Float[Tensor, " fold"]]:
    by_fold = rows.weight.double().unflatten(0, (-1, folds))
    total = by_fold.sum((0, 2)).clamp(min=1e-300)[:, None]
    rows = replace(rows, weight=(by_fold / total).float().flatten(0, 1))
    return rows, (by_fold > 0).sum((0, 2)).clamp(min=1).double()


def fit_tolerance(nats: Float[Tensor, "*head"]) -> Float[Tensor, "*head"]:
    """Convergence tolerance in nats of a fit that should explain `nats`."""
    return TOLERANCE * nats + 1e-6
