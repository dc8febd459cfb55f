"""Figure of what the attention of each head follows if keys exchange their contents."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.figures import inputs, style
from ropelens.figures.head_points import add_points
from ropelens.figures.inputs import Selected
from ropelens.profiles.measures import complete_profile

FOLLOWS = ("follows_position", "follows_content", "follows_chance")


@public
def plot_follow(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Attention of each head after keys exchanged their contents, coloured by label.

    x is `follows_content`, the attention that moves with the contents, and y is
    `follows_position`, the attention that stays at the same positions. Both are shares of the
    attention on exchanged keys. Dotted lines show the median of `follows_chance`. Sink and
    diffuse heads are left out. The head `selected` (layer, head) gets a ring.
    """
    profile = complete_profile(profile)
    heads = inputs.head_table(profile, heads)
    shown = ~heads["label"].isin(style.EXCLUDED_LABELS).to_numpy()
    columns = heads.reindex(columns=FOLLOWS)
    stays = np.where(shown, inputs.numbers(columns, "follows_position"), np.nan)
    moves = np.where(shown, inputs.numbers(columns, "follows_content"), np.nan)
    chance = np.where(shown, inputs.numbers(columns, "follows_chance"), np.nan)
    title = "Attention after keys exchanged contents"
    figure = style.new_figure(title, height=430, rows=1, cols=1)
    if np.isfinite(chance).any():
        _add_chance(figure, float(np.nanmedian(chance)))
    add_points(figure, heads, x=moves, y=stays, selected=selected)
    figure.update_xaxes(title_text="attention that moves with the contents (0 to 1)")
    figure.update_yaxes(title_text="attention that stays<br>at its positions (0 to 1)")
    ticks = [0, 0.25, 0.5, 0.75, 1]
    figure.update_xaxes(range=[-0.04, 1.04], tickvals=ticks)
    figure.update_yaxes(range=[-0.04, 1.04], tickvals=ticks)
    figure.update_layout(legend_itemsizing="constant")
    why = "no head was measured with exchanged keys"
    return style.note_missing(figure, why, moves * stays)


def _add_chance(figure: go.Figure, level: float) -> None:
    """Draw a horizontal and a vertical line at the level of chance."""
    figure.add_scatter(
        x=[0, 1],
        y=[level, level],
        mode="lines",
        line=style.DOTTED,
        textfont_color=style.MUTED,
        showlegend=False,
        hoverinfo="skip",
        textposition="middle right",
    )
    figure.add_scatter(
        x=[level, level],
        y=[0, 1],
        mode="lines+text",
        text=["", "chance (median)"],
        line=style.DOTTED,
        textfont_color=style.MUTED,
        showlegend=False,
        hoverinfo="skip",
        textposition="middle right",
    )
