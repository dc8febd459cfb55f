"""What a head looks at in a short excerpt, token by token."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import get_colorscale

from ropelens.figures.excerpts import excerpt_tokens
from ropelens.figures.inputs import check_head
from ropelens.figures.style import SEQUENTIAL, new_figure
from ropelens.figures.text import plotly_text, visible_token

GAPS_FIT = 32
"""Up to so many tokens, cells stand apart; beyond, gaps would outweigh them."""


def plot_attention(
    profile: xr.Dataset, *, layer: int, head: int, excerpt: int = 0
) -> go.Figure:
    """Attention of each query token (row) over the keys (columns) it may see, in an excerpt.

    Weights of a row sum to 1 (less a learned sink's). The colour grows with the square root
    of the weight, so that a tenth still shows beside a whole. Cells ahead of the query
    are empty. Token strings are shown letter by letter, white space made visible.
    """
    check_head(profile, layer=layer, head=head)
    strings = excerpt_tokens(profile, excerpt)
    named = np.array([plotly_text(visible_token(token)) for token in strings], dtype=object)
    ticks = [plotly_text(visible_token(token, longest=12)) for token in strings]
    one_head = profile["excerpt_attention"].isel(excerpt=excerpt, layer=layer, head=head)
    weights = one_head.transpose("excerpt_query", "excerpt_key").values
    weights = weights[: len(strings), : len(strings)]
    keys = np.arange(len(named))
    figure = new_figure(f"Attention of layer {layer}, head {head} on an excerpt", height=640)
    figure.add_heatmap(
        x=keys,
        y=keys,
        z=np.where(keys[None] <= keys[:, None], weights, np.nan),
        zmin=0,
        zmax=1,
        colorscale=square_root_scale(SEQUENTIAL),
        colorbar={
            # In the empty half, above the diagonal.
            "title": {"text": "weight (% of row)", "side": "top", "font": {"size": 11}},
            "tickvals": [0, 0.5, 1],
            "tickformat": ".0%",
            "orientation": "h",
            "thickness": 10,
            "len": 0.42,
            **{"x": 1, "xanchor": "right", "y": 1, "yanchor": "top"},
        },
        meta={"z": "attention"},
        # One text a cell, [query token, key token]: cheaper as text of rows and columns.
        customdata=np.stack(np.meshgrid(named, named, indexing="ij"), axis=-1),
        hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:.1%}<extra></extra>",
        hoverongaps=False,
        xgap=1 if len(named) <= GAPS_FIT else 0,
        ygap=1 if len(named) <= GAPS_FIT else 0,
    )
    axis = {"tickfont": {"size": 10}, "showgrid": False, "ticks": ""}
    figure.update_xaxes(title_text="key (token)", tickvals=keys, ticktext=ticks, **axis)
    figure.update_xaxes(tickangle=-90)
    figure.update_yaxes(title_text="query (token)", tickvals=keys, ticktext=ticks, **axis)
    return figure.update_yaxes(range=[len(keys) - 0.5, -0.5])


def square_root_scale(name: str) -> list[list]:
    """A colour scale that spends its colours on the square root of the value."""
    return [[place**2, color] for place, color in get_colorscale(name)]
