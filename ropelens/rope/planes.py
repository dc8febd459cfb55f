"""The planes that RoPE rotates: coordinates, frequencies, and the measurement of both.

If each plane of a query or key x~ is a complex number, RoPE multiplies it at position p by
exp(i w p) (Su et al. 2021, arXiv 2104.09864, eq. 34).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int, Real
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import Function
from ropelens.noise import FLOOR, NOISE_FACTOR

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
        return slice(self.offset, self.offset + self.rotary_dim // 2)

    @property
    def second(self) -> slice:
        """The coordinates of the imaginary parts, in the order of the planes."""
        if self.pairing == "interleaved":
            return slice(self.offset + 1, self.offset + self.rotary_dim, 2)
        return slice(self.offset + self.rotary_dim // 2, self.offset + self.rotary_dim)

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
        term = torch.full((self.head_dim,), self.terms - 1)
        term[self.first] = term[self.second] = torch.arange(self.rotary_dim // 2)
        return term

    def by_coordinate(self, x: ByTerm) -> ByCoordinate:
        """`x` of the term of each coordinate."""
        count = self.rotary_dim // 2
        spread = x[..., -1:].repeat(*[1] * (x.ndim - 1), self.head_dim)
        spread[..., self.first] = spread[..., self.second] = x[..., :count]
        return spread

    def of_keys(self, kv_heads: int) -> "Planes":
        """The planes of the keys. A key-value head has the planes of its first query head."""
        if self.inv_freq.ndim == 1:
            return self
        return replace(self, inv_freq=self.inv_freq[:: len(self.inv_freq) // kv_heads])

    def sum_coordinates(self, x: ByCoordinate) -> ByTerm:
        """Sum of `x` over the coordinates of each term; for q * k, Re(q_f conj(k_f))."""
        planes = x[..., self.first] + x[..., self.second]
        if self.rotary_dim == self.head_dim:
            return planes
        before, after = x[..., : self.offset], x[..., self.offset + self.rotary_dim :]
        rest = before.sum(-1, keepdim=True) + after.sum(-1, keepdim=True)
        return torch.cat([planes, rest], dim=-1)

    def norms(self, x: ByCoordinate) -> ByTerm:
        """Length of each term of `x` (Barbero et al. 2024, arXiv 2410.06205), in its units."""
        real, imaginary = x[..., self.first], x[..., self.second]
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
        return torch.cat(
            [of_planes, self.sum_coordinates(query * key)[..., -1:]], dim=-1
        )

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


def kept(most: int = 1000) -> Callable[[Function], Function]:
    """Let the first argument of a function keep its results, by the other arguments.

    Only the `most` latest are kept. Tensors, compared by identity, must not change in place.
    """

    def decorate(function: Function) -> Function:
        name = f"kept {function.__name__}"

        @wraps(function)
        def call(owner: Any, *key: Any) -> Any:
            results = vars(owner).setdefault(name, {})
            result = results.get(key)
            if result is None:
                result = results[key] = function(owner, *key)
                for old in list(results)[
                    :-most
                ]:  # a copy, because threads share owners
                    results.pop(old, None)
            return result

        return call  # type: ignore[return-value]

    return decorate


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the `device`. `x` keeps the copy, so that a table moves once for all layers."""
    if x.device == device:
        return x
    # Inference tensors do not count their changes.
    return _copy(x, device, None if x.is_inference() else x._version)


@kept(most=1)
def _copy(x: Tensor, device: torch.device, _version: int | None) -> Tensor:
    return x.to(device)


