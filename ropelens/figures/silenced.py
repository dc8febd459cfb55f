"""What the loss becomes where heads are silenced, or planes of theirs stop."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from ropelens.errors import public
from ropelens.figures.style import COLORS, MUTED, SYMBOLS, interval_bars, new_figure


@public
def plot_silenced(table: pd.DataFrame) -> go.Figure:
    """Change of loss (nats/token) with its 95 % interval: a row a set, a panel a kind of token.

    `table` has, a row a number: `what` was done, to heads of which `label` ("" of none, drawn
    grey), the kind of `tokens`, and `change`, `low`, `high`.
    """
    kinds, sets = list(dict.fromkeys(table["tokens"])), list(dict.fromkeys(table["what"]))
    panels = {"rows": 1, "cols": len(kinds), "shared_yaxes": True, "subplot_titles": kinds}
    title = "Change of loss where heads are silenced"
    figure = new_figure(title, height=130 + 34 * len(sets), **panels, horizontal_spacing=0.03)
    for row in table.to_dict("records"):
        color = COLORS.get(row["label"], MUTED)
        change, low, high = row["change"], row["low"], row["high"]
        figure.add_scatter(
            x=[change],
            y=[row["what"]],
            error_x=interval_bars([change], [low], [high], color=color),
            mode="markers",
            marker={"color": color, "symbol": SYMBOLS.get(row["label"], "line-ns-open")},
            marker_size=9,
            hovertemplate=f"{row['tokens']}<br>%{{y}}<br>%{{x:+.4f}} nats/token "
            f"({low:+.4f} to {high:+.4f})<extra></extra>",
            showlegend=False,
            row=1,
            col=kinds.index(row["tokens"]) + 1,
        )
    figure.update_xaxes(title_text="change (nats/token)", zeroline=True, nticks=6)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=sets[::-1], showgrid=False)
    figure.update_yaxes(title_text="what is silenced (heads)", col=1)
    return figure.update_layout(margin_t=90)
