"""Running sums become labelled numbers, row by row of the table of variables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xarray as xr

from ropelens.rope.planes import Planes
from ropelens.statistics.sums import LayerMeans, Sums
from ropelens.statistics.variables import (
    BINS,
    INDICES,
    MEASURES,
    PLANES,
    Derived,
    Statistic,
    labelled,
    stack,
)


def summarize(
    sums: Sums, planes: Sequence[Planes], *, extra: Sequence[Statistic] = ()
) -> xr.Dataset:
    """The profile of `sums`: everything that does not need the model again.

    Sums of two halves of a corpus, added, give the profile of the whole. Heads and planes
    that a layer does not have are NaN. `extra` are statistics beside those of every profile.
    """
    rows = [row for row in (*MEASURES, *extra) if isinstance(row, Statistic | Derived)]
    statistics = [row for row in rows if isinstance(row, Statistic)]
    layers = [
        LayerMeans(sums.layers[layer], sums, plane, statistics)
        for layer, plane in zip(sorted(sums.layers), planes, strict=True)
    ]
    dataset = xr.Dataset(
        labelled({row.name: _values(row, layers) for row in rows if row.saved}, rows)
    )
    for row in extra:
        dataset[row.name].attrs |= {"column": row.column} if row.column else {}
    edges, starts = layers[0].edges.numpy(), [sums.layers[n].start for n in sorted(sums.layers)]
    farthest = [int((np.arange(len(start)) - start.numpy()).max()) for start in starts]
    dataset = dataset.assign(labelled({"farthest_offset": np.array(farthest)}, BINS))
    dataset = dataset.assign_coords(
        plane_coordinates(planes)
        | labelled({"offset_start": edges[:-1], "offset_stop": edges[1:]}, BINS)
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


def _values(row: Statistic | Derived, layers: Sequence[LayerMeans]) -> np.ndarray:
    """The values of all layers; of groups of sequences, those that have rows."""
    dims = row.saved_dims
    if "layer" in dims:
        values = np.moveaxis(stack(map(row.value, layers)), 0, dims.index("layer"))
    else:
        values = row.value(layers[0]).numpy()
    return values[layers[0].group_rows.numpy() > 0] if dims[0] == "group" else values


def number_dims(dataset: xr.Dataset) -> xr.Dataset:
    """`dataset` with its layers, heads and planes numbered."""
    sizes = {row.name: dataset.sizes[row.name] for row in INDICES if row.name in dataset.sizes}
    numbers = {dim: np.arange(size) for dim, size in sizes.items()}
    return dataset.assign_coords(labelled(numbers, INDICES))


def plane_coordinates(planes: Sequence[Planes]) -> dict[str, xr.Variable]:
    """`inv_freq` (rad/token) and `wavelength` (tokens) of each layer; NaN beyond its planes.

    Where an edit makes heads of a layer differ they are of the head that turns fastest in the
    plane, beside `head_wavelength` (layer, head, frequency).
    """
    fastest = [layer.term_inv_freq.abs().reshape(-1, layer.terms).amax(0) for layer in planes]
    wavelengths = (2 * math.pi / inv_freq.double() for inv_freq in fastest)
    values = {"inv_freq": stack(fastest), "wavelength": stack(wavelengths)}
    heads = [len(layer.inv_freq) for layer in planes if layer.inv_freq.ndim == 2]
    if heads:
        each = (layer.wavelength.expand(heads[0], -1) for layer in planes)
        values["head_wavelength"] = stack(each)
    return labelled(values, PLANES)
