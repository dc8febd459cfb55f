"""Query and key norms by wavelength, of layers and of a layer's heads."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument, Count, public
from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import SEQUENTIAL, index_axis, name_panel, new_figure
from ropelens.figures.wavelengths import (
    column_names,
    common_columns,
    in_columns,
    mark_context,
    one_title,
    wavelength_axis,
)

PANELS = {"q_norm": "query", "k_norm": "key"}


@public
def plot_norms(
    profile: xr.Dataset, *, layer: Count | None = None, head: Count | None = None
) -> go.Figure:
    """Mean norm of every plane by wavelength, queries above keys; brighter is longer.

    A row a layer: the mean over heads, or with `head` that query head and the key-value head
    it reads. With `layer`, a row a head of that layer. In the units of the model's queries
    and keys. Source: Barbero et al. 2024 (arXiv 2410.06205), its figures of norms.
    """
    if layer is not None and head is not None:
        raise BadArgument("plot_norms: a layer or a head, not both.", attempt="one of them")
    check_head(profile, layer=layer or 0, head=head or 0)
    wavelength = profile["wavelength"].values
    edges, planes = common_columns(wavelength)
    names = column_names(wavelength, planes)
    what = "layer" if layer is None else "head"
    whose = "mean over heads" if head is None else f"head {head} of each layer"
    whose = whose if layer is None else f"heads of layer {layer}"
    rows = profile.sizes[what]
    figure = new_figure(
        f"Query and key norms by wavelength, {whose}",
        height=170 + 2 * int(np.clip(rows * 30, 120, max(220, rows * 9))),
        **{"rows": 2, "cols": 1, "shared_xaxes": True},
        vertical_spacing=0.14 if rows <= 16 else 0.07,
    )
    for row, (name, side) in enumerate(PANELS.items(), start=1):
        norms = _rows(profile, name, layer=layer, head=head)
        which = slice(None) if layer is None else np.full(len(norms), layer)
        z = in_columns(norms, planes[which])
        figure.add_heatmap(
            x=edges,
            y=np.arange(len(z)),
            z=z,
            text=names[which],
            name=f"{side} norm",
            colorscale=SEQUENTIAL,
            zmin=0,
            zmax=float(np.nanmax(z)),
            colorbar={"thickness": 10, "nticks": 4, "len": 0.46, "yanchor": "top"}
            | {"y": 1.0 if row == 1 else 0.46},
            hovertemplate=f"{what} %{{y}}<br>wavelength %{{text}} tokens<br>"
            f"{side} norm %{{z:.3f}}<extra></extra>",
            hoverongaps=False,
            meta={"role": name},
            row=row,
            col=1,
        )
        # A colour bar's title would widen the margin.
        name_panel(figure, row, f"{side} norm (model units)")
        of_keys = layer is not None and name == "k_norm"
        axis = index_axis(len(z), "key-value head" if of_keys else what)
        figure.update_yaxes(**axis, row=row)
    figure.update_xaxes(**wavelength_axis(wavelength), showgrid=False)
    figure.update_xaxes(range=np.log10([edges[0], edges[-1]]).tolist())
    mark_context(figure, profile, color="#ffffff", below=True)
    one_title(figure)
    return figure


def _rows(profile: xr.Dataset, name: str, *, layer: int | None, head: int | None) -> np.ndarray:
    """`q_norm` or `k_norm` as [row, frequency]: the heads of a layer, or a row a layer."""
    dim = "head" if name == "q_norm" else "kv_head"
    values = profile[name].transpose("layer", dim, "frequency")
    if layer is not None:
        return values.values[layer]
    if head is None:
        return values.mean(dim).values
    layers = np.arange(profile.sizes["layer"])
    return values.values[layers, head if dim == "head" else kv_heads(profile)[:, head]]