@kept(most=1)
def _waves(
    positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos w p and sin w p."""
    frequency = on_device(inv_freq, device).float()[..., None, :]
    angle = on_device(positions, device).float()[..., None] * frequency
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
    real, imaginary = x[..., planes.first], x[..., planes.second]
    turned = torch.empty_like(x) if out is None else out
    if planes.rotary_dim < planes.head_dim:
        turned.copy_(x)
    first, second = turned[..., planes.first], turned[..., planes.second]
    torch.mul(real, cos, out=first).addcmul_(imaginary, sin, value=-sign)
    torch.mul(imaginary, cos, out=second).addcmul_(real, sin, value=sign)
    return turned


@dataclass(frozen=True)
class MeasuredRotation:
    """The rotation that a layer applies to a vector as its position grows.

    `residual` is the largest change of a plane's length, relative to the mean length: about
    1e-7 for a rotation in float32, and above 0.1 for anything else. `noise` is in the same
    unit. `resolution[f]` (rad/token) is the error of `planes.inv_freq[f]` of a sound model.
    """

    planes: Planes
    residual: float
    noise: float
    resolution: Float[Tensor, " frequency"]


def probe_positions(longest: int) -> Int[Tensor, " position"]:
    """0, 1, 2, 4, 8, ... and `longest`. Each doubling refines every frequency."""
    powers = {2**i for i in range(longest.bit_length())}
    return torch.tensor(sorted({0, longest} | powers))


def read_rotation(
    vectors: Float[Tensor, "vector position coordinate"],
    positions: Int[Tensor, " position"],
    *,
    noise: Float[Tensor, " coordinate"],
    counts: Iterable[int] = (),
) -> MeasuredRotation:
    """The rotation that maps `vectors[:, 0]` to `vectors[:, p]`, for every p.

    `vectors` are queries and keys of single tokens in one layer, at `positions` 0, 1, 2, 4, ...
    `noise` is in their units, and `counts` are the numbers of planes that the model states. The
    pairing keeps lengths constant. Doubling the distance unwraps the phase from position 0.
    """
    x = vectors.double()
    head_dim = x.shape[-1]
    still = Planes(torch.zeros(0), head_dim, "none")
    squares = x.square().mean(dim=(0, 1))  # of each coordinate
    relative = float(noise.max() / squares.mean().sqrt())
    # A plane that turns moves by its own length, and other coordinates by rounding.
    moved = (x - x[:, :1]).square().mean(dim=0).amax(dim=0).sqrt()
    limit = torch.maximum(NOISE_FACTOR * noise, FLOOR * squares.sqrt())
    changed = (moved > limit).nonzero()[:, 0].tolist()
    if not changed:
        return MeasuredRotation(still, 0.0, relative, torch.zeros(0))

    offset = changed[0] - changed[0] % 2
    count = (changed[-1] - offset) // 2 + 1
    stated = [n for n in counts if changed[-1] < 2 * n <= head_dim]
    shapes: list[tuple[Pairing, int, int]] = [
        *((pairing, n, 0) for n in stated for pairing in PAIRINGS),
        ("half", head_dim // 2, 0),
        *((pairing, count, offset) for pairing in PAIRINGS),
    ]
    candidates = [
        Planes(torch.zeros(n), head_dim, pair, begin) for pair, n, begin in shapes
    ]
    residuals = []  # largest change of a root-mean-square length, relative to the mean length
    for planes in candidates:
        lengths = planes.norms(x)
        change = (lengths - lengths[:, :1]).square().mean(dim=0).sqrt().max()
        residuals.append(float(change / lengths.square().mean().sqrt()))
    # Planes of length 0 fit any count, so take the first shape, with most planes, that fits.
    fits = max(2 * min(residuals), 4 * relative)
    best = next(i for i, residual in enumerate(residuals) if not residual > fits)
    inv_freq, resolution = _frequencies(x, positions, candidates[best], noise)
    planes = replace(candidates[best], inv_freq=inv_freq)
    return MeasuredRotation(planes, residuals[best], relative, resolution)


def _frequencies(
    x: Vectors,
    positions: Int[Tensor, " position"],
    planes: Planes,
    noise: Float[Tensor, " coordinate"],
) -> tuple[Frequencies, Frequencies]:
    """Angular frequency of each plane and its error (rad/token); NaN without any length."""
    z = planes.complex(x)
    turned = (z * z[:, :1].conj()).sum(dim=0)  # [position, frequency]
    inv_freq = turned[1].angle()
    baseline = torch.ones_like(inv_freq)
    for p, product in zip(positions[2:].tolist(), turned[2:], strict=True):
        expected = inv_freq * p
        correction = (
            product * torch.polar(torch.ones_like(expected), -expected)
        ).angle()
        refined = inv_freq + correction / p
        usable = (
            refined.abs() * p <= 1024.0
        )  # rad: the error of float32 is 6e-8 of an angle
        inv_freq = torch.where(usable, refined, inv_freq)
        baseline = torch.where(usable, float(p), baseline)
    length = z.abs().square().mean(dim=(0, 1)).sqrt()
    phase_noise = torch.hypot(noise[planes.first], noise[planes.second]) / length
    still = inv_freq.abs() * baseline < 8 * phase_noise
    seen = phase_noise < 1 / NOISE_FACTOR
    inv_freq = torch.where(still, 0.0, inv_freq).where(seen, math.nan)
    rounding = 32 * 2**-23 * inv_freq.abs()  # of angles in float32
    resolution = (NOISE_FACTOR * phase_noise).clamp(min=FLOOR) / baseline + rounding
    return inv_freq, resolution.where(seen, math.inf)
