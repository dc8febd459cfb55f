"""The planes, frequencies and errors of a rotation that was measured at several positions."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from ropelens.noise import FLOOR, NOISE_FACTOR
from ropelens.rope.planes import (
    PAIRINGS,
    Frequencies,
    Pairing,
    Planes,
    zero_frequencies,
)

LARGEST_ANGLE = 1024.0  # rad: the error of float32 is 6e-8 of an angle


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


@dataclass(frozen=True)
class LayerRotation:
    """Rotation of one layer: `measured`, `stated` by the model, and the `planes` to use."""

    measured: MeasuredRotation
    stated: Float[Tensor, " frequency"] | None
    planes: Planes  # with the stated frequencies, exact to the bit, if the model states some
    query_scale: dict[int, float]  # factor on queries at each position
    factor: float | None = None  # the attention factor, if it is known


def probe_positions(longest: int) -> Int[Tensor, " position"]:
    """0, 1, 2, 4, 8, ... and `longest`. Each doubling refines every frequency."""
    powers = [2**power for power in range(longest.bit_length())]
    positions = {0, longest, *powers}
    return torch.tensor(sorted(positions), dtype=torch.long, device="cpu")


def planes_around(changed: list[int], head_dim: int, pairing: Pairing) -> Planes:
    """The fewest planes that contain all `changed` coordinates."""
    offset = changed[0] - changed[0] % 2
    count = (changed[-1] - offset) // 2 + 1
    return Planes(zero_frequencies(count), head_dim, pairing, offset)


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
    samples = Samples(vectors.double(), positions, noise)
    head_dim = vectors.shape[-1]
    changed = samples.changed_coordinates()
    if not changed:
        return MeasuredRotation(
            planes=Planes(zero_frequencies(0), head_dim, "none"),
            residual=0.0,
            noise=samples.relative_noise,
            resolution=zero_frequencies(0),
        )
    candidates = _candidate_planes(changed, head_dim, counts)
    residuals = [samples.residual(planes) for planes in candidates]
    # Planes of length 0 fit any count, so take the first shape, with most planes, that fits.
    largest = max(2 * min(residuals), 4 * samples.relative_noise)
    fails = [residual > largest for residual in residuals]
    best = fails.index(False)
    frequencies = samples.frequencies(candidates[best])
    return MeasuredRotation(
        planes=replace(candidates[best], inv_freq=frequencies.inv_freq),
        residual=residuals[best],
        noise=samples.relative_noise,
        resolution=frequencies.resolution,
    )


def _candidate_planes(
    changed: list[int], head_dim: int, counts: Iterable[int]
) -> list[Planes]:
    candidates = []
    for count in counts:
        if changed[-1] < 2 * count <= head_dim:
            inv_freq = zero_frequencies(count)
            candidates += [Planes(inv_freq, head_dim, pairing) for pairing in PAIRINGS]
    candidates.append(Planes(zero_frequencies(head_dim // 2), head_dim, "half"))
    candidates += [planes_around(changed, head_dim, pairing) for pairing in PAIRINGS]
    return candidates


@dataclass(frozen=True)
class MeasuredFrequencies:
    """Angular frequency of each plane and its error, in rad/token; NaN without any length."""

    inv_freq: Frequencies
    resolution: Frequencies


@dataclass(frozen=True)
class Unwrapped:
    """Angular frequency of each plane, and the distance in tokens that shows it."""

    inv_freq: Frequencies
    baseline: Frequencies


@dataclass(frozen=True)
class Samples:
    """Vectors in float64 at several positions, and their rounding noise."""

    vectors: Float[Tensor, "vector position coordinate"]
    positions: Int[Tensor, " position"]
    noise: Float[Tensor, " coordinate"]

    @cached_property
    def squares(self) -> Float[Tensor, " coordinate"]:
        return self.vectors.square().mean(dim=(0, 1))

    @cached_property
    def relative_noise(self) -> float:
        return float(self.noise.max() / self.squares.mean().sqrt())

    def changed_coordinates(self) -> list[int]:
        """A plane that turns moves by its own length, and other coordinates by rounding."""
        x = self.vectors
        moved = (x - x[:, :1]).square().mean(dim=0).amax(dim=0).sqrt()
        limit = torch.maximum(NOISE_FACTOR * self.noise, FLOOR * self.squares.sqrt())
        return (moved > limit).nonzero()[:, 0].tolist()

    def residual(self, planes: Planes) -> float:
        """Largest change of a root mean square length, relative to the mean length."""
        lengths = planes.norms(self.vectors)
        change = (lengths - lengths[:, :1]).square().mean(dim=0).sqrt().max()
        return float(change / lengths.square().mean().sqrt())

    def frequencies(self, planes: Planes) -> MeasuredFrequencies:
        z = planes.complex(self.vectors)
        unwrapped = self._unwrap(z)
        inv_freq = unwrapped.inv_freq
        length = z.abs().square().mean(dim=(0, 1)).sqrt()
        noise = torch.hypot(self.noise[planes.first], self.noise[planes.second])
        phase_noise = noise / length
        still = inv_freq.abs() * unwrapped.baseline < 8 * phase_noise
        seen = phase_noise < 1 / NOISE_FACTOR
        inv_freq = torch.where(still, 0.0, inv_freq).where(seen, math.nan)
        of_noise = (NOISE_FACTOR * phase_noise).clamp(min=FLOOR) / unwrapped.baseline
        of_rounding = 32 * 2**-23 * inv_freq.abs()  # of angles in float32
        resolution = (of_noise + of_rounding).where(seen, math.inf)
        return MeasuredFrequencies(inv_freq, resolution)

    def _unwrap(self, z: Complex[Tensor, "vector position plane"]) -> Unwrapped:
        """Refine each frequency from the first step to the farthest position."""
        turned = (z * z[:, :1].conj()).sum(dim=0)  # [position, frequency]
        inv_freq = turned[1].angle()
        baseline = torch.ones_like(inv_freq)
        farther = zip(self.positions[2:].tolist(), turned[2:], strict=True)
        for position, product in farther:
            expected = inv_freq * position
            turned_back = product * torch.polar(torch.ones_like(expected), -expected)
            refined = inv_freq + turned_back.angle() / position
            usable = refined.abs() * position <= LARGEST_ANGLE
            inv_freq = torch.where(usable, refined, inv_freq)
            baseline = torch.where(usable, float(position), baseline)
        return Unwrapped(inv_freq, baseline)
