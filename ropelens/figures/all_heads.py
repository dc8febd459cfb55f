"""Figures of all heads: the map, and the claim about wavelengths."""

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import hex_to_rgb

from ropelens.arguments import public
from ropelens.claims.arrays import claim_numbers
from ropelens.claims.numbers import correlations
from ropelens.figures import inputs, style
from ropelens.figures.formats import number, short_count
from ropelens.figures.inputs import Selected
from ropelens.profiles.kinds import layers_by_kind

MAX_HEADS_WITH_SIGNS = 24  # cells of wider layers show no sign or offset
IDLE = "no attention"  # layers of a hybrid model
FULL_COLOR = 2.0  # bits from which the colour of a cell is full
FOLLOWS = ("follows_position", "follows_content", "follows_chance")
CLAIM_PANELS = {
    "rows": 2,
    "cols": 1,
    "row_heights": [0.8, 0.2],
    "vertical_spacing": 0.2,
}


@public
def plot_head_map(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Map of layers and heads, coloured by label. Stronger colours mean more `total_bits`.

    Each label has a heat map: z is `total_bits` [layer, head] for heads with the label, else
    NaN. Colours are full from 2 bits on. Cells show the offset of a positional head (tokens) or
    the sign of the label. The head `selected` (layer, head) gets a frame.
    """
    heads = inputs.head_table(profile, heads)
    grid, columns = partial(inputs.head_grid, profile, heads), ("total_bits", "offset")
    bits, offset = (grid(inputs.numbers(heads, name)).astype(float) for name in columns)
    labels, hovers = grid(heads["label"]), grid(inputs.hover_lines(heads))
    layers, count = labels.shape
    figure = style.layer_map(
        "Heads by layer: label and strength", layers, count, "head"
    )
    figure.update_xaxes(constrain="domain")
    for label in style.LABEL_ORDER:
        here = labels == label
        signs = np.where(
            np.isnan(offset), style.SIGNS[label], np.char.mod("%.0f", offset)
        )
        texts = {
            "text": np.where(here, signs, ""),
            "customdata": np.where(here, hovers, ""),
        }
        _add_cells(figure, label, z=np.where(here, bits, np.nan), **texts)
    colors = {k: v for k, v in style.COLORS.items() if (heads["label"] == k).any()}
    if idle := inputs.idle_layers(profile):
        colors[IDLE] = style.MUTED
        z = np.where(
            np.isin(np.arange(layers), idle)[:, None], 1.0, np.full(count, np.nan)
        )
        look: dict[str, Any] = {"colorscale": [[0, style.SHADE], [1, style.SHADE]]}
        if "layer_type" in profile.coords:
            look["customdata"] = np.tile(
                profile["layer_type"].values[:, None], (1, count)
            )
        look["hovertemplate"] = f"layer %{{y}}: %{{customdata}}, {IDLE}<extra></extra>"
        figure.add_heatmap(
            z=z, **look, name=IDLE, meta={"role": "idle"}, showscale=False
        )
    for name, color in colors.items():  # legend entries, which heat maps do not have
        look = {
            "mode": "markers",
            "marker": {"color": color, "symbol": "square", "size": 11},
        }
        figure.add_scatter(x=[None], y=[None], name=name, hoverinfo="skip", **look)
    kinds = layers_by_kind(profile)
    if len(kinds) > 1:
        kind_of = {n: kind for kind, members in kinds.items() for n in members}
        ticks = [n for n in range(layers) if not n or kind_of[n] != kind_of[n - 1]]
        names = [f"{n} {kind_of[n]}" for n in ticks]
        figure.update_yaxes(
            tickvals=ticks, ticktext=names, title_text="layer (index, kind)"
        )
    if selected is not None:
        figure.add_shape(inputs.frame_of(selected))
    return style.note_missing(figure, "no head has a number of bits", bits)


def _add_cells(
    figure: go.Figure, label: str, *, z: np.ndarray, **texts: np.ndarray
) -> None:
    """Draw the heads with this label; `z` is NaN for other heads."""
    rgb = ",".join(map(str, hex_to_rgb(style.COLORS[label])))
    # The colour of diffuse cells is close to the colour of the page, light or dark.
    ink = style.MUTED if label == "diffuse" else style.INK["light"]
    look: dict[str, Any] = {
        "colorscale": [[0, f"rgba({rgb},0.2)"], [1, f"rgba({rgb},1)"]]
    }
    look |= {"zmin": 0, "zmax": FULL_COLOR, "showscale": False, "showlegend": False}
    look |= {"textfont_color": ink, "hovertemplate": "%{customdata}<extra></extra>"}
    down, across = (1 + (size <= MAX_HEADS_WITH_SIGNS) for size in z.shape)
    look |= {"texttemplate": "%{text}"} if across == 2 else {}
    figure.add_heatmap(z=z, **texts, **look, xgap=across, ygap=down, name=label)


def _add_points(
    figure: go.Figure,
    heads: pd.DataFrame,
    x: np.ndarray,
    y: np.ndarray,
    selected: Selected,
) -> None:
    """Draw a point per head, whose area grows with its bits, and a ring at `selected`."""
    hovers, bits = (
        inputs.hover_lines(heads),
        heads["total_bits"].to_numpy(float).clip(min=0),
    )
    largest = np.nanmax(bits, initial=0) or 1.0
    crowd = 1.0 if len(heads) <= 200 else 0.75
    sizes = np.nan_to_num(crowd * np.sqrt(25 + 200 * bits / largest), nan=5.0)
    look: dict[str, Any] = {"mode": "markers", "cliponaxis": False, "row": 1, "col": 1}
    for label in style.LABEL_ORDER:
        rows = (heads["label"] == label).to_numpy() & np.isfinite(x) & np.isfinite(y)
        if rows.any():
            marker = {
                "color": style.COLORS[label],
                "size": sizes[rows],
                "opacity": 0.85,
            }
            marker |= {"symbol": style.SYMBOLS[label], "line_width": 1}
            data = {"x": x[rows], "y": y[rows], "text": hovers[rows], "name": label}
            data["customdata"] = heads.loc[rows, ["layer", "head"]].to_numpy(int)
            figure.add_scatter(
                **data, marker=marker, hovertemplate=style.TEXT_ONLY, **look
            )
    if selected is not None:
        row = [inputs.row_of(heads, selected)]
        ring = {"symbol": "circle-open", "size": 22, "line": {"width": 2.5}}
        look |= {"hoverinfo": "skip", "showlegend": False, "meta": {"role": "selected"}}
        figure.add_scatter(x=x[row], y=y[row], marker=ring, **look)


def bit_shares(heads: pd.DataFrame) -> np.ndarray:
    """Share [row, part] of sinks, position, shared bits, content and interaction.

    Content excludes the shared bits. The shares are NaN if their sum is 0, and the share of
    shared bits is NaN if they were not measured.
    """
    parts = [
        "sink_bits",
        "position_bits",
        "shared_bits",
        "content_bits",
        "interaction_bits",
    ]
    bits = heads.reindex(columns=parts).to_numpy(float).clip(min=0)
    bits[:, 3] -= np.nan_to_num(bits[:, 2])
    total = np.nansum(bits, axis=1, keepdims=True)
    return np.divide(bits, total, out=np.full_like(bits, np.nan), where=total > 0)


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
    heads = inputs.head_table(profile, heads)
    shown = ~heads["label"].isin(style.EXCLUDED_LABELS).to_numpy()
    columns = heads.reindex(columns=FOLLOWS)
    y, x, chance = (
        np.where(shown, inputs.numbers(columns, name), np.nan) for name in FOLLOWS
    )
    title = "Attention after keys exchanged contents"
    figure = style.new_figure(title, height=430, rows=1, cols=1)
    if np.isfinite(chance).any():
        level, words = float(np.nanmedian(chance)), ["", "chance (median)"]
        look: dict[str, Any] = {"line": style.DOTTED, "textfont_color": style.MUTED}
        look |= {
            "showlegend": False,
            "hoverinfo": "skip",
            "textposition": "middle right",
        }
        figure.add_scatter(x=[0, 1], y=[level] * 2, mode="lines", **look)
        figure.add_scatter(
            x=[level] * 2, y=[0, 1], mode="lines+text", text=words, **look
        )
    _add_points(figure, heads, x, y, selected)
    axis = {"range": [-0.04, 1.04], "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    figure.update_xaxes(
        title_text="attention that moves with the contents (0 to 1)", **axis
    )
    figure.update_yaxes(
        title_text="attention that stays<br>at its positions (0 to 1)", **axis
    )
    figure.update_layout(legend_itemsizing="constant")
    return style.note_missing(figure, "no head was measured with exchanged keys", x * y)


@public
def plot_claim(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Share of each head's bits that the offset explains, by the head's mean wavelength.

    x is the mean wavelength, weighted by the push toward keys that are not sinks. y is the
    share of the bits without sinks. Both are measured on the rows of the surrogates. Sink and
    diffuse heads are left out. The lower panel shows the rank correlation of x and y in this
    model and in the surrogates, which have their frequencies in a random order. The head
    `selected` (layer, head) gets a ring.
    """
    heads = inputs.head_table(profile, heads)
    drawn = claim_numbers(profile)
    indices = heads["layer"].to_numpy(int), heads["head"].to_numpy(int)
    y, x = (of_draws[0][indices] for of_draws in drawn)
    x = np.exp(x)
    figure = style.new_figure(
        claim_title(heads.attrs.get("claim")), height=430, **CLAIM_PANELS
    )
    _add_points(figure, heads, x, y, selected)
    rho, stroke = correlations(*drawn), {"symbol": "line-ns-open", "size": 16}
    stroke |= {"color": style.MUTED, "line_width": 1.5}
    diamond = {"symbol": "star-diamond", "size": 14}
    parts = ("surrogate", rho[1:], stroke), ("this model", rho[:1], diamond)
    for words, value, marker in parts:
        look = {"mode": "markers", "marker": marker, "showlegend": False}
        look["hovertemplate"] = f"{words}: %{{x:.2f}}<extra></extra>"
        figure.add_scatter(x=value, y=0 * value, **look, row=2, col=1)
    ticks = {
        n * 10.0**power: short_count(n * 10.0**power)
        for power in range(10)
        for n in (1, 3)
    }
    used = np.log10(x[np.isfinite(x) & (x > 0)])
    ends = [float(used.min()) - 0.15, float(used.max()) + 0.15] if used.size else [0, 6]
    figure.update_xaxes(
        **style.log_axis({0.1: "0.1", 0.3: "0.3"} | ticks, range=ends), row=1
    )
    figure.update_xaxes(title_text="mean wavelength (tokens, log scale)", row=1)
    axis = {"range": [-0.04, 1.04], "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    figure.update_yaxes(title_text="explained by<br>offset (0 to 1)", **axis, row=1)
    axis = {"range": [-1.05, 1.05], "tickvals": [-1, -0.5, 0, 0.5, 1]}
    title = "diamond: this model; strokes: surrogates<br>rank correlation (−1 to 1)"
    figure.update_xaxes(title_text=title, **axis, row=2)
    figure.update_yaxes(visible=False, range=[-1, 1], row=2)
    figure.update_layout(legend_itemsizing="constant")
    return style.note_missing(figure, "no head has a wavelength and a share", x * y)


def claim_title(claim: dict | None) -> str:
    if not claim:
        return "Share explained by the offset, by mean wavelength"
    if not math.isfinite(claim["rank_correlation"]):
        return "Too few heads for a rank correlation"
    names = ("rank_correlation", "null_low", "null_high")
    value, low, high = (number(claim[name]) for name in names)
    if not math.isfinite(claim["null_low"]):
        return f"Rank correlation {value}, without surrogates"
    return f"Rank correlation {value}; surrogates {low} to {high}"
