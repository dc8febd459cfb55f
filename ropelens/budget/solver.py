"""Fits of many log-linear models at once, by L-BFGS with a known curvature.

All problems are evaluated together. A problem whose step was too long tries a shorter step in
the next evaluation. The products that correct the curvature are few and large (Byrd, Nocedal
and Schnabel 1994, theorem 2.2). On a GPU, the host looks rarely at which problems have
converged, because it has to wait for the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import solve_triangular, vecdot

DECREASE = 1e-4
"""Least decrease by a step, as a share of the promised decrease (Armijo)."""

SHORTEST_STEP = 1e-6
"""Shortest share of a step that is tried: rounding hides the gain of less."""

SMOOTH = 3.0
"""Weight of squared steps between neighbours, relative to squared weights."""

LONGEST_STEP = 8.0
"""Longest step of a weight: a fit in single precision cannot return from a larger step."""

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative increase that rounding may cause."""

MEMORY = 5  # steps that correct the curvature
LOOK_EVERY = {"cpu": 1, "cuda": 5}
"""Evaluations between looks at the problems that converged."""

MOST_EVALUATIONS = 100

ByProblem = Float[Tensor, " problem"]
ByVariable = Float[Tensor, "problem variable"]
Steps = Float[Tensor, "problem step variable"]


@dataclass(frozen=True)
class Curvature:
    """Curvature of log Z of each problem: a diagonal, and a factor if it is not diagonal.

    `factor` is the Cholesky factor of the curvature in the first variables, with the penalty,
    and replaces their diagonal.
    """

    diagonal: ByVariable
    factor: Float[Tensor, "problem first first"] | None = None

    def divide(
        self, vectors: Float[Tensor, "problem any variable"]
    ) -> Float[Tensor, "problem any variable"]:
        """The `vectors` divided by the curvature."""
        if self.factor is None:
            return vectors / self.diagonal[:, None]
        first = self.factor.shape[-1]
        solved = torch.cholesky_solve(vectors[..., :first].mT, self.factor).mT
        rest = vectors[..., first:] / self.diagonal[:, None, first:]
        return torch.cat([solved, rest], -1)

    def select(self, index: Int[Tensor, " some"]) -> "Curvature":
        """The curvature of some problems."""
        factor = None if self.factor is None else self.factor[index]
        return Curvature(self.diagonal[index], factor)


@dataclass(frozen=True)
class Moments:
    """log Z of each problem, its gradient, and its curvature.

    The gradient is the expected sums that the weights multiply. The curvature is None if the
    curvature of an earlier point will do.
    """

    log_z: ByProblem
    expected: ByVariable
    curvature: Curvature | None = None


@dataclass(frozen=True)
class Minimum:
    """The weights of each problem, and the value there."""

    point: ByVariable
    value: ByProblem


Evaluate = Callable[
    [ByVariable, Int[Tensor, " problem"], Int[Tensor, " some"]], Moments
]
"""`evaluate(points, problems, alive)`, where `problems` are the indices of the problems. Only
the `alive` problems (on the host) need values."""


def fit_log_linear(
    evaluate: Evaluate,
    observed: ByVariable,
    *,
    ridge: ByProblem,
    smooth: slice,
    start: ByVariable,
    tolerance: ByProblem,
) -> Minimum:
    """Minimize log Z - `observed` . weights + penalty of each problem within its `tolerance`.

    The penalty is `ridge` / 2 times the sum of the squared weights and `SMOOTH` times the
    squared steps between neighbours in `smooth`. A problem ends when no step promises more than
    its tolerance, and is then not active. The weights of a problem are NaN if its value or its
    gradient is not finite.
    """
    penalty = Penalty(ridge[:, None].to(start), smooth)
    fits = _Fits(evaluate, observed, penalty, tolerance, start)
    result = Minimum(start.clone(), torch.zeros_like(tolerance))
    look_every = LOOK_EVERY[start.device.type]
    for evaluation in range(1, MOST_EVALUATIONS + 1):
        fits.advance()
        if evaluation % look_every == 0 and not fits.remove_converged(result):
            break
    fits.store(result)
    return result


