"""The planes that RoPE turns: which coordinates share one, and how fast it goes.

Seen as complex numbers, one per plane, RoPE multiplies a query or key at position p
by exp(i w p) (Su et al. 2021, arXiv 2104.09864, eq. 34). Everything here works on
coordinates as the model stores them, in either pairing: "half" pairs coordinate f with f + F
(Llama), "interleaved" 2f with 2f + 1 (GPT-J).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

Pairing = Literal["half", "interleaved", "none"]


@dataclass(frozen=True)
class Planes:
    """The planes of one layer's heads, fastest first.

    `inv_freq[f]` is the angular frequency of plane f in rad/token, 0 for a plane that
    stands still, negative where the model turns clockwise (NanoChat). The F planes fill
    the coordinates from `offset` to `offset + 2F`; RoPE leaves the others alone (partial
    rotary, NoPE layers), and together they are one more term of every score. `pairing` is
    "none" where nothing rotates. Where an edit makes heads of the layer differ, `inv_freq` has
    a row for each query head.
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

    A rotation keeps lengths, so queries before and after RoPE agree. (YaRN scales both by
    its attention factor; the lengths carry it.) Source: Barbero et al. 2024 (arXiv
    2410.06205), the statistic of its norm figures.
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
    """`x` with its rotation taken off: each plane times exp(-i w p).

    The angle is the float32 product that transformers' rotary modules compute, so that the
    model's rounding cancels at far positions.
    """
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
