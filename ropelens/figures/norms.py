"""Query and key norms by wavelength, of layers and of a layer's heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import SEQUENTIAL, index_axis, name_panel, new_figure
from ropelens.figures.wavelengths import (
    column_names,
    common_columns,
    mark_context,
    one_title,
    wavelength_axis,
)

PANELS = {"q_norm": "query", "k_norm": "key"}


def plot_norms(profile: xr.Dataset, *, head: int | None = None) -> go.Figure:
    """Mean norm of every plane by layer, queries above keys; brighter is longer.

    `head`: that query head of each layer, with the key-value head it reads; None: the mean
    over heads. Values are in the units of the model's queries and keys. Source: Barbero et
    al. 2024 (arXiv 2410.06205), its figures of norms by layer and frequency.
    """
    if head is not None:
        check_head(profile, layer=0, head=head)
    layers = profile.sizes["layer"]
    whose = "mean over heads" if head is None else f"head {head} of each layer"
    figure = new_figure(
        f"Query and key norms by wavelength, {whose}",
        height=170 + 2 * int(np.clip(layers * 30, 120, max(220, layers * 9))),
        **{"rows": 2, "cols": 1, "shared_xaxes": True},
        vertical_spacing=0.14 if layers <= 16 else 0.07,
    )
    edges, planes = common_columns(profile["wavelength"].values)
    names = column_names(profile["wavelength"].values, planes)
    for row, (name, side) in enumerate(PANELS.items(), start=1):
        z = in_columns(norms_by_layer(profile, name, head=head), planes)
        bar = {"len": 0.46, "y": 1.0 if row == 1 else 0.46, "yanchor": "top"}
        figure.add_heatmap(
            **_norm_cells(edges, z, names, row="layer", side=side, bar=bar),
            meta={"role": name},
            zmax=float(np.nanmax(z)),
            row=row,
            col=1,
        )
        # A bar's own title would widen the margin.
        name_panel(figure, row, f"{side} norm (model units)")
    figure.update_yaxes(**index_axis(layers, "layer"))
    _lay_out(figure, profile, edges)
    one_title(figure)
    return figure


def plot_head_norms(profile: xr.Dataset, *, layer: int) -> go.Figure:
    """Mean query norm of every plane, a row a head of `layer`; in the model's units.

    Source: Barbero et al. 2024 (arXiv 2410.06205), its figure of norms by head.
    """
    check_head(profile, layer=layer, head=0)
    heads = profile.sizes["head"]
    norms = profile["q_norm"].transpose("layer", "head", "frequency").values[layer]
    edges, planes = common_columns(profile["wavelength"].values)
    z = in_columns(norms, np.broadcast_to(planes[layer], (heads, planes.shape[1])))
    names = column_names(profile["wavelength"].values, planes)[np.full(heads, layer)]
    figure = new_figure(
        f"Query norms by wavelength, heads of layer {layer}",
        height=150 + int(np.clip(heads * 30, 120, max(240, heads * 9))),
    )
    bar = {"title": {"text": "norm<br>(model<br>units)"}}
    figure.add_heatmap(**_norm_cells(edges, z, names, row="head", side="query", bar=bar))
    figure.update_yaxes(**index_axis(heads, "head"))
    _lay_out(figure, profile, edges)
    return figure


def norms_by_layer(profile: xr.Dataset, name: str, *, head: int | None) -> np.ndarray:
    """`q_norm` or `k_norm` as [layer, frequency]: one head's, or the mean over heads."""
    dim = "head" if name == "q_norm" else "kv_head"
    values = profile[name].transpose("layer", dim, "frequency")
    if head is None:
        return values.mean(dim).values
    layers = np.arange(profile.sizes["layer"])
    return values.values[layers, head if dim == "head" else kv_heads(profile)[:, head]]


def in_columns(values: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Values [row, frequency] moved to the columns of `common_columns`; NaN where none."""
    moved = np.take_along_axis(values, np.maximum(planes, 0), axis=1)
    return np.where(planes >= 0, moved, np.nan)


def _norm_cells(
    edges: np.ndarray, z: np.ndarray, names: np.ndarray, *, row: str, side: str, bar: dict
) -> dict[str, Any]:
    """A heat map of norms `z` [row, column], a `row` being a layer or a head.

    `names` [row, column] are those of the cells' wavelengths.
    """
    return {
        "x": edges,
        "y": np.arange(len(z)),
        "z": z,
        "text": names,
        "name": f"{side} norm",
        "colorscale": SEQUENTIAL,
        "zmin": 0,
        "colorbar": {"thickness": 10, "nticks": 4} | bar,
        "hovertemplate": f"{row} %{{y}}<br>wavelength %{{text}} tokens<br>"
        f"{side} norm %{{z:.3f}}<extra></extra>",
        "hoverongaps": False,
    }


def _lay_out(figure: go.Figure, profile: xr.Dataset, edges: np.ndarray) -> None:
    figure.update_xaxes(**wavelength_axis(profile["wavelength"].values), showgrid=False)
    figure.update_xaxes(range=np.log10([edges[0], edges[-1]]).tolist())
    mark_context(figure, profile, color="#ffffff", below=True)
