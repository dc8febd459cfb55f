"""Layers of one kind in a profile, their planes, and sets of these planes that stop."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from ropelens.claims.arrays import rotating_in
from ropelens.claims.run_arrays import SETS
from ropelens.interventions.plane_edits import Edit
from ropelens.rope.select import ALL_HEADS, PlaneNumbers

# Radians. A stop of planes that turn less changes their scores by less than 10 %
MIN_TURN = 0.1

Planes = Int[np.ndarray, " _"]  # numbers of planes
PlaneSet = Planes | tuple[int, ...]


@dataclass(frozen=True)
class Quarters:
    """Sets with a quarter of the planes that rotate: the ends, and up to 40 random sets."""

    slowest: Planes
    fastest: Planes
    random: list[tuple[int, ...]]

    @property
    def all(self) -> list[PlaneSet]:
        return [self.slowest, self.fastest, *self.random]


@dataclass(frozen=True)
class LayersOfKind:
    """The layers of one kind in a profile, or `every` layer if there is one kind."""

    profile: xr.Dataset
    every: bool
    seed: int

    @property
    def layers(self) -> Int[np.ndarray, " layer"]:
        """Numbers of the layers that rotate."""
        return self.profile["layer"].values[rotating_in(self.profile).layers]

    @cached_property
    def rotating(self) -> Planes:
        """The planes that rotate in any layer."""
        return np.flatnonzero(np.isfinite(self.wavelength).any(0))

    @property
    def wavelength(self) -> Float[np.ndarray, "layer frequency"]:
        return self.profile["wavelength"].values

    @cached_property
    def quarters(self) -> Quarters:
        count = len(self.rotating) // 4
        fastest = self.rotating[:count]
        slowest = self.rotating[len(self.rotating) - count :]
        random = planes_at_random(self.rotating, [slowest, fastest], self.seed)
        return Quarters(slowest=slowest, fastest=fastest, random=random)

    @cached_property
    def heads(self) -> str:
        """The choice of all heads of these layers."""
        if self.every:
            return ALL_HEADS
        return ",".join(f"{layer}.*" for layer in self.profile["layer"].values)

    def why_no_effect(
        self, wavelength: Float[np.ndarray, "layer _"], length: int
    ) -> str:
        """`why_no_effect`, on texts no longer than the reach of the layers."""
        reach = length if self.every else int(self.profile.attrs["trained_context"])
        return why_no_effect(wavelength, min(length, reach))


def tokens_to_turn(wavelength: Float[np.ndarray, "layer _"]) -> int:
    """Tokens within which the fastest of these planes turns by `MIN_TURN`; 0 without planes."""
    shortest = _shortest(wavelength)
    if math.isinf(shortest):
        return 0
    return math.ceil(MIN_TURN / (2 * np.pi) * shortest)


def _shortest(wavelength: Float[np.ndarray, "layer _"]) -> float:
    return float(wavelength[np.isfinite(wavelength)].min(initial=np.inf))


def why_no_effect(wavelength: Float[np.ndarray, "layer _"], length: int) -> str:
    """Why a stop of these planes cannot act on texts of `length` tokens; "" if it can."""
    needs = tokens_to_turn(wavelength)
    shortest = _shortest(wavelength)
    if length >= needs:
        return ""
    return (
        f"the stopped planes have wavelengths of {shortest:,.0f} tokens or more, and "
        f"turn by less than {MIN_TURN} rad within the tested {length:,} tokens; a verdict "
        f"needs {needs:,} tokens"
    )


def planes_at_random(
    planes: Planes, excluded: Sequence[Planes], seed: int
) -> list[tuple[int, ...]]:
    """Up to 40 random sets of planes, as large as the `excluded` sets and other than them."""
    random = np.random.default_rng(seed)
    size = len(excluded[0])
    sets = dict.fromkeys(tuple(numbers.tolist()) for numbers in excluded)
    possible = math.comb(len(planes), size)
    count = min(SETS + len(sets), possible)
    while len(sets) < count:
        drawn = np.sort(random.choice(planes, size, replace=False))
        sets[tuple(drawn.tolist())] = None
    return [*sets][len(excluded) :]


def edits_of(
    change: Callable[..., Edit], sets: Iterable[PlaneSet], heads: str
) -> dict[str, Edit]:
    """The same change of each set of planes, by names such as "stop 0"."""
    edits = {}
    for index, planes in enumerate(sets):
        numbers = [int(plane) for plane in planes]
        name = f"{change.__name__} {index}"
        edits[name] = change(PlaneNumbers(numbers), heads=heads)
    return edits
