"""The planes and heads that an edit changes, and the planes that a truncation sweep stops."""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument, UnsupportedModel, check_count
from ropelens.rope.planes import Planes

ALL_HEADS = "*.*"

HeadMask = Bool[Tensor, "layer head"]

Selection = Callable[[Planes], Bool[Tensor, " frequency"]]
"""Selects planes of a layer, as the model without edits rotates them, fastest first.

Any such function can be used, for example lambda planes: planes.inv_freq < 0.01
"""


@dataclass(frozen=True)
class Slowest:
    """The slowest `fraction` of the planes, which p-RoPE with p = 1 - fraction stops."""

    fraction: float | int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise BadArgument(f"A fraction of planes is from 0 to 1, not {self.fraction}.")

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        number = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(len(planes.inv_freq)) >= number


@dataclass(frozen=True)
class Fastest(Slowest):
    """The fastest `fraction` of the planes, as many as `Slowest` (the paper's "reversed")."""

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        return super().__call__(planes).flip(0)


@dataclass(frozen=True)
class PlaneNumbers:
    """The planes with these numbers, as far as a layer has them; 0 is the fastest."""

    numbers: Sequence[int]

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        numbers = torch.tensor(self.numbers, dtype=torch.long)
        return torch.isin(torch.arange(len(planes.inv_freq)), numbers)


ALL_PLANES = Slowest(1)


def kept_planes(p: float | int, rotary_dim: int) -> int:
    """Number of planes that p-RoPE keeps of D = `rotary_dim` coordinates: int(p D // 2)."""
    return int(round(p, 12) * rotary_dim // 2)  # 1 - 0.9 is less than 0.1


def heads_by_layer(
    heads: str, able: HeadMask, *, doing: str, kinds: Sequence[str] = ()
) -> HeadMask:
    """The heads in a list such as "3.5,4.*,full.*" that are `able` to attend or to rotate.

    Raises `BadArgument` if an item of the list matches none. `kinds` are those of the layers.
    """
    (layers, count), among = able.shape, able.any(1).nonzero().flatten().tolist()
    chosen = torch.zeros_like(able)
    for part in heads.split(","):
        layer, _, head = part.strip().partition(".")
        of_kind = [layer == kind for kind in kinds]
        in_layer = torch.tensor(of_kind) if any(of_kind) else _numbered(layer, layers)
        named = in_layer[:, None] & _numbered(head, count)
        if not (able & named).any():
            that = f" that {doing}s" * bool(named.any())
            able_layers = f" ({', '.join(map(str, among))} {doing})" * (len(among) < layers)
            seen = f"layers 0 to {layers - 1}{able_layers}, heads 0 to {count - 1}"
            seen += f"; kinds of layers: {', '.join(dict.fromkeys(kinds))}" * bool(kinds)
            hint = '"1.0" for head 0 of layer 1, "1.*" for all of layer 1, "0-2.0,*.1"'
            what = f"The model has no head {part.strip()!r}{that}."
            raise BadArgument(what, seen=seen, hint=hint)
        chosen |= able & named
    return chosen


def heads_of_layers(layers: str, heads: str = ALL_HEADS) -> str:
    """The list of all heads in `layers`, such as "full" or "0-3,7"; "*" returns `heads`."""
    if layers == "*":
        return heads
    if heads != ALL_HEADS:
        hint = 'heads="full.*" for all heads of full layers'
        raise BadArgument("Give either layers or heads.", seen=f"{layers}, {heads}", hint=hint)
    return ",".join(f"{layer.strip()}.*" for layer in layers.split(","))


def _numbered(name: str, count: int) -> Bool[Tensor, " number"]:
    first, dash, last = name.partition("-")
    ends = [0, count] if name == "*" else [first, last if dash else first]
    within = all(str(end).isdecimal() for end in ends)
    low, high = (min(int(end), count) for end in ends) if within else (count, count)
    number = torch.arange(count)
    return (number >= low) & (number <= high)


SAME_WAVELENGTH = 1e-3  # relative difference up to which two wavelengths count as the same

Wavelengths = dict[int, float]  # tokens, of the planes of a layer that rotate, by plane number
Numbers = tuple[int, ...]  # ascending plane numbers of a layer, or a count for each layer
Stopped = tuple[Numbers, ...]  # numbers of the planes that stop, for each layer


def rotating_planes(planes: Planes) -> Wavelengths:
    """Wavelengths of the planes of a layer that rotate."""
    wavelength = planes.wavelength.tolist()
    return {n: length for n, length in enumerate(wavelength) if math.isfinite(length)}


@dataclass(frozen=True)
class Cut:
    """One entry of a sweep: the planes that stop in each layer, and the reason (`kind`).

    `turning` are the planes of the swept layers, which `layers` names. The attributes are the
    coordinates of a truncation.
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
        layers = {n: " ".join(map(str, layers)) for n, layers in self.layers_of.items() if n}
        return "; ".join(f"{layers[n]}: {sets[n]}" for n in layers)

    @property
    def planes_stopped(self) -> int:
        """Number of stopped planes of a layer, the largest of all layers."""
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


def plan_cuts(
    layers: Sequence[Wavelengths],
    *,
    keep: Sequence[float | int],
    ends: Sequence[str],
    bands: int,
    controls: int,
    seed: int,
) -> list[Cut]:
    """The entries of a sweep, "none" first; see `truncate`."""
    check_count(controls, "controls")
    for share in keep:
        Slowest(share)  # from 0 to 1
    if not (keep or bands):
        raise BadArgument("No planes are to be stopped.", hint="--keep or --bands")
    if not any(layers):
        raise UnsupportedModel("The model has no planes that rotate, so none can be stopped.")
    sizes = {tuple(len(x) - kept_planes(share, 2 * len(x)) for x in layers) for share in keep}
    steps = sorted(sizes - {(0,) * len(layers)}) if ends else []
    fast = [list(layer) for layer in layers]
    orders = {"slow": [numbers[::-1] for numbers in fast], "fast": fast}
    at_ends = {(end, size): _first(orders[end], size) for size in steps for end in orders}
    random = partial(_random, layers, draws=controls, seed=seed % 2**64)  # as numpy has seeds
    controls_of = random(steps, set(at_ends.values()))
    cuts = [Cut("none", ((),) * len(layers), layers)]
    for size in steps:
        cuts += [Cut(end, at_ends[end, size], layers) for end in orders if end in ends]
        cuts += controls_of[size]
    for band, stopped in enumerate(_bands(layers, bands)):
        size = tuple(map(len, stopped))
        cuts.append(Cut("band", stopped, layers, band=band))
        cuts += random([size], {stopped}, band=band)[size]
    return cuts


def _first(orders: Sequence[Sequence[int]], size: Numbers) -> Stopped:
    return tuple(tuple(sorted(order[:n])) for order, n in zip(orders, size, strict=True))


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
    varied = [s for s in sizes if any(0 < n < m for n, m in zip(s, counts, strict=True))]
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
