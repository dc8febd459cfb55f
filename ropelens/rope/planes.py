"""The planes that RoPE turns: their coordinates, how fast they go, and how to turn them anew.

Seen as complex numbers, one per plane, RoPE multiplies a query or key x~ at position p by
exp(i w p) (Su et al. 2021, arXiv 2104.09864, eq. 34). Times exp(i (v - w) p) it is the vector
that the model would have computed with frequency v in place of w: v = 0 stops the plane.
Angles are the float32 products that transformers' rotary modules compute, so that the model's
rounding cancels at far positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

Pairing = Literal["half", "interleaved", "none"]


@dataclass(frozen=True)
class Planes:
    """The planes of one layer's heads, fastest first.

    `inv_freq[f]` is the angular frequency of plane f in rad/token, 0 for a plane that
    stands still, negative where the model turns clockwise (NanoChat). The F planes fill
    the coordinates from `offset` to `offset + 2F` as the model stores them: `pairing` "half"
    pairs f with f + F (Llama), "interleaved" 2f with 2f + 1 (GPT-J), "none" where nothing
    rotates. RoPE leaves the others alone (partial rotary, NoPE layers); together they are one
    more term of every score. Where an edit makes heads of the layer differ, `inv_freq` has a
    row for each query head.
    """

    inv_freq: Float[Tensor, "*head frequency"]
    head_dim: int
    pairing: Pairing
    offset: int = 0

    @property
    def rotary_dim(self) -> int:
        """Number of coordinates that lie in planes."""
        return 2 * self.inv_freq.shape[-1]

    @property
    def first(self) -> slice:
        """The coordinates that are real parts, in the order of the planes."""
        if self.pairing == "interleaved":
            return slice(self.offset, self.offset + self.rotary_dim, 2)
        return slice(self.offset, self.offset + self.rotary_dim // 2)

    @property
    def second(self) -> slice:
        """The coordinates that are imaginary parts, in the order of the planes."""
        if self.pairing == "interleaved":
            return slice(self.offset + 1, self.offset + self.rotary_dim, 2)
        return slice(self.offset + self.rotary_dim // 2, self.offset + self.rotary_dim)

    @property
    def terms(self) -> int:
        """Number of terms that a score splits into: a plane each, and one for the rest."""
        return self.inv_freq.shape[-1] + (self.rotary_dim < self.head_dim)

    @property
    def term_inv_freq(self) -> Float[Tensor, "*head term"]:
        """`inv_freq` of each term; the unrotated rest comes last, with 0."""
        return pad(self.inv_freq, (0, self.terms - self.inv_freq.shape[-1]))

    @property
    def wavelength(self) -> Float[Tensor, "*head term"]:
        """Tokens per turn of each term; infinite where it does not rotate."""
        return 2 * math.pi / self.term_inv_freq.double().abs()

    @property
    def term_of(self) -> Int[Tensor, " coordinate"]:
        """The term that each coordinate of a head belongs to."""
        term = torch.full((self.head_dim,), self.terms - 1)
        term[self.first] = term[self.second] = torch.arange(self.rotary_dim // 2)
        return term

    def of_keys(self, kv_heads: int) -> Planes:
        """The planes of the keys: of each, those of the first query head that reads it."""
        if self.inv_freq.ndim == 1:
            return self
        return replace(self, inv_freq=self.inv_freq[:: len(self.inv_freq) // kv_heads])

    def sum_coordinates(
        self, x: Float[Tensor, "*batch coordinate"]
    ) -> Float[Tensor, "*batch term"]:
        """Sum of `x` over the coordinates of each term, in the units of `x`.

        Of a product q * k it is each plane's share Re(q_f conj(k_f)) of the score.
        """
        planes = x[..., self.first] + x[..., self.second]
        if self.rotary_dim == self.head_dim:
            return planes
        before, after = x[..., : self.offset], x[..., self.offset + self.rotary_dim :]
        rest = before.sum(-1, keepdim=True) + after.sum(-1, keepdim=True)
        return torch.cat([planes, rest], dim=-1)


def plane_norms(
    x: Float[Tensor, "*batch coordinate"], planes: Planes
) -> Float[Tensor, "*batch term"]:
    """Length of each plane of `x`, in the units of `x`; last that of the unrotated rest.

    A rotation keeps it (YaRN's attention factor stays in it). Source: Barbero et al. 2024,
    arXiv 2410.06205, the statistic of its norm figures.
    """
    real, imaginary = x[..., planes.first], x[..., planes.second]
    squares = real.square().addcmul_(imaginary, imaginary)
    if planes.rotary_dim < planes.head_dim:
        rest = planes.sum_coordinates(x.square())[..., -1:]
        squares = torch.cat([squares, rest], dim=-1)
    return squares.sqrt_()


def unrotate(
    x: Float[Tensor, "*batch position coordinate"],
    positions: Int[Tensor, " position"],
    planes: Planes,
) -> Float[Tensor, "*batch position coordinate"]:
    """`x` with its rotation taken off: each plane times exp(-i w p)."""
    inv_freq = planes.inv_freq.to(x.device, torch.float32)
    angle = positions.to(x.device, torch.float32)[:, None] * inv_freq[..., None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    real, imaginary = x[..., planes.first], x[..., planes.second]
    unrotated = torch.empty_like(x)
    if planes.rotary_dim < planes.head_dim:
        unrotated.copy_(x)
    first, second = unrotated[..., planes.first], unrotated[..., planes.second]
    torch.mul(real, cos, out=first).addcmul_(imaginary, sin)
    torch.mul(imaginary, cos, out=second).addcmul_(real, sin, value=-1)
    return unrotated


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
        """This side with a new frequency, gain or mean of the chosen planes; gain 0 stays."""
        new: dict[str, Tensor] = {}
        if inv_freq is not None:
            new["inv_freq"] = torch.where(chosen, inv_freq.float(), self.inv_freq)
        if gain is not None:
            new["gain"] = torch.where(chosen & (self.gain != 0), gain, self.gain)
        if mean is not None:
            new["mean"] = torch.where(chosen[..., None], mean.float(), self.mean)
        return replace(self, **new)

    def shared(self, *, groups: int) -> Side | None:
        """One row for each of `groups` groups of heads; None where heads of a group differ."""
        parts = [x.unflatten(0, (groups, -1)) for x in (self.inv_freq, self.gain, self.mean)]
        same = [(x == x[:, :1]) | (x.isnan() & x[:, :1].isnan()) for x in parts]
        return Side(*(x[:, 0] for x in parts)) if all(x.all() for x in same) else None


def turn(
    x: Float[Tensor, "batch head position coordinate"],
    positions: Int[Tensor, "_ position"],
    planes: Planes,
    side: Side,
) -> Float[Tensor, "batch head position coordinate"]:
    """`x`, which rotates in `planes`, changed as `side` says; the rest keeps every bit."""
    same = (side.inv_freq == planes.inv_freq.float()).all()
    if same and (side.gain == 1).all() and side.mean.isnan().all():
        return x
    side = side.shared(groups=1) or side
    at = positions.to(x.device, torch.float32)[:, None, :, None]
    old = (at * planes.inv_freq.to(x.device, torch.float32)).double()
    new = (at * side.inv_freq.to(x.device)[:, None]).double()
    exact = torch.promote_types(x.dtype, torch.float32)
    gain, mean = side.gain[:, None].to(x.device, exact), side.mean[:, None].to(x.device, exact)
    z = torch.stack([x[..., planes.first], x[..., planes.second]]).to(exact)
    z = _rotated(z, new - old, gain)
    if not mean.isnan().all():
        means = mean.movedim(-1, 0)[:, None]
        z = torch.where(means.isnan(), z, _rotated(means, new, gain))
    result = x.clone()
    result[..., planes.first], result[..., planes.second] = z.to(x.dtype)
    return result


def _rotated(z: Float[Tensor, "2 ..."], angle: Tensor, gain: Tensor) -> Float[Tensor, "2 ..."]:
    """Times gain exp(i angle), for real and imaginary parts of `z`."""
    cos, sin = angle.cos().to(z.dtype) * gain, angle.sin().to(z.dtype) * gain
    return torch.stack([z[0] * cos - z[1] * sin, z[1] * cos + z[0] * sin])
