"""The map of a model's heads: what each one does, and how strongly."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import Count, public
from ropelens.figures.inputs import head_grid, head_table, hover_lines, numbers
from ropelens.figures.style import (
    COLORS,
    INK,
    LABELS,
    MUTED,
    SIGNS,
    faded,
    index_step,
    new_figure,
)

SIGNS_FIT = 24
"""Up to so many heads a layer, a cell has a sign of its label, or names its offset."""

STRONG = 2.0
"""Bits of a head that is drawn at full strength."""


@public
def plot_head_map(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[Count, Count] | None = None,
) -> go.Figure:
    """Layer by head; the colour is the label, its strength the bits that the head chooses.

    One heat map a label: z is `total_bits` [layer, head] where the head has that label, else
    NaN; from 2 bits on colours are full. The number in a positional cell is the head's offset
    in tokens; other cells have their label's sign. `selected` (layer, head) gets a frame.
    """
    heads = head_table(profile, heads)
    layers, count = profile.sizes["layer"], profile.sizes["head"]
    bits = head_grid(profile, heads, numbers(heads, "total_bits")).astype(float)
    labels = head_grid(profile, heads, heads["label"])
    hovers = head_grid(profile, heads, hover_lines(heads))
    offset = head_grid(profile, heads, numbers(heads, "offset")).astype(float)
    # Cells of 13 to 40 pixels, plus title, legend and axis.
    height = int(np.clip(layers * 40, 200, max(300, layers * 13)) + 130)
    figure = new_figure("Heads by layer: label and strength", height=height)
    for label in LABELS:
        here = labels == label
        signs = np.where(np.isnan(offset), SIGNS[label], np.char.mod("%.0f", offset))
        figure.add_heatmap(
            z=np.where(here, bits, np.nan),
            zmin=0,
            zmax=STRONG,
            colorscale=[[0, faded(COLORS[label], 0.2)], [1, faded(COLORS[label], 1)]],
            showscale=False,
            showlegend=False,
            name=label,
            text=np.where(here, signs, ""),
            texttemplate="%{text}" if count <= SIGNS_FIT else None,
            # Diffuse cells are nearly the page's own colour, light or dark.
            textfont_color=MUTED if label == "diffuse" else INK["light"],
            customdata=np.where(here, hovers, ""),
            hovertemplate="%{customdata}<extra></extra>",
            hoverongaps=False,
            xgap=2 if count <= SIGNS_FIT else 1,
            ygap=2 if layers <= SIGNS_FIT else 1,
        )
    for label in LABELS:  # heat maps have no entries in a legend; empty scatters do
        if (heads["label"] == label).any():
            marker = {"color": COLORS[label], "symbol": "square", "size": 11}
            legend = {"mode": "markers", "name": label, "marker": marker, "hoverinfo": "skip"}
            figure.add_scatter(x=[None], y=[None], **legend)
    figure.update_xaxes(**_cell_axis("head", count), constrain="domain")
    figure.update_yaxes(**_cell_axis("layer", layers))
    figure.update_yaxes(range=figure.layout.yaxis.range[::-1])
    if selected is not None:
        layer, head = selected
        corners = {"x0": head - 0.5, "x1": head + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
        fill = {"line_width": 3, "fillcolor": "rgba(0,0,0,0)"}
        figure.add_shape(name="selected", type="rect", **corners, **fill)
    return figure


def _cell_axis(what: str, count: int) -> dict:
    """An axis over `count` cells, with room at both ends for a frame's stroke."""
    room = 0.5 + max(0.05, 0.006 * count)
    ticks = {"dtick": index_step(count), "tick0": 0, "showgrid": False}
    return {"title_text": f"{what} (index)", "range": [-room, count - 1 + room], **ticks}
