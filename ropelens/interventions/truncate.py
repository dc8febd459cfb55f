"""Truncation sweeps: the cost of stopping more and more planes.

Barbero et al. 2024 (arXiv 2410.06205) truncate the low frequencies of RoPE (p-RoPE) and, for
comparison, the high frequencies. It matters *which* planes stop only if stopping the same
number of random planes has a different cost.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import xarray as xr

from ropelens.attention.variables import labelled
from ropelens.errors import Count, Number, Positive, Whole, public
from ropelens.interventions.edit import Edit, stop
from ropelens.interventions.evaluate import evaluate
from ropelens.interventions.truncation_table import ALL_MEASURES
from ropelens.interventions.variables import SWEEP
from ropelens.profiles.capture import TokenNames
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.rope.select import (
    ALL_HEADS,
    Cut,
    PlaneNumbers,
    Wavelengths,
    heads_of_layers,
    plan_cuts,
    rotating_planes,
)
from ropelens.rotation.probe import select_heads
from ropelens.runtime.progress import ProgressOption, display_of, opening
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput

End = Literal["slow", "fast"]


@dataclass(frozen=True, kw_only=True)
class PlaneSweep:
    """The arguments of `truncate` that define a sweep, and their defaults."""

    heads: str = ALL_HEADS
    layers: str | None = None
    keep: Sequence[Number] = (1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0)
    ends: Sequence[End] = ("slow", "fast")
    bands: int = 0
    controls: int = 3
    measures: str | Sequence[str] = ALL_MEASURES

    def cuts(self, groups: Mapping[str, Sequence[Wavelengths]], *, seed: int) -> list[Cut]:
        """Sets of planes that stop in each group of layers; the first set is empty."""
        names = ("keep", "ends", "bands", "controls")
        options = {name: getattr(self, name) for name in names} | {"seed": seed}
        planned = {name: plan_cuts(layers, **options) for name, layers in groups.items()}
        none, *_ = next(iter(planned.values()))
        cuts = (replace(x, layers=name) for name, cuts in planned.items() for x in cuts[1:])
        return [none, *cuts]


@public
def truncate(
    model: Measured,
    text: TextInput,
    *,
    tokenizer: TokenNames | None = None,
    heads: str = ALL_HEADS,
    layers: str | None = PlaneSweep.layers,
    keep: Sequence[Number] = PlaneSweep.keep,
    ends: Sequence[End] = PlaneSweep.ends,
    bands: Count = PlaneSweep.bands,
    controls: Count = PlaneSweep.controls,
    measures: str | Sequence[str] = PlaneSweep.measures,
    rows: HowMany = "auto",
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Stop more and more planes of `model` and measure the effect, always on the same text.

    Planes stop in `heads`, such as "3.4,12-29.*", or in all heads of `layers`, such as "full",
    "0-3,7" or "*" (all layers). By default they stop in all layers, or if the model has several
    kinds of layers that rotate (`layer_type` of a profile), in one kind after the other. They
    stop for each share of these layers' rotating planes in `keep` and each of `ends`:

    - "slow" stops the slowest planes of every layer and keeps int(p D // 2) planes of D rotated
      coordinates, as p-RoPE does (`rope_type` "proportional" of transformers).
    - "fast" stops the same number of the fastest planes.
    - `controls` random sets of the same size are stopped for each share (kind "random"). Draw n
      stops planes in one random order, and more of them for a smaller share.
    - `bands` groups of neighbouring wavelengths, about equal in size, are stopped one by one
      (kind "band"), with `controls` random sets each ("band control"). keep=(): only bands.

    Stopping planes may cost nothing in short text and much in long text, so sequences should be
    as long as the trained context. Copies are measured up to half of the context.

    Returns the dataset of `evaluate` for `measures`, with these coordinates over `edit`:
    `layers` ("all", or the kind of the layers whose planes stop), `kind`, `kept` (0 to 1),
    `planes` ("0,1,5"), `wavelength_low` and `wavelength_high` (tokens), `draw` and `band`. The
    first entry, "none", is the unmodified model. Equal sets are measured once.

    Raises `BadArgument` for shares outside [0, 1] and for heads that do not exist or do not
    rotate, `UnsupportedModel` for a model that does not rotate, and the errors of `evaluate`.
    """
    sweep = PlaneSweep(
        heads=heads_of_layers(layers or "*", ALL_HEADS if heads == "*" else heads),
        layers=layers,
        keep=keep,
        ends=ends,
        bands=bands,
        controls=controls,
        measures=measures,
    )
    measurement = Measurement.of(
        model, text, tokenizer=tokenizer, rows=rows, seed=seed, batch_size=batch_size
    )
    live, context = measurement.live, measurement.text.context
    everywhere = layers is None and sweep.heads == ALL_HEADS
    with opening(display_of(progress), "probing"):
        turning = [rotating_planes(layer) for layer in measurement.rotation.planes(alike=True)]
        rotating = [number for number, planes in enumerate(turning) if planes]
        chosen = live.attending_heads
        if not everywhere:
            able = chosen & torch.tensor([bool(planes) for planes in turning])[:, None]
            chosen = select_heads(
                able, sweep.heads, lambda: measurement.rotation.kinds, doing="rotate"
            )
        kinds = [kind.name for kind in measurement.rotation.kinds]
    swept = {layer: kinds[layer] for layer in rotating if chosen[layer].any()}
    if not everywhere or len({*swept.values()}) < 2:
        swept = dict.fromkeys(swept, "all")
    groups = {
        name: [planes if swept.get(n) == name else {} for n, planes in enumerate(turning)]
        for name in swept.values() or ["all"]
    }
    cuts = sweep.cuts(groups, seed=measurement.seed)
    heads_by_layer: list[Sequence[int | str]] = ["*" for _ in turning]
    if not everywhere:
        heads_by_layer = [mask.nonzero().flatten().tolist() for mask in chosen]
    # Cuts that stop the same planes are measured once, under the name of the first cut.
    names = {x.stopped: x.name(groups.get(x.layers, turning)) for x in reversed(cuts)}
    farthest = (min(live.context, context) - 1) // 2
    evaluation = evaluate(
        measurement,
        measurement.text,
        edits={names[x.stopped]: edits_of(x, heads_by_layer) for x in cuts if x.kind != "none"},
        measures=sweep.measures,
        distances=tuple(max(2, farthest >> halvings) for halvings in (6, 4, 2, 0)),
        tokenizer=tokenizer,
        progress=progress,
    )
    entries = evaluation.sel(edit=[names[cut.stopped] for cut in cuts])
    numbers = {name: [n for n, x in enumerate(layers) if x] for name, layers in groups.items()}
    facts = {"heads": sweep.heads, "layers": json.dumps(numbers)}
    return named_entries(entries, cuts, groups).assign_attrs(facts)


