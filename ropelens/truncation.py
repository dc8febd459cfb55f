"""Truncation sweeps: which planes may stop rotating, and what that costs.

Barbero et al. 2024 (arXiv 2410.06205) truncate the low frequencies of RoPE (p-RoPE) and, as a
foil, the high ones. A sweep does both to a live model, step by step, and beside every step
stops random planes of the same number: a cost says something of *which* planes stopped
only where it differs from that of any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor, nn

from ropelens.collect import Progress
from ropelens.edit import Edit, stop_planes
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.evaluation import MEASURES, evaluate
from ropelens.models.rotation import read_layers
from ropelens.models.subject import as_subject
from ropelens.rope.planes import Planes
from ropelens.rope.select import kept_planes

KEEP = (1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0)
ENDS = ("slow", "fast")
ATTEMPTS = 100
"""Orders that are drawn before a control may be missing."""

ALIKE = 1e-3
"""Relative difference below which wavelengths of two layers count as one."""

Numbers = tuple[int, ...]
"""Plane numbers of a layer, 0 the fastest, ascending."""

DESCRIBED = {
    "edit": ("what was done to the model", ""),
    "kind": ("what stopped: nothing, one end, a band, or random planes as control", ""),
    "kept": ("share of the model's rotating planes that still rotate", "1"),
    "planes": ("numbers of the stopped planes, 0 the fastest", ""),
    "planes_stopped": ("number of stopped planes of a layer, the largest of all layers", "1"),
    "wavelength_low": ("shortest wavelength that stopped", "token"),
    "wavelength_high": ("longest wavelength that stopped", "token"),
    "draw": ("number of the random draw, -1 where nothing is random", "1"),
    "band": ("number of the band, 0 the fastest, -1 outside bands", "1"),
}


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
    """One entry of a sweep: the planes that stop in each layer, and why those."""

    kind: str
    stopped: tuple[Numbers, ...]
    draw: int = -1
    band: int = -1

    def kept(self, layers: Sequence[Turning]) -> float:
        """Share of all planes that rotate in the model which still rotate."""
        whole = sum(len(layer.numbers) for layer in layers)
        return (whole - sum(map(len, self.stopped))) / whole

    def name(self, layers: Sequence[Turning]) -> str:
        """What the dimension `edit` calls it: "slow 0.75", "random 0.75 #1", "band 3"."""
        what = self.kind.removesuffix(" control")
        place = f"{self.kept(layers):.4g}" if self.band < 0 else f"{self.band}"
        control = " control" if self.kind.endswith("control") else ""
        number = f" #{self.draw}" if self.draw >= 0 else ""
        return f"{what} {place}{control}{number}" if self.kind != "none" else "none"

    def edits(self) -> list[Edit]:
        """The cut as edits of a live model: one for all layers that stop the same planes."""
        layers: dict[Numbers, list[int]] = {}
        for layer, numbers in enumerate(self.stopped):
            layers.setdefault(numbers, []).append(layer)
        return [
            stop_planes(numbers, heads=",".join(f"{layer}.*" for layer in named))
            for numbers, named in layers.items()
            if numbers
        ]


def truncate(
    model: nn.Module,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    keep: Sequence[float | int] = KEEP,
    ends: Sequence[str] = ENDS,
    bands: int = 0,
    controls: int = 3,
    measures: Sequence[str] = MEASURES,
    rows: int | Literal["all"] = "all",
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Stop more and more planes of `model` and measure what that does, all on the same tokens.

    For each share in `keep` and each of `ends`: "slow" stops the slowest planes of every
    layer and keeps int(p D // 2) of its D rotated coordinates' planes, as p-RoPE does
    (transformers' `rope_type` "proportional"); "fast" stops the fastest and keeps as many.
    Beside each share stand `controls` random sets of as many planes (kind "random"): draw n
    stops planes in one random order, more for a smaller share. `bands` splits the
    wavelengths into so many groups of neighbours, alike in number of planes, and stops one
    at a time (kind "band"), each beside `controls` random sets of its size ("band
    control"). Shares are of the planes that rotate in the model as it is; sets that come out
    equal are measured once.

    Returns what `ropelens.evaluate` gives for `measures`, with coordinates over `edit`:
    `kind`, `kept` (0 to 1), `planes` ("0,1,5"), `wavelength_low`, `wavelength_high`
    (tokens), `draw`, `band`; the first entry, "none", is the model as it is. All
    differences between entries are paired. The model is left as it was, on errors too.

    Raises `BadArgument` for shares outside [0, 1], an end that does not exist or more bands
    than wavelengths, `UnsupportedModel` for a model that does not rotate, and what
    `evaluate` raises.
    """
    layers = [Turning.of(layer.planes) for layer in read_layers(as_subject(model))]
    cuts = plan_cuts(layers, keep=keep, ends=ends, bands=bands, controls=controls, seed=seed)
    names = {cut.stopped: cut.name(layers) for cut in reversed(cuts)}  # the first one's
    edits = {names[cut.stopped]: cut.edits() for cut in cuts if cut.kind != "none"}
    measured = evaluate(
        model,
        tokens,
        lengths=lengths,
        edits=edits,
        measures=measures,
        rows=rows,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    return named_entries(measured.sel(edit=[names[cut.stopped] for cut in cuts]), cuts, layers)


def count_cuts(
    model: nn.Module,
    *,
    keep: Sequence[float | int] = KEEP,
    ends: Sequence[str] = ENDS,
    bands: int = 0,
    controls: int = 3,
    seed: int = 0,
) -> int:
    """How many different edits, the model as it is included, `truncate` would measure.

    Raises what `truncate` raises before it begins.
    """
    layers = [Turning.of(layer.planes) for layer in read_layers(as_subject(model))]
    cuts = plan_cuts(layers, keep=keep, ends=ends, bands=bands, controls=controls, seed=seed)
    return len({cut.stopped for cut in cuts})


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
    _check(keep, ends, bands, controls)
    if not any(layer.numbers for layer in layers):
        raise UnsupportedModel(
            "The model has no planes that rotate, so none can be stopped.",
            means="it was made without RoPE, or all of its planes stand still",
        )
    nothing = tuple(() for _ in layers)
    cuts = [Cut("none", nothing)]
    sizes = sorted(
        {tuple(_stopped(layer, share) for layer in layers) for share in keep},
    )
    sizes = [size for size in sizes if any(size)]
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


def _check(keep: Sequence[float | int], ends: Sequence[str], bands: int, controls: int) -> None:
    if isinstance(keep, (float, int, str)):
        raise BadArgument(
            "keep lists shares of the planes.", seen=repr(keep), attempt="keep=[0.75, 0.5]"
        )
    wrong = [share for share in keep if not 0 <= share <= 1]
    if wrong or not len(keep):
        raise BadArgument(
            "A kept share of the planes lies between 0 and 1.",
            seen=str(wrong[0]) if wrong else "no share at all",
        )
    if not len(ends):
        raise BadArgument("No end to stop planes from.", attempt='"slow", "fast", or both')
    unknown = [end for end in ends if end not in ENDS]
    if unknown:
        raise BadArgument(
            f"The planes have no end {unknown[0]!r}.", attempt='"slow", "fast", or both'
        )
    for what, number in (("bands", bands), ("controls", controls)):
        if not isinstance(number, Integral) or number < 0:
            raise BadArgument(f"{what} must be a whole number, 0 or more.", seen=repr(number))


def _stopped(layer: Turning, share: float | int) -> int:
    count = len(layer.numbers)
    return count - kept_planes(float(share), 2 * count)


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


def named_entries(
    measured: xr.Dataset, cuts: Sequence[Cut], layers: Sequence[Turning]
) -> xr.Dataset:
    """`measured`, an entry a cut in the order of `cuts`, with what each is as coordinates."""
    columns: Mapping[str, list[Any]] = {
        "edit": [cut.name(layers) for cut in cuts],
        "kind": [cut.kind for cut in cuts],
        "kept": [cut.kept(layers) for cut in cuts],
        "planes": [_planes_text(cut) for cut in cuts],
        "planes_stopped": [max(map(len, cut.stopped)) for cut in cuts],
        "wavelength_low": [min(_lengths(cut, layers), default=math.nan) for cut in cuts],
        "wavelength_high": [max(_lengths(cut, layers), default=math.nan) for cut in cuts],
        "draw": [cut.draw for cut in cuts],
        "band": [cut.band for cut in cuts],
    }
    named = measured.assign_coords(
        {name: ("edit", _array(values)) for name, values in columns.items()}
    )
    for name, (long_name, units) in DESCRIBED.items():
        named[name].attrs = {"long_name": long_name, "units": units}
    return named


def _array(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=object if isinstance(values[0], str) else None)


def _planes_text(cut: Cut) -> str:
    """ "0,1,5"; where layers stop different ones "0 2: 0,1; 3: 5", each with its layers."""
    layers: dict[str, list[str]] = {}
    for layer, numbers in enumerate(cut.stopped):
        layers.setdefault(",".join(map(str, numbers)), []).append(str(layer))
    if len(layers) == 1:
        return next(iter(layers))
    return "; ".join(f"{' '.join(of)}: {text}" for text, of in layers.items() if text)


def _lengths(cut: Cut, layers: Sequence[Turning]) -> list[float]:
    """Wavelengths (tokens) of the planes that stop."""
    return [
        length
        for stopped, layer in zip(cut.stopped, layers, strict=True)
        for number, length in zip(layer.numbers, layer.wavelength, strict=True)
        if number in stopped
    ]
