"""Fits of many log-linear models at once, by L-BFGS with a known curvature.

Nocedal & Wright 2006, algorithm 7.4, with the curvature that the caller knows instead of the
identity. All problems are evaluated together. A problem whose step was too long tries a shorter
step in the next evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

DECREASE = 1e-4  # least decrease by a step, as a share of the promised decrease (Armijo)
SHORTEST_STEP = 1e-6  # shortest share of a step that is tried: rounding hides the gain of less
SMOOTH = 3.0  # weight of squared steps between neighbours, relative to squared weights
LONGEST_STEP = 8.0  # of a weight: a fit in single precision cannot return from a larger step
ROUNDING = 4 * torch.finfo(torch.float32).eps  # relative increase that rounding may cause

Divide = Callable[[Tensor, Tensor], Tensor]
"""Divides gradients [problem, variable] by the curvature, whose diagonal it receives."""

LogZAndMoments = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""`log_z_and_moments(points, active)` returns log Z, the expected sums and the diagonal of the
Hessian of log Z. Entries of the diagonal that `divide` handles are ignored."""


@dataclass(frozen=True)
class Minimum:
    """The weights of each problem, the value there, and whether the fit has converged."""

    point: Float[Tensor, "problem variable"]
    value: Float[Tensor, " problem"]
    done: Bool[Tensor, " problem"]


def fit_log_linear(
    log_z_and_moments: LogZAndMoments,
    observed: Float[Tensor, "problem variable"],
    *,
    ridge: float,
    smooth: slice,
    start: Float[Tensor, "problem variable"],
    tolerance: Float[Tensor, " problem"],
    max_evaluations: int = 100,
    memory: int = 24,
    divide: Divide = torch.divide,
) -> Minimum:
    """Minimize log Z - `observed` . weights + penalty of each problem within its `tolerance`.

    The penalty is `ridge` / 2 times the sum of the squared weights and `SMOOTH` times the
    squared steps between neighbours in `smooth`. `divide` knows the curvature, by default its
    diagonal, and the last `memory` steps correct it. A problem ends when no step promises more
    than its tolerance, and is then not active.
    """

    def evaluate(point: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_norm, expected, diagonal = log_z_and_moments(point, active)
        diagonal = diagonal.clamp(min=0) + ridge
        diagonal[:, smooth] += 2 * SMOOTH * ridge
        pull = point.clone()
        pull[:, smooth] -= SMOOTH * pad(point[:, smooth].diff(dim=-1), (1, 1)).diff(dim=-1)
        penalty = ridge * (pull * point).sum(-1) / 2
        value = log_norm - (observed * point).sum(-1) + penalty
        return value, expected - observed + ridge * pull, diagonal

    point, active = start, torch.ones(len(start), dtype=torch.bool)
    value, gradient, diagonal = evaluate(point, active)
    direction = -divide(gradient, diagonal)
    length = _first_length(direction)
    slope = (gradient * direction).sum(-1)
    active = -slope / 2 > tolerance
    steps: list[tuple[Tensor, Tensor]] = []
    for _ in range(1, max_evaluations):
        if not active.any():
            break
        trial = point + (active * length)[:, None] * direction
        new_value, new_gradient, diagonal = evaluate(trial, active)
        rounding = ROUNDING * (1 + value.abs())
        better = active & (new_value <= value + DECREASE * length * slope + rounding)
        moved = better[:, None]
        change = torch.where(moved, new_gradient - gradient, 0)
        steps = [*steps, (torch.where(moved, trial - point, 0), change)][-memory:]
        # The minimum of the parabola through both values and the slope.
        rise = (new_value - value - length * slope).clamp(min=1e-30)
        shorter = (-slope * length**2 / (2 * rise)).nan_to_num(0.0)
        shorter = shorter.clamp(0.1 * length, 0.5 * length)
        point = torch.where(moved, trial, point)
        value = torch.where(better, new_value, value)
        gradient = torch.where(moved, new_gradient, gradient)
        newton = _two_loops(gradient, steps, divide, diagonal)
        direction = torch.where(moved, -newton, direction)
        length = torch.where(active, shorter, length)
        length = torch.where(better, _first_length(direction), length)
        slope = (gradient * direction).sum(-1)
        active = (-slope / 2 > tolerance) & (length > SHORTEST_STEP)
    return Minimum(point, value, ~active)


def _first_length(direction: Float[Tensor, "problem variable"]) -> Float[Tensor, " problem"]:
    """1, or less if a weight would change by more than `LONGEST_STEP`."""
    return (LONGEST_STEP / direction.abs().amax(-1)).clamp(max=1)


def _two_loops(
    gradient: Float[Tensor, "problem variable"],
    steps: list[tuple[Tensor, Tensor]],
    divide: Divide,
    diagonal: Float[Tensor, "problem variable"],
) -> Float[Tensor, "problem variable"]:
    """Divide the gradient by the curvature, corrected by the last steps and their changes."""
    result, shares = gradient, []
    for step, change in reversed(steps):
        # Weight 0 if a convex function shows no curvature, by rounding or without a step.
        product = (step * change).sum(-1, keepdim=True)
        weight = torch.where(product > 1e-20, 1 / product.clamp(min=1e-20), 0.0)
        share = weight * (step * result).sum(-1, keepdim=True)
        result = result - share * change
        shares.append((step, change, weight, share))
    result = divide(result, diagonal)
    for step, change, weight, share in reversed(shares):
        back = weight * (change * result).sum(-1, keepdim=True)
        result = result + step * (share - back)
    return result
