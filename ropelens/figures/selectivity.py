"""One head, plane by plane: what pushes it toward its keys, and what it could push with."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import Count, public
from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import DASHED, SHADE, new_figure
from ropelens.figures.wavelengths import (
    mark_context,
    one_title,
    wavelength_axis,
    wavelength_positions,
)

PANELS = {
    "selectivity<br>(nats)": {"selectivity_keys": "on keys", "selectivity_sink": "on sinks"},
    "norm<br>(model units)": {"q_norm": "query", "k_norm": "key"},
    "coherence<br>(0 to 1)": {"q_coherence": "query", "k_coherence": "key"},
}
FILLED = {"marker": {"size": 4}, "fill": "tozeroy", "fillcolor": SHADE}
LINES: dict[str, dict[str, Any]] = {
    "on keys": FILLED | {"line": {"width": 1.5, "shape": "hvh"}},
    "on sinks": {"line": DASHED | {"shape": "hvh"}, "marker": {"size": 3}},
    "query": {"line": {"width": 2}, "marker": {"size": 5}},
    "key": {"line": DASHED, "marker": {"size": 5}},
}


@public
def plot_selectivity(profile: xr.Dataset, *, layer: Count, head: Count) -> go.Figure:
    """Selectivity, norms and coherence of a head over wavelengths, one above the other.

    Selectivity (nats): how much each plane pushes the head toward the keys it picks, sinks
    apart. Norms (the model's units) bound what a plane could do. Coherence, in [0, 1]: 1
    where the plane carries the same vector whatever the token. Trace `meta` names the variable
    behind each axis; `customdata` is the wavelength in tokens.
    """
    check_head(profile, layer=layer, head=head)
    wavelength = profile["wavelength"].values
    panels = {"rows": 3, "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.06}
    title = f"Planes of layer {layer}, head {head}"
    figure = new_figure(title, height=460, **panels, row_heights=[0.4, 0.34, 0.26])
    for row, (unit, names) in enumerate(PANELS.items(), start=1):
        for name, side in names.items():
            figure.add_scatter(
                x=wavelength_positions(wavelength)[layer],
                y=of_head(profile, name, layer=layer, head=head),
                name=side,
                legendgroup=side,
                showlegend=row < 3,
                mode="lines+markers",
                **LINES[side],
                meta={"x": "wavelength_position", "y": name, "customdata": "wavelength"},
                customdata=wavelength[layer],
                hovertemplate=f"{side} %{{y:.3f}}<br>wavelength %{{customdata:.3~s}} tokens"
                "<extra></extra>",
                row=row,
                col=1,
            )
        figure.update_yaxes(title_text=unit, nticks=5, row=row)
    figure.update_yaxes(zeroline=True, row=1)
    figure.update_yaxes(rangemode="tozero", row=2)
    figure.update_yaxes(range=[-0.03, 1.03], tickvals=[0, 0.5, 1], row=3)
    figure.update_xaxes(**wavelength_axis(wavelength))
    one_title(figure)
    mark_context(figure, profile)
    return figure


def of_head(profile: xr.Dataset, name: str, *, layer: int, head: int) -> np.ndarray:
    """A variable of one head over frequencies; for keys, of the key-value head it reads."""
    values = profile[name].isel(layer=layer)
    if "kv_head" in values.dims:
        return values.isel(kv_head=kv_heads(profile)[layer, head]).values
    return values.isel(head=head).values
