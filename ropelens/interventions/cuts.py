"""The planes that stop in a truncation sweep: at an end, in a band, or at random."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from ropelens.arguments import Number, check_count
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.interventions.measure_names import ALL_MEASURES
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, Slowest, kept_planes

End = Literal["slow", "fast"]
SAME_WAVELENGTH = (
    1e-3  # relative difference up to which two wavelengths count as the same
)

Wavelengths = dict[
    int, float
]  # tokens, of the planes of a layer that rotate, by plane number
Numbers = tuple[
    int, ...
]  # ascending plane numbers of a layer, or a count for each layer
Stopped = tuple[Numbers, ...]  # numbers of the planes that stop, for each layer


def rotating_planes(planes: Planes) -> Wavelengths:
    wavelength = planes.wavelength.tolist()
    return {n: length for n, length in enumerate(wavelength) if math.isfinite(length)}


@dataclass(frozen=True)
class Cut:
    """One entry of a sweep: the planes that stop in each layer, and the reason (`kind`).

    The swept layers have the planes `turning`. Attributes are coordinates of a truncation.
    """

    kind: str
    stopped: Stopped
    turning: Sequence[Wavelengths]
    draw: int = -1
    band: int = -1
    layers: str = "all"

    @property
    def kept(self) -> float:
        """Share of the rotating planes of the swept layers that still rotate."""
        total = sum(map(len, self.turning))
        return (total - sum(map(len, self.stopped))) / total

    @property
    def edit(self) -> str:
        """Name: "slow 0.75", "full random 0.75 #1", "band 3"."""
        if self.kind == "none":
            return "none"
        place = f"{self.kept:.4g}" if self.band < 0 else f"{self.band}"
        kind, *control = self.kind.split()
        draw = [f"#{self.draw}"] if self.draw >= 0 else []
        named = [self.layers] if self.layers != "all" else []
        return " ".join([*named, kind, place, *control, *draw])

    @property
    def layers_of(self) -> dict[Numbers, list[int]]:
        """The layers that stop each set of planes."""
        layers: dict[Numbers, list[int]] = {}
        for layer, numbers in enumerate(self.stopped):
            layers.setdefault(numbers, []).append(layer)
        return layers

    @property
    def planes(self) -> str:
        """The numbers of the stopped planes: "0,1,5", or by layers "0 2: 0,1; 3: 5"."""
        sets = {n: ",".join(map(str, n)) for n in self.layers_of}
        if len(sets) == 1:
            return sets[self.stopped[0]]
        layers = {
            n: " ".join(map(str, layers)) for n, layers in self.layers_of.items() if n
        }
        return "; ".join(f"{layers[n]}: {sets[n]}" for n in layers)

    @property
    def planes_stopped(self) -> int:
        return max(map(len, self.stopped))

    @property
    def wavelength_low(self) -> float:
        """Shortest wavelength (tokens) that stops; NaN if none stops."""
        return min(self._wavelengths, default=math.nan)

    @property
    def wavelength_high(self) -> float:
        """Longest wavelength (tokens) that stops."""
        return max(self._wavelengths, default=math.nan)

    @property
    def _wavelengths(self) -> list[float]:
        pairs = zip(self.turning, self.stopped, strict=True)
        return [layer[number] for layer, numbers in pairs for number in numbers]


@dataclass(frozen=True, kw_only=True)
class PlaneSweep:
    """The arguments of `truncate` that define a sweep, and their defaults."""

    heads: str = ALL_HEADS
    layers: str | None = None
    keep: Sequence[Number] = (1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0)
    ends: Sequence[End] = ("slow", "fast")
    bands: int = 0
    controls: int = 3
    scale: Number | None = None
    measures: str | Sequence[str] = ALL_MEASURES

    def cuts(
        self, groups: Mapping[str, Sequence[Wavelengths]], *, seed: int
    ) -> list[Cut]:
        """Sets of planes that stop in each group of layers; the first set is empty."""
        planned = {
            name: self.plan(layers, seed=seed) for name, layers in groups.items()
        }
        none, *_ = next(iter(planned.values()))
        cuts = (
            replace(x, layers=name) for name, cuts in planned.items() for x in cuts[1:]
        )
        return [none, *cuts]

    def plan(self, layers: Sequence[Wavelengths], *, seed: int) -> list[Cut]:
        """The entries of the sweep of some layers, "none" first; see `truncate`."""
        check_count(self.controls, "controls")
        for share in self.keep:
            Slowest(share)  # from 0 to 1
        if not (self.keep or self.bands):
            raise BadArgument("No planes are to be stopped.", hint="--keep or --bands")
        if not any(layers):
            what = "The model has no planes that rotate, so none can be stopped."
            raise UnsupportedModel(what)
        keep, seed = self.keep, seed % 2**64  # as numpy has seeds
        sizes = {
            tuple(len(x) - kept_planes(p, 2 * len(x)) for x in layers) for p in keep
        }
        steps = sorted(sizes - {(0,) * len(layers)}) if self.ends else []
        fast = [list(layer) for layer in layers]
        orders = {"slow": [numbers[::-1] for numbers in fast], "fast": fast}
        at_ends = {
            (end, size): _first(orders[end], size) for size in steps for end in orders
        }
        random = partial(_random, layers, draws=self.controls, seed=seed)
        controls_of = random(steps, set(at_ends.values()))
        cuts = [Cut("none", ((),) * len(layers), layers)]
        for size in steps:
            cuts += [
                Cut(end, at_ends[end, size], layers)
                for end in orders
                if end in self.ends
            ]
            cuts += controls_of[size]
        for band, stopped in enumerate(_bands(layers, self.bands)):
            size = tuple(map(len, stopped))
            cuts.append(Cut("band", stopped, layers, band=band))
            cuts += random([size], {stopped}, band=band)[size]
        return cuts


def _first(orders: Sequence[Sequence[int]], size: Numbers) -> Stopped:
    return tuple(
        tuple(sorted(order[:n])) for order, n in zip(orders, size, strict=True)
    )


def _random(
    layers: Sequence[Wavelengths],
    sizes: Sequence[Numbers],
    exclude: Set[Stopped],
    *,
    draws: int,
    seed: int,
    band: int = -1,
) -> dict[Numbers, list[Cut]]:
    """Draw random sets of `size[layer]` planes in each layer, for each of `sizes`.

    Larger sets of a draw contain its smaller sets, and layers with as many planes get the same
    set. Draws in `exclude` are repeated, or left out if they stay equal.
    """
    counts = [len(numbers) for numbers in layers]
    varied = [
        s for s in sizes if any(0 < n < m for n, m in zip(s, counts, strict=True))
    ]
    cuts: dict[Numbers, list[Cut]] = {size: [] for size in sizes}
    for draw in range(draws if varied else 0):
        for attempt in range(100):
            key = (seed, 1 + band, draw, attempt)
            random = [np.random.default_rng([*key, count]) for count in counts]
            pairs = zip(random, layers, strict=True)
            orders = [generator.permutation(list(x)).tolist() for generator, x in pairs]
            sets = {size: _first(orders, size) for size in varied}
            if exclude.isdisjoint(sets.values()):
                break
        kind = "random" if band < 0 else "band control"
        for size, stopped in sets.items():
            if stopped not in exclude:
                cuts[size].append(Cut(kind, stopped, layers, draw, band))
    return cuts


def _bands(layers: Sequence[Wavelengths], bands: int) -> list[Stopped]:
    """Divide the planes into `bands` groups of neighbouring wavelengths, fastest first."""
    lengths = np.unique([length for layer in layers for length in layer.values()])
    distinct = lengths[np.append(True, np.diff(np.log(lengths)) > SAME_WAVELENGTH)]
    count = min(bands, len(distinct))  # other bands would be empty
    begins = [part[0] for part in np.array_split(distinct, max(count, 1)) if len(part)]
    edges = [*begins, math.inf] if bands else []
    return [
        tuple(tuple(n for n, w in layer.items() if low <= w < high) for layer in layers)
        for low, high in pairwise(edges)
    ]
