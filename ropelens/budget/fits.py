"""Fits of the models S, P, C and B of every head to the rows of both folds.

S and P need no scores (see offsets.py), and C and B need the scores of all keys in every
evaluation (see content_models.py). All heads and folds are one batch of problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.block import blocks_of
from ropelens.attention.formulas import information
from ropelens.attention.sampled_call import SampledCall
from ropelens.budget.content_models import ContentModel, Part, parts_of
from ropelens.budget.head_sums import HeadSums
from ropelens.budget.logit import RIDGE, count_rows, fit_tolerance, normalize_weights
from ropelens.budget.offsets import OffsetModels, OffsetRows, fit_offsets
from ropelens.budget.solver import ByProblem, ByVariable, Minimum, fit_log_linear
from ropelens.text.text import SINKS


@torch.no_grad()
def fit_models(
    sampled: SampledCall, folds: int = 1
) -> Float[Tensor, "model fold head variable"]:
    """The weights of S, P, C and B of every head, fitted to the rows of each fold.

    The sequences belong to the folds in turn. Each model starts from the models that it
    contains, and has weight 0 for variables of other models. The ridge keeps a weight finite if
    no row constrains it; for 64 rows of 8 sequences it costs less than 0.01 of the bits.
    """
    problems = _Problems.of(sampled, folds)
    of_offsets = problems.fit_offset_models()
    tolerance = fit_tolerance(problems.left_by_sinks(of_offsets.sink))
    parts = parts_of(problems.sampled, folds)
    sink = pad(of_offsets.sink.point, (problems.terms, 0))
    position = pad(of_offsets.position.point, (problems.terms, 0))
    of_content = problems.fit_content(parts, start=sink, tolerance=tolerance)
    content = pad(of_content.point, (0, problems.size - problems.first))
    # Start B from the better of P and C, plus half of the step from S to the other model.
    position_leads = of_offsets.position.value < of_content.value
    better = torch.where(position_leads[:, None], position, content)
    start = (better + position + content - sink) / 2
    both = problems.fit_both(parts, start=start, tolerance=tolerance)
    models = torch.stack([sink, position, content, both.point])
    return models.unflatten(1, (folds, sampled.q.shape[1]))


@dataclass(frozen=True)
class _Problems:
    """All fits of a layer. The problems are the heads of each fold in turn.

    `sampled` has normalized weights of rows. `information` is KL(A || U) in nats, and
    `observed` are the sums that the weights of B multiply. Both are means over the rows.
    """

    sampled: SampledCall
    table: OffsetRows
    information: ByProblem
    observed: ByVariable
    ridge: ByProblem

    @classmethod
    def of(cls, sampled: SampledCall, folds: int) -> "_Problems":
        normalized = normalize_weights(sampled, folds)
        sums = HeadSums(normalized, normalized.row_q.shape[:3])
        for block in blocks_of(normalized):
            sums.add(block, information(block), block.attention, block.heads)
        by_problem = sums.by_fold(folds).flatten(0, 2)
        ridge = (RIDGE / count_rows(sampled.rows, folds)).to(by_problem.device)
        return cls(
            sampled=normalized,
            table=OffsetRows.of(normalized, folds=folds),
            information=by_problem[:, 0],
            observed=by_problem[:, 1:],
            ridge=ridge.repeat_interleave(sampled.q.shape[1]),
        )

    @property
    def terms(self) -> int:
        """Number of weights beta."""
        return self.sampled.planes.terms

    @property
    def first(self) -> int:
        """Number of weights beta and sigma, which come first."""
        return self.terms + len(SINKS)

    @property
    def size(self) -> int:
        """Number of weights of B."""
        return self.observed.shape[1]

    def fit_offset_models(self) -> OffsetModels:
        """Fit S and P. They cost little, and S may leave little, so the tolerance is small."""
        return fit_offsets(
            self.observed[:, self.terms :],
            self.table,
            ridge=self.ridge,
            tolerance=fit_tolerance(self.information) / 10,
        )

    def left_by_sinks(self, sink: Minimum) -> ByProblem:
        """Information in nats that S does not explain."""
        heads = self.sampled.q.shape[1]
        uniform = self.table.uniform.expand(-1, heads).flatten()
        return self.information + sink.value - uniform

    def fit_content(
        self, parts: Sequence[Part], *, start: ByVariable, tolerance: ByProblem
    ) -> Minimum:
        """Fit C. Only its variables in `start` count."""
        model = ContentModel("content", parts, self.ridge, self.first, self.first)
        return fit_log_linear(
            model.evaluate,
            self.observed[:, : self.first],
            ridge=self.ridge,
            smooth=slice(0, 0),
            start=start[:, : self.first].contiguous(),
            tolerance=tolerance,
        )

    def fit_both(
        self, parts: Sequence[Part], *, start: ByVariable, tolerance: ByProblem
    ) -> Minimum:
        """Fit B."""
        model = ContentModel("both", parts, self.ridge, self.first, self.size)
        context = self.sampled.k.shape[2]
        return fit_log_linear(
            model.evaluate,
            self.observed,
            ridge=self.ridge,
            smooth=slice(self.first, self.first + context),
            start=start,
            tolerance=tolerance,
        )
