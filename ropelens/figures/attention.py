"""Short excerpts of the text: what a head looks at, and the planes of one query and key."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import get_colorscale

from ropelens.errors import BadArgument, Count, public
from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import SEQUENTIAL, new_figure
from ropelens.figures.text import plotly_text, visible_token
from ropelens.figures.wavelengths import set_wavelengths, wavelength_positions

GAPS_FIT = 32
"""Up to so many tokens, cells stand apart; beyond, gaps would outweigh them."""

FARTHEST = 1024
"""Tokens that keys are moved away, at most."""


@public
def plot_attention(
    profile: xr.Dataset, *, layer: Count, head: Count, excerpt: Count = 0
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
    # In the empty half, above the diagonal.
    corner = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "top", "orientation": "h"}
    title = {"text": "weight (% of row)", "side": "top", "font": {"size": 11}}
    ticked = {"tickvals": [0, 0.5, 1], "tickformat": ".0%", "thickness": 10, "len": 0.42}
    figure.add_heatmap(
        x=keys,
        y=keys,
        z=np.where(keys[None] <= keys[:, None], weights, np.nan),
        zmin=0,
        zmax=1,
        colorscale=square_root_scale(SEQUENTIAL),
        colorbar=corner | ticked | {"title": title},
        meta={"z": "attention"},
        # One text a cell, [query token, key token]: cheaper as text of rows and columns.
        customdata=np.stack(np.meshgrid(named, named, indexing="ij"), axis=-1),
        hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:.1%}<extra></extra>",
        hoverongaps=False,
        xgap=1 if len(named) <= GAPS_FIT else 0,
        ygap=1 if len(named) <= GAPS_FIT else 0,
    )
    axis = {"tickfont": {"size": 10}, "showgrid": False, "ticks": ""}
    axis |= {"tickvals": keys, "ticktext": ticks}
    figure.update_xaxes(title_text="key (token)", tickangle=-90, **axis)
    figure.update_yaxes(title_text="query (token)", **axis)
    return figure.update_yaxes(range=[len(keys) - 0.5, -0.5])


def square_root_scale(name: str) -> list[list]:
    """A colour scale that spends its colours on the square root of the value."""
    return [[place**2, color] for place, color in get_colorscale(name)]


@public
def plot_pair(
    profile: xr.Dataset,
    *,
    layer: Count,
    head: Count,
    query: Count,
    key: Count,
    excerpt: Count = 0,
) -> go.Figure:
    """What each plane adds to the score of a pair, and how the score goes with distance.

    `query` and `key` are positions in the excerpt. Above, the terms of the score at their
    distance, in nats, over wavelengths. Below, the score of the same query and key if they
    were 0, 1, 2, ... tokens apart; a circle marks their distance. Both are empty for a
    head whose queries the profile does not hold.
    """
    vectors = head_vectors(profile, layer=layer, head=head, excerpt=excerpt)
    strings = excerpt_tokens(profile, excerpt)
    names = [plotly_text(visible_token(token, longest=12)) for token in strings]
    wavelength = profile["wavelength"].values
    distance = np.arange(max(farthest(profile, layer), query - key) + 1)
    terms = vectors.terms(query, key, query - key)
    trace = vectors.terms(query, key, distance).sum(-1)
    title = f"Layer {layer}, head {head}: {names[query]} looks at {names[key]}"
    panels = {"rows": 2, "cols": 1, "vertical_spacing": 0.2, "row_heights": [0.5, 0.5]}
    figure = new_figure(title, height=380, **panels)
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
    below: dict[str, Any] = {"showlegend": False, "row": 2, "col": 1}
    hover = "%{x} back: %{y:.2f} nats<extra></extra>"
    line = {"mode": "lines", "line": {"width": 1.2}, "hovertemplate": hover}
    figure.add_scatter(x=distance, y=trace, meta={"role": "score"}, **line, **below)
    circle = {"size": 11, "symbol": "circle-open", "line": {"width": 2.5}}
    here = {"mode": "markers", "marker": circle, "hoverinfo": "skip", "meta": {"role": "here"}}
    figure.add_scatter(x=[query - key], y=[trace[query - key]], **here, **below)
    set_wavelengths(figure, wavelength)
    axis = {"type": "linear", "tickmode": "auto", "autorange": True, "rangemode": "tozero"}
    figure.update_xaxes(title_text=figure.layout.xaxis2.title.text, row=1)
    figure.update_xaxes(**axis, title_text="distance (tokens)", row=2)
    figure.update_yaxes(title_text="push<br>(nats)", zeroline=True, nticks=5, row=1)
    figure.update_yaxes(title_text="score<br>(nats)", zeroline=True, nticks=5, row=2)
    return figure


def farthest(profile: xr.Dataset, layer: int) -> int:
    """How far keys are moved away, in tokens: to the end of the context, and at most 1,023.

    In a layer with a sliding window, to the end of the window.
    """
    context = int(profile.attrs["context"])
    whole = max(profile.sizes["excerpt_key"], min(context, FARTHEST)) - 1
    seen = int(profile["farthest_offset"][layer]) if "farthest_offset" in profile else context
    return min(whole, seen) if seen < context - 1 else whole


def excerpt_tokens(profile: xr.Dataset, excerpt: int) -> list[str]:
    """The tokens of an excerpt. Raises `BadArgument` where the profile has no such excerpt."""
    count = profile.sizes["excerpt"]
    if not 0 <= excerpt < count:
        raise BadArgument(f"There is no excerpt {excerpt}.", seen=f"{count}, counted from 0")
    length = int(profile["excerpt_length"][excerpt])
    return [str(token) for token in profile["excerpt_token"].values[excerpt, :length]]


class Vectors(NamedTuple):
    """Queries and keys of a head on an excerpt, [position, coordinate], and how they turn.

    Coordinates are the planes' real parts, their imaginary parts, and what does not rotate;
    `inv_freq` (rad/token) belongs to the planes, `scale` to the scores.
    """

    query: np.ndarray
    key: np.ndarray
    inv_freq: np.ndarray
    scale: float

    def terms(self, query: int, key: int, distance: np.ndarray | int) -> np.ndarray:
        """What each plane adds to the score of a pair, in nats, at a `distance`.

        The last term is that of the coordinates that do not rotate, if there are any. Shape:
        that of `distance`, then term.
        """
        count = len(self.inv_freq)
        q, k = self.scale * self.query[query], self.key[key]
        q_plane = q[:count] + 1j * q[count : 2 * count]
        k_plane = k[:count] + 1j * k[count : 2 * count]
        angle = np.multiply.outer(np.asarray(distance, float), self.inv_freq)
        turned = (q_plane * k_plane.conj() * np.exp(1j * angle)).real
        if len(q) == 2 * count:
            return turned
        rest = np.full((*turned.shape[:-1], 1), q[2 * count :] @ k[2 * count :])
        return np.concatenate([turned, rest], axis=-1)


def head_vectors(profile: xr.Dataset, *, layer: int, head: int, excerpt: int = 0) -> Vectors:
    """Queries and keys of a head; NaN where the profile does not hold them."""
    count = len(excerpt_tokens(profile, excerpt))
    check_head(profile, layer=layer, head=head)
    one = profile.isel(excerpt=excerpt, layer=layer)
    kv_head = int(kv_heads(profile)[layer, head])
    key = one["excerpt_key_still"].isel(kv_head=kv_head).values[:count]
    used = np.isfinite(key).all(0)  # layers of smaller heads end in NaN
    query = one["excerpt_query_still"].isel(head=head).values[:count]
    inv_freq = one["inv_freq"].values[: int(one["excerpt_planes"])]
    return Vectors(query[:, used], key[:, used], inv_freq, float(one["excerpt_scale"]))
