"""Query and key norms by wavelength, of layers and of a layer's heads."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument, Count, public
from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import SEQUENTIAL, index_axis, stacked
from ropelens.figures.wavelengths import mark_context, plane_map, set_wavelengths

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
    what = "layer" if layer is None else "head"
    whose = "mean over heads" if head is None else f"head {head} of each layer"
    whose = whose if layer is None else f"heads of layer {layer}"
    rows = profile.sizes[what]
    figure = stacked(
        f"Query and key norms by wavelength, {whose}",
        2,
        height=170 + 2 * int(np.clip(rows * 30, 120, max(220, rows * 9))),
        spacing=0.14 if rows <= 16 else 0.07,
    )
    for row, (name, side) in enumerate(PANELS.items(), start=1):
        norms = _rows(profile, name, layer=layer, head=head)
        layers = np.arange(len(norms)) if layer is None else np.full(len(norms), layer)
        cells = plane_map(profile["wavelength"].values, norms, layers)
        figure.add_heatmap(
            **cells,
            y=np.arange(len(norms)),
            name=f"{side} norm",
            colorscale=SEQUENTIAL,
            zmin=0,
            zmax=float(np.nanmax(cells["z"])),
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
        place = {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yanchor": "bottom"}
        words = {"text": f"{side} norm (model units)", "font_size": 12}
        figure.add_annotation(place | words, yref="y domain" if row == 1 else "y2 domain")
        of_keys = layer is not None and name == "k_norm"
        axis = index_axis(len(norms), "key-value head" if of_keys else what)
        figure.update_yaxes(**axis, row=row)
    set_wavelengths(figure, profile["wavelength"].values)
    ends = np.log10(figure.data[0].x[[0, -1]]).tolist()
    figure.update_xaxes(range=ends, showgrid=False)
    mark_context(figure, profile, color="#ffffff", below=True)
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
