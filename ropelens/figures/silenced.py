"""What the loss becomes where heads are silenced, or planes of theirs stop."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ropelens.errors import public
from ropelens.figures.style import COLORS, MUTED, SYMBOLS, new_figure


@public
def plot_silenced(table: pd.DataFrame) -> go.Figure:
    """Change of loss (nats/token) with its 95 % interval: a row a set, a panel a kind of token.

    `table` has, a row a number: `what` was done, to heads of which `label` ("" of none, drawn
    grey), the kind of `tokens`, and `change`, `low`, `high`.
    """
    kinds, sets = list(dict.fromkeys(table["tokens"])), list(dict.fromkeys(table["what"]))
    figure = new_figure(
        "Change of loss where heads are silenced",
        height=130 + 34 * len(sets),
        **{"rows": 1, "cols": len(kinds), "shared_yaxes": True, "horizontal_spacing": 0.03},
        subplot_titles=kinds,
    )
    for row in table.to_dict("records"):
        color = COLORS.get(row["label"], MUTED)
        symbol = SYMBOLS.get(row["label"], "line-ns-open")
        bars = {"type": "data", "symmetric": False, "color": color, "thickness": 1.5}
        bars["array"] = np.nan_to_num([row["high"] - row["change"]])
        bars["arrayminus"] = np.nan_to_num([row["change"] - row["low"]])
        figure.add_scatter(
            x=[row["change"]],
            y=[row["what"]],
            error_x=bars,
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 9},
            hovertemplate=f"{row['tokens']}<br>%{{y}}<br>%{{x:+.4f}} nats/token "
            f"({row['low']:+.4f} to {row['high']:+.4f})<extra></extra>",
            showlegend=False,
            row=1,
            col=kinds.index(row["tokens"]) + 1,
        )
    figure.update_xaxes(title_text="change (nats/token)", zeroline=True, nticks=6)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=sets[::-1], showgrid=False)
    figure.update_yaxes(title_text="what is silenced (heads)", col=1)
    return figure.update_layout(margin_t=90)
