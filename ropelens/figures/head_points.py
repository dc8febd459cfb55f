"""Points of heads in a figure, whose area grows with the bits of the head."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ropelens.figures import inputs, style
from ropelens.figures.inputs import Selected

FEW_HEADS = 200  # the points of more heads are smaller


def add_points(
    figure: go.Figure,
    heads: pd.DataFrame,
    *,
    x: np.ndarray,
    y: np.ndarray,
    selected: Selected,
) -> None:
    """Draw a point per head in the first panel, and a ring at the head `selected`."""
    hovers = inputs.hover_lines(heads)
    sizes = _sizes(heads)
    for label in style.LABEL_ORDER:
        of_label = (heads["label"] == label).to_numpy()
        drawn = of_label & np.isfinite(x) & np.isfinite(y)
        if not drawn.any():
            continue
        marker = {
            "color": style.COLORS[label],
            "size": sizes[drawn],
            "opacity": 0.85,
            "symbol": style.SYMBOLS[label],
            "line_width": 1,
        }
        figure.add_scatter(
            x=x[drawn],
            y=y[drawn],
            text=hovers[drawn],
            customdata=heads.loc[drawn, ["layer", "head"]].to_numpy(int),
            name=label,
            mode="markers",
            marker=marker,
            cliponaxis=False,
            hovertemplate=style.TEXT_ONLY,
            row=1,
            col=1,
        )
    if selected is not None:
        row = [inputs.row_of(heads, selected)]
        figure.add_scatter(
            x=x[row],
            y=y[row],
            mode="markers",
            marker={"symbol": "circle-open", "size": 22, "line": {"width": 2.5}},
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
            meta={"role": "selected"},
            row=1,
            col=1,
        )


def _sizes(heads: pd.DataFrame) -> np.ndarray:
    """Diameter of each point in pixels."""
    bits = heads["total_bits"].to_numpy(float).clip(min=0)
    largest = np.nanmax(bits, initial=0) or 1.0
    scale = 1.0 if len(heads) <= FEW_HEADS else 0.75
    return np.nan_to_num(scale * np.sqrt(25 + 200 * bits / largest), nan=5.0)
