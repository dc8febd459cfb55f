"""Queries and keys under other rotations.

A rotated vector has exp(i w p) x~ in every plane (Su et al. 2021, arXiv 2104.09864, eq. 34).
Times exp(i (v - w) p) it is the vector that the model would have computed with frequency v in
place of w: v = 0 stops the plane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes


@dataclass(frozen=True)
class Side:
    """How a layer's queries change, or its keys: a row for each head, or one for all.

    Plane f turns at `inv_freq[..., f]` rad/token (signed as in `Planes`) and becomes
    `gain[..., f]` times as long.
    """

    inv_freq: Float[Tensor, "head frequency"]
    gain: Float[Tensor, "head frequency"]

    def at(
        self,
        chosen: Bool[Tensor, "head frequency"],
        inv_freq: Float[Tensor, " frequency"] | None,
        gain: float | None,
    ) -> Side:
        """This side with a new frequency or gain of the chosen planes; gain 0 stays."""
        turned, length = self.inv_freq, self.gain
        if inv_freq is not None:
            turned = torch.where(chosen, inv_freq.float(), turned)
        if gain is not None:
            length = torch.where(chosen & (length != 0), gain, length)
        return Side(turned, length)

    def shared(self, *, groups: int) -> Side | None:
        """One row for each of `groups` groups of heads; None where heads of a group differ."""
        parts = [x.unflatten(0, (groups, -1)) for x in (self.inv_freq, self.gain)]
        same = all((x == x[:, :1]).all() for x in parts)
        return Side(*(x[:, 0] for x in parts)) if same else None


def turn(
    x: Float[Tensor, "batch head position coordinate"],
    positions: Int[Tensor, "_ position *axis"],
    planes: Planes,
    side: Side,
) -> Float[Tensor, "batch head position coordinate"]:
    """`x`, which rotates in `planes`, changed as `side` says; the rest keeps every bit.

    Of positions on several axes each plane turns with its own.
    """
    if (side.inv_freq == planes.inv_freq.float()).all() and (side.gain == 1).all():
        return x
    side = side.shared(groups=1) or side
    at = by_plane(positions, planes).to(x.device, torch.float32)[:, None]
    old = (at * planes.inv_freq.to(x.device, torch.float32)).double()
    new = (at * side.inv_freq.to(x.device)[:, None]).double()
    return moved(x, new - old, planes, gain=side.gain[:, None].to(x.device))


def moved(
    x: Float[Tensor, "batch head position coordinate"],
    angle: Float[Tensor, "_ _ position frequency"],
    planes: Planes,
    *,
    gain: Tensor | float = 1.0,
) -> Float[Tensor, "batch head position coordinate"]:
    """`x` times gain exp(i angle), rad, in every plane; its bits where that is 1."""
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (z.to(exact) * gain for z in (angle.double().cos(), angle.double().sin()))
    real, imaginary = (x[..., part].to(exact) for part in (planes.first, planes.second))
    result = x.clone()
    result[..., planes.first] = (real * cos - imaginary * sin).to(x.dtype)
    result[..., planes.second] = (imaginary * cos + real * sin).to(x.dtype)
    return result


def by_plane(
    positions: Int[Tensor, "_ position *axis"], planes: Planes
) -> Int[Tensor, "_ position frequency"]:
    """The positions by which each plane turns; one for all where they have no axes."""
    return positions[..., None] if positions.ndim == 2 else positions[..., planes.axis]
