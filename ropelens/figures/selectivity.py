"""One head, plane by plane: what pushes it toward its keys, and what it could push with."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.norms import mark_context
from ropelens.figures.style import MUTED, template
from ropelens.figures.wavelengths import AXIS_TITLE, wavelength_axis, wavelength_positions

PANELS = (
    ("selectivity<br>(nats)", {"selectivity": "selectivity"}),
    ("norm<br>(model units)", {"q_norm": "query", "k_norm": "key"}),
    ("coherence<br>(0 to 1)", {"q_coherence": "query", "k_coherence": "key"}),
)


def plot_selectivity(profile: xr.Dataset, *, layer: int, head: int) -> go.Figure:
    """Selectivity, norms and coherence of a head over wavelengths, one above the other.

    Selectivity (nats): how much each plane pushes the head toward the keys it picks. Norms
    (the model's units) bound what a plane could do. Coherence, in [0, 1]: 1 where the plane
    carries the same vector whatever the token. Trace `meta` names the variable behind each
    axis; `customdata` is the wavelength in tokens.
    """
    check_head(profile, layer=layer, head=head)
    wavelength = profile["wavelength"].values
    figure = make_subplots(
        rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.4, 0.34, 0.26]
    )
    for row, (title, names) in enumerate(PANELS, start=1):
        for name, side in names.items():
            figure.add_scatter(
                x=wavelength_positions(wavelength)[layer],
                y=of_head(profile, name, layer=layer, head=head),
                name=side,
                legendgroup=side,
                showlegend=row == 2,
                mode="lines+markers",
                line=_line(name),
                marker={"size": 5 if name != "selectivity" else 4},
                fill="tozeroy" if name == "selectivity" else None,
                fillcolor="rgba(128,132,140,0.22)" if name == "selectivity" else None,
                meta={"x": "wavelength_position", "y": name, "customdata": "wavelength"},
                customdata=wavelength[layer],
                hovertemplate=f"{side} %{{y:.3f}}<br>wavelength %{{customdata:.3~s}} tokens"
                "<extra></extra>",
                row=row,
                col=1,
            )
        figure.update_yaxes(title_text=title, nticks=5, row=row)
    figure.update_layout(
        template=template("light"),
        title_text=f"Planes of layer {layer}, head {head}",
        height=460,
    )
    figure.update_yaxes(zeroline=True, row=1)
    figure.update_yaxes(rangemode="tozero", row=2)
    figure.update_yaxes(range=[-0.03, 1.03], tickvals=[0, 0.5, 1], row=3)
    figure.update_xaxes(**wavelength_axis(wavelength))
    figure.update_xaxes(title_text="", row=1)
    figure.update_xaxes(title_text="", row=2)
    figure.update_xaxes(title_text=AXIS_TITLE, row=3)
    mark_context(figure, profile, color=MUTED)
    return figure


def of_head(profile: xr.Dataset, name: str, *, layer: int, head: int) -> np.ndarray:
    """A variable of one head over frequencies, of the key-value head it reads for keys."""
    values = profile[name].isel(layer=layer)
    if "kv_head" in values.dims:
        return values.isel(kv_head=kv_heads(profile)[layer, head]).values
    return values.isel(head=head).values


def _line(name: str) -> dict:
    if name == "selectivity":
        return {"width": 1.5, "shape": "hvh"}
    return (
        {"width": 2}
        if name.startswith("q")
        else {"width": 2, "dash": "4px,3px", "color": MUTED}
    )
