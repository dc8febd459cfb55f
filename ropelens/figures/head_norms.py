"""Query norms of every head of one layer: do its heads prefer different planes?"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import check_head
from ropelens.figures.norms import in_columns, mark_context
from ropelens.figures.style import SEQUENTIAL, index_step, new_figure
from ropelens.figures.wavelengths import common_columns, wavelength_axis


def plot_head_norms(profile: xr.Dataset, *, layer: int) -> go.Figure:
    """Mean query norm of every plane, a row a head of `layer`; in the model's units.

    Source: Barbero et al. 2024 (arXiv 2410.06205), its figure of norms by head.
    """
    check_head(profile, layer=layer, head=0)
    heads = profile.sizes["head"]
    norms = profile["q_norm"].transpose("layer", "head", "frequency").values[layer]
    edges, planes = common_columns(profile["wavelength"].values)
    z = in_columns(norms, np.broadcast_to(planes[layer], (heads, planes.shape[1])))
    figure = new_figure(
        f"Query norms by wavelength, heads of layer {layer}",
        height=150 + int(np.clip(heads * 30, 120, max(240, heads * 9))),
    )
    figure.add_heatmap(
        x=edges,
        y=np.arange(heads),
        z=z,
        name="query norm",
        colorscale=SEQUENTIAL,
        zmin=0,
        colorbar={"thickness": 10, "nticks": 4, "title": {"text": "norm<br>(model<br>units)"}},
        hovertemplate="head %{y}<br>wavelength %{x:.3~s} tokens<br>query norm %{z:.3f}"
        "<extra></extra>",
        hoverongaps=False,
    )
    figure.update_yaxes(
        title_text="head (index)",
        range=[heads - 0.5, -0.5],
        dtick=index_step(heads, most=8),
        tick0=0,
        showgrid=False,
    )
    figure.update_xaxes(**wavelength_axis(profile["wavelength"].values), showgrid=False)
    figure.update_xaxes(range=np.log10([edges[0], edges[-1]]).tolist())
    mark_context(figure, profile, color="#ffffff", below=True)
    return figure
