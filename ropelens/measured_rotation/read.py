"""The planes, frequencies and errors of a rotation that was measured at several positions."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.noise import FLOOR, NOISE_FACTOR
from ropelens.rope.planes import PAIRINGS, Frequencies, Pairing, Planes, Vectors


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


def planes_around(changed: list[int], head_dim: int, pairing: Pairing) -> Planes:
    """The fewest planes that contain all `changed` coordinates."""
    offset = changed[0] - changed[0] % 2
    count = (changed[-1] - offset) // 2 + 1
    return Planes(torch.zeros(count), head_dim, pairing, offset)


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

    stated = [n for n in counts if changed[-1] < 2 * n <= head_dim]
    candidates = [
        *(Planes(torch.zeros(n), head_dim, pair) for n in stated for pair in PAIRINGS),
        Planes(torch.zeros(head_dim // 2), head_dim, "half"),
        *(planes_around(changed, head_dim, pairing) for pairing in PAIRINGS),
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