def named_entries(
    evaluation: xr.Dataset, cuts: Sequence[Cut], groups: Mapping[str, Sequence[Wavelengths]]
) -> xr.Dataset:
    """`evaluation`, whose entries are the `cuts`, with coordinates that describe the cuts."""
    layers_of = [groups.get(cut.layers) or next(iter(groups.values())) for cut in cuts]
    pairs = list(zip(cuts, layers_of, strict=True))
    wavelengths = [cut.wavelengths(layers) for cut, layers in pairs]
    values = {
        "edit": np.array([cut.name(layers) for cut, layers in pairs], dtype=object),
        "layers": np.array([cut.layers for cut in cuts], dtype=object),
        "kind": np.array([cut.kind for cut in cuts], dtype=object),
        "kept": np.array([cut.kept(layers) for cut, layers in pairs]),
        "planes": np.array([cut.planes for cut in cuts], dtype=object),
        "planes_stopped": np.array([max(map(len, cut.stopped)) for cut in cuts]),
        "wavelength_low": np.array([min(tokens, default=math.nan) for tokens in wavelengths]),
        "wavelength_high": np.array([max(tokens, default=math.nan) for tokens in wavelengths]),
        "draw": np.array([cut.draw for cut in cuts]),
        "band": np.array([cut.band for cut in cuts]),
    }
    return evaluation.assign_coords(labelled(values, SWEEP)).assign_attrs(kind="truncation")


def edits_of(cut: Cut, heads_by_layer: Sequence[Sequence[int | str]]) -> list[Edit]:
    """Edits that make a cut: one edit for all layers that stop the same planes."""
    edits = []
    for planes, layers in cut.layers_of.items():
        heads = [f"{layer}.{head}" for layer in layers for head in heads_by_layer[layer]]
        if planes and heads:
            edits.append(stop(PlaneNumbers(planes), heads=",".join(heads)))
    return edits
