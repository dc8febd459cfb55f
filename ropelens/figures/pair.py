"""One query and one key of an excerpt: each plane's push, and the score at any distance."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.excerpts import excerpt_tokens, head_vectors
from ropelens.figures.style import new_figure
from ropelens.figures.text import plotly_text, visible_token
from ropelens.figures.wavelengths import wavelength_axis, wavelength_positions

FARTHEST = 1024
"""Tokens that keys are moved away, at most."""


def plot_pair(
    profile: xr.Dataset, *, layer: int, head: int, query: int, key: int, excerpt: int = 0
) -> go.Figure:
    """What each plane adds to the score of a pair, and how the score goes with distance.

    `query` and `key` are positions in the excerpt. Above, the terms of the score at their
    own distance, in nats, over wavelengths. Below, the score of the same query and key were
    they 0, 1, 2, ... tokens apart; a mark stands at their own distance. All are empty for a
    head whose queries the profile does not keep.
    """
    vectors = head_vectors(profile, layer=layer, head=head, excerpt=excerpt)
    names = [
        plotly_text(visible_token(token, longest=12))
        for token in excerpt_tokens(profile, excerpt)
    ]
    wavelength = profile["wavelength"].values
    distance = np.arange(max(farthest(profile, layer), query - key) + 1)
    terms = vectors.terms(query, key, query - key)
    trace = vectors.terms(query, key, distance).sum(-1)
    title = f"Layer {layer}, head {head}: {names[query]} looks at {names[key]}"
    figure = new_figure(
        title, height=380, rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.5, 0.5]
    )
    places = wavelength_positions(wavelength)[layer, : len(terms)]
    figure.add_bar(
        x=places,
        y=terms,
        width=0.3 * places,
        customdata=wavelength[layer, : len(terms)],
        hovertemplate="%{y:+.2f} nats<br>wavelength %{customdata:.3~s} tokens<extra></extra>",
        showlegend=False,
        meta={"role": "push"},
    )
    figure.add_scatter(
        x=distance,
        y=trace,
        mode="lines",
        line={"width": 1.2},
        hovertemplate="%{x} back: %{y:.2f} nats<extra></extra>",
        showlegend=False,
        meta={"role": "score"},
        row=2,
        col=1,
    )
    figure.add_scatter(
        x=[query - key],
        y=[trace[query - key]],
        mode="markers",
        marker={"size": 11, "symbol": "circle-open", "line": {"width": 2.5}},
        hoverinfo="skip",
        showlegend=False,
        meta={"role": "here"},
        row=2,
        col=1,
    )
    figure.update_xaxes(**wavelength_axis(wavelength), row=1)
    figure.update_xaxes(title_text="distance (tokens)", rangemode="tozero", row=2)
    figure.update_yaxes(title_text="push<br>(nats)", zeroline=True, nticks=5, row=1)
    figure.update_yaxes(title_text="score<br>(nats)", zeroline=True, nticks=5, row=2)
    return figure


def farthest(profile: xr.Dataset, layer: int) -> int:
    """How far keys are moved away, in tokens: to the end of the context, and not too far.

    In a layer with a sliding window to its end.
    """
    context = int(profile.attrs["context"])
    whole = max(profile.sizes["excerpt_key"], min(context, FARTHEST)) - 1
    seen = int(profile["farthest_offset"][layer]) if "farthest_offset" in profile else context
    return min(whole, seen) if seen < context - 1 else whole
