"""Which planes a truncation sweep stops: from an end, a band of wavelengths, or at random.

No model is needed: `Turning` says which planes of a layer rotate, a `Cut` which of them stop,
and `plan_cuts` makes the cuts of a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.rope.planes import Planes
from ropelens.rope.select import kept_planes

ENDS = ("slow", "fast")
ATTEMPTS = 100
"""How often a control is drawn again before it may be left out."""

ALIKE = 1e-3
"""Relative difference below which wavelengths of two layers count as one."""

Numbers = tuple[int, ...]
"""Plane numbers of a layer, 0 the fastest, ascending; or a number of planes for each layer."""

Stopped = tuple[Numbers, ...]
"""The planes of each layer that stop."""


@dataclass(frozen=True)
class Turning:
    """The planes of one layer that rotate: their numbers and wavelengths (tokens)."""

    numbers: Numbers
    wavelength: tuple[float, ...]

    @classmethod
    def of(cls, planes: Planes) -> Turning:
        wavelength = planes.wavelength[: len(planes.inv_freq)].tolist()
        numbers = tuple(n for n, length in enumerate(wavelength) if math.isfinite(length))
        return cls(numbers, tuple(wavelength[n] for n in numbers))


@dataclass(frozen=True)
class Cut:
    """One entry of a sweep: the planes that stop in each layer, and why (`kind`)."""

    kind: str
    stopped: Stopped
    draw: int = -1
    band: int = -1

    def kept(self, layers: Sequence[Turning]) -> float:
        """Share of the model's rotating planes that still rotate."""
        whole = sum(len(layer.numbers) for layer in layers)
        return (whole - sum(map(len, self.stopped))) / whole

    def name(self, layers: Sequence[Turning]) -> str:
        """Its name in the dimension `edit`: "slow 0.75", "random 0.75 #1", "band 3"."""
        if self.kind == "none":
            return "none"
        kind, _, control = self.kind.partition(" ")
        place = f"{self.kept(layers):.4g}" if self.band < 0 else f"{self.band}"
        draw = f"#{self.draw}" if self.draw >= 0 else ""
        return " ".join(filter(None, (kind, place, control, draw)))

    @property
    def planes(self) -> str:
        """The numbers of the stopped planes: "0,1,5".

        Where layers stop different ones, each set with its layers: "0 2: 0,1; 3: 5".
        """
        layers: dict[str, list[str]] = {}
        for layer, numbers in enumerate(self.stopped):
            layers.setdefault(",".join(map(str, numbers)), []).append(str(layer))
        if len(layers) == 1:
            return next(iter(layers))
        return "; ".join(f"{' '.join(of)}: {text}" for text, of in layers.items() if text)

    def wavelengths(self, layers: Sequence[Turning]) -> list[float]:
        """Wavelengths (tokens) of the planes that stop."""
        return [
            length
            for stopped, layer in zip(self.stopped, layers, strict=True)
            for number, length in zip(layer.numbers, layer.wavelength, strict=True)
            if number in stopped
        ]


def plan_cuts(
    layers: Sequence[Turning],
    *,
    keep: Sequence[float | int],
    ends: Sequence[str],
    bands: int,
    controls: int,
    seed: int,
) -> list[Cut]:
    """The entries of a sweep, "none" first; see `truncate`."""
    check_cuts(keep, ends)
    if not any(layer.numbers for layer in layers):
        raise UnsupportedModel(
            "The model has no planes that rotate, so none can be stopped.",
            means="it was made without RoPE, or all of its planes stand still",
        )
    cuts = [Cut("none", tuple(() for _ in layers))]
    steps = sorted({tuple(_stopped(layer, share) for layer in layers) for share in keep})
    steps = [sizes for sizes in steps if any(sizes)] if len(ends) else []
    at_ends = {_at_end(layers, sizes, end) for sizes in steps for end in ENDS}
    seed %= 1 << 64  # torch takes any number, numpy none below 0
    random = _controls(layers, steps, draws=controls, seed=(seed, 0), beside=at_ends)
    for sizes in steps:
        cuts += [Cut(end, _at_end(layers, sizes, end)) for end in ENDS if end in ends]
        cuts += [Cut("random", stopped, draw=draw) for draw, stopped in random[sizes]]
    for band, stopped in enumerate(_bands(layers, bands)):
        sizes, stream = tuple(map(len, stopped)), (seed, 1 + band)
        random = _controls(layers, [sizes], draws=controls, seed=stream, beside={stopped})
        cuts.append(Cut("band", stopped, band=band))
        cuts += [
            Cut("band control", others, draw=draw, band=band) for draw, others in random[sizes]
        ]
    return cuts