@dataclass(frozen=True)
class Penalty:
    """The penalty of each problem; see `fit_log_linear`."""

    ridge: Float[Tensor, "problem 1"]
    smooth: slice

    def half_gradient(self, point: ByVariable) -> ByVariable:
        """Half of the gradient of the penalty. The product with `point` is the penalty."""
        pull = point.clone()
        low = self.smooth.start
        high = self.smooth.stop
        if low < high:
            step = point[:, low:high].diff()
            pull[:, low : high - 1].sub_(step, alpha=SMOOTH)
            pull[:, low + 1 : high].add_(step, alpha=SMOOTH)
        return pull.mul_(self.ridge / 2)

    def add_to(self, curvature: Curvature) -> Curvature:
        """The curvature with the penalty on its diagonal."""
        diagonal = curvature.diagonal.clamp(min=0).add_(self.ridge)
        diagonal[:, self.smooth] += 2 * SMOOTH * self.ridge
        return Curvature(diagonal, curvature.factor)

    def select(self, index: Int[Tensor, " some"]) -> "Penalty":
        """The penalty of some problems."""
        return Penalty(self.ridge[index], self.smooth)


@dataclass(frozen=True)
class _Trial:
    """A point of each problem, and the value and gradient there."""

    point: ByVariable
    value: ByProblem
    gradient: ByVariable

    def where(self, better: Bool[Tensor, " problem"], other: "_Trial") -> "_Trial":
        """These points for the `better` problems, and the `other` points for the rest."""
        moved = better[:, None]
        return _Trial(
            point=torch.where(moved, self.point, other.point),
            value=torch.where(better, self.value, other.value),
            gradient=torch.where(moved, self.gradient, other.gradient),
        )

    def select(self, index: Int[Tensor, " some"]) -> "_Trial":
        return _Trial(self.point[index], self.value[index], self.gradient[index])


class _Memory:
    """The last steps of each problem, and the changes of its gradient.

    They are 0 for steps that a problem did not take. The arrays have space for later steps, so
    that the kept steps rarely move.
    """

    def __init__(self, start: ByVariable) -> None:
        number, variables = start.shape
        space = start.new_empty(2, number, 2 * MEMORY, variables)
        self._steps, self._changes = space.unbind()
        self._kept = slice(0, 0)

    @property
    def steps(self) -> Steps:
        return self._steps[:, self._kept]

    @property
    def changes(self) -> Steps:
        return self._changes[:, self._kept]

    def add(
        self, before: _Trial, after: _Trial, better: Bool[Tensor, " problem"]
    ) -> None:
        """Keep the steps of the `better` problems, and 0 for the other problems."""
        end = self._kept.stop
        if end == 2 * MEMORY:
            for array in (self._steps, self._changes):
                array[:, : MEMORY - 1] = array[:, 1 + MEMORY :].clone()
            end = MEMORY - 1
        step = self._steps[:, end]
        change = self._changes[:, end]
        torch.sub(after.point, before.point, out=step)
        torch.sub(after.gradient, before.gradient, out=change)
        # A convex function shows no curvature by rounding only, or without a step.
        without_curvature = vecdot(step, change) <= 1e-20
        unmoved = ~better[:, None] | without_curvature[:, None]
        step.masked_fill_(unmoved, 0)
        change.masked_fill_(unmoved, 0)
        self._kept = slice(max(0, end + 1 - MEMORY), end + 1)

    def select(self, index: Int[Tensor, " some"]) -> None:
        """Keep only some problems."""
        self._steps = self._steps[index]
        self._changes = self._changes[index]


