"""Fits of many log-linear models at once, by L-BFGS with a known curvature.

All problems are evaluated together. A problem whose step was too long tries a shorter step in
the next evaluation. The products that correct the curvature are few and large (Byrd, Nocedal
and Schnabel 1994, theorem 2.2). On a GPU, the host looks rarely at which problems have
converged, because it has to wait for the answer.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import solve_triangular, vecdot

DECREASE = (
    1e-4  # least decrease by a step, as a share of the promised decrease (Armijo)
)
SHORTEST_STEP = (
    1e-6  # shortest share of a step that is tried: rounding hides the gain of less
)
SMOOTH = 3.0  # weight of squared steps between neighbours, relative to squared weights
LONGEST_STEP = (
    8.0  # of a weight: a fit in single precision cannot return from a larger step
)
ROUNDING = (
    4 * torch.finfo(torch.float32).eps
)  # relative increase that rounding may cause
MEMORY = 5  # steps that correct the curvature
LOOK_EVERY = {
    "cpu": 1,
    "cuda": 5,
}  # evaluations between looks at the problems that converged

ByVariable = Float[Tensor, "problem variable"]
Kept = Float[Tensor, "problem kept variable"]

Moments = tuple[Tensor, ByVariable, tuple[Tensor, ...]]
"""log Z, the expected sums, and the curvature of log Z: the diagonal and further arguments of
`divide`. The curvature is () if the curvature of an earlier point will do."""

Evaluate = Callable[[Tensor, Tensor, Tensor], Moments]
"""`evaluate(points, problems, alive)`, where `problems` are the indices of the problems. Only
the `alive` problems (on the host) need values."""

Divide = Callable[..., Tensor]
"""`divide(vectors, *curvature)` divides vectors [problem, any, variable] by the curvature. The
diagonal then contains the penalty."""


class Minimum(NamedTuple):
    """The weights of each problem, and the value there."""

    point: ByVariable
    value: Float[Tensor, " problem"]


def fit_log_linear(
    evaluate: Evaluate,
    observed: ByVariable,
    *,
    ridge: Float[Tensor, " problem"],
    smooth: slice,
    start: ByVariable,
    tolerance: Float[Tensor, " problem"],
    divide: Divide = lambda vectors, diagonal: vectors / diagonal[:, None],
    max_evaluations: int = 100,
) -> Minimum:
    """Minimize log Z - `observed` . weights + penalty of each problem within its `tolerance`.

    The penalty is `ridge` / 2 times the sum of the squared weights and `SMOOTH` times the
    squared steps between neighbours in `smooth`. A problem ends when no step promises more than
    its tolerance, and is then not active. The weights of a problem are NaN if its value or its
    gradient is not finite.
    """
    fits = _Fits(observed, ridge[:, None].to(start), tolerance, start)
    result = Minimum(start.clone(), torch.zeros_like(tolerance))
    look_every = LOOK_EVERY[start.device.type]
    for evaluation in range(1, max_evaluations + 1):
        fits.advance(evaluate, divide, smooth)
        if evaluation % look_every == 0 and not fits.remove_converged(result):
            break
    fits.store(result)
    return result


class _Fits:
    """The state of the problems that are still in the batch. The first axis is the problem.

    A trial is `point` - `length` `direction`, and `slope` is the decrease that a full step
    promises by the gradient. The last steps and the changes of the gradient are in
    `steps[:, kept]` and `changes[:, kept]`, and are 0 if a problem did not move. `here` are the
    indices of the problems, and `alive` the indices that were active at the last look (both on
    the host).
    """

    def __init__(
        self, observed: ByVariable, ridge: Tensor, tolerance: Tensor, start: ByVariable
    ) -> None:
        self.observed, self.ridge, self.tolerance = observed, ridge, tolerance
        self.here = self.alive = torch.arange(len(start))
        self.point, self.problems = start, torch.arange(len(start), device=start.device)
        self.active = self.problems >= 0
        self.gradient = self.direction = torch.zeros_like(start)
        self.slope = torch.zeros_like(tolerance)
        self.length, self.value = self.slope + 1, self.slope + torch.inf
        steps = start.new_empty(2, len(start), 2 * MEMORY, start.shape[1])
        self.steps, self.changes = steps
        self.curvature: tuple[Tensor, ...] = ()
        self.kept = slice(0, 0)

    def advance(self, evaluate: Evaluate, divide: Divide, smooth: slice) -> None:
        """Evaluate a trial point of each problem, move there if it is better, and aim again."""
        length = self.active * self.length
        trial = torch.addcmul(self.point, self.direction, length[:, None], value=-1)
        log_z, expected, curvature = evaluate(trial, self.problems, self.alive)
        if curvature:
            diagonal = curvature[0].clamp(min=0).add_(self.ridge)
            diagonal[:, smooth] += 2 * SMOOTH * self.ridge
            self.curvature = (diagonal, *curvature[1:])
        penalty = self._half_penalty(trial, smooth)
        pull = self.observed - penalty
        value = log_z - vecdot(trial, pull)
        gradient = expected.sub_(pull).add_(penalty)
        promised = length * self.slope
        rise = value - self.value + promised
        allowed = (1 - DECREASE) * promised + ROUNDING * (1 + self.value.abs())
        better = self.active & (rise <= allowed)
        moved = better[:, None]
        self._remember(trial, gradient, ~moved)
        self.point = torch.where(moved, trial, self.point)
        self.gradient = torch.where(moved, gradient, self.gradient)
        self.value = torch.where(better, value, self.value)
        kept = self.steps[:, self.kept], self.changes[:, self.kept]
        newton = divide_by_curvature(self.gradient, *kept, divide, self.curvature)
        self.direction = torch.where(moved, newton, self.direction)
        # The minimum of the parabola through both values and the slope.
        shorter = (promised / (2 * rise)).nan_to_num_(0.0).clamp_(
            0.1, 0.5
        ) * self.length
        longest = LONGEST_STEP / self.direction.abs().amax(-1)
        self.length = torch.where(better, longest.clamp_(max=1), shorter)
        self.slope = vecdot(self.gradient, self.direction)
        self.active = (self.slope > 2 * self.tolerance) & (self.length > SHORTEST_STEP)

    def _half_penalty(self, point: Tensor, smooth: slice) -> ByVariable:
        """Half of the gradient of the penalty. The product with `point` is the penalty."""
        pull, low, high = point.clone(), smooth.start, smooth.stop
        if low < high:
            step = point[:, low:high].diff()
            pull[:, low : high - 1].sub_(step, alpha=SMOOTH)
            pull[:, low + 1 : high].add_(step, alpha=SMOOTH)
        return pull.mul_(self.ridge / 2)

    def _remember(self, point: Tensor, gradient: Tensor, unmoved: Tensor) -> None:
        """Keep a step and the change of the gradient, in front of space for later steps."""
        end = self.kept.stop
        if end == 2 * MEMORY:
            for kept in (self.steps, self.changes):
                kept[:, : MEMORY - 1] = kept[:, 1 + MEMORY :].clone()
            end = MEMORY - 1
        step, change = self.steps[:, end], self.changes[:, end]
        torch.sub(point, self.point, out=step)
        torch.sub(gradient, self.gradient, out=change)
        # A convex function shows no curvature by rounding only, or without a step.
        unmoved = unmoved | (vecdot(step, change) <= 1e-20)[:, None]
        step.masked_fill_(unmoved, 0)
        change.masked_fill_(unmoved, 0)
        self.kept = slice(max(0, end + 1 - MEMORY), end + 1)

    def remove_converged(self, result: Minimum) -> bool:
        """Return whether problems are active; if only half of the batch is, remove the rest."""
        active = self.active.cpu()
        self.alive = self.here[active]
        if 0 < 2 * len(self.alive) <= len(self.here):  # more copies would cost time
            self.store(result)
            index, self.here = active.nonzero()[:, 0].to(self.point.device), self.alive
            for name, x in vars(self).items():
                if isinstance(x, Tensor) and name not in ("here", "alive"):
                    setattr(self, name, x[index])
            self.curvature = tuple(x[index] for x in self.curvature)
        return len(self.alive) > 0

    def store(self, result: Minimum) -> None:
        """Write the problems of the batch into the `result` of all problems."""
        finite = 0 * (self.value + self.slope)  # or NaN
        result.point[self.problems] = self.point + finite[:, None]
        result.value[self.problems] = self.value


def divide_by_curvature(
    gradient: ByVariable,
    steps: Kept,
    changes: Kept,
    divide: Divide,
    known: tuple[Tensor, ...],
) -> ByVariable:
    """Divide the gradient by the corrected curvature (Byrd et al. 1994, equation 2.6)."""
    divided = divide(torch.cat([gradient[:, None], changes], dim=1), *known)
    first, divided = divided[:, 0], divided[:, 1:]
    triangle = (steps @ changes.mT).triu_()
    diagonal = triangle.diagonal(dim1=-2, dim2=-1)
    diagonal += diagonal == 0  # a step that was not taken
    t = solve_triangular(triangle, steps @ gradient[..., None], upper=True)
    inner = (
        diagonal[..., None] * t
        + (changes @ divided.mT) @ t
        - changes @ first[..., None]
    )
    u = solve_triangular(triangle.mT, inner, upper=False)
    result = torch.baddbmm(first[:, None], u.mT, steps)
    return result.baddbmm_(t.mT, divided, alpha=-1)[:, 0]
