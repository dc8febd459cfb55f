"""One head: its planes, offsets and reach, its attention on an excerpt, one query and key."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import get_colorscale
from scipy.special import softmax

from ropelens.errors import Count, public
from ropelens.figures import style
from ropelens.figures.comparison import variant_looks
from ropelens.figures.inputs import kv_heads
from ropelens.figures.text import plotly_text, short_count, visible_token
from ropelens.figures.wavelengths import mark_context, set_wavelengths, wavelength_positions
from ropelens.interventions.variables import OWN

PANELS = {
    "selectivity<br>(nats)": {"selectivity_keys": "on keys", "selectivity_sink": "on sinks"},
    "norm<br>(model units)": {"q_norm": "query", "k_norm": "key"},
    "coherence<br>(0 to 1)": {"q_coherence": "query", "k_coherence": "key"},
}
MARKED = 32  # up to so many planes every line has markers: of more they merge, and take long
FILLED = {"marker": {"size": 4}, "fill": "tozeroy", "fillcolor": style.SHADE}
LINES: dict[str, dict[str, Any]] = {
    "on keys": FILLED | {"line": {"width": 1.5, "shape": "hvh"}},
    "on sinks": {"line": style.DASHED | {"shape": "hvh"}, "marker": {"size": 3}},
    "query": {"line": {"width": 2}, "marker": {"size": 5}},
    "key": {"line": style.DASHED, "marker": {"size": 5}},
}


@public
def plot_selectivity(profile: xr.Dataset, *, layer: Count, head: Count) -> go.Figure:
    """Selectivity, norms and coherence of a head over wavelengths, one above the other.

    Selectivity (nats): how much each plane pushes the head toward the keys it picks, sinks
    apart. Norms (the model's units) bound what a plane could do. Coherence, in [0, 1]: 1
    where the plane carries the same vector whatever the token. Trace `meta` names the variable
    behind each axis; `customdata` is the wavelength in tokens.
    """
    at = {"layer": layer, "head": head, "kv_head": kv_heads(profile)[layer, head]}
    wavelength = profile["wavelength"].values
    places = wavelength_positions(wavelength)[layer]
    title = f"Planes of layer {layer}, head {head}"
    figure = style.stacked(title, 3, height=460, row_heights=[0.4, 0.34, 0.26])
    for row, (unit, names) in enumerate(PANELS.items(), start=1):
        for name, side in names.items():
            data = {"x": places, "y": profile[name].isel(at, missing_dims="ignore").values}
            data |= {"customdata": wavelength[layer]}
            meta = {"x": "wavelength_position", "y": name, "customdata": "wavelength"}
            marked = name == "selectivity_keys" or len(places) <= MARKED
            look = LINES[side] | {"mode": "lines+markers" if marked else "lines", "meta": meta}
            legend = {"name": side, "legendgroup": side, "showlegend": row < 3}
            hover = f"{side} %{{y:.3f}}<br>wavelength %{{customdata:.3~s}} tokens"
            hover += "<extra></extra>"
            figure.add_scatter(**data, **look, **legend, hovertemplate=hover, row=row, col=1)
        figure.update_yaxes(title_text=unit, nticks=5, row=row)
    figure.update_yaxes(zeroline=True, row=1)
    figure.update_yaxes(rangemode="tozero", row=2)
    figure.update_yaxes(range=[-0.03, 1.03], tickvals=[0, 0.5, 1], row=3)
    set_wavelengths(figure, wavelength)
    mark_context(figure, profile)
    drawn = [trace.y for trace in figure.data]
    return style.note_missing(figure, drawn, "no plane of this head was measured")


MEASURED = {"line": {"width": 2, "shape": "hvh"}, "fill": "tozeroy", "fillcolor": style.SHADE}


@public
def plot_kernel(profile: xr.Dataset, *, layer: Count, head: Count) -> go.Figure:
    """The weight of one offset, by offset: fitted to the attention, and from means alone.

    Measured: the kernel that explains the head's attention best, the sink aside. Predicted:
    what the head would do if every query and key were its mean (`predicted_kernel`, turned
    into weights with the same sum as the measured ones). Offsets are drawn at offset + 1 on a
    logarithmic axis, so that 0 has a place; ticks and hovers name the true ones. Trace `meta`
    names the array behind each axis.
    """
    arrays = kernel_arrays(profile)
    start, last = profile["offset_start"].values, profile["offset_stop"].values - 1
    named = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(start, last, strict=True)]
    figure = style.new_figure(f"Kernel of layer {layer}, head {head}", height=340)
    for name, words, look in (
        ("kernel_measured", "fitted to the attention", MEASURED),
        ("kernel_predicted", "predicted from mean q and k", {"line": style.DASHED}),
    ):
        hover = f"offset %{{customdata}}: %{{y:.2%}} {words}<extra></extra>"
        data = {"x": start + 1, "y": arrays[name][layer, head], "customdata": named}
        trace = {"name": words, "mode": "lines", "meta": {"y": name}, "hovertemplate": hover}
        figure.add_scatter(**data, **trace, **look)
    context = int(profile["offset_stop"].values[-1])
    ticks = [0, *(2**k for k in range(context.bit_length()) if 2**k < context)]
    ends = [-0.03, float(np.log10(context + 1))]
    axis = style.log_axis({offset + 1: f"{offset}" for offset in ticks}, range=ends)
    style.set_x(figure, axis, "offset: tokens looked back (tokens, log scale)")
    title = "weight of one offset (% of attention)"
    figure.update_yaxes(title_text=title, tickformat=".2~%", rangemode="tozero")
    figure.update_layout(hovermode="x unified", meta=style.DRAWN_FROM_ONE)
    drawn = arrays["kernel_measured"][layer, head]
    return style.note_missing(figure, drawn, "no kernel was fitted to this head")


def kernel_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """`kernel_measured` and `kernel_predicted`, weights of one offset [layer, head, bin]."""
    dims = ("layer", "head", "offset_bin")
    measured = profile["kernel"].transpose(*dims).values
    score = profile["predicted_kernel"].transpose(*dims).values
    width = (profile["offset_stop"] - profile["offset_start"]).values
    known = np.isfinite(score) & np.isfinite(measured)
    whole = np.nansum(measured * width, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # of heads without a kernel
        share = softmax(np.where(known, score + np.log(width), -np.inf), axis=-1)
    predicted = np.where(known, whole * share / width, np.nan)
    return {"kernel_measured": measured, "kernel_predicted": predicted}


GAPS_FIT = 32  # up to so many tokens, cells stand apart; beyond, gaps would outweigh them
FARTHEST = 1024  # tokens that keys are moved away, at most


@public
def plot_attention(
    profile: xr.Dataset, *, layer: Count, head: Count, excerpt: Count = 0
) -> go.Figure:
    """Attention of each query token (row) over the keys (columns) it may see, in an excerpt.

    Weights of a row sum to 1 (less a learned sink's). The colour grows with the square root
    of the weight, so that a tenth still shows beside a whole. Cells ahead of the query
    are empty. Token strings are shown letter by letter, white space made visible.
    """
    strings = excerpt_tokens(profile, excerpt)
    named = np.array([plotly_text(visible_token(token)) for token in strings], dtype=object)
    ticks = [plotly_text(visible_token(token, longest=12)) for token in strings]
    one_head = profile["excerpt_attention"].isel(excerpt=excerpt, layer=layer, head=head)
    weights = one_head.transpose("excerpt_query", "excerpt_key").values
    weights = weights[: len(strings), : len(strings)]
    keys = np.arange(len(named))
    title = f"Attention of layer {layer}, head {head} on an excerpt"
    figure = style.new_figure(title, height=640)
    # In the empty half, above the diagonal.
    corner = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "top", "orientation": "h"}
    named_bar = {"text": "weight (% of row)", "side": "top", "font": {"size": 11}}
    ticked = {"tickvals": [0, 0.5, 1], "tickformat": ".0%", "thickness": 10, "len": 0.42}
    figure.add_heatmap(
        x=keys,
        y=keys,
        z=np.where(keys[None] <= keys[:, None], weights, np.nan),
        zmin=0,
        zmax=1,
        colorscale=[[place**2, color] for place, color in get_colorscale(style.SEQUENTIAL)],
        colorbar=corner | ticked | {"title": named_bar},
        meta={"z": "attention"},
        # One text a cell, [query token, key token]: cheaper as text of rows and columns.
        customdata=np.stack(np.meshgrid(named, named, indexing="ij"), axis=-1),
        hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:.1%}<extra></extra>",
        xgap=1 if len(named) <= GAPS_FIT else 0,
        ygap=1 if len(named) <= GAPS_FIT else 0,
    )
    axis = {"tickfont": {"size": 10}, "showgrid": False, "ticks": ""}
    axis |= {"tickvals": keys, "ticktext": ticks}
    figure.update_xaxes(title_text="key (token)", tickangle=-90, **axis)
    figure.update_yaxes(title_text="query (token)", **axis)
    figure.update_yaxes(range=[len(keys) - 0.5, -0.5])
    return style.note_missing(figure, weights, "this head has no attention on the excerpt")


def pair_figure(profile: xr.Dataset) -> go.Figure:
    """Each plane's push on a pair, above the score by distance; without data.

    Above, contrasts at the pair's distance, in nats, over wavelengths: what a plane adds to the
    score of the key beyond what it adds to those of the row's other keys. Below, the score of
    the same query and key if they were 0, 1, 2, ... tokens apart; a circle marks their
    distance. The page's script computes them.
    """
    panels = {"rows": 2, "cols": 1, "vertical_spacing": 0.2, "row_heights": [0.5, 0.5]}
    figure = style.new_figure("One query, one key", height=380, **panels)
    hover = "%{y:+.2f} nats<br>wavelength %{customdata[0]:.3~s} tokens%{customdata[1]}"
    hover += "<extra></extra>"
    figure.add_bar(x=[], y=[], hovertemplate=hover, meta={"role": "push"})
    hover = "%{x} back: %{y:.2f} nats<extra></extra>"
    line = {"mode": "lines", "line": {"width": 1.2}, "hovertemplate": hover}
    figure.add_scatter(x=[], y=[], meta={"role": "score"}, **line, row=2, col=1)
    circle = {"size": 11, "symbol": "circle-open", "line": {"width": 2.5}}
    here = {"mode": "markers", "marker": circle, "hoverinfo": "skip", "meta": {"role": "here"}}
    figure.add_scatter(x=[], y=[], **here, row=2, col=1)
    set_wavelengths(figure, profile["wavelength"].values)
    axis = {"type": "linear", "tickmode": "auto", "autorange": True, "rangemode": "tozero"}
    figure.update_xaxes(title_text=figure.layout.xaxis2.title.text, row=1)
    figure.update_xaxes(**axis, title_text="distance (tokens)", row=2)
    figure.update_yaxes(title_text="push<br>(nats)", zeroline=True, nticks=5, row=1)
    figure.update_yaxes(title_text="score<br>(nats)", zeroline=True, nticks=5, row=2)
    return figure.update_traces(showlegend=False)


def farthest(profile: xr.Dataset, layer: int) -> int:
    """How far keys are moved away, in tokens: to the end of the context, and at most 1,023.

    In a layer with a sliding window, to the end of the window.
    """
    context = int(profile.attrs["context"])
    whole = max(profile.sizes["excerpt_key"], min(context, FARTHEST)) - 1
    seen = context
    if "farthest_offset" in profile:  # NaN of a layer that does not attend
        seen = int(np.nan_to_num(profile["farthest_offset"].values[layer], nan=context))
    return min(whole, seen) if seen < context - 1 else whole


def excerpt_tokens(profile: xr.Dataset, excerpt: int) -> list[str]:
    """The tokens of an excerpt."""
    length = int(profile["excerpt_length"][excerpt])
    return profile["excerpt_token"].values[excerpt, :length].astype(str).tolist()


@public
def plot_reach(
    reach: xr.Dataset, *, layer: Count | None = None, head: Count | None = None
) -> go.Figure:
    """How often heads find a key, by its distance: copies that were run, and what turning says.

    Circles: `found_share` of copies that stand so far back. Dotted: `extrapolated_share`, what
    the farthest run says of distances beyond it. Of one head, or the mean over all measured
    heads, of `layer` or of the model. x: distance (tokens, log scale). Trace `meta` names the
    array of `reach_arrays` behind each line.
    """
    chosen = {"layer": layer, "head": head}
    at = {name: number for name, number in chosen.items() if number is not None}
    several = [name for name in chosen if name not in at]
    where = ", ".join(f"{name} {number}" for name, number in at.items())
    title = f"Reach of {where}" if at else "How often heads find a key, by distance"
    figure = style.new_figure(title, height=400)
    names = reach["variant"].values.tolist()
    looks = variant_looks([name for name in names if name != OWN])
    thin = {"mode": "lines", "showlegend": False}
    marked = {"mode": "lines+markers", "marker": {"size": 9}}
    of = reach[["found_share", "extrapolated_share"]].isel(at).mean(several)
    for name in names:  # the model's own rotation is drawn in ink
        line = dict(looks[name].line) if name in looks else {"width": 2.5}
        for variable, dim, words, look in (
            ("found_share", "run_distance", "of copies found", marked | {"line": line}),
            ("extrapolated_share", "distance", "foretold by turning keys",
                thin | {"line": line | {"dash": "dot", "width": 1.5}}),
        ):  # fmt: skip
            hover = f"{name}<br>%{{y:.0%}} {words} %{{x:,.0f}} tokens back<extra></extra>"
            data = {"x": reach[dim].values, "y": of[variable].sel(variant=name).values}
            meta = {"name": name, "legendgroup": name, "meta": {"y": f"{variable} {name}"}}
            figure.add_scatter(**data, **look, **meta, hovertemplate=hover)
    figure.update_yaxes(title_text="copies found (% of rows)", tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.03])
    distances = [*reach["run_distance"].values, *reach["distance"].values]
    low, high = np.log10([min(distances), max(distances)]).tolist()
    ticks = [10**power for power in range(int(low), int(high) + 1)]
    ticks = ticks if reach.sizes["distance"] else distances
    ends = [low - 0.05, high + 0.05]
    axis = style.log_axis({tick: short_count(tick) for tick in ticks}, range=ends)
    style.set_x(figure, axis, "distance (tokens, log scale)")
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}  # it may take several rows
    figure.update_layout(legend=below, meta=style.DRAWN_FROM_ONE)
    drawn = of["found_share"].values
    return style.note_missing(figure, drawn, "the reach of these heads was not measured")


def reach_arrays(reach: xr.Dataset) -> dict[str, np.ndarray]:
    """What a page draws and tells of the reach of every head, [layer, head, distance]."""
    return {
        f"{name} {variant}": reach[name].sel(variant=variant).values
        for name in map(str, reach.data_vars)
        for variant in reach["variant"].values
    }