class _Fits:
    """The state of the problems that are still in the batch. The first axis is the problem.

    A trial is `here.point` - `length` `direction`, and `slope` is the decrease that a full step
    promises by the gradient. `problems` are the indices of the problems. On the host, `batch`
    has the same indices, and `alive` the indices that were active at the last look.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        observed: ByVariable,
        penalty: Penalty,
        tolerance: ByProblem,
        start: ByVariable,
    ) -> None:
        self.evaluate = evaluate
        self.observed = observed
        self.penalty = penalty
        self.tolerance = tolerance
        self.batch = torch.arange(len(start), device="cpu")
        self.alive = self.batch
        self.problems = torch.arange(len(start), device=start.device)
        self.active = self.problems >= 0
        self.direction = torch.zeros_like(start)
        self.slope = torch.zeros_like(tolerance)
        self.length = self.slope + 1
        value = self.slope + torch.inf
        self.here = _Trial(start, value, gradient=self.direction)
        self.memory = _Memory(start)
        self.curvature: Curvature | None = None

    def advance(self) -> None:
        """Evaluate a trial point of each problem, move there if it is better, and aim again.

        The first call evaluates the start: no step has a direction yet, and any value is better
        than infinity.
        """
        length = self.active * self.length
        trial = self._evaluate_step(length)
        promised = length * self.slope
        missing = trial.value - self.here.value + promised  # of the promised decrease
        allowed = (1 - DECREASE) * promised + ROUNDING * (1 + trial.value.abs())
        better = self.active & (missing <= allowed)
        self.memory.add(self.here, trial, better)
        self.here = trial.where(better, self.here)
        self._aim(better)
        # The minimum of the parabola through both values and the slope.
        share = (promised / (2 * missing)).nan_to_num_(0.0).clamp_(0.1, 0.5)
        longest = LONGEST_STEP / self.direction.abs().amax(-1)
        self.length = torch.where(better, longest.clamp_(max=1), share * self.length)
        self.slope = vecdot(self.here.gradient, self.direction)
        # A full step of Newton promises `slope`, and the minimum lies lower by half of it.
        can_decrease = self.slope > 2 * self.tolerance
        self.active = can_decrease & (self.length > SHORTEST_STEP)

    def _evaluate_step(self, length: ByProblem) -> _Trial:
        step = length[:, None]
        point = torch.addcmul(self.here.point, self.direction, step, value=-1)
        moments = self.evaluate(point, self.problems, self.alive)
        if moments.curvature is not None:
            self.curvature = self.penalty.add_to(moments.curvature)
        penalty = self.penalty.half_gradient(point)
        pull = self.observed - penalty
        value = moments.log_z - vecdot(point, pull)
        gradient = moments.expected.sub_(pull).add_(penalty)
        return _Trial(point, value, gradient)

    def _aim(self, better: Bool[Tensor, " problem"]) -> None:
        """Give the problems that moved a new direction."""
        assert self.curvature is not None, "the first evaluation has a curvature"
        newton = divide_by_curvature(
            self.here.gradient, self.memory.steps, self.memory.changes, self.curvature
        )
        self.direction = torch.where(better[:, None], newton, self.direction)

    def remove_converged(self, result: Minimum) -> bool:
        """Return whether problems are active; if only half of the batch is, remove the rest."""
        active = self.active.cpu()
        self.alive = self.batch[active]
        if 0 < 2 * len(self.alive) <= len(self.batch):  # more copies would cost time
            self.store(result)
            self.batch = self.alive
            self._select(active.nonzero()[:, 0].to(self.problems.device))
        return len(self.alive) > 0

    def _select(self, index: Int[Tensor, " some"]) -> None:
        """Keep only some problems."""
        assert self.curvature is not None
        self.observed = self.observed[index]
        self.penalty = self.penalty.select(index)
        self.tolerance = self.tolerance[index]
        self.problems = self.problems[index]
        self.active = self.active[index]
        self.here = self.here.select(index)
        self.direction = self.direction[index]
        self.slope = self.slope[index]
        self.length = self.length[index]
        self.memory.select(index)
        self.curvature = self.curvature.select(index)

    def store(self, result: Minimum) -> None:
        """Write the problems of the batch into the `result` of all problems."""
        finite = 0 * (self.here.value + self.slope)  # or NaN
        result.point[self.problems] = self.here.point + finite[:, None]
        result.value[self.problems] = self.here.value


def divide_by_curvature(
    gradient: ByVariable, steps: Steps, changes: Steps, curvature: Curvature
) -> ByVariable:
    """Divide the gradient by the corrected curvature (Byrd et al. 1994, equation 2.6)."""
    divided = curvature.divide(torch.cat([gradient[:, None], changes], dim=1))
    newton = divided[:, 0]
    divided_changes = divided[:, 1:]
    triangle = (steps @ changes.mT).triu_()
    diagonal = triangle.diagonal(dim1=-2, dim2=-1)
    diagonal += diagonal == 0  # a step that was not taken
    t = solve_triangular(triangle, steps @ gradient[..., None], upper=True)
    inner = (
        diagonal[..., None] * t
        + (changes @ divided_changes.mT) @ t
        - changes @ newton[..., None]
    )
    u = solve_triangular(triangle.mT, inner, upper=False)
    corrected = torch.baddbmm(newton[:, None], u.mT, steps)
    return corrected.baddbmm_(t.mT, divided_changes, alpha=-1)[:, 0]
