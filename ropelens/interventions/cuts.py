"""The planes that stop in a truncation sweep: at an end, in a band, or at random."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ropelens.arguments import Number, check_count
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.interventions.measure_names import ALL_MEASURES
from ropelens.rope.planes import Planes
from ropelens.rope.select import Slowest, kept_planes

End = Literal["slow", "fast"]
SAME_WAVELENGTH = 1e-3  # relative difference of two wavelengths that count as the same
ATTEMPTS = 100  # to draw sets that differ from the planes at the ends

Wavelengths = dict[int, float]
"""Wavelength (tokens) of each plane of a layer that rotates, by the number of the plane."""

PlaneSet = tuple[int, ...]  # ascending numbers of planes of a layer
Stopped = tuple[PlaneSet, ...]  # the planes that stop, for each layer
Counts = tuple[int, ...]  # the number of planes that stop, for each layer


def rotating_planes(planes: Planes) -> Wavelengths:
    rotating = {}
    for plane, length in enumerate(planes.wavelength.tolist()):
        if math.isfinite(length):
            rotating[plane] = length
    return rotating


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
        kind, *control = self.kind.split()
        words = [kind, f"{self.kept:.4g}" if self.band < 0 else f"{self.band}"]
        words += control
        if self.draw >= 0:
            words.append(f"#{self.draw}")
        if self.layers != "all":
            words.insert(0, self.layers)
        return " ".join(words)

    @property
    def layers_of(self) -> dict[PlaneSet, list[int]]:
        """The layers that stop each set of planes."""
        layers: dict[PlaneSet, list[int]] = {}
        for layer, planes in enumerate(self.stopped):
            layers.setdefault(planes, []).append(layer)
        return layers

    @property
    def planes(self) -> str:
        """The numbers of the stopped planes: "0,1,5", or by layers "0 2: 0,1; 3: 5"."""
        if len(self.layers_of) == 1:
            return ",".join(map(str, self.stopped[0]))
        parts = []
        for planes, layers in self.layers_of.items():
            if planes:
                numbers = ",".join(map(str, planes))
                parts.append(f"{' '.join(map(str, layers))}: {numbers}")
        return "; ".join(parts)

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
        wavelengths = []
        for of_layer, planes in zip(self.turning, self.stopped, strict=True):
            wavelengths += [of_layer[plane] for plane in planes]
        return wavelengths


@dataclass(frozen=True, kw_only=True)
class PlaneSweep:
    """The arguments of `truncate` that define a sweep, and their defaults.

    If `heads` is None, planes stop in all heads of one kind of layers after the other.
    """

    heads: str | None = None
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
        cuts: list[Cut] = []
        for name, layers in groups.items():
            unmodified, *of_group = self.plan(layers, seed=seed)
            if not cuts:
                cuts.append(unmodified)
            cuts += [replace(cut, layers=name) for cut in of_group]
        return cuts

    def plan(self, layers: Sequence[Wavelengths], *, seed: int) -> list[Cut]:
        """The entries of the sweep of some layers, "none" first; see `truncate`."""
        self._check(layers)
        draws = RandomSets(layers, draws=self.controls, seed=seed % 2**64)
        cuts = [Cut("none", ((),) * len(layers), layers)]
        steps = self._steps(layers)
        slow = {counts: planes_at_end(layers, "slow", counts) for counts in steps}
        fast = {counts: planes_at_end(layers, "fast", counts) for counts in steps}
        controls = draws.of_steps(steps, {*slow.values(), *fast.values()})
        for counts in steps:
            if "slow" in self.ends:
                cuts.append(Cut("slow", slow[counts], layers))
            if "fast" in self.ends:
                cuts.append(Cut("fast", fast[counts], layers))
            cuts += controls[counts]
        for band, stopped in enumerate(_bands(layers, self.bands)):
            cuts.append(Cut("band", stopped, layers, band=band))
            cuts += draws.of_band(stopped, band)
        return cuts

    def _check(self, layers: Sequence[Wavelengths]) -> None:
        check_count(self.controls, "controls")
        for share in self.keep:
            Slowest(share)  # refuses shares outside [0, 1]
        if not (self.keep or self.bands):
            raise BadArgument("No planes are to be stopped.", hint="--keep or --bands")
        if not any(layers):
            what = "The model has no planes that rotate, so none can be stopped."
            raise UnsupportedModel(what)

    def _steps(self, layers: Sequence[Wavelengths]) -> list[Counts]:
        """Ascending numbers of planes that stop from an end, without 0 planes."""
        if not self.ends:
            return []
        steps = set()
        for share in self.keep:
            counts = []
            for of_layer in layers:
                kept = kept_planes(share, 2 * len(of_layer))
                counts.append(len(of_layer) - kept)
            if any(counts):
                steps.add(tuple(counts))
        return sorted(steps)


def planes_at_end(layers: Sequence[Wavelengths], end: End, counts: Counts) -> Stopped:
    """The slowest or fastest planes of each layer; lower numbers rotate faster."""
    stopped = []
    for of_layer, count in zip(layers, counts, strict=True):
        planes = list(of_layer)
        if end == "slow":
            planes.reverse()
        stopped.append(tuple(sorted(planes[:count])))
    return tuple(stopped)


@dataclass(frozen=True)
class RandomSets:
    """Random sets of planes of some layers, as controls of a sweep; `seed` is not negative."""

    layers: Sequence[Wavelengths]
    draws: int
    seed: int

    def of_steps(
        self, steps: Sequence[Counts], at_ends: Set[Stopped]
    ) -> dict[Counts, list[Cut]]:
        """Controls of steps from an end. A larger set of a draw contains the smaller sets."""
        return self._draw(steps, at_ends, kind="random", band=-1)

    def of_band(self, stopped: Stopped, band: int) -> list[Cut]:
        """Controls of a band of wavelengths."""
        counts = tuple(map(len, stopped))
        drawn = self._draw([counts], {stopped}, kind="band control", band=band)
        return drawn[counts]

    def _draw(
        self, sizes: Sequence[Counts], exclude: Set[Stopped], *, kind: str, band: int
    ) -> dict[Counts, list[Cut]]:
        """Draw sets of `counts[layer]` planes in each layer, for each of `sizes`.

        Draws in `exclude` are repeated, or left out if they stay equal.
        """
        cuts: dict[Counts, list[Cut]] = {counts: [] for counts in sizes}
        varied = [counts for counts in sizes if self._varies(counts)]
        if not varied:
            return cuts
        for draw in range(self.draws):
            for attempt in range(ATTEMPTS):
                orders = self._orders((self.seed, 1 + band, draw, attempt))
                sets = {counts: _first_of(orders, counts) for counts in varied}
                if exclude.isdisjoint(sets.values()):
                    break
            for counts, stopped in sets.items():
                if stopped not in exclude:
                    cuts[counts].append(Cut(kind, stopped, self.layers, draw, band))
        return cuts

    def _varies(self, counts: Counts) -> bool:
        """Whether a layer stops some of its planes, but not all."""
        for of_layer, count in zip(self.layers, counts, strict=True):
            if 0 < count < len(of_layer):
                return True
        return False

    def _orders(self, key: tuple[int, ...]) -> list[list[int]]:
        """A random order of each layer's planes; layers with as many planes have the same."""
        orders = []
        for of_layer in self.layers:
            random = np.random.default_rng([*key, len(of_layer)])
            orders.append(random.permutation(list(of_layer)).tolist())
        return orders


def _first_of(orders: Sequence[Sequence[int]], counts: Counts) -> Stopped:
    """The first planes of each layer's order."""
    stopped = []
    for order, count in zip(orders, counts, strict=True):
        stopped.append(tuple(sorted(order[:count])))
    return tuple(stopped)


def _bands(layers: Sequence[Wavelengths], bands: int) -> list[Stopped]:
    """Divide the planes into `bands` groups of neighbouring wavelengths, fastest first."""
    if not bands:
        return []
    lengths = np.unique([length for layer in layers for length in layer.values()])
    distinct = lengths[np.append(True, np.diff(np.log(lengths)) > SAME_WAVELENGTH)]
    groups = np.array_split(
        distinct, min(bands, len(distinct))
    )  # others would be empty
    edges = [group[0] for group in groups]
    stopped = []
    for low, high in pairwise([*edges, math.inf]):
        planes = [_within(of_layer, low, high) for of_layer in layers]
        stopped.append(tuple(planes))
    return stopped


def _within(wavelengths: Wavelengths, low: float, high: float) -> PlaneSet:
    """The planes with wavelengths from `low` up to but without `high`."""
    planes = []
    for plane, length in wavelengths.items():
        if low <= length < high:
            planes.append(plane)
    return tuple(planes)
