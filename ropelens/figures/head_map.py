"""The map of a model's heads: what each one does, and how sure that is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import head_grid, head_table, hover_lines
from ropelens.figures.style import COLORS, LABELS, faded, index_step, new_figure

OFFSETS_FIT = 24
"""Up to so many heads a layer, a positional head's cell names its offset."""


def plot_head_map(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """Layer by head; the colour is the label, its strength the label's confidence.

    One heat map a label: z is the confidence [layer, head] in [0, 1] where the head has
    that label, else NaN. A head whose confidence was not measured is drawn at full
    strength, and its hover names none. The number in a positional cell is the head's
    offset in tokens. `selected` (layer, head) gets a frame.
    """
    heads = head_table(profile, heads)
    layers, count = profile.sizes["layer"], profile.sizes["head"]
    confidence = np.nan_to_num(head_grid(profile, heads, "confidence"), nan=1.0)
    labels = _words(profile, heads, heads["label"].to_numpy(object))
    hovers = _words(profile, heads, hover_lines(heads))
    offset = head_grid(profile, heads, "offset")
    numbers = [["" if np.isnan(x) else f"{x:.0f}" for x in row] for row in offset]
    figure = new_figure("Heads by layer: label and confidence", height=_height(layers))
    for label in LABELS:
        figure.add_heatmap(
            z=np.where(labels == label, confidence, np.nan),
            zmin=0,
            zmax=1,
            colorscale=[[0, faded(COLORS[label], 0.3)], [1, faded(COLORS[label], 1)]],
            showscale=False,
            showlegend=False,
            name=label,
            text=numbers if label == "positional" and count <= OFFSETS_FIT else None,
            texttemplate="%{text}" if label == "positional" and count <= OFFSETS_FIT else None,
            customdata=np.where(labels == label, hovers, ""),
            hovertemplate="%{customdata}<extra></extra>",
            hoverongaps=False,
            xgap=2 if count <= OFFSETS_FIT else 1,
            ygap=2 if layers <= OFFSETS_FIT else 1,
        )
    _add_legend(figure, heads)
    figure.update_xaxes(
        title_text="head (index)",
        range=_ends(count),
        dtick=index_step(count),
        tick0=0,
        showgrid=False,
        constrain="domain",
    )
    figure.update_yaxes(
        title_text="layer (index)",
        range=_ends(layers)[::-1],
        dtick=index_step(layers),
        tick0=0,
        showgrid=False,
    )
    if selected is not None:
        figure.add_shape(name="selected", **frame(*selected))
    return figure


def frame(layer: int, head: int) -> dict:
    """The rectangle around one cell of the map, as keywords of a plotly shape."""
    return {
        "type": "rect",
        "x0": head - 0.5,
        "x1": head + 0.5,
        "y0": layer - 0.5,
        "y1": layer + 0.5,
        "line_width": 3,
        "fillcolor": "rgba(0,0,0,0)",
    }


def _ends(count: int) -> list[float]:
    """An axis over `count` cells, with room at both ends for a frame's stroke."""
    room = 0.5 + max(0.05, 0.006 * count)
    return [-room, count - 1 + room]


def _height(layers: int) -> int:
    """Pixels: cells of 13 to 40 pixels, plus title, legend and axis."""
    return int(np.clip(layers * 40, 200, max(300, layers * 13)) + 130)


def _words(profile: xr.Dataset, heads: pd.DataFrame, values: np.ndarray) -> np.ndarray:
    grid = np.empty((profile.sizes["layer"], profile.sizes["head"]), dtype=object)
    grid[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = values
    return grid


def _add_legend(figure: go.Figure, heads: pd.DataFrame) -> None:
    """Heat maps have no entries of their own; empty scatters with their colours do."""
    for label in LABELS:
        if (heads["label"] == label).any():
            figure.add_scatter(
                x=[None],
                y=[None],
                mode="markers",
                name=label,
                marker={"color": COLORS[label], "symbol": "square", "size": 11},
                hoverinfo="skip",
            )
