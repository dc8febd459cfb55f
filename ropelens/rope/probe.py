"""Reading a rotation off vectors that differ by nothing else.

A lone token has the same hidden state at every position, so its query at position p is the
rotation of its query at position 0. Such vectors show which coordinates rotate, how they pair,
and how fast each plane turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Pairing, Planes, plane_norms

PAIRINGS: tuple[Pairing, Pairing] = ("half", "interleaved")

LARGEST_ANGLE = 1024.0
"""Radians up to which a phase is used: float32 angles carry 6e-8 of themselves as error."""


@dataclass(frozen=True)
class MeasuredRotation:
    """What one layer does to a vector as its position grows.

    `residual` is the largest change of a plane's length between positions, relative to
    the mean length: 1e-7 for a rotation in float32, above 0.1 for anything else.
    `resolution[f]` is the relative error to which `planes.inv_freq[f]` is known.
    """

    planes: Planes
    residual: float
    resolution: Float[Tensor, " frequency"]


def probe_positions(longest: int) -> Int[Tensor, " position"]:
    """0, 1, 2, 4, 8, ... and `longest`: each doubling refines every frequency."""
    powers = {2**i for i in range(longest.bit_length())}
    return torch.tensor(sorted({0, longest} | powers))


def read_rotation(
    vectors: Float[Tensor, "vector position coordinate"],
    positions: Int[Tensor, " position"],
    *,
    noise: float,
    counts: Iterable[int] = (),
) -> MeasuredRotation:
    """The rotation that takes `vectors[:, 0]` to `vectors[:, p]`, for every p.

    `vectors` are queries and keys of lone tokens in one layer, at `positions` 0, 1, 2, 4, ...;
    `noise` is the eps of their dtype, `counts` the numbers of planes that the model states.
    The pairing is the one under which lengths stay constant; the frequency comes from the
    phase against position 0, unwrapped by doubling the distance.
    """
    x = vectors.double()
    head_dim = x.shape[-1]
    still = Planes(torch.zeros(0), head_dim, "none")
    size = x.square().mean(dim=(0, 1)).sum().sqrt()
    # A coordinate of a vector holds size / sqrt(D); rounding moves it by `noise` of that.
    moved = (x - x[:, :1]).square().mean(dim=0).amax(dim=0).sqrt()
    changed = (moved > 32 * noise * size / math.sqrt(head_dim)).nonzero()[:, 0].tolist()
    if not changed:
        return MeasuredRotation(still, 0.0, torch.zeros(0))

    offset = changed[0] - changed[0] % 2
    count = (changed[-1] - offset) // 2 + 1
    stated = [n for n in counts if changed[-1] < 2 * n <= head_dim]
    shapes: list[tuple[Pairing, int, int]] = [
        *((pairing, n, 0) for n in stated for pairing in PAIRINGS),
        ("half", head_dim // 2, 0),
        *((pairing, count, offset) for pairing in PAIRINGS),
    ]
    candidates = [Planes(torch.zeros(n), head_dim, pair, begin) for pair, n, begin in shapes]
    residuals = [_residual(x, planes) for planes in candidates]
    # Planes that are 0 fit any count: of shapes that fit alike, the first, most planes.
    fits = max(2 * min(residuals), 4 * noise)
    best = next(i for i, residual in enumerate(residuals) if not residual > fits)
    inv_freq, resolution = _frequencies(x, positions, candidates[best], noise=noise)
    planes = replace(candidates[best], inv_freq=inv_freq)
    return MeasuredRotation(planes, residuals[best], resolution)


def _residual(x: Float[Tensor, "vector position coordinate"], planes: Planes) -> float:
    """Largest change of any term's root-mean-square length, relative to the mean length."""
    lengths = plane_norms(x, planes)
    change = (lengths - lengths[:, :1]).square().mean(dim=0).sqrt().max()
    return float(change / lengths.square().mean().sqrt())


def _frequencies(
    x: Float[Tensor, "vector position coordinate"],
    positions: Int[Tensor, " position"],
    planes: Planes,
    *,
    noise: float,
) -> tuple[Float[Tensor, " frequency"], Float[Tensor, " frequency"]]:
    """Angular frequency of each plane (rad/token) and its relative error.

    NaN where queries and keys have no length in a plane: it cannot be seen to turn.
    """
    z = torch.complex(x[..., planes.first], x[..., planes.second])
    turned = (z * z[:, :1].conj()).sum(dim=0)  # [position, frequency]
    inv_freq = turned[1].angle()
    baseline = torch.ones_like(inv_freq)
    for p, product in zip(positions[2:].tolist(), turned[2:], strict=True):
        expected = inv_freq * p
        correction = (product * torch.polar(torch.ones_like(expected), -expected)).angle()
        refined = inv_freq + correction / p
        usable = refined.abs() * p <= LARGEST_ANGLE
        inv_freq = torch.where(usable, refined, inv_freq)
        baseline = torch.where(usable, float(p), baseline)
    angle = inv_freq.abs() * baseline
    still = angle < 8 * noise
    length = z.abs().square().mean(dim=(0, 1)).sqrt()
    seen = length > 32 * noise * x.square().mean(dim=(0, 1)).sum().sqrt() / x.shape[-1] ** 0.5
    inv_freq = torch.where(still, 0.0, inv_freq).where(seen, math.nan)
    return inv_freq, torch.where(still | ~seen, math.inf, noise / angle + 2**-23)
