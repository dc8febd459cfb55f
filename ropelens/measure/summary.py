"""Running sums become labelled numbers, row by row of the schema."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xarray as xr

from ropelens.rope.planes import Planes
from ropelens.statistics.layer import LayerMeans
from ropelens.statistics.ragged import stack
from ropelens.statistics.sums import Sums
from ropelens.statistics.variables import MEASURES, Derived, Statistic

INDICES = {
    "layer": "index of the layer",
    "head": "index of the query head in its layer",
    "kv_head": "index of the key-value head in its layer",
    "frequency": "index of the plane, 0 turns fastest",
}


def summarize(
    sums: Sums, planes: Sequence[Planes], *, extra: Sequence[Statistic] = ()
) -> xr.Dataset:
    """The profile of `sums`: everything but what needs the model again.

    Sums of two halves of a corpus, added, give the profile of the whole. Layers, heads
    and planes that a model does not have (kv heads or head dimensions that differ
    between layers) are NaN. `extra` are statistics that were summed beside the usual ones.
    """
    rows = [row for row in (*MEASURES, *extra) if isinstance(row, Statistic | Derived)]
    statistics = [row for row in rows if isinstance(row, Statistic)]
    layers = [
        LayerMeans(sums.layers[layer], sums, plane, statistics)
        for layer, plane in zip(sorted(sums.layers), planes, strict=True)
    ]
    dataset = xr.Dataset({row.name: _variable(row, layers) for row in rows if row.saved})
    for row in extra:
        dataset[row.name].attrs |= {"column": row.column} if row.column else {}
    first, stop = layers[0].edges[:-1].numpy(), layers[0].edges[1:].numpy()
    dataset = dataset.assign_coords(plane_coordinates(planes)).assign_coords(
        offset_start=described("offset_bin", first, "first offset of the bin", "token"),
        offset_stop=described("offset_bin", stop, "first offset beyond the bin", "token"),
    )
    loss, loss_se = sums.loss
    dataset.attrs = {
        "sequences": sums.sequences,
        "tokens": sums.tokens,
        "rows_measured": float(sums.row_weight.sum()),
        "loss": loss,
        "loss_se": loss_se,
    }
    return number_dims(dataset)


def _variable(row: Statistic | Derived, layers: Sequence[LayerMeans]) -> xr.Variable:
    """One variable of all layers; of groups of sequences, those that have rows."""
    dims = row.saved_dims
    if "layer" in dims:
        values = np.moveaxis(stack(map(row.value, layers)), 0, dims.index("layer"))
    else:
        values = row.value(layers[0]).numpy()
    if dims[0] == "group":
        values = values[layers[0].group_rows.numpy() > 0]
    return xr.Variable(dims, values, row.attrs)


def described(
    dims: str | tuple[str, ...], values: np.ndarray, long_name: str, units: str
) -> xr.Variable:
    """An array that says what it is and in what unit."""
    return xr.Variable(dims, values, {"long_name": long_name, "units": units})


def number_dims(dataset: xr.Dataset) -> xr.Dataset:
    """`dataset` with its layers, heads and planes numbered, where it has them."""
    return dataset.assign_coords(
        {
            dim: described(dim, np.arange(dataset.sizes[dim]), long_name, "")
            for dim, long_name in INDICES.items()
            if dim in dataset.sizes
        }
    )


def plane_coordinates(planes: Sequence[Planes]) -> dict[str, xr.Variable]:
    """`inv_freq` (rad/token) and `wavelength` (tokens) of each layer; NaN beyond its own.

    Where an edit makes heads of a layer differ they are of the head that turns fastest in the
    plane, and `head_wavelength` (layer, head, frequency) is there too.
    """
    by_plane = ("layer", "frequency")
    fastest = [layer.term_inv_freq.abs().reshape(-1, layer.terms).amax(0) for layer in planes]
    inv_freq, wavelength = stack(fastest), stack(2 * math.pi / w.double() for w in fastest)
    found = {
        "inv_freq": described(
            by_plane, inv_freq, "angular frequency of the plane", "rad/token"
        ),
        "wavelength": described(by_plane, wavelength, "tokens per turn of the plane", "token"),
    }
    heads = [len(layer.inv_freq) for layer in planes if layer.inv_freq.ndim == 2]
    if not heads:
        return found
    each = stack(layer.wavelength.expand(heads[0], -1) for layer in planes)
    dims, long_name = ("layer", "head", "frequency"), "tokens per turn of the plane in the head"
    return found | {"head_wavelength": described(dims, each, long_name, "token")}
