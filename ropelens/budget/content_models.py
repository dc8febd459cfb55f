"""The models C and B, which compute the scores of all keys of a row in every evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.block import Block, blocks_of, sparse_rows
from ropelens.attention.fast_products import BLOCK_ELEMENTS, softmax
from ropelens.attention.sampled_call import SampledCall
from ropelens.budget.head_sums import HeadSums, sum_folds
from ropelens.budget.logit import (
    HeadWeights,
    head_weights,
    log_weights,
    normalize_weights,
)
from ropelens.budget.solver import ByProblem, ByVariable, Curvature, Moments
from ropelens.caches import kept, on_device
from ropelens.text.rows import Rows
from ropelens.text.text import SINKS

CURVATURE_ROWS = 64
"""Rows whose scores by plane give the curvature of the likelihood in beta."""

CURVATURE_KEYS = 64  # keys of such a row
CURVATURE_EVALUATIONS = (0, 8, 24)  # evaluations of a fit that compute this curvature


class ContentModel:
    """C or B of all problems, which the solver evaluates.

    `first` is the number of weights beta and sigma, and `size` the number of all weights.
    """

    def __init__(
        self,
        name: Literal["content", "both"],
        parts: Sequence["Part"],
        ridge: ByProblem,
        first: int,
        size: int,
    ) -> None:
        self.name = name
        self.parts = list(parts)
        self.ridge = ridge
        self.first = first
        self.size = size
        self.evaluations = 0

    def evaluate(
        self,
        point: ByVariable,
        problems: Int[Tensor, " problem"],
        alive: Int[Tensor, " some"],
    ) -> Moments:
        """log Z and its derivatives, of some problems. Only the `alive` need values."""
        with_curvature = self.evaluations in CURVATURE_EVALUATIONS
        self.evaluations += 1
        kept_parts = [part.without_converged(alive) for part in self.parts]
        self.parts = [part for part in kept_parts if part is not None]
        weights = point.new_zeros(len(self.ridge), self.size)
        weights.index_copy_(0, problems, point)
        of_parts = [self._weights_of(part, weights) for part in self.parts]
        sums = self._sums(of_parts, squares=with_curvature)[problems]
        log_z, expected, squares = sums.tensor_split((1, 1 + self.size), dim=-1)
        if not with_curvature:
            return Moments(log_z[:, 0], expected)
        diagonal = expected.clone()
        diagonal[:, self.first :] -= squares
        covariance = self._covariance(of_parts)[problems]
        factor = _cholesky(covariance, self.ridge[problems])
        return Moments(log_z[:, 0], expected, Curvature(diagonal, factor))

    def _weights_of(self, part: "Part", weights: ByVariable) -> HeadWeights:
        of_heads = weights[part.index].unflatten(0, part.problems.shape)
        return head_weights(of_heads, part.blocks[0], self.name)

    def _sums(
        self, of_parts: Sequence[HeadWeights], *, squares: bool
    ) -> Float[Tensor, "problem sum"]:
        """log Z, the expected sums, and with `squares` the expected squares by offset."""
        columns = 1 + self.size
        if squares:
            columns += self.size - self.first
        sums = self.ridge.new_zeros(len(self.ridge), columns)
        for part, weights in zip(self.parts, of_parts, strict=True):
            sums.index_copy_(0, part.index, part.sums(weights, squares=squares))
        return sums

    def _covariance(
        self, of_parts: Sequence[HeadWeights]
    ) -> Float[Tensor, "problem first first"]:
        """Hessian of log Z in beta and sigma of all problems."""
        total = self.ridge.new_zeros(len(self.ridge), self.first, self.first)
        for part, weights in zip(self.parts, of_parts, strict=True):
            total.index_add_(0, part.index, part.covariance(weights))
        return total


@dataclass(frozen=True)
class Part:
    """Blocks of some heads of some folds, and blocks of the rows that give the curvature.

    `problems` are on the host.
    """

    problems: Int[Tensor, "fold kv_head group"]
    blocks: list[Block]
    curvature_blocks: list[Block]

    @property
    def index(self) -> Int[Tensor, " problem"]:
        """`problems` on the device of the blocks."""
        return on_device(self.problems, self.blocks[0].q.device).flatten()

    def without_converged(self, alive: Int[Tensor, " some"]) -> "Part | None":
        """The part with the heads that some problem in `alive` needs; None if there is none.

        Heads are removed by key-value head and by member of the groups, so some problems that
        converged remain. The part itself is returned if a copy would save too little.
        """
        is_alive = torch.isin(self.problems, alive)
        needs_kv_head = is_alive.any(2).any(0)
        needs_member = is_alive.any(0).any(0)
        heads = is_alive[0].numel()
        needed_heads = int(needs_kv_head.sum() * needs_member.sum())
        if needed_heads == 0:
            return None
        has_several_kv_heads = len(needs_kv_head) > 1  # a copy has copies of their keys
        saves_little = has_several_kv_heads and 2 * needed_heads > heads
        if needed_heads == heads or saves_little:
            return self
        device = self.blocks[0].q.device
        kv_heads = on_device(needs_kv_head.nonzero()[:, 0], device)
        members = on_device(needs_member.nonzero()[:, 0], device)
        return Part(
            problems=self.problems[:, needs_kv_head][:, :, needs_member],
            blocks=[block.of_heads(kv_heads, members) for block in self.blocks],
            curvature_blocks=[
                block.of_heads(kv_heads, members) for block in self.curvature_blocks
            ],
        )

    def sums(
        self, weights: HeadWeights, *, squares: bool
    ) -> Float[Tensor, "problem sum"]:
        """log Z, the expected sums, and with `squares` the expected squares by offset."""
        sums = HeadSums(
            self.blocks[0].sampled,
            self.blocks[0].q.shape[:3],
            offsets=weights.kappa is not None,
            squares=weights.kappa is not None and squares,
        )
        for block in self.blocks:
            model = softmax(log_weights(block, weights))
            sums.add(block, model.log_norm, model.weights, heads=slice(None))
        return sums.by_fold(folds=len(self.problems)).flatten(0, 2)

    def covariance(self, weights: HeadWeights) -> Float[Tensor, "problem first first"]:
        """Hessian of log Z in beta and sigma, from a few rows."""
        folds = len(self.problems)
        first, *others = self.curvature_blocks
        total = sum_folds(covariance(first, weights), folds)
        for block in others:
            total = total + sum_folds(covariance(block, weights), folds)
        return total.flatten(0, 2)


def parts_of(sampled: SampledCall, folds: int) -> list[Part]:
    """All folds together on a GPU; on a CPU, parts that fit into its caches."""
    kv_heads, group = sampled.row_q.shape[1:3]
    few_rows = sampled.with_rows(_curvature_rows(sampled.rows, folds))
    few_rows = normalize_weights(few_rows, folds)
    problems = torch.arange(folds * kv_heads * group, device="cpu")
    problems = problems.view(-1, kv_heads, group)
    step = folds if sampled.k.device.type == "cpu" else 1
    parts = []
    for fold in range(step):
        of_folds = slice(fold, None, step)
        part_rows = sampled.of_sequences(of_folds)
        part_few_rows = few_rows.of_sequences(of_folds)
        together = _heads_together(part_rows)
        for begin in range(0, kv_heads, together):
            heads = slice(begin, min(begin + together, kv_heads))
            part = Part(
                problems=problems[of_folds, heads],
                blocks=list(blocks_of(part_rows, heads)),
                curvature_blocks=list(blocks_of(part_few_rows, heads)),
            )
            parts.append(part)
    return parts


def _heads_together(sampled: SampledCall) -> int:
    """Number of key-value heads that one part has."""
    device = sampled.k.device.type
    batch, rows = sampled.weight.shape
    group = sampled.row_q.shape[2]
    cells = batch * group * sparse_rows(rows, device) * sampled.k.shape[2]
    return max(1, BLOCK_ELEMENTS[device] // 2 // cells)


def _cholesky(
    curvature: Float[Tensor, "problem first first"], ridge: ByProblem
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
    share = softmax(log_weights(block, weights)).weights
    seen = (share > 0).float()
    drawn = share + seen / seen.sum(-1, keepdim=True)
    running = drawn.cumsum(-1)
    number = torch.arange(CURVATURE_KEYS, dtype=torch.float32, device=share.device)
    steps = (number + 0.5) / CURVATURE_KEYS
    key = torch.searchsorted(running, running[..., -1:] * steps)
    key.clamp_(max=len(block.keys) - 1)  # NaN ends the fit
    key_weight = share.gather(-1, key) / drawn.gather(-1, key)
    key_weight /= key_weight.sum(-1, keepdim=True)
    features = _features(block, key)
    # Subtract row means, or rounding could exceed the variance of a sharp head.
    features -= key_weight[..., None, :] @ features
    of_rows = block.weight[:, None, None, :, None]
    weighted = features * (key_weight * of_rows)[..., None]
    return (weighted.flatten(3, 4).mT @ features.flatten(3, 4)).double()


def _features(
    block: Block, key: Int[Tensor, "batch kv_head group row drawn"]
) -> Float[Tensor, "batch kv_head group row drawn first"]:
    """What beta and sigma multiply at the `key` of each row: c~ by plane, sinks by kind."""
    by_plane = _scores_by_plane(block, key)
    kind = key.new_zeros(*key.shape[:3], len(block.keys))
    kind[..., block.sinks] = block.sink_kind[..., 0, :].expand(*key.shape[:3], -1)
    of_keys = kind.gather(-1, key.flatten(-2)).view(*key.shape, 1)
    kinds = torch.arange(1, 1 + len(SINKS), device=key.device)
    return torch.cat([by_plane, (of_keys == kinds).to(by_plane.dtype)], dim=-1)


def _scores_by_plane(
    block: Block, key: Int[Tensor, "batch kv_head group row drawn"]
) -> Float[Tensor, "batch kv_head group row drawn plane"]:
    """c~ of each plane at the `key` of each row."""
    q = (block.call.scale * block.q_still)[..., None, :]
    return block.planes.sum_coordinates(q * _take_keys(block, key))


def _take_keys(
    block: Block, key: Int[Tensor, "batch kv_head group row drawn"]
) -> Float[Tensor, "batch kv_head group row drawn coordinate"]:
    """k~ at the `key` of each row."""
    batch, kv_heads, keys, coordinates = block.k_still.shape
    head = torch.arange(batch * kv_heads, device=key.device)
    index = key + head.view(batch, kv_heads, 1, 1, 1) * keys
    all_keys = block.k_still.reshape(-1, coordinates)
    return all_keys.index_select(0, index.flatten()).view(*key.shape, coordinates)


@kept()
def _curvature_rows(rows: Rows, folds: int) -> Rows:
    """A few rows of each sequence, spread evenly and different for each sequence."""
    batch, available = rows.position.shape
    number = min(-(-CURVATURE_ROWS * folds // batch), available)
    step = torch.arange(number, device="cpu") * available // number
    sequence = torch.arange(batch, device="cpu")
    turn = 2 * (sequence // folds) + sequence % folds
    shift = turn % max(1, available // number)
    index = step + shift[:, None]
    return replace(
        rows,
        position=rows.position.gather(1, index),
        weight=rows.weight.gather(1, index),
        dense=False,
    )
