"""Truncation sweeps: which planes may stop rotating, and what that costs.

Barbero et al. 2024 (arXiv 2410.06205) truncate the low frequencies of RoPE (p-RoPE) and, as a
foil, the high ones. A sweep does both to a live model, step by step, and beside every step
stops random planes of the same number: a cost says something of *which* planes stopped
only where it differs from that of any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ropelens.edit.actions import Edit, stop_planes
from ropelens.measure.batches import Progress
from ropelens.measure.evaluate import TRYING, evaluate_in_stages
from ropelens.measure.profile import OpenStage
from ropelens.measure.terms import MEASURES, wanted_measures
from ropelens.models.subject import Model, as_subject
from ropelens.rope.cuts import ENDS, Cut, Numbers, Turning, check_cuts, plan_cuts
from ropelens.statistics.rows import HowMany
from ropelens.statistics.seeds import whole_seed

KEEP = (1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0)

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


def truncate(
    model: Model,
    tokens: Int[Tensor, "sequence position"],
    *,
    lengths: Int[Tensor, " sequence"] | None = None,
    documents: Int[Tensor, " sequence"] | None = None,
    keep: Sequence[float | int] = KEEP,
    ends: Sequence[str] = ENDS,
    bands: int = 0,
    controls: int = 3,
    measures: Sequence[str] = MEASURES,
    rows: HowMany = "auto",
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
    sweep = plan_truncation(
        model,
        keep=keep,
        ends=ends,
        bands=bands,
        controls=controls,
        measures=measures,
        seed=seed,
    )
    return sweep.measure(
        model,
        tokens,
        lengths=lengths,
        documents=documents,
        rows=rows,
        batch_size=batch_size,
        stage=lambda what, **_: nullcontext(progress if what == TRYING else None),
    )


@dataclass(frozen=True)
class Sweep:
    """What `truncate` will measure: cuts of the planes that turn in `layers`, "none" first."""

    layers: list[Turning]
    cuts: list[Cut]
    measures: Sequence[str]
    seed: int

    @property
    def entries(self) -> int:
        """Different edits, the model as it is included: equal cuts are measured once."""
        return len({cut.stopped for cut in self.cuts})

    def measure(
        self,
        model: Model,
        tokens: Int[Tensor, "sequence position"],
        *,
        lengths: Int[Tensor, " sequence"] | None,
        documents: Int[Tensor, " sequence"] | None,
        rows: HowMany,
        batch_size: int | None,
        stage: OpenStage,
    ) -> xr.Dataset:
        """What `truncate` returns, each stage of it shown by `stage`."""
        # Cuts that stop the same planes are measured under the name of the first.
        names = {cut.stopped: cut.name(self.layers) for cut in reversed(self.cuts)}
        measured = evaluate_in_stages(
            model,
            tokens,
            lengths=lengths,
            documents=documents,
            edits={names[c.stopped]: edits_of(c) for c in self.cuts if c.kind != "none"},
            measures=self.measures,
            rows=rows,
            seed=self.seed,
            batch_size=batch_size,
            stage=stage,
        )
        entries = measured.sel(edit=[names[cut.stopped] for cut in self.cuts])
        return named_entries(entries, self.cuts, self.layers)


def plan_truncation(
    model: Model,
    *,
    keep: Sequence[float | int] = KEEP,
    ends: Sequence[str] = ENDS,
    bands: int = 0,
    controls: int = 3,
    measures: Sequence[str] = MEASURES,
    seed: int = 0,
) -> Sweep:
    """The sweep that `truncate` makes of `model`; raises what that raises before it begins."""
    wanted_measures(measures)
    seed = whole_seed(seed)
    layers = [Turning.of(planes) for planes in as_subject(model).planes(alike=True)]
    cuts = plan_cuts(layers, keep=keep, ends=ends, bands=bands, controls=controls, seed=seed)
    return Sweep(layers, cuts, measures, seed)


def check_truncation(
    *,
    keep: Sequence[float | int] = KEEP,
    ends: Sequence[str] = ENDS,
    bands: int = 0,
    controls: int = 3,
    measures: Sequence[str] = MEASURES,
) -> None:
    """Raise what `truncate` would for options that no model can have."""
    wanted_measures(measures)
    check_cuts(keep, ends)


def named_entries(
    measured: xr.Dataset, cuts: Sequence[Cut], layers: Sequence[Turning]
) -> xr.Dataset:
    """`measured`, an entry a cut in the order of `cuts`, with what each is as coordinates."""
    columns: Mapping[str, list[Any]] = {
        "edit": [cut.name(layers) for cut in cuts],
        "kind": [cut.kind for cut in cuts],
        "kept": [cut.kept(layers) for cut in cuts],
        "planes": [cut.planes for cut in cuts],
        "planes_stopped": [max(map(len, cut.stopped)) for cut in cuts],
        "wavelength_low": [min(cut.wavelengths(layers), default=math.nan) for cut in cuts],
        "wavelength_high": [max(cut.wavelengths(layers), default=math.nan) for cut in cuts],
        "draw": [cut.draw for cut in cuts],
        "band": [cut.band for cut in cuts],
    }
    named = measured.assign_coords(
        {name: ("edit", _array(values)) for name, values in columns.items()}
    )
    for name, (long_name, units) in DESCRIBED.items():
        named[name].attrs = {"long_name": long_name, "units": units}
    return named.assign_attrs(kind="truncation")


def _array(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=object if isinstance(values[0], str) else None)


def edits_of(cut: Cut) -> list[Edit]:
    """A cut as edits of a live model: one for all layers that stop the same planes."""
    layers: dict[Numbers, list[int]] = {}
    for layer, numbers in enumerate(cut.stopped):
        layers.setdefault(numbers, []).append(layer)
    return [
        stop_planes(numbers, heads=",".join(f"{layer}.*" for layer in named))
        for numbers, named in layers.items()
        if numbers
    ]
