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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import Block, ByKey, blocks_of
from ropelens.attention.fast_products import HIDDEN, products, softmax
from ropelens.attention.formulas import GAINS
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges
from ropelens.budget.offsets import split_weights
from ropelens.caches import kept, on_device
from ropelens.text.rows import Rows

MODELS = ("sink", "position", "content", "both")  # S, P, C and B

SCORES = ("weight", "information", "uniform", *MODELS)
"""Sums over rows: the weight, and in nats sum_j A_ij log A_ij and sum_j A_ij log P_i(j)."""

RIDGE = 0.03  # strength of the ridge, in units of the log-likelihood of one row
TOLERANCE = 5e-4
"""Error that a step promises to mend, as a share of the information that S leaves."""


@dataclass(frozen=True)
class HeadWeights:
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
    context = block.call.key.shape[2]
    planes = block.planes
    of_model = split_weights(weights.to(block.q), planes.terms, context)
    beta = None
    if model in ("content", "both"):
        with_scale = block.call.scale * of_model.beta
        beta = planes.by_coordinate(with_scale)[..., None, :]
    if model in ("sink", "content"):
        bins = len(offset_edges(context)) - 1
        return HeadWeights(beta, pad(of_model.sigma, (1, bins)), kappa=None)
    kappa = of_model.kappa
    ahead = kappa[..., :1]
    if block.visibility.mask is None:
        ahead = torch.full_like(ahead, HIDDEN)
    by_column = torch.cat([kappa.flip(-1), ahead.expand_as(kappa)], dim=-1)
    of_sinks = torch.cat([pad(of_model.sigma, (1, 0)), of_model.tau], dim=-1)
    return HeadWeights(beta, of_sinks, kappa=by_column)


def log_weights(block: Block, weights: HeadWeights) -> ByKey:
    """log P_i(j) + log Z_i of every key."""
    scores = block.buffer("model")
    if weights.kappa is not None:
        block.from_offsets(weights.kappa, out=scores)
    elif weights.beta is None:
        scores.zero_()
    if weights.beta is not None:
        by_fold = block.q_still.unflatten(0, (-1, len(weights.beta)))
        q = (by_fold * weights.beta).flatten(0, 1)
        products(q, block.k_still, out=scores, add=weights.kappa is not None)
    scores.index_add_(-1, block.sinks, _sink_weights(block, weights.of_sinks))
    if weights.kappa is not None and block.sees_all_behind:
        return scores  # kappa hides the keys ahead
    return block.hide(scores)


def _sink_weights(
    block: Block, of_sinks: Float[Tensor, "fold kv_head group kind_or_bin"]
) -> Float[Tensor, "batch kv_head group row sink"]:
    """sigma + tau of each sink of a block."""
    batch = len(block.q)
    if len(of_sinks) < batch:
        of_sinks = of_sinks.repeat(batch // len(of_sinks), 1, 1, 1)
    kinds_and_bins = of_sinks.gather(-1, block.sink_variables)
    return kinds_and_bins.view(*block.q.shape[:4], -1, 2).sum(-1)


@torch.no_grad()
def score_models(
    sampled: SampledCall,
    weights: Float[Tensor, "model shared head variable"],
    sets: Bool[Tensor, "batch set position"] | None = None,
) -> Float[Tensor, "batch set head score"]:
    """The `SCORES` of each sequence and set; the weights are for all sequences or for each."""
    batch, heads = sampled.q.shape[:2]
    device = sampled.k.device
    if sets is None:
        sets = torch.ones(batch, 1, sampled.k.shape[2], dtype=torch.bool, device="cpu")
    shape = (batch, sets.shape[1], heads, len(SCORES))
    scores = torch.zeros(shape, dtype=torch.float64, device=device)
    by_kv_head = on_device(weights, device).unflatten(2, (sampled.k.shape[1], -1))
    models_of: dict[range, list[HeadWeights]] = {}  # by the key-value heads of blocks
    for block in blocks_of(sampled):
        kv_heads = range(block.heads.start, block.heads.stop)
        if kv_heads not in models_of:
            of_heads = by_kv_head[:, :, block.heads]
            models_of[kv_heads] = _models_of_block(of_heads, block)
        by_row = _scores_by_row(block, models_of[kv_heads])
        scores[:, :, block.query_heads].add_(block.sum_over_sets(by_row, sets))
    return scores


def _models_of_block(
    weights: Float[Tensor, "model shared kv_head group variable"], block: Block
) -> list[HeadWeights]:
    named = zip(MODELS, weights, strict=True)
    return [head_weights(of_model, block, name) for name, of_model in named]


def _scores_by_row(
    block: Block, models: Sequence[HeadWeights]
) -> Float[Tensor, "batch kv_head group row score"]:
    """The `SCORES` of each row of a block."""
    expected = block.expect(block.scores)  # read before A, which could overwrite them
    log_keys = block.count.log().expand_as(expected)
    likelihoods = [torch.ones_like(log_keys), expected - block.log_norm, -log_keys]
    for model in models:
        log_weight = log_weights(block, model)
        # The expectation is read first, because the softmax overwrites the weights.
        log_p = block.expect(log_weight) - softmax(log_weight).log_norm
        likelihoods.append(log_p)
    return torch.stack(likelihoods, dim=-1)


def gains(scores: Float[Tensor, "*head score"]) -> dict[str, Float[Tensor, "*head"]]:
    """Bits per row over uniform attention, by the names of `GAINS`; NaN without rows."""
    weight, total, uniform, *models = scores[..., : len(SCORES)].unbind(-1)
    bits = weight * math.log(2)
    likelihoods = zip(GAINS, (total, *models), strict=True)
    return {name: (nats - uniform) / bits for name, nats in likelihoods}


def normalize_weights(sampled: SampledCall, folds: int = 1) -> SampledCall:
    """The call with weights of rows that sum to one in each fold."""
    return sampled.with_rows(_normalized(sampled.rows, folds))


@kept()
def _normalized(rows: Rows, folds: int) -> Rows:
    by_fold = rows.weight.double().unflatten(0, (-1, folds))
    total = by_fold.sum((0, 2)).clamp(min=1e-300)
    weight = (by_fold / total[:, None]).float().flatten(0, 1)
    return replace(rows, weight=weight)


@kept()
def count_rows(rows: Rows, folds: int = 1) -> Float[Tensor, " fold"]:
    """Number of rows of each fold that have a weight, at least 1."""
    by_fold = rows.weight.unflatten(0, (-1, folds))
    return (by_fold > 0).sum((0, 2)).clamp(min=1).double()


def fit_tolerance(nats: Float[Tensor, "*head"]) -> Float[Tensor, "*head"]:
    """Convergence tolerance in nats of a fit that should explain `nats`."""
    return TOLERANCE * nats + 1e-6
