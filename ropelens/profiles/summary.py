"""Running sums become labelled numbers, one row of the table of measures at a time."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.formulas import describe_kernel
from ropelens.attention.sums import LayerMeans, Sums
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.budget.held_out import LayerFit, head_budget
from ropelens.budget.logit import SCORES
from ropelens.measured_rotation.layer_kinds import LayerKind
from ropelens.profiles.measures import MEASURES
from ropelens.rope.planes import Planes
from ropelens.schema.axes import AXES
from ropelens.schema.rows import Derived, Statistic, labelled, stack


def summarize(
    sums: Sums,
    planes: Sequence[Planes],
    fits: Mapping[int, LayerFit] | None = None,
    *,
    extra: Sequence[Statistic] = (),
) -> xr.Dataset:
    """A profile of `MEASURES` and `extra`, from `sums` and `fits`; NaN for missing heads."""
    computed = [
        row for row in (*MEASURES, *extra) if isinstance(row, Statistic | Derived)
    ]
    statistics = [row for row in computed if isinstance(row, Statistic)]
    layers = sorted(sums.layers)
    means = [
        LayerMeans(sums.layers[layer], sums, planes[layer], statistics)
        for layer in layers
    ]
    values = {row.name: values_of(row, means) for row in computed if row.saved}
    values["farthest_offset"] = np.array([layer.sums.farthest for layer in means])
    if fits:
        values.update(budget_values(sums, fits))
    coordinates = bin_coordinates(means[0].edges, values, extra)
    coordinates.update(
        plane_coordinates(
            [planes[layer] for layer in layers], heads=values["q_norm"].shape[1]
        )
    )
    loss, loss_se = sums.loss
    attributes = {
        "sequences": sums.sequences,
        "tokens": sums.tokens,
        "rows_measured": float(sums.row_weight.sum()),
        "loss": loss,
        "loss_se": loss_se,
    }
    variables = labelled(values, [*MEASURES, *extra, *AXES])
    dataset = xr.Dataset(variables, {**coordinates, "layer": layers}, attributes)
    for row in extra:
        if row.column:
            dataset[row.name].attrs["column"] = row.column
    dataset = dataset.reindex(
        layer=range(len(planes)), fill_value={"farthest_offset": 0}
    )
    return number_dims(dataset)


def values_of(row: Statistic | Derived, layers: Sequence[LayerMeans]) -> np.ndarray:
    """The values of all layers; groups of sequences without rows are left out."""
    dims = row.saved_dims
    if "layer" in dims:
        by_layer = stack([row.value(layer) for layer in layers])
        values = np.moveaxis(by_layer, 0, dims.index("layer"))
    else:
        values = row.value(layers[0]).numpy()
    if dims[0] == "group":
        has_rows = layers[0].total.row_weight.sum(1).numpy() > 0
        return values[has_rows]
    return values


def bin_coordinates(
    edges: Int[Tensor, " edge"],
    values: Mapping[str, np.ndarray],
    extra: Sequence[Statistic],
) -> dict[str, xr.Variable]:
    """Ends of the bins of offsets; bins of distances are one octave wide."""
    offsets = edges.numpy()
    ends = {"offset_start": offsets[:-1], "offset_stop": offsets[1:]}
    for row in extra:
        if "distance_bin" in row.dims:
            start = 2 ** np.arange(values[row.name].shape[-1])
            ends["distance_start"] = start
            ends["distance_stop"] = 2 * start
    return labelled(ends, AXES)


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
    wavelengths = [2 * math.pi / inv_freq.double() for inv_freq in fastest]
    values = {"inv_freq": stack(fastest), "wavelength": stack(wavelengths)}
    if any(layer.inv_freq.ndim == 2 for layer in planes):
        by_head = [wavelength_by_head(layer, heads) for layer in planes]
        values["head_wavelength"] = stack(by_head)
    return labelled(values, AXES)


def wavelength_by_head(planes: Planes, heads: int) -> Float[Tensor, "head term"]:
    """Wavelengths of the heads of a layer; NaN for heads that the layer does not have."""
    wavelength = torch.atleast_2d(planes.wavelength)
    if len(wavelength) == 1:
        return wavelength.expand(heads, -1)
    missing = heads - len(wavelength)
    return pad(wavelength, (0, 0, 0, missing), value=math.nan)


def kind_coordinates(kinds: Sequence[LayerKind]) -> dict[str, xr.Variable]:
    """`layer_type`, `reach`, `base` and `scaling` of each layer."""
    values = {
        "layer_type": np.array([kind.name for kind in kinds], dtype=object),
        "reach": np.array([kind.reach for kind in kinds]),
        "base": np.array([kind.base for kind in kinds]),
        "scaling": np.array([kind.scaling for kind in kinds], dtype=object),
    }
    return labelled(values, AXES)


def budget_values(sums: Sums, fits: Mapping[int, LayerFit]) -> dict[str, np.ndarray]:
    """The variables of `MEASURES` that follow from the fits and their scores."""
    layers = sorted(sums.scores)
    scores = torch.from_numpy(stack([sums.scores[layer][:, 0] for layer in layers]))
    rows = scores[0, :, 0, SCORES.index("weight")]
    of_text = head_budget(scores.sum(1))
    values = {f"{name}_bits": bits for name, bits in of_text.bits.items()}
    values.update(of_text.numbers.variables())
    kernels = []
    for layer in layers:
        seen_by = sums.layers[layer].offset_weight[0] / sums.row_weight.sum()
        kernels.append(kernel_values(fits[layer], seen_by))
    values.update(stack_by_name(kernels))
    values["group_scored"] = rows[rows > 0].numpy()
    of_groups = head_budget(scores[:, rows > 0])
    for name, gain in of_groups.gains.items():
        values[f"group_{name}"] = np.moveaxis(gain, 0, 1)
    for name, follow in of_groups.follow.items():
        values[f"group_follow_{name}"] = np.moveaxis(follow, 0, 1)
    surrogates = stack_by_name([fits[layer].surrogates for layer in layers])
    for name, drawn in surrogates.items():
        values[name] = np.moveaxis(drawn, 0, 1)
    return values


def kernel_values(
    fit: LayerFit, seen_by: Float[Tensor, " offset"]
) -> dict[str, Shaped[Tensor, "*head_and_bin"]]:
    """The kernel of each head by bin, its peak and middle half, and the sink that was found."""
    values = describe_kernel(fit.kappa, seen_by)
    edges = offset_edges(len(seen_by))
    values["kernel"] = sum_bins(values["kernel"], edges) / edges.diff()
    found, position = fit.found_sinks.max(-1)
    values["found_sink"] = position.double().where(found, torch.nan)
    return values


def stack_by_name(
    layers: Sequence[Mapping[str, Tensor]],
) -> dict[str, Float[np.ndarray, "layer ..."]]:
    """Arrays of all layers by their names; shorter arrays end with NaN."""
    return {name: stack([layer[name] for layer in layers]) for name in layers[0]}
