"""The minimum of many convex functions at once, each of its own variables.

L-BFGS (Nocedal & Wright 2006, algorithm 7.4) with a curvature that the caller knows in place
of the identity. All problems are evaluated together, and every evaluation is of use to each:
one whose step was too long tries a shorter one while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

DECREASE = 1e-4
"""Share of the decrease promised by the slope that a step must bring (Armijo)."""

SHORTEST = 1e-6
"""Share of a step below which no shorter one is tried: rounding hides what it would bring."""

SMOOTH = 3.0
"""Weight of the squared steps between neighbours beside the squared weights themselves."""

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative increase of a value that may be rounding alone."""

Divide = Callable[[Tensor], Tensor]
"""Divides gradients [problem, variable] by about the curvature at the current points."""


@dataclass(frozen=True)
class Minimum:
    """Where each function was found to be smallest, and its value there.

    `done` says where no step promised more than the tolerance; `evaluations` what it took.
    """

    point: Float[Tensor, "problem variable"]
    value: Float[Tensor, " problem"]
    done: Bool[Tensor, " problem"]
    evaluations: int


def minimize(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    curvature: Callable[[Tensor], Divide],
    start: Float[Tensor, "problem variable"],
    *,
    tolerance: Float[Tensor, " problem"],
    max_evaluations: int,
    memory: int,
) -> Minimum:
    """The minimum of each function, to within about `tolerance`.

    `evaluate` gives values [problem] and gradients [problem, variable] at a point of each
    problem; `curvature`, asked after an evaluation, what divides by the curvature at a point,
    which the last steps, `memory` of them, correct. It stops when no step promises more than
    the tolerance.
    """
    point = start
    value, gradient = evaluate(point)
    direction, length = -curvature(point)(gradient), torch.ones_like(value)
    slope = (gradient * direction).sum(-1)
    active = -slope / 2 > tolerance
    steps: list[tuple[Tensor, Tensor]] = []
    evaluations = 1
    while active.any() and evaluations < max_evaluations:
        trial = point + (active * length)[:, None] * direction
        new_value, new_gradient = evaluate(trial)
        evaluations += 1
        rounding = ROUNDING * (1 + value.abs())
        better = active & (new_value <= value + DECREASE * length * slope + rounding)
        moved = better[:, None]
        last = (
            torch.where(moved, trial - point, 0),
            torch.where(moved, new_gradient - gradient, 0),
        )
        steps = [*steps, last][-memory:]
        # where the parabola through both values and the slope has its minimum
        rise = (new_value - value - length * slope).clamp(min=1e-30)
        shorter = (-slope * length**2 / (2 * rise)).nan_to_num(0.0)
        shorter = shorter.clamp(0.1 * length, 0.5 * length)
        length = torch.where(better, 1.0, torch.where(active, shorter, length))
        point = torch.where(moved, trial, point)
        value = torch.where(better, new_value, value)
        gradient = torch.where(moved, new_gradient, gradient)
        direction = torch.where(
            moved, -_two_loops(gradient, steps, curvature(point)), direction
        )
        slope = (gradient * direction).sum(-1)
        active = (-slope / 2 > tolerance) & (length > SHORTEST)
    return Minimum(point, value, ~active, evaluations)


def fit_log_linear(
    expect: Callable[[Tensor], tuple[Tensor, Tensor]],
    observed: Float[Tensor, "problem variable"],
    *,
    has: Float[Tensor, " variable"],
    ridge: Float[Tensor, "problem 1"],
    smooth: slice,
    curvature: Callable[[Tensor, Tensor], Divide],
    start: Float[Tensor, "problem variable"],
    tolerance: Float[Tensor, " problem"],
    max_evaluations: int = 100,
    memory: int = 4,
) -> Minimum:
    """The weights of log-linear models of highest likelihood, less a penalty.

    The penalty is `ridge` / 2 times the sum of their squares, and `SMOOTH` times that of the
    steps between neighbours of those in `smooth`. The likelihood is `observed` times the
    weights, less log Z; `expect` gives log Z and what the model makes of the observed sums,
    and `curvature` divides at a point with these sums. Models have the weights where `has` is
    1, and 0 elsewhere.
    """
    observed = observed * has
    modelled = torch.zeros_like(observed)

    def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
        log_norm, sums = expect(point)
        modelled.copy_(sums * has)
        pull = point.clone()
        steps = point[:, smooth].diff(dim=-1)
        pull[:, smooth] -= SMOOTH * pad(steps, (1, 1)).diff(dim=-1)
        penalty = ridge[:, 0] * (pull * point).sum(-1) / 2
        value = log_norm - (observed * point).sum(-1) + penalty
        return value, modelled - observed + ridge * pull

    return minimize(
        evaluate,
        lambda point: curvature(point, modelled.clone()),
        start * has,
        tolerance=tolerance,
        max_evaluations=max_evaluations,
        memory=memory,
    )


def _two_loops(
    gradient: Float[Tensor, "problem variable"],
    steps: list[tuple[Tensor, Tensor]],
    divide: Divide,
) -> Float[Tensor, "problem variable"]:
    """The gradient divided by the curvature, as corrected by what the last steps have shown."""
    result, shares = gradient, []
    for step, change in reversed(steps):
        weight = _inverse((step * change).sum(-1, keepdim=True))
        share = weight * (step * result).sum(-1, keepdim=True)
        result = result - share * change
        shares.append((step, change, weight, share))
    result = divide(result)
    for step, change, weight, share in reversed(shares):
        back = weight * (change * result).sum(-1, keepdim=True)
        result = result + step * (share - back)
    return result


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where a convex function has shown no curvature: rounding, or no step."""
    return torch.where(x > 1e-20, 1 / x.clamp(min=1e-20), 0.0)
