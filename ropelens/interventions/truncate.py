"""Truncation sweeps: the cost of stopping more and more planes (arXiv 2410.06205).

It matters *which* planes stop only if as many random planes have a different cost.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

from ropelens.arguments import Count, Number, Positive, Whole, public
from ropelens.interventions.cuts import Cut, End, PlaneSweep, rotating_planes
from ropelens.interventions.edit import Edit, stop
from ropelens.interventions.edit import scale as scale_planes
from ropelens.interventions.evaluate import evaluate
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.rope.select import (
    ALL_HEADS,
    PlaneNumbers,
    heads_by_layer,
    heads_of_layers,
)
from ropelens.runtime.progress import ProgressOption, display_of, opening
from ropelens.schema import SWEEP, labelled
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput


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
    scale: Number | None = PlaneSweep.scale,
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

    - "slow" stops the slowest planes and keeps int(p D // 2) planes of D rotated coordinates,
      as p-RoPE does (`rope_type` "proportional" of transformers).
    - "fast" stops the same number of the fastest planes.
    - `controls` random sets of the same size are stopped for each share (kind "random"). Draw n
      stops planes in one random order.
    - `bands` groups of neighbouring wavelengths, about equal in size, are stopped one by one
      (kind "band"), with `controls` random sets each ("band control"). keep=(): only bands.
    - With `scale`, planes do not stop: their terms of the scores are multiplied by this number,
      as by `ropelens.scale` (0 drops them).

    Sequences should be as long as the trained context, because stopping planes may cost little
    in short text. Copies are measured up to half of the context.

    Returns the dataset of `evaluate` for `measures`, with these coordinates over `edit`:
    `layers` ("all", or the kind of the layers whose planes stop), `kind`, `kept` (0 to 1),
    `planes` ("0,1,5"), `wavelength_low` and `wavelength_high` (tokens), `draw` and `band`. The
    first entry, "none", is the unmodified model. Equal sets are measured once.

    Raises `BadArgument` for shares outside [0, 1] and for heads that do not exist or do not
    rotate, `UnsupportedModel` for a model that does not rotate, and the errors of `evaluate`.
    """
    heads = heads_of_layers(layers or "*", ALL_HEADS if heads == "*" else heads)
    options: dict[str, Any] = {
        "keep": keep,
        "ends": ends,
        "bands": bands,
        "controls": controls,
    }
    sweep = PlaneSweep(
        heads=heads, layers=layers, measures=measures, scale=scale, **options
    )
    options = {"rows": rows, "seed": seed, "batch_size": batch_size}
    measurement = Measurement.of(model, text, tokenizer=tokenizer, **options)
    live, context = measurement.live, measurement.text.context
    everywhere = layers is None and heads == ALL_HEADS
    with opening(display_of(progress), "probing"):
        turning = [
            rotating_planes(layer) for layer in measurement.rotation.planes(alike=True)
        ]
        rotating = [number for number, planes in enumerate(turning) if planes]
        chosen = live.attending_heads
        if not everywhere:
            able = chosen & torch.tensor([bool(planes) for planes in turning])[:, None]
            kind_names = measurement.rotation.kind_names
            chosen = heads_by_layer(heads, able, kind_names, doing="rotate")
        kinds = [kind.name for kind in measurement.rotation.kinds]
    swept = {layer: kinds[layer] for layer in rotating if chosen[layer].any()}
    if not everywhere or len({*swept.values()}) < 2:
        swept = dict.fromkeys(swept, "all")
    groups = {
        name: [
            planes if swept.get(n) == name else {} for n, planes in enumerate(turning)
        ]
        for name in swept.values() or ["all"]
    }
    cuts = sweep.cuts(groups, seed=measurement.seed)
    by_layer: list[Sequence[int | str]] = ["*" for _ in turning]
    if not everywhere:
        by_layer = [mask.nonzero().flatten().tolist() for mask in chosen]
    # Cuts that stop the same planes are measured once, under the name of the first cut.
    names = {cut.stopped: cut.edit for cut in reversed(cuts)}
    farthest = (min(live.context, context) - 1) // 2
    evaluation = evaluate(
        measurement,
        measurement.text,
        edits={
            names[x.stopped]: edits_of(x, by_layer, scale)
            for x in cuts
            if x.kind != "none"
        },
        measures=measures,
        distances=tuple(max(2, farthest >> halvings) for halvings in (6, 4, 2, 0)),
        tokenizer=tokenizer,
        progress=progress,
    )
    entries = evaluation.sel(edit=[names[cut.stopped] for cut in cuts])
    numbers = {
        name: [n for n, x in enumerate(layers) if x] for name, layers in groups.items()
    }
    facts: dict[str, Any] = {"heads": heads, "layers": json.dumps(numbers)}
    facts |= {} if scale is None else {"scale": float(scale)}
    return named_entries(entries, cuts).assign_attrs(facts)


def named_entries(evaluation: xr.Dataset, cuts: Sequence[Cut]) -> xr.Dataset:
    """`evaluation`, whose entries are the `cuts`, with coordinates that describe the cuts."""
    columns = {row.name: [getattr(cut, row.name) for cut in cuts] for row in SWEEP}
    texts = {
        name: object for name, column in columns.items() if isinstance(column[0], str)
    }
    values = {
        name: np.array(column, dtype=texts.get(name))
        for name, column in columns.items()
    }
    return evaluation.assign_coords(labelled(values, SWEEP)).assign_attrs(
        kind="truncation"
    )


def edits_of(
    cut: Cut, by_layer: Sequence[Sequence[int | str]], by: Number | None = None
) -> list[Edit]:
    """Edits that make a cut: one edit for all layers that stop the same planes."""
    edits, change = [], stop if by is None else partial(scale_planes, by=by)
    for planes, layers in cut.layers_of.items():
        heads = [f"{layer}.{head}" for layer in layers for head in by_layer[layer]]
        if planes and heads:
            edits.append(change(PlaneNumbers(planes), heads=",".join(heads)))
    return edits
