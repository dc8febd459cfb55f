"""Which planes a truncation sweep stops: from an end, a band of wavelengths, or at random.

Plans, without a model: `Turning` says which planes of a layer rotate, a `Cut` which of them
stop, `plan_cuts` which cuts a sweep makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from ropelens.errors import BadArgument, UnsupportedModel, check_count
from ropelens.rope.plain import plain_list, plain_number
from ropelens.rope.planes import Planes
from ropelens.rope.select import kept_planes

ENDS = ("slow", "fast")
ATTEMPTS = 100
"""How often a control is drawn anew before it may be left out."""

ALIKE = 1e-3
"""Relative difference below which wavelengths of two layers count as one."""

Numbers = tuple[int, ...]
"""Plane numbers of a layer, 0 the fastest, ascending."""


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
    """One entry of a sweep: which planes stop in each layer; `kind` says why those."""

    kind: str
    stopped: tuple[Numbers, ...]
    draw: int = -1
    band: int = -1

    def kept(self, layers: Sequence[Turning]) -> float:
        """Share of the model's rotating planes that still rotate."""
        whole = sum(len(layer.numbers) for layer in layers)
        return (whole - sum(map(len, self.stopped))) / whole

    def name(self, layers: Sequence[Turning]) -> str:
        """Its name in the dimension `edit`: "slow 0.75", "random 0.75 #1", "band 3"."""
        what = self.kind.removesuffix(" control")
        place = f"{self.kept(layers):.4g}" if self.band < 0 else f"{self.band}"
        control = " control" if self.kind.endswith("control") else ""
        number = f" #{self.draw}" if self.draw >= 0 else ""
        return f"{what} {place}{control}{number}" if self.kind != "none" else "none"

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
    shares, ends = check_cuts(keep, ends, bands, controls)
    if not any(layer.numbers for layer in layers):
        raise UnsupportedModel(
            "The model has no planes that rotate, so none can be stopped.",
            means="it was made without RoPE, or all of its planes stand still",
        )
    nothing = tuple(() for _ in layers)
    cuts = [Cut("none", nothing)]
    sizes = sorted(
        {tuple(_stopped(layer, share) for layer in layers) for share in shares},
    )
    sizes = [size for size in sizes if any(size)] if ends else []
    both = {_at_end(layers, size, end) for size in sizes for end in ENDS}
    seed %= 1 << 64  # torch takes any number, numpy none below 0
    random = _controls(layers, sizes, draws=controls, seed=(seed, 0), beside=both)
    for size in sizes:
        cuts += [Cut(end, _at_end(layers, size, end)) for end in ENDS if end in ends]
        cuts += [Cut("random", stopped, draw=draw) for draw, stopped in random[size]]
    for band, stopped in enumerate(_bands(layers, bands)):
        size = tuple(map(len, stopped))
        stream = (seed, 1 + band)
        random = _controls(layers, [size], draws=controls, seed=stream, beside={stopped})
        cuts.append(Cut("band", stopped, band=band))
        cuts += [
            Cut("band control", others, draw=draw, band=band) for draw, others in random[size]
        ]
    return cuts


def check_cuts(
    keep: Sequence[float | int], ends: Sequence[str], bands: int, controls: int
) -> tuple[list[float], list[str]]:
    """The shares and ends, as plain lists; `BadArgument` for cuts that no model can have."""
    kept, named = plain_list(keep), plain_list(ends)
    if kept is None:
        raise BadArgument(
            "keep lists shares of the planes.",
            seen=repr(keep)[:80],
            attempt="keep=[0.75, 0.5]",
        )
    shares = [plain_number(share) for share in kept]
    wrong = [given for given, share in zip(kept, shares, strict=True) if not 0 <= share <= 1]
    if wrong or not shares:
        raise BadArgument(
            "A kept share of the planes lies between 0 and 1.",
            seen=repr(wrong[0])[:80] if wrong else "no share at all",
        )
    if named is None:
        raise BadArgument(
            "ends lists ends of the planes.", seen=repr(ends)[:80], attempt='ends=["slow"]'
        )
    unknown = [end for end in named if end not in ENDS]
    if unknown:
        raise BadArgument(
            f"The planes have no end {unknown[0]!r}.", attempt='"slow", "fast", or both'
        )
    for what, number in (("bands", bands), ("controls", controls)):
        check_count(what, number)
    return shares, named


def _stopped(layer: Turning, share: float) -> int:
    count = len(layer.numbers)
    return count - kept_planes(share, 2 * count)


def _at_end(layers: Sequence[Turning], size: Numbers, end: str) -> tuple[Numbers, ...]:
    """The slowest or fastest `size[layer]` planes of each layer."""
    return tuple(
        layer.numbers[len(layer.numbers) - n :] if end == "slow" else layer.numbers[:n]
        for layer, n in zip(layers, size, strict=True)
    )


def _controls(
    layers: Sequence[Turning],
    sizes: Sequence[Numbers],
    *,
    draws: int,
    seed: tuple[int, int],
    beside: Set[tuple[Numbers, ...]],
) -> dict[Numbers, list[tuple[int, tuple[Numbers, ...]]]]:
    """Random sets of `size[layer]` planes a layer, with the number of their draw, by size.

    A draw stops planes in one order: its larger sets hold the smaller ones. Layers of as many
    planes get the same. An order that leads through a set in `beside` is drawn again; where
    none leads past them, such sets are left out. Of all planes there is no other set.
    """
    found: dict[Numbers, list[tuple[int, tuple[Numbers, ...]]]] = {size: [] for size in sizes}
    whole = [len(layer.numbers) for layer in layers]
    some = [s for s in sizes if any(0 < n < of for n, of in zip(s, whole, strict=True))]
    for draw in range(draws if some else 0):
        for attempt in range(ATTEMPTS):
            sets = {size: _drawn(layers, size, (*seed, draw, attempt)) for size in some}
            if beside.isdisjoint(sets.values()):
                break
        for size, stopped in sets.items():
            if stopped not in beside:
                found[size].append((draw, stopped))
    return found


def _drawn(
    layers: Sequence[Turning], size: Numbers, seed: tuple[int, ...]
) -> tuple[Numbers, ...]:
    """The first `size[layer]` planes of each layer, in an order that `seed` shuffles."""
    stopped = []
    for layer, n in zip(layers, size, strict=True):
        count = len(layer.numbers)
        order = np.random.default_rng([*seed, count]).permutation(count)
        stopped.append(tuple(layer.numbers[at] for at in sorted(order[:n].tolist())))
    return tuple(stopped)


def _bands(layers: Sequence[Turning], bands: int) -> list[tuple[Numbers, ...]]:
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
    begin = [part[0] for part in np.array_split(distinct, bands)]
    edges = [*begin, math.inf]
    return [
        tuple(
            tuple(
                number
                for number, length in zip(layer.numbers, layer.wavelength, strict=True)
                if edges[band] <= length < edges[band + 1]
            )
            for layer in layers
        )
        for band in range(bands)
    ]
