"""Running sums become labelled numbers, one row of the table of measures at a time."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xarray as xr
from torch.nn.functional import pad

from ropelens.attention.formulas import describe_kernel
from ropelens.attention.sums import LayerMeans, Sums
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.budget.held_out import LayerFit, head_budget
from ropelens.budget.logit import SCORES
from ropelens.measured_rotation.layer_kinds import LayerKind
from ropelens.profiles.kinds import KIND_COORDINATES
from ropelens.profiles.measures import MEASURES
from ropelens.rope.planes import Planes
from ropelens.schema import AXES, Derived, Statistic, labelled, stack


def summarize(
    sums: Sums,
    planes: Sequence[Planes],
    fits: Mapping[int, LayerFit] | None = None,
    *,
    extra: Sequence[Statistic] = (),
) -> xr.Dataset:
    """A profile of `MEASURES` and `extra`, from `sums` and `fits`; NaN for missing heads."""
    rows = [row for row in (*MEASURES, *extra) if isinstance(row, Statistic | Derived)]
    statistics = [row for row in rows if isinstance(row, Statistic)]
    numbers = sorted(sums.layers)
    layers = [LayerMeans(sums.layers[n], sums, planes[n], statistics) for n in numbers]
    values = {row.name: _values(row, layers) for row in rows if row.saved}
    values["farthest_offset"] = np.array([layer.sums.farthest for layer in layers])
    values |= _budget(sums, fits) if fits else {}
    edges, (loss, loss_se) = layers[0].edges.numpy(), sums.loss
    ends = {"offset_start": edges[:-1], "offset_stop": edges[1:]}
    for sizes in [
        values[row.name].shape for row in extra if "distance_bin" in row.dims
    ]:
        ends |= {
            "distance_start": (x := 2 ** np.arange(sizes[-1])),
            "distance_stop": 2 * x,
        }
    bins = labelled(ends, AXES)
    coordinates = bins | plane_coordinates(
        [planes[n] for n in numbers], heads=values["q_norm"].shape[1]
    )
    attrs: dict[str, float] = {"sequences": sums.sequences, "tokens": sums.tokens}
    attrs |= {
        "rows_measured": float(sums.row_weight.sum()),
        "loss": loss,
        "loss_se": loss_se,
    }
    variables = labelled(values, [*MEASURES, *extra, *AXES])
    dataset = xr.Dataset(variables, coordinates | {"layer": numbers}, attrs)
    for row in extra:
        dataset[row.name].attrs |= {"column": row.column} if row.column else {}
    fill = {"farthest_offset": 0}
    return number_dims(dataset.reindex(layer=range(len(planes)), fill_value=fill))


def _values(row: Statistic | Derived, layers: Sequence[LayerMeans]) -> np.ndarray:
    """The values of all layers; groups of sequences without rows are left out."""
    dims = row.saved_dims
    if "layer" in dims:
        values = np.moveaxis(stack(map(row.value, layers)), 0, dims.index("layer"))
    else:
        values = row.value(layers[0]).numpy()
    has_rows = layers[0].total.row_weight.sum(1).numpy() > 0
    return values[has_rows] if dims[0] == "group" else values


def number_dims(dataset: xr.Dataset) -> xr.Dataset:
    """`dataset` with an index for each layer, head, plane and so on."""
    names = {row.name for row in AXES} & set(dataset.sizes)
    numbers = {name: np.arange(dataset.sizes[name]) for name in sorted(names)}
    return dataset.assign_coords(labelled(numbers, AXES))


def plane_coordinates(
    planes: Sequence[Planes], *, heads: int
) -> dict[str, xr.Variable]:
    """`inv_freq` (rad/token) and `wavelength` (tokens) of each layer; NaN beyond its planes.

    If heads of a layer differ, these are the numbers of the head that rotates fastest in the
    plane, and `head_wavelength` (layer, head, frequency) has all heads.
    """
    fastest = [torch.atleast_2d(layer.term_inv_freq.abs()).amax(0) for layer in planes]
    wavelengths = (2 * math.pi / inv_freq.double() for inv_freq in fastest)
    values = {"inv_freq": stack(fastest), "wavelength": stack(wavelengths)}
    if any(layer.inv_freq.ndim == 2 for layer in planes):
        by_layer = (torch.atleast_2d(layer.wavelength) for layer in planes)
        by_layer = (w.expand(heads, -1) if len(w) == 1 else w for w in by_layer)
        missing = (pad(w, (0, 0, 0, heads - len(w)), value=math.nan) for w in by_layer)
        values["head_wavelength"] = stack(missing)
    return labelled(values, AXES)


def kind_coordinates(kinds: Sequence[LayerKind]) -> dict[str, xr.Variable]:
    """`layer_type`, `base`, `scaling` and `reach` of each layer."""
    columns = zip(KIND_COORDINATES, zip(*kinds, strict=True), strict=True)
    values = {name: np.array(column) for name, column in columns}
    texts = {name: values[name].astype(object) for name in ("layer_type", "scaling")}
    return labelled(values | texts, AXES)


def _budget(sums: Sums, fits: Mapping[int, LayerFit]) -> dict[str, np.ndarray]:
    layers = sorted(sums.scores)
    scores = torch.from_numpy(stack(sums.scores[layer][:, 0] for layer in layers))
    rows = scores[0, :, 0, SCORES.index("weight")]
    fitted = []
    for layer in layers:
        seen_by = sums.layers[layer].offset_weight[0] / sums.row_weight.sum()
        kernel, edges = (
            describe_kernel(fits[layer].kappa, seen_by),
            offset_edges(len(seen_by)),
        )
        kernel["kernel"] = sum_bins(kernel["kernel"], edges) / edges.diff()
        found, sink = fits[layer].found_sinks.max(-1)
        fitted.append(kernel | {"found_sink": sink.double().where(found, torch.nan)})
    drawn = [fits[layer].surrogates for layer in layers]
    of_text = head_budget(scores.sum(1))
    of_groups = head_budget(scores[:, rows > 0])
    by_group = dict(of_groups.gains)
    for name, values in of_groups.follow.items():
        by_group[f"follow_{name}"] = values
    return {
        **{f"{name}_bits": values for name, values in of_text.bits.items()},
        **of_text.numbers.variables(),
        **{name: stack(layer[name] for layer in fitted) for name in fitted[0]},
        "group_scored": rows[rows > 0].numpy(),
        **{f"group_{name}": np.moveaxis(x, 0, 1) for name, x in by_group.items()},
        **{name: np.moveaxis(stack(x[name] for x in drawn), 0, 1) for name in drawn[0]},
    }
