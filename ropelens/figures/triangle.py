"""The budget triangle: where the information in each head's choice of keys comes from."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import head_table, hover_lines, row_of
from ropelens.figures.style import COLORS, LABELS, SYMBOLS, new_figure

PARTS = ("sink_bits", "position_bits", "content_bits")


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
    hovers = hover_lines(heads)
    shares = bit_shares(heads)
    size = marker_size(heads)
    figure = new_figure("Where each head's bits come from", height=430)
    for label in LABELS:
        rows = (heads["label"] == label).to_numpy() & np.isfinite(shares).all(1)
        if not rows.any():
            continue
        figure.add_scatterternary(
            a=shares[rows, 0],
            b=shares[rows, 1],
            c=shares[rows, 2],
            mode="markers",
            name=label,
            marker={
                "color": COLORS[label],
                "symbol": SYMBOLS[label],
                "size": size[rows],
                "opacity": 0.85,
                "line": {"width": 1},
            },
            customdata=heads.loc[rows, ["layer", "head"]].to_numpy(int),
            text=hovers[rows],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
        )
    if selected is not None:
        row = shares[row_of(heads, selected)]
        figure.add_scatterternary(
            **dict(zip("abc", ([value] for value in row), strict=True)),
            meta={"role": "selected"},
            **ring(),
        )
    _lay_out(figure)
    return figure


def bit_shares(heads: pd.DataFrame) -> np.ndarray:
    """Shares [row, (sink, position, content)] of each head's bits; NaN where it has none."""
    parts = heads[list(PARTS)].to_numpy(float).clip(min=0)
    whole = parts.sum(1, keepdims=True)
    return np.divide(parts, whole, out=np.full_like(parts, np.nan), where=whole > 0)


def marker_size(heads: pd.DataFrame) -> np.ndarray:
    """Diameter in pixels, 5 to 15: the area grows with the head's total bits."""
    bits = heads["total_bits"].to_numpy(float).clip(min=0)
    largest = np.nanmax(bits) if np.isfinite(bits).any() and np.nanmax(bits) > 0 else 1.0
    crowd = 1.0 if len(heads) <= 200 else 0.75
    return np.nan_to_num(crowd * np.sqrt(25 + 200 * bits / largest), nan=5.0)


def ring() -> dict:
    """The open circle around the selected head, as keywords of a scatter."""
    return {
        "mode": "markers",
        "marker": {"symbol": "circle-open", "size": 22, "line": {"width": 2.5}},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }


def _lay_out(figure: go.Figure) -> None:
    corners = {
        "aaxis": "sink (% of bits)",
        "baxis": "position<br>(% of bits)",
        "caxis": "content<br>(% of bits)",
    }
    ticks = {"tickvals": [0.25, 0.5, 0.75], "tickformat": ".0%", "ticks": ""}
    figure.update_layout(
        ternary={
            "sum": 1,
            **{axis: {"title_text": text, **ticks} for axis, text in corners.items()},
        },
        legend={"itemsizing": "constant", "orientation": "v", "y": 1, "yanchor": "top"},
        margin={"l": 56, "r": 56, "t": 80, "b": 56},
    )
