"""The budget triangle: where the information in each head's choice of keys comes from."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import head_table, points_by_label, ring, row_of
from ropelens.figures.style import new_figure

CORNERS = {
    "sink_bits": "sink (% of bits)",
    "position_bits": "position<br>(% of bits)",
    "content_bits": "content<br>(% of bits)",
}


def plot_budget_triangle(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """A point a head: its bits shared out among sink (top), position and content.

    The area of a point grows with the head's total bits, so heads that choose nothing,
    whose shares mean little, stay small. `selected` (layer, head) gets a ring. Shares
    are of the head's total bits, in [0, 1]; a head of no bits has none and is left out.
    """
    heads = head_table(profile, heads)
    shares = bit_shares(heads)
    figure = new_figure("Where each head's bits come from", height=430)
    for rows, look in points_by_label(heads, np.isfinite(shares).all(1)):
        a, b, c = shares[rows].T
        figure.add_scatterternary(a=a, b=b, c=c, **look)
    if selected is not None:
        a, b, c = shares[[row_of(heads, selected)]].T
        figure.add_scatterternary(a=a, b=b, c=c, **ring())
    axis = {"tickvals": [0.25, 0.5, 0.75], "tickformat": ".0%", "ticks": ""}
    titles = zip(("aaxis", "baxis", "caxis"), CORNERS.values(), strict=True)
    figure.update_layout(
        ternary={"sum": 1} | {name: axis | {"title_text": title} for name, title in titles},
        legend={"itemsizing": "constant", "orientation": "v", "y": 1, "yanchor": "top"},
        margin={"l": 56, "r": 56, "t": 80, "b": 56},
    )
    return figure


def bit_shares(heads: pd.DataFrame) -> np.ndarray:
    """Shares [row, (sink, position, content)] of each head's bits; NaN where it has none."""
    parts = heads[list(CORNERS)].to_numpy(float).clip(min=0)
    whole = parts.sum(1, keepdims=True)
    return np.divide(parts, whole, out=np.full_like(parts, np.nan), where=whole > 0)
