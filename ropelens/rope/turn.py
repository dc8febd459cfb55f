"""Queries and keys rotated again: from the angles of the model to other ones.

A rotated vector has exp(i w p) x~ in every plane. Times exp(i (v - w) p) it is the vector
that the model would have computed with frequency v in place of w (Su et al. 2021, arXiv
2104.09864, eq. 34): v = 0 stops the plane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes


@dataclass(frozen=True)
class Side:
    """How a layer's queries change, or its keys: a row for each head, or one for all.

    Plane f turns at `inv_freq[..., f]` rad/token (signed as in `Planes`) and becomes
    `gain[..., f]` times as long. Where `mean[..., f, :]` is not NaN, it replaces the unrotated
    vector of every token.
    """

    inv_freq: Float[Tensor, "head frequency"]
    gain: Float[Tensor, "head frequency"]
    mean: Float[Tensor, "head frequency 2"]

    @classmethod
    def of(cls, planes: Planes, *, heads: int) -> Side:
        """A side that changes nothing."""
        shape = (heads, len(planes.inv_freq))
        inv_freq = planes.inv_freq.float().expand(shape)
        return cls(inv_freq, torch.ones(shape), torch.full((*shape, 2), math.nan))

    def at(
        self,
        chosen: Bool[Tensor, "head frequency"],
        *,
        inv_freq: Float[Tensor, " frequency"] | None = None,
        gain: float | None = None,
        mean: Float[Tensor, "head frequency 2"] | None = None,
    ) -> Side:
        """This side with a new frequency, gain or mean of the chosen planes.

        A plane with gain 0 keeps it.
        """
        new: dict[str, Tensor] = {}
        if inv_freq is not None:
            new["inv_freq"] = torch.where(chosen, inv_freq.float(), self.inv_freq)
        if gain is not None:
            new["gain"] = torch.where(chosen & (self.gain != 0), gain, self.gain)
        if mean is not None:
            new["mean"] = torch.where(chosen[..., None], mean.float(), self.mean)
        return replace(self, **new)

    def leaves(self, planes: Planes) -> bool:
        """Whether this side changes nothing of a layer that rotates in `planes`."""
        same = self.inv_freq == planes.inv_freq.float()
        return bool(same.all() and (self.gain == 1).all() and self.mean.isnan().all())

    def shared(self, *, groups: int) -> Side | None:
        """One row for each of `groups` groups of heads; None where heads of a group differ."""
        parts = [x.unflatten(0, (groups, -1)) for x in (self.inv_freq, self.gain, self.mean)]
        for part in parts:
            one = part[:, :1]
            if not ((part == one) | (part.isnan() & one.isnan())).all():
                return None
        return Side(*(part[:, 0] for part in parts))


def turn(
    x: Float[Tensor, "batch head position coordinate"],
    positions: Int[Tensor, "_ position"],
    planes: Planes,
    side: Side,
) -> Float[Tensor, "batch head position coordinate"]:
    """`x`, which rotates in `planes`, changed as `side` says.

    Coordinates outside the planes keep every bit. Both angles are the float32 products that
    transformers' rotary modules compute, so that the model's rounding cancels at far positions.
    """
    one = side.shared(groups=1)
    side = side if one is None else one
    at = positions.to(x.device, torch.float32)[:, None, :, None]
    old = (at * planes.inv_freq.to(x.device, torch.float32)).double()
    new = (at * side.inv_freq.to(x.device)[:, None]).double()
    gain = side.gain.to(x.device)[:, None]
    exact = torch.promote_types(x.dtype, torch.float32)
    real, imaginary = x[..., planes.first].to(exact), x[..., planes.second].to(exact)
    first, second = _rotated(real, imaginary, new - old, gain.to(exact))
    if not side.mean.isnan().all():
        mean = side.mean.to(x.device, exact)[:, None].unbind(-1)
        stays = mean[0].isnan()
        fixed = _rotated(mean[0], mean[1], new, gain.to(exact))
        first, second = (
            torch.where(stays, rotated, part)
            for rotated, part in zip((first, second), fixed, strict=True)
        )
    result = x.clone()
    result[..., planes.first] = first.to(x.dtype)
    result[..., planes.second] = second.to(x.dtype)
    return result


def _rotated(
    real: Tensor, imaginary: Tensor, angle: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """(real + i imaginary) gain exp(i angle)."""
    cos, sin = angle.cos().to(real.dtype) * gain, angle.sin().to(real.dtype) * gain
    return real * cos - imaginary * sin, imaginary * cos + real * sin
