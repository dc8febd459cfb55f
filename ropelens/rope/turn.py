"""Queries and keys under other rotations.

A rotated vector has exp(i w p) x~ in every plane (Su et al. 2021, arXiv 2104.09864, eq. 34).
Multiply it by exp(i (v - w) p) to give it the frequency v; with v = 0 the plane stops.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import UnsupportedModel
from ropelens.rope.planes import Planes

HeadVectors = Float[Tensor, "batch head position coordinate"]
Positions = Int[Tensor, "_ position *axis"]
Angles = Float[Tensor, "_ _ position frequency"]


@dataclass(frozen=True)
class TargetRotation:
    """The rotation (rad/token, signed) and gain that a layer's queries or keys should get.

    The last gain is also the gain of the coordinates that never rotate.
    """

    inv_freq: Float[Tensor, "head frequency"]
    gain: Float[Tensor, "head term"]

    def shared(self, *, groups: int) -> "TargetRotation | None":
        """One row for each of `groups` groups of heads; None if heads of a group differ."""
        inv_freq = self.inv_freq.unflatten(0, (groups, -1))
        gain = self.gain.unflatten(0, (groups, -1))
        first_inv_freq = inv_freq[:, :1]
        first_gain = gain[:, :1]
        if not ((inv_freq == first_inv_freq).all() and (gain == first_gain).all()):
            return None
        return TargetRotation(first_inv_freq[:, 0], first_gain[:, 0])


def rotate_to(
    x: HeadVectors, positions: Positions, planes: Planes, target: TargetRotation
) -> HeadVectors:
    """Give `x`, which rotates in `planes`, the target rotation."""
    if (target.inv_freq == planes.inv_freq.float()).all() and (target.gain == 1).all():
        return x
    target = target.shared(groups=1) or target
    position = positions_by_plane(positions, planes).to(x.device, torch.float32)
    position = position[:, None]
    old = (position * planes.inv_freq.to(x.device, torch.float32)).double()
    new = (position * target.inv_freq.to(x.device)[:, None]).double()
    gain = planes.by_coordinate(target.gain)[:, None].to(x.device)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))  # rounds only once
    return (rotate_by(exact, new - old, planes) * gain).to(x.dtype)


def rotate_by(x: HeadVectors, angle: Angles, planes: Planes) -> HeadVectors:
    """Multiply every plane by exp(i angle); an angle of 0 changes no bit."""
    exact = torch.promote_types(x.dtype, torch.float32)
    cos = angle.double().cos().to(exact)
    sin = angle.double().sin().to(exact)
    real = x[..., planes.first].to(exact)
    imaginary = x[..., planes.second].to(exact)
    rotated = x.clone()
    rotated[..., planes.first] = (real * cos - imaginary * sin).to(x.dtype)
    rotated[..., planes.second] = (imaginary * cos + real * sin).to(x.dtype)
    return rotated


def positions_by_plane(
    positions: Positions, planes: Planes
) -> Int[Tensor, "_ position _"]:
    """The positions by which each plane rotates; one for all planes without axes (M-RoPE)."""
    if positions.ndim == 2:
        return positions[..., None]
    if planes.axis is None:
        raise UnsupportedModel(
            "The tokens have positions on several axes, but the model has no M-RoPE.",
            hint="position_ids of two dimensions",
        )
    return positions[..., planes.axis]
