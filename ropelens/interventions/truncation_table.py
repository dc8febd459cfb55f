"""The table of a truncation sweep, and the sweeps of each kind of layers."""

import json

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.interventions.changes import ENDS_OF_INTERVAL, changes_of_edits

QUARTER = 0.75  # share that rotates in the step of which sentences about an end speak
WITH_CHANGES = (
    "loss",
    "far_loss",
    "copy_loss",
    "repeat_loss",
    "induction",
    "retrieval",
)


def _columns() -> tuple[str, ...]:
    columns = ["edit", "layers", "kind", "kept", "draw", "band"]
    columns += ["planes_stopped", "planes", "wavelength_low", "wavelength_high"]
    for measure in WITH_CHANGES:
        columns.append(measure)
        columns += [f"{measure}_change{end}" for end in ENDS_OF_INTERVAL]
    columns += ["labels_changed", "labels_changed_share"]
    for count in ("labels_differ", "labels_differ_share"):
        columns += [f"{count}{end}" for end in ENDS_OF_INTERVAL]
    return tuple(columns)


COLUMNS = _columns()
"""The columns of truncation.csv."""


def summarize_truncation(truncation: xr.Dataset) -> pd.DataFrame:
    """The columns of truncation.csv, one row for each edit; NaN if it was not measured."""
    return changes_of_edits(truncation).reindex(columns=list(COLUMNS))


def sweeps_by_kind(truncation: xr.Dataset) -> dict[str, xr.Dataset]:
    """The sweep of each kind of layers; only "all" if one sweep covers all layers."""
    layers_of = swept_layers(truncation)
    layer_type = truncation.get("layers")
    if len(layers_of) < 2 or layer_type is None:
        return {"all": truncation}
    sweeps = {}
    for name, layers in layers_of.items():
        of_sweep = (layer_type == name) | (truncation["kind"] == "none")
        sweep = truncation.isel(edit=np.flatnonzero(of_sweep))
        sweeps[name] = sweep.assign_attrs(
            layers=json.dumps({name: layers}), heads=f"{name}.*"
        )
    return sweeps


def swept_layers(truncation: xr.Dataset) -> dict[str, list[int]]:
    """The layers whose planes stop in each sweep of `truncation`."""
    layers_of = json.loads(truncation.attrs.get("layers", "{}"))
    if not layers_of:
        return {"all": list(range(truncation.sizes["layer"]))}
    return layers_of
