"""Truncation sweeps: which planes may stop rotating, and what that costs.

Barbero et al. 2024 (arXiv 2410.06205) truncate the low frequencies of RoPE (p-RoPE) and, as a
foil, the high ones. A cost says *which* planes matter only where as many random ones differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from ropelens.attention.variables import labelled
from ropelens.errors import Count, Number, Positive, Whole, public
from ropelens.interventions.edit import Edit, stop
from ropelens.interventions.evaluate import evaluate_edits
from ropelens.interventions.truncation_table import ALL_MEASURES
from ropelens.interventions.variables import SWEEP
from ropelens.model.as_live_model import Model
from ropelens.profiles.capture import TokenNames
from ropelens.profiles.measurement import Measurement
from ropelens.rope.select import Cut, PlaneNumbers, Wavelengths, plan_cuts, rotating_planes
from ropelens.runtime.progress import ShowProgress, opening, silent
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput

KEEP = (1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0)


@public
def truncate(
    model: Model,
    text: TextInput,
    *,
    tokenizer: TokenNames | None = None,
    heads: str = "*",
    keep: Sequence[Number] = KEEP,
    ends: Sequence[Literal["slow", "fast"]] = ("slow", "fast"),
    bands: Count = 0,
    controls: Count = 3,
    measures: str | Sequence[str] = ALL_MEASURES,
    rows: HowMany = "auto",
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Stop more and more planes of `model` and measure what that does, all on the same tokens.

    Planes stop in `heads`, such as "3.4,12-29.*"; by default in all. For each share in `keep`
    and each of `ends`: "slow" stops the slowest planes of every layer and keeps int(p D // 2)
    of its D rotated coordinates' planes, as p-RoPE does (transformers' `rope_type`
    "proportional"); "fast" stops the fastest and keeps as many. Beside each share stand
    `controls` random sets of as many planes (kind "random"): draw n stops planes in one random
    order, more for a smaller share. `bands` splits the wavelengths into so many groups of
    neighbours, alike in number of planes, and stops one at a time (kind "band"), each beside
    `controls` random sets of its size ("band control"); with `keep=()` bands alone. Shares are
    of the planes that rotate in the model as it is; sets that come out equal are measured once.
    Copies are tried at a half of the context and less. What costs nothing in short text may
    cost much in long text: `tokens` are best as long as the trained context.

    Returns what `ropelens.evaluate` gives for `measures`, by class of tokens too with a
    `tokenizer`, with coordinates over `edit`: `kind`,
    `kept` (0 to 1), `planes` ("0,1,5"), `wavelength_low`, `wavelength_high` (tokens), `draw`,
    `band`; the first entry, "none", is the model as it is. All differences between entries are
    paired. The model is left as it was, on errors too.

    Raises `BadArgument` for shares outside [0, 1] and heads that do not exist or rotate,
    `UnsupportedModel` for a model that does not rotate, and what `evaluate` raises.
    """
    options: dict[str, Any] = {"rows": rows, "seed": seed, "batch_size": batch_size}
    return sweep_planes(
        Measurement.of(model, text, tokenizer=tokenizer, **options),
        tokenizer=tokenizer,
        heads=heads,
        keep=keep,
        ends=ends,
        bands=bands,
        controls=controls,
        measures=measures,
        progress=progress,
    )


def sweep_planes(
    measurement: Measurement,
    *,
    tokenizer: TokenNames | None = None,
    heads: str = "*",
    keep: Sequence[Number] = KEEP,
    ends: Sequence[Literal["slow", "fast"]] = ("slow", "fast"),
    bands: int = 0,
    controls: int = 3,
    measures: str | Sequence[str] = ALL_MEASURES,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Return the truncation sweep of a measurement; `truncate` explains the arguments."""
    live = measurement.live
    with opening(progress or silent, "probing"):
        layers = [rotating_planes(layer) for layer in measurement.rotation.planes(alike=True)]
    sets: dict[str, Any] = {"keep": keep, "ends": ends, "bands": bands, "controls": controls}
    cuts = plan_cuts(layers, seed=measurement.seed, **sets)
    turn = [number for number, layer in enumerate(layers) if layer]
    chosen = None if heads == "*" else live.heads_of(heads, turn)
    # Cuts that stop the same planes are measured under the name of the first.
    names = {cut.stopped: cut.name(layers) for cut in reversed(cuts)}
    edits = {names[cut.stopped]: edits_of(cut, chosen) for cut in cuts if cut.kind != "none"}
    farthest = (measurement.prompt_context - 1) // 2
    measured = evaluate_edits(
        measurement,
        tokenizer=tokenizer,
        edits=edits,
        measures=measures,
        distances=tuple(max(2, farthest >> halvings) for halvings in (6, 4, 2, 0)),
        progress=progress,
    )
    entries = measured.sel(edit=[names[cut.stopped] for cut in cuts])
    return named_entries(entries, cuts, layers).assign_attrs(heads=heads)


def named_entries(
    measured: xr.Dataset, cuts: Sequence[Cut], layers: Sequence[Wavelengths]
) -> xr.Dataset:
    """`measured`, an entry a cut in the order of `cuts`, with coordinates that describe it."""
    stopped = [[*cut.wavelengths(layers)] for cut in cuts]
    values = {
        "edit": np.array([cut.name(layers) for cut in cuts], dtype=object),
        "kind": np.array([cut.kind for cut in cuts], dtype=object),
        "kept": np.array([cut.kept(layers) for cut in cuts]),
        "planes": np.array([cut.planes for cut in cuts], dtype=object),
        "planes_stopped": np.array([max(map(len, cut.stopped)) for cut in cuts]),
        "wavelength_low": np.array([min(of, default=math.nan) for of in stopped]),
        "wavelength_high": np.array([max(of, default=math.nan) for of in stopped]),
        "draw": np.array([cut.draw for cut in cuts]),
        "band": np.array([cut.band for cut in cuts]),
    }
    return measured.assign_coords(labelled(values, SWEEP)).assign_attrs(kind="truncation")


def edits_of(cut: Cut, chosen: Bool[Tensor, "layer head"] | None = None) -> list[Edit]:
    """A cut as edits of a live model: one for all layers that stop the same planes."""

    def heads_of(layer: int) -> list[str]:
        heads = ["*"] if chosen is None else chosen[layer].nonzero()[:, 0].tolist()
        return [f"{layer}.{head}" for head in heads]

    each = {numbers: [*chain(*map(heads_of, at))] for numbers, at in cut.layers_of.items()}
    return [
        stop(PlaneNumbers(numbers), heads=",".join(heads))
        for numbers, heads in each.items()
        if numbers and heads
    ]
