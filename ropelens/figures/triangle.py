"""The budget triangle: where the information in each head's choice of keys comes from."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import RING, head_table, points_by_label, row_of
from ropelens.figures.style import OUTSIDE, new_figure

BITS = ("sink_bits", "position_bits", "content_bits", "interaction_bits")
"""The four parts of a head's bits."""

CORNERS = {"aaxis": "position only (%)", "baxis": "content<br>(%)", "caxis": "both<br>(%)"}


def plot_budget_triangle(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """A point a head: the shares, in [0, 1], of the bits that sinks do not explain.

    Position only (top): what the offset adds to what the tokens explain. Content: what the
    tokens explain. Both at once: which tokens count depends on how far they are. The area of
    a point grows with the head's total bits, so heads that choose nothing stay small.
    `selected` (layer, head) gets a ring. A head without bits is left out.
    """
    heads = head_table(profile, heads)
    shares = _shares_without_sinks(bit_shares(heads))
    figure = new_figure("What sinks do not explain: where it comes from", height=430)
    for rows, look in points_by_label(heads, np.isfinite(shares).all(1), hollow=OUTSIDE):
        a, b, c = shares[rows].T
        figure.add_scatterternary(a=a, b=b, c=c, **look)
    if selected is not None:
        a, b, c = shares[[row_of(heads, selected)]].T
        figure.add_scatterternary(a=a, b=b, c=c, **RING)
    axis = {"tickvals": [1 / 3, 2 / 3], "tickformat": ".0%", "ticks": ""}
    axes = {name: axis | {"title_text": title} for name, title in CORNERS.items()}
    return figure.update_layout(
        ternary={"sum": 1} | axes,
        legend={"itemsizing": "constant", "orientation": "v", "y": 1, "yanchor": "top"},
        margin={"l": 56, "r": 56, "t": 80, "b": 56},
    )


def bit_shares(heads: pd.DataFrame) -> np.ndarray:
    """Shares [row, (sink, position, content, interaction)] of each head's bits; NaN of none."""
    parts = heads[list(BITS)].to_numpy(float).clip(min=0)
    whole = parts.sum(1, keepdims=True)
    return np.divide(parts, whole, out=np.full_like(parts, np.nan), where=whole > 0)


def _shares_without_sinks(shares: np.ndarray) -> np.ndarray:
    """The last three of the shares, as shares of their sum; NaN where that is nothing."""
    rest = shares[:, 1:].sum(1, keepdims=True)
    out = np.full_like(shares[:, 1:], np.nan)
    return np.divide(shares[:, 1:], rest, out=out, where=rest > 0)