def check_cuts(keep: Sequence[float | int], ends: Sequence[str]) -> None:
    """Raise `BadArgument` for shares and ends that no model has."""
    wrong = [share for share in keep if not 0 <= share <= 1]
    if wrong or not len(keep):
        raise BadArgument(
            "A kept share of the planes lies between 0 and 1.",
            seen=f"{wrong[0]}" if wrong else "no share at all",
        )
    unknown = [end for end in ends if end not in ENDS]
    if unknown:
        raise BadArgument(
            f"The planes have no end {unknown[0]!r}.", attempt='"slow", "fast", or both'
        )


def _stopped(layer: Turning, share: float | int) -> int:
    count = len(layer.numbers)
    return count - kept_planes(share, 2 * count)


def _at_end(layers: Sequence[Turning], sizes: Numbers, end: str) -> Stopped:
    """The slowest or fastest `sizes[layer]` planes of each layer."""
    return tuple(
        layer.numbers[len(layer.numbers) - n :] if end == "slow" else layer.numbers[:n]
        for layer, n in zip(layers, sizes, strict=True)
    )


def _controls(
    layers: Sequence[Turning],
    steps: Sequence[Numbers],
    *,
    draws: int,
    seed: tuple[int, int],
    beside: Set[Stopped],
) -> dict[Numbers, list[tuple[int, Stopped]]]:
    """Random sets of `sizes[layer]` planes a layer for each step, with the number of the draw.

    A draw stops planes in one order: its larger sets contain the smaller ones. Layers with as
    many planes get the same. An order that leads through a set in `beside` is drawn again;
    where none avoids them, such sets are left out. Of all planes there is no other set.
    """
    controls: dict[Numbers, list[tuple[int, Stopped]]] = {sizes: [] for sizes in steps}
    whole = [len(layer.numbers) for layer in layers]
    some = [s for s in steps if any(0 < n < of for n, of in zip(s, whole, strict=True))]
    for draw in range(draws if some else 0):
        for attempt in range(ATTEMPTS):
            sets = {sizes: _drawn(layers, sizes, (*seed, draw, attempt)) for sizes in some}
            if beside.isdisjoint(sets.values()):
                break
        for sizes, stopped in sets.items():
            if stopped not in beside:
                controls[sizes].append((draw, stopped))
    return controls


def _drawn(layers: Sequence[Turning], sizes: Numbers, seed: tuple[int, ...]) -> Stopped:
    """The first `sizes[layer]` planes of each layer, in an order that `seed` shuffles."""
    stopped = []
    for layer, n in zip(layers, sizes, strict=True):
        count = len(layer.numbers)
        order = np.random.default_rng([*seed, count]).permutation(count)
        stopped.append(tuple(layer.numbers[at] for at in sorted(order[:n].tolist())))
    return tuple(stopped)


def _bands(layers: Sequence[Turning], bands: int) -> list[Stopped]:
    """The planes of each layer, in `bands` groups of neighbouring wavelengths, fast first."""
    if not bands:
        return []
    lengths = np.unique([length for layer in layers for length in layer.wavelength])
    first = np.append(True, np.diff(np.log(lengths)) > ALIKE)
    distinct = lengths[first]  # layers measured apart differ in the last digits
    if bands > len(distinct):
        raise BadArgument(
            f"There are more bands than planes to share out: {bands}.",
            seen=f"{len(distinct)} different wavelengths",
            attempt=f"{len(distinct)} bands or fewer",
        )
    edges = [*(part[0] for part in np.array_split(distinct, bands)), math.inf]

    def between(layer: Turning, low: float, high: float) -> Numbers:
        planes = zip(layer.numbers, layer.wavelength, strict=True)
        return tuple(number for number, length in planes if low <= length < high)

    return [
        tuple(between(layer, low, high) for layer in layers) for low, high in pairwise(edges)
    ]
