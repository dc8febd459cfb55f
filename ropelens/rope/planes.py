"""The planes that RoPE rotates: coordinates, frequencies, and vectors in planes.

If each plane of a query or key x~ is a complex number, RoPE multiplies it at position p by
exp(i w p) (Su et al. 2021, arXiv 2104.09864, eq. 34).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int, Real
from torch import Tensor
from torch.nn.functional import pad

from ropelens.caches import kept, on_device

Pairing = Literal["half", "interleaved", "none"]
PAIRINGS: tuple[Pairing, Pairing] = ("half", "interleaved")

Vectors = Float[Tensor, "*batch position coordinate"]
ByCoordinate = Float[Tensor, "*batch coordinate"]
ByTerm = Float[Tensor, "*batch term"]
Frequencies = Float[Tensor, " frequency"]


@dataclass(frozen=True)
class Planes:
    """The planes of one layer's heads, fastest first.

    `inv_freq[f]` is the angular frequency of plane f in rad/token: 0 for a plane that does not
    rotate, and negative for clockwise rotation (NanoChat). It has a row for each query head if
    an edit makes heads differ. The F planes fill the coordinates from `offset` to
    `offset + 2F`. The `pairing` "half" pairs f with f + F (Llama), and "interleaved" pairs 2f
    with 2f + 1 (GPT-J). The other coordinates together are one term of every score. If a token
    has several positions (M-RoPE), plane f rotates with the position on `axis[f]`.
    """

    inv_freq: Float[Tensor, "*head frequency"]
    head_dim: int
    pairing: Pairing
    offset: int = 0
    axis: Int[Tensor, " frequency"] | None = None

    @property
    def rotary_dim(self) -> int:
        """Number of coordinates that lie in planes."""
        return 2 * self.inv_freq.shape[-1]

    @property
    def first(self) -> slice:
        """The coordinates of the real parts, in the order of the planes."""
        if self.pairing == "interleaved":
            return slice(self.offset, self.offset + self.rotary_dim, 2)
        middle = self.offset + self.rotary_dim // 2
        return slice(self.offset, middle)

    @property
    def second(self) -> slice:
        """The coordinates of the imaginary parts, in the order of the planes."""
        if self.pairing == "interleaved":
            return slice(self.offset + 1, self.offset + self.rotary_dim, 2)
        middle = self.offset + self.rotary_dim // 2
        return slice(middle, self.offset + self.rotary_dim)

    @property
    def terms(self) -> int:
        """Number of terms of a score: one for each plane, and one for other coordinates."""
        return self.inv_freq.shape[-1] + (self.rotary_dim < self.head_dim)

    @property
    def term_inv_freq(self) -> Float[Tensor, "*head term"]:
        """`inv_freq` of each term; 0 for the unrotated coordinates, which come last."""
        return pad(self.inv_freq, (0, self.terms - self.inv_freq.shape[-1]))

    @property
    def wavelength(self) -> Float[Tensor, "*head term"]:
        """Tokens per turn of each term; infinite if it does not rotate."""
        return 2 * math.pi / self.term_inv_freq.double().abs()

    @property
    def term_of(self) -> Int[Tensor, " coordinate"]:
        """The term of each coordinate of a head."""
        term = torch.full(
            (self.head_dim,), self.terms - 1, dtype=torch.long, device="cpu"
        )
        planes = torch.arange(self.rotary_dim // 2, device="cpu")
        term[self.first] = planes
        term[self.second] = planes
        return term

    def by_coordinate(self, x: ByTerm) -> ByCoordinate:
        """`x` of the term of each coordinate."""
        of_planes = x[..., : self.rotary_dim // 2]
        once = [1] * (x.ndim - 1)
        spread = x[..., -1:].repeat(*once, self.head_dim)
        spread[..., self.first] = of_planes
        spread[..., self.second] = of_planes
        return spread

    def of_keys(self, kv_heads: int) -> "Planes":
        """The planes of the keys. A key-value head has the planes of its first query head."""
        if self.inv_freq.ndim == 1:
            return self
        group = len(self.inv_freq) // kv_heads
        return replace(self, inv_freq=self.inv_freq[::group])

    def sum_coordinates(self, x: ByCoordinate) -> ByTerm:
        """Sum of `x` over the coordinates of each term; for q * k, Re(q_f conj(k_f))."""
        planes = x[..., self.first] + x[..., self.second]
        if self.rotary_dim == self.head_dim:
            return planes
        before = x[..., : self.offset]
        after = x[..., self.offset + self.rotary_dim :]
        rest = before.sum(-1, keepdim=True) + after.sum(-1, keepdim=True)
        return torch.cat([planes, rest], dim=-1)

    def norms(self, x: ByCoordinate) -> ByTerm:
        """Length of each term of `x` (Barbero et al. 2024, arXiv 2410.06205), in its units."""
        real = x[..., self.first]
        imaginary = x[..., self.second]
        squares = real.square().addcmul_(imaginary, imaginary)
        if self.rotary_dim < self.head_dim:
            rest = self.sum_coordinates(x.square())[..., -1:]
            squares = torch.cat([squares, rest], dim=-1)
        return squares.sqrt_()

    def complex(self, x: ByCoordinate) -> Complex[Tensor, "*batch plane"]:
        """Each plane of `x` as a complex number, in the units of `x`."""
        return torch.complex(x[..., self.first], x[..., self.second])

    def products(
        self,
        query: Float[Tensor, "*#batch coordinate"],
        key: Float[Tensor, "*#batch coordinate"],
    ) -> Complex[Tensor, "*#batch term"]:
        """q conj(k) of every term. The real parts sum to q . k."""
        of_planes = self.complex(query) * self.complex(key).conj_physical_()
        if self.rotary_dim == self.head_dim:
            return of_planes
        rest = self.sum_coordinates(query * key)[..., -1:]
        return torch.cat([of_planes, rest], dim=-1)

    def moved_scores(
        self,
        products: Complex[Tensor, "*batch term"],
        distance: Real[Tensor, " distance"],
    ) -> Float[Tensor, "*batch distance"]:
        """Re sum_f c_f exp(i w_f d) of the `products` c at distances d (arXiv 2410.06205)."""
        angle = self.term_inv_freq.double()[..., None] * distance.double().cpu()
        waves = torch.cat([angle.cos(), -angle.sin()], dim=-2).to(products.real)
        parts = torch.cat([products.real, products.imag], dim=-1)
        return (parts[..., None, :] @ waves)[..., 0, :]


def zero_frequencies(count: int) -> Frequencies:
    """Frequencies of `count` planes that do not rotate, or whose frequency is not known."""
    return torch.zeros(count, dtype=torch.float32, device="cpu")


@kept(most=1)
def _waves(
    positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos w p and sin w p."""
    frequency = on_device(inv_freq, device).float()
    position = on_device(positions, device).float()
    angle = position[..., None] * frequency[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def unrotate(
    x: Vectors,
    positions: Int[Tensor, "*#batch position"],
    planes: Planes,
    *,
    sign: int = -1,
    out: Vectors | None = None,
) -> Vectors:
    """Remove the rotation of `x`: multiply each plane by exp(-i w p); the `sign` 1 rotates.

    The angle is the float32 product of transformers, so that its rounding cancels far away.
    """
    cos, sin = _waves(positions, planes.inv_freq, x.dtype, x.device)
    real = x[..., planes.first]
    imaginary = x[..., planes.second]
    turned = torch.empty_like(x) if out is None else out
    if planes.rotary_dim < planes.head_dim:
        turned.copy_(x)
    turned_real = turned[..., planes.first]
    turned_imaginary = turned[..., planes.second]
    torch.mul(real, cos, out=turned_real).addcmul_(imaginary, sin, value=-sign)
    torch.mul(imaginary, cos, out=turned_imaginary).addcmul_(real, sin, value=sign)
    return turned
