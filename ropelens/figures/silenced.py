"""Figure of the change of loss if heads are silenced."""

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from ropelens.arguments import public
from ropelens.figures import style


@public
def plot_silenced(table: pd.DataFrame) -> go.Figure:
    """Change of loss (nats/token) with 95 % intervals, by silenced heads and kind of token.

    Columns of `table`: `what` (the heads), `label` (or ""), `tokens`, `change`, `low` and
    `high`.
    """
    token_kinds = table["tokens"].unique().tolist()
    sets = table["what"].unique().tolist()
    titles = token_kinds
    if len(token_kinds) > 1:  # lines that fit on a phone
        titles = [name.replace(" ", "<br>") for name in token_kinds]
    figure = style.new_figure(
        "Change of loss if heads are silenced",
        height=130 + 34 * len(sets),
        cols=max(1, len(token_kinds)),
        shared_yaxes=True,
        subplot_titles=titles,
        horizontal_spacing=0.03,
    )
    for heads in table.to_dict("records"):
        _add_change(figure, heads, col=token_kinds.index(heads["tokens"]) + 1)
    figure.update_annotations(font_size=12)
    figure.update_xaxes(zeroline=True, nticks=5, rangemode="tozero")
    middle = 1 + len(token_kinds) // 2
    figure.update_xaxes(title_text="change (nats/token)", col=middle)
    figure.update_yaxes(categoryorder="array", categoryarray=sets[::-1], showgrid=False)
    figure.update_yaxes(title_text="silenced heads (set)", col=1)
    figure.update_layout(margin_t=100)
    return style.note_missing(figure, "no change of loss was measured", table["change"])


def _add_change(figure: go.Figure, heads: Mapping[Hashable, Any], *, col: int) -> None:
    change = heads["change"]
    low = heads["low"]
    high = heads["high"]
    color = style.COLORS.get(heads["label"], style.MUTED)
    hover = f"{heads['tokens']}<br>%{{y}}<br>%{{x:+.4f}} nats/token"
    figure.add_scatter(
        x=[change],
        y=[heads["what"]],
        error_x=style.interval_bars([change], [low], [high], color=color),
        showlegend=False,
        mode="markers",
        marker={
            "color": color,
            "symbol": style.SYMBOLS.get(heads["label"], "line-ns-open"),
            "size": 9,
        },
        hovertemplate=f"{hover} ({low:+.4f} to {high:+.4f})<extra></extra>",
        row=1,
        col=col,
    )
