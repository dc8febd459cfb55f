"""Truncation sweeps: the cost of stopping more and more planes (arXiv 2410.06205).

It matters *which* planes stop only if as many random planes have a different cost.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr

from ropelens.arguments import Count, Number, Positive, Whole, public
from ropelens.interventions.cuts import (
    Cut,
    End,
    PlaneSweep,
    Wavelengths,
    rotating_planes,
)
from ropelens.interventions.edit import scale as scale_planes
from ropelens.interventions.edit import stop
from ropelens.interventions.evaluate import evaluate
from ropelens.interventions.plane_edits import Edit
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.rope.select import ALL_HEADS, HeadMask, PlaneNumbers, heads_by_layer
from ropelens.runtime.progress import ProgressOption, display_of, opening
from ropelens.schema.evaluation import SWEEP
from ropelens.schema.rows import labelled
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput


@public
def truncate(
    model: Measured,
    text: TextInput,
    *,
    tokenizer: TokenNames | None = None,
    heads: str | None = PlaneSweep.heads,
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

    Planes stop in `heads`, such as "3.4,12-29.*", "full.*", or "*.*" (all heads together). By
    default they stop in all heads, or if the model has several kinds of layers that rotate
    (`layer_type` of a profile), in one kind after the other. They stop for each share of these
    layers' rotating planes in `keep` and each of `ends`:

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
    sweep = PlaneSweep(
        heads=heads,
        keep=keep,
        ends=ends,
        bands=bands,
        controls=controls,
        scale=scale,
        measures=measures,
    )
    measurement = Measurement.of(
        model, text, tokenizer=tokenizer, rows=rows, seed=seed, batch_size=batch_size
    )
    with opening(display_of(progress), "probing"):
        swept = SweptHeads.of(measurement, heads)
    cuts = sweep.cuts(swept.groups, seed=measurement.seed)
    # Cuts that stop the same planes are measured once, under the name of the first cut.
    names = {cut.stopped: cut.edit for cut in reversed(cuts)}
    edits = {}
    for cut in cuts:
        if cut.kind != "none":
            edits[names[cut.stopped]] = edits_of(cut, swept.by_layer, scale)
    farthest = (min(measurement.live.context, measurement.text.context) - 1) // 2
    evaluation = evaluate(
        measurement,
        measurement.text,
        edits=edits,
        measures=measures,
        distances=tuple(max(2, farthest >> halvings) for halvings in (6, 4, 2, 0)),
        tokenizer=tokenizer,
        progress=progress,
    )
    entries = evaluation.sel(edit=[names[cut.stopped] for cut in cuts])
    truncation = named_entries(entries, cuts).assign_attrs(
        heads=heads or ALL_HEADS, layers=json.dumps(swept.layers)
    )
    if scale is not None:
        truncation.attrs["scale"] = float(scale)
    return truncation


@dataclass(frozen=True)
class SweptHeads:
    """The heads whose planes stop.

    `groups` are the planes of each layer that stop together, by the name of the group: the kind
    of its layers, or "all". `by_layer` are the heads of each layer, or "*" for all of them.
    """

    groups: dict[str, list[Wavelengths]]
    by_layer: Sequence[Sequence[int] | Sequence[str]]

    @property
    def layers(self) -> dict[str, list[int]]:
        """The layers of each group."""
        layers = {}
        for name, planes in self.groups.items():
            layers[name] = [layer for layer, of_layer in enumerate(planes) if of_layer]
        return layers

    @classmethod
    def of(cls, measurement: Measurement, heads: str | None) -> "SweptHeads":
        """The heads in a list such as "3.4,full.*", or all heads by kind of layers for None."""
        turning = [
            rotating_planes(planes)
            for planes in measurement.rotation.planes(alike=True)
        ]
        is_turning = [bool(planes) for planes in turning]
        rotates = torch.tensor(is_turning, dtype=torch.bool, device="cpu")
        able = measurement.live.attending_heads & rotates[:, None]
        layer_types = measurement.rotation.kind_names
        if heads is None:
            every_head = [["*"] for _ in turning]
            return cls(_by_layer_type(turning, able, layer_types()), every_head)
        chosen = heads_by_layer(heads, able, layer_types, doing="rotate")
        planes = [
            of_layer if chosen[layer].any() else {}
            for layer, of_layer in enumerate(turning)
        ]
        by_layer = [mask.nonzero().flatten().tolist() for mask in chosen]
        return cls({"all": planes}, by_layer)


def _by_layer_type(
    turning: list[Wavelengths], able: HeadMask, layer_types: list[str]
) -> dict[str, list[Wavelengths]]:
    """The rotating planes of each kind of layers, or of "all" layers if there is one kind.

    `able` are the heads that attend and rotate.
    """
    swept = {}
    for layer, layer_type in enumerate(layer_types):
        if able[layer].any():
            swept[layer] = layer_type
    names = list(dict.fromkeys(swept.values()))
    if len(names) < 2:
        names = ["all"]
        swept = dict.fromkeys(swept, "all")
    groups = {}
    for name in names:
        groups[name] = [
            of_layer if swept.get(layer) == name else {}
            for layer, of_layer in enumerate(turning)
        ]
    return groups


def named_entries(evaluation: xr.Dataset, cuts: Sequence[Cut]) -> xr.Dataset:
    """`evaluation`, whose entries are the `cuts`, with coordinates that describe the cuts."""
    values = {}
    for row in SWEEP:
        column = [getattr(cut, row.name) for cut in cuts]
        dtype = object if isinstance(column[0], str) else None
        values[row.name] = np.array(column, dtype=dtype)
    named = evaluation.assign_coords(labelled(values, SWEEP))
    return named.assign_attrs(kind="truncation")


def edits_of(
    cut: Cut,
    by_layer: Sequence[Sequence[int] | Sequence[str]],
    by: Number | None = None,
) -> list[Edit]:
    """Edits that make a cut: one edit for all layers that stop the same planes."""
    edits = []
    for planes, layers in cut.layers_of.items():
        heads = [f"{layer}.{head}" for layer in layers for head in by_layer[layer]]
        if not (planes and heads):
            continue
        select = PlaneNumbers(planes)
        names = ",".join(heads)
        if by is None:
            edits.append(stop(select, heads=names))
        else:
            edits.append(scale_planes(select, by=by, heads=names))
    return edits
