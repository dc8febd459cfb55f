"""Figures of one head: planes, kernel, attention on an excerpt, one pair, and reach."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import get_colorscale
from scipy.special import softmax

from ropelens.arguments import Count, public
from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.comparison import variant_looks
from ropelens.figures.formats import plotly_text, short_count, visible_token
from ropelens.figures.inputs import Head, Layer, head_of, kv_heads, place_of
from ropelens.figures.planes import mark_context, set_wavelengths, wavelength_positions
from ropelens.interventions.variables import OWN_ROTATION

SELECTIVITY_PANELS = {
    "selectivity<br>(nats)": {
        "selectivity_keys": "on keys",
        "selectivity_sink": "on sinks",
    },
    "norm<br>(model units)": {"q_norm": "query", "k_norm": "key"},
    "coherence<br>(0 to 1)": {"q_coherence": "query", "k_coherence": "key"},
}
MAX_MARKED_PLANES = 32  # markers of more planes overlap and are slow
MAX_TOKENS_WITH_GAPS = 32  # gaps between the cells of more tokens would cover too much
MAX_DISTANCE = 1024  # of a moved key (tokens)
MEASURED = {
    "line": {"width": 2, "shape": "hvh"},
    "fill": "tozeroy",
    "fillcolor": style.SHADE,
}
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kernel_measured": ("fitted to the attention", MEASURED),
    "kernel_predicted": ("predicted from mean query and key", {"line": style.DASHED}),
}
THIN, CIRCLES = {"mode": "lines", "showlegend": False}, {"mode": "lines+markers"}
REACH_LINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "found_share": ("run_distance", "of copies found", CIRCLES | {"marker_size": 9}),
    "extrapolated_share": ("distance", "of copies found (extrapolated)", THIN),
}
FILLED = {"marker": {"size": 4}, "fill": "tozeroy", "fillcolor": style.SHADE}
LINES: dict[str, dict[str, Any]] = {
    "on keys": FILLED | {"line": {"width": 1.5, "shape": "hvh"}},
    "on sinks": {"line": style.DASHED | {"shape": "hvh"}, "marker": {"size": 3}},
    "query": {"line": {"width": 2}, "marker": {"size": 5}},
    "key": {"line": style.DASHED, "marker": {"size": 5}},
}


@public
def plot_selectivity(
    profile: xr.Dataset, *, layer: Layer = None, head: Head
) -> go.Figure:
    """Selectivity, norms and coherence of a head by wavelength, in three panels.

    Selectivity is the push of a plane toward the keys that the head picks. Norms bound the
    push. Coherence is 1 if the plane has the same vector for all tokens, and at least 0. The
    selectivity of a capture includes sinks. The head is "2.3", or layer=2, head=3. Trace `meta`
    names the variable of each axis; `customdata` is the wavelength in tokens.
    """
    profile, layer, head, place = head_of(profile, layer, head)
    indices = {"layer": layer, "head": head, "kv_head": kv_heads(profile)[layer, head]}
    wavelength = profile["wavelength"].values
    places = wavelength_positions(wavelength)[layer]
    title = "Planes of layer {}, head {}".format(*place)
    figure = style.stacked(title, 3, height=460, row_heights=[0.4, 0.34, 0.26])
    for row, (unit, names) in enumerate(SELECTIVITY_PANELS.items(), start=1):
        for name, side in names.items():
            y = profile[name].isel(indices, missing_dims="ignore").values
            data = {"x": places, "y": y, "customdata": wavelength[layer]}
            meta = {"x": "wavelength_position", "y": name, "customdata": "wavelength"}
            marked = name == "selectivity_keys" or len(places) <= MAX_MARKED_PLANES
            look = LINES[side] | {
                "mode": "lines+markers" if marked else "lines",
                "meta": meta,
            }
            look |= {"name": side, "legendgroup": side, "showlegend": row < 3}
            hover = f"{side} %{{y:.3f}}<br>"
            hover += "wavelength %{customdata:.3~s} tokens<extra></extra>"
            figure.add_scatter(**data, **look, hovertemplate=hover, row=row, col=1)
        figure.update_yaxes(title_text=unit, nticks=5, row=row)
    figure.update_yaxes(zeroline=True, row=1)
    figure.update_yaxes(rangemode="tozero", row=2)
    figure.update_yaxes(range=[-0.03, 1.03], tickvals=[0, 0.5, 1], row=3)
    set_wavelengths(figure, wavelength)
    mark_context(figure, profile, [layer])
    return style.note_missing(figure, "no plane of this head was measured")


@public
def plot_kernel(profile: xr.Dataset, *, layer: Layer = None, head: Head) -> go.Figure:
    """Weight of each offset: fitted to the attention, and predicted from mean vectors.

    The fitted kernel explains the attention of the head best; sinks are left out. The predicted
    kernel is `predicted_kernel` as weights with the same sum: the attention if every query and
    key were equal to its mean. The log axis draws offsets at offset + 1, so that it can show 0.
    Trace `meta` names the array that y shows. The head is "2.3", or layer=2, head=3. Raises
    `BadArgument` for a profile without budget and for a capture, to which no kernel is fitted.
    """
    layer, head = place_of(layer, head)
    if "kernel" not in profile:
        hint = "a profile with its budget, or plot_attention"
        raise BadArgument("These results have no fitted kernel.", hint=hint)
    start, last = profile["offset_start"].values, profile["offset_stop"].values - 1
    named = [
        f"{a}" if a == b else f"{a} to {b}" for a, b in zip(start, last, strict=True)
    ]
    figure = style.new_figure(f"Kernel of layer {layer}, head {head}", height=340)
    for name, y in kernel_arrays(profile).items():
        words, look = KERNELS[name]
        hover = f"offset %{{customdata}}: %{{y:.2%}} {words}<extra></extra>"
        data = {"x": start + 1, "y": y[layer, head], "customdata": named}
        trace = {
            "name": words,
            "mode": "lines",
            "meta": {"y": name},
            "hovertemplate": hover,
        }
        figure.add_scatter(**data, **trace, **look)
    context = int(profile["offset_stop"].values[-1])
    ticks = [0, *(2**k for k in range(context.bit_length()) if 2**k < context)]
    ends = [-0.03, float(np.log10(context + 1))]
    axis = style.log_axis({offset + 1: f"{offset}" for offset in ticks}, range=ends)
    style.set_x(figure, axis, "offset: distance back (tokens, log scale)")
    title = "weight of one offset (% of attention)"
    figure.update_yaxes(title_text=title, tickformat=".2~%", rangemode="tozero")
    figure.update_layout(hovermode="x unified", meta=style.DRAWN_FROM_ONE)
    return style.note_missing(figure, "no kernel was fitted to this head")


def kernel_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """`kernel_measured` and `kernel_predicted`: weight of one offset [layer, head, bin]."""
    dims = ("layer", "head", "offset_bin")
    measured = profile["kernel"].transpose(*dims).values
    score = profile["predicted_kernel"].transpose(*dims).values
    width = (profile["offset_stop"] - profile["offset_start"]).values
    known = np.isfinite(score) & np.isfinite(measured)
    total = np.nansum(measured * width, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # heads without a kernel
        share = softmax(np.where(known, score + np.log(width), -np.inf), axis=-1)
    predicted = np.where(known, total * share / width, np.nan)
    return {"kernel_measured": measured, "kernel_predicted": predicted}


@public
def plot_attention(
    profile: xr.Dataset, *, layer: Layer = None, head: Head, excerpt: Count = 0
) -> go.Figure:
    """Attention of each query token (row) to the keys (columns) that it sees, in an excerpt.

    The weights of a row, with a learned sink, sum to 1. The colour grows with the square root
    of the weight, so that small weights are visible. `excerpt` is the number of a prompt if
    `profile` is a capture. The head is "2.3", or layer=2, head=3.
    """
    profile, layer, head, place = head_of(profile, layer, head)
    strings = excerpt_tokens(profile, excerpt)
    named = np.array(
        [plotly_text(visible_token(token)) for token in strings], dtype=object
    )
    ticks = [plotly_text(visible_token(token, longest=12)) for token in strings]
    one_head = profile["excerpt_attention"].isel(
        excerpt=excerpt, layer=layer, head=head
    )
    keys = np.arange(len(strings))
    weights = one_head.transpose("excerpt_query", "excerpt_key").values[keys][:, keys]
    title = "Attention of layer {}, head {} on an excerpt".format(*place)
    figure = style.new_figure(title, height=640)
    # The colour bar is in the empty half above the diagonal.
    bar = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "top", "orientation": "h"}
    bar |= {"tickvals": [0, 0.5, 1], "tickformat": ".0%", "thickness": 10, "len": 0.42}
    bar["title"] = {"text": "attention (% of row)", "side": "top", "font": {"size": 11}}
    gap = 1 if len(named) <= MAX_TOKENS_WITH_GAPS else 0
    colors = [[place**2, color] for place, color in get_colorscale(style.SEQUENTIAL)]
    look = {"colorscale": colors, "colorbar": bar, "xgap": gap, "ygap": gap}
    data = {
        "x": keys,
        "y": keys,
        "z": np.where(keys[None] <= keys[:, None], weights, np.nan),
    }
    # Texts of a cell: [query token, key token].
    data["customdata"] = np.stack(np.meshgrid(named, named, indexing="ij"), axis=-1)
    hover = "%{customdata[0]} → %{customdata[1]}: %{z:.1%}<extra></extra>"
    look |= {"zmin": 0, "zmax": 1, "meta": {"z": "attention"}, "hovertemplate": hover}
    figure.add_heatmap(**data, **look)
    axis = {"tickfont": {"size": 10}, "showgrid": False, "ticks": "", "tickvals": keys}
    figure.update_xaxes(title_text="key (token)", ticktext=ticks, tickangle=-90, **axis)
    axis["range"] = [len(keys) - 0.5, -0.5]
    figure.update_yaxes(title_text="query (token)", ticktext=ticks, **axis)
    return style.note_missing(figure, "this head has no attention on the excerpt")


def pair_figure(profile: xr.Dataset) -> go.Figure:
    """Panels of pushes and scores without data, which the script fills for a pair."""
    panels = {"rows": 2, "cols": 1, "vertical_spacing": 0.2, "row_heights": [0.5, 0.5]}
    figure = style.new_figure("One query, one key", height=380, **panels)
    hover = "%{y:+.2f} nats<br>wavelength %{customdata[0]:.3~s} tokens%{customdata[1]}"
    figure.add_bar(
        x=[], y=[], hovertemplate=f"{hover}<extra></extra>", meta={"role": "push"}
    )
    hover = "%{x} tokens back: %{y:.2f} nats<extra></extra>"
    line = {"mode": "lines", "line": {"width": 1.2}, "hovertemplate": hover}
    figure.add_scatter(x=[], y=[], meta={"role": "score"}, **line, row=2, col=1)
    circle = {"size": 11, "symbol": "circle-open", "line": {"width": 2.5}}
    here = {
        "mode": "markers",
        "marker": circle,
        "hoverinfo": "skip",
        "meta": {"role": "here"},
    }
    figure.add_scatter(x=[], y=[], **here, row=2, col=1)
    set_wavelengths(figure, profile["wavelength"].values)
    axis = {
        "type": "linear",
        "tickmode": "auto",
        "autorange": True,
        "rangemode": "tozero",
    }
    figure.update_xaxes(title_text=figure.layout.xaxis2.title.text, row=1)
    figure.update_xaxes(**axis, title_text="distance (tokens)", row=2)
    figure.update_yaxes(title_text="push<br>(nats)", zeroline=True, nticks=5, row=1)
    figure.update_yaxes(title_text="score<br>(nats)", zeroline=True, nticks=5, row=2)
    return figure.update_traces(showlegend=False)


def farthest_distance(profile: xr.Dataset, layer: int) -> int:
    """Largest distance of keys on a page: to the context, 1,023 tokens or a sliding window."""
    context = int(profile.attrs["context"])
    limit = max(profile.sizes["excerpt_key"], min(context, MAX_DISTANCE)) - 1
    offsets = profile.get("farthest_offset")  # NaN for a layer without attention
    visible = context if offsets is None else offsets.values[layer]
    return min(limit, int(visible)) if visible < context - 1 else limit


def excerpt_tokens(profile: xr.Dataset, excerpt: int) -> list[str]:
    length = int(profile["excerpt_length"][excerpt])
    return profile["excerpt_token"].values[excerpt, :length].astype(str).tolist()


@public
def plot_reach(
    reach: xr.Dataset, *, layer: Layer = None, head: Head | None = None
) -> go.Figure:
    """Share of copies that a head finds by distance, or the mean over measured heads.

    Circles show `found_share`, which is measured on copies at the distance. Dotted lines show
    `extrapolated_share`. Trace `meta` names the array of `reach_arrays` that y shows.
    """
    if isinstance(head, str):
        layer, head = place_of(layer, head)
    indices = {
        name: n for name, n in (("layer", layer), ("head", head)) if n is not None
    }
    averaged = [name for name in ("layer", "head") if name not in indices]
    where = ", ".join(f"{name} {number}" for name, number in indices.items())
    title = f"Copies found by {where or 'heads'}, by distance (dotted: extrapolated)"
    figure = style.new_figure(title, height=400)
    names = reach["variant"].values.tolist()
    looks = variant_looks([name for name in names if name != OWN_ROTATION])
    shares = reach[[*REACH_LINES]].isel(indices).mean(averaged)
    for name, (variable, (dim, words, look)) in product(names, REACH_LINES.items()):
        # The rotation of the model itself has the colour of text.
        line = dict(looks[name].line) if name in looks else {"width": 2.5}
        line |= {"dash": "dot", "width": 1.5} if dim == "distance" else {}
        hover = f"{name}<br>%{{y:.0%}} {words} %{{x:,.0f}} tokens back<extra></extra>"
        data = {"x": reach[dim].values, "y": shares[variable].sel(variant=name).values}
        meta = {"name": name, "legendgroup": name, "meta": {"y": f"{variable} {name}"}}
        figure.add_scatter(**data, **look, **meta, line=line, hovertemplate=hover)
    figure.update_yaxes(title_text="copies found (% of rows)", tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.03])
    distances = [*reach["run_distance"].values, *reach["distance"].values]
    low, high = np.log10([min(distances), max(distances)]).tolist()
    ticks = [10**power for power in range(int(low), int(high) + 1)]
    ticks = ticks if reach.sizes["distance"] else distances
    axis = {tick: short_count(tick) for tick in ticks}
    axis = style.log_axis(axis, range=[low - 0.05, high + 0.05])
    style.set_x(figure, axis, "distance (tokens, log scale)")
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}  # room for several rows
    figure.update_layout(legend=below, meta=style.DRAWN_FROM_ONE)
    why = "the reach of these heads was not measured"
    return style.note_missing(figure, why, shares["found_share"])


def reach_arrays(reach: xr.Dataset) -> dict[str, np.ndarray]:
    """Variables of `reach` by variant, [layer, head, distance]."""
    named = product(map(str, reach.data_vars), reach["variant"].values)
    return {
        f"{name} {variant}": reach[name].sel(variant=variant).values
        for name, variant in named
    }
