"""Figure of all heads: a map of layers and heads, coloured by label."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import hex_to_rgb

from ropelens.arguments import public
from ropelens.figures import inputs, style
from ropelens.figures.inputs import Selected
from ropelens.profiles.kinds import layers_by_kind
from ropelens.profiles.measures import complete_profile

MAX_HEADS_WITH_SIGNS = 24  # cells of wider layers show no sign or offset
IDLE = "no attention"  # layers of a hybrid model
FULL_COLOR = 2.0  # bits from which the colour of a cell is full


@public
def plot_head_map(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Map of layers and heads, coloured by label. Stronger colours mean more `total_bits`.

    Each label has a heat map: z is `total_bits` [layer, head] for heads with the label, else
    NaN. Colours are full from 2 bits on. Cells show the offset of a positional head (tokens) or
    the sign of the label. The head `selected` (layer, head) gets a frame.
    """
    profile = complete_profile(profile)
    heads = inputs.head_table(profile, heads)
    layers = profile.sizes["layer"]
    count = profile.sizes["head"]
    figure = style.layer_map(
        "Heads by layer: label and strength", layers, count, "head"
    )
    figure.update_xaxes(constrain="domain")
    bits = _grid_of_numbers(profile, heads, "total_bits")
    offset = _grid_of_numbers(profile, heads, "offset")
    labels = inputs.head_grid(profile, heads, heads["label"])
    hovers = inputs.head_grid(profile, heads, inputs.hover_lines(heads))
    offset_words = np.char.mod("%.0f", offset)
    for label in style.LABEL_ORDER:
        of_label = labels == label
        signs = np.where(np.isnan(offset), style.SIGNS[label], offset_words)
        _add_cells(
            figure,
            label,
            bits=np.where(of_label, bits, np.nan),
            signs=np.where(of_label, signs, ""),
            hovers=np.where(of_label, hovers, ""),
        )
    idle = inputs.idle_layers(profile)
    if idle:
        _add_idle_layers(figure, profile, idle)
    _add_legend(figure, heads, idle)
    _name_layer_types(figure, layers_by_kind(profile), layers)
    if selected is not None:
        figure.add_shape(inputs.frame_of(selected))
    return style.note_missing(figure, "no head has a number of bits", bits)


def _grid_of_numbers(profile: xr.Dataset, heads: pd.DataFrame, name: str) -> np.ndarray:
    """A column of the table [layer, head]; NaN for missing heads."""
    return inputs.head_grid(profile, heads, inputs.numbers(heads, name)).astype(float)


def _add_cells(
    figure: go.Figure,
    label: str,
    *,
    bits: np.ndarray,
    signs: np.ndarray,
    hovers: np.ndarray,
) -> None:
    """Draw the heads with this label; `bits` are NaN for other heads."""
    rgb = ",".join(map(str, hex_to_rgb(style.COLORS[label])))
    # The colour of diffuse cells is close to the colour of the page, light or dark.
    ink = style.MUTED if label == "diffuse" else style.INK["light"]
    layers, count = bits.shape
    shows_signs = count <= MAX_HEADS_WITH_SIGNS
    figure.add_heatmap(
        z=bits,
        text=signs,
        customdata=hovers,
        colorscale=[[0, f"rgba({rgb},0.2)"], [1, f"rgba({rgb},1)"]],
        zmin=0,
        zmax=FULL_COLOR,
        showscale=False,
        showlegend=False,
        textfont_color=ink,
        texttemplate="%{text}" if shows_signs else None,
        hovertemplate="%{customdata}<extra></extra>",
        xgap=2 if shows_signs else 1,
        ygap=2 if layers <= MAX_HEADS_WITH_SIGNS else 1,
        name=label,
    )


def _add_idle_layers(figure: go.Figure, profile: xr.Dataset, idle: list[int]) -> None:
    """Shade the layers without attention; `idle` are their indices."""
    z = np.full((profile.sizes["layer"], profile.sizes["head"]), np.nan)
    z[idle] = 1.0
    types = None
    hover = f"layer %{{y}}: {IDLE}"
    if "layer_type" in profile.coords:
        types = np.tile(profile["layer_type"].values[:, None], (1, z.shape[1]))
        hover = f"layer %{{y}}: %{{customdata}}, {IDLE}"
    one_color = [[0, style.SHADE], [1, style.SHADE]]
    figure.add_heatmap(
        z=z,
        colorscale=one_color,
        customdata=types,
        hovertemplate=f"{hover}<extra></extra>",
        name=IDLE,
        meta={"role": "idle"},
        showscale=False,
    )


def _add_legend(figure: go.Figure, heads: pd.DataFrame, idle: list[int]) -> None:
    """Add legend entries, which heat maps do not have."""
    colors: dict[str, Any] = {}
    for label, color in style.COLORS.items():
        if (heads["label"] == label).any():
            colors[label] = color
    if idle:
        colors[IDLE] = style.MUTED
    for name, color in colors.items():
        figure.add_scatter(
            x=[None],
            y=[None],
            name=name,
            hoverinfo="skip",
            mode="markers",
            marker={"color": color, "symbol": "square", "size": 11},
        )


def _name_layer_types(
    figure: go.Figure, layer_types: dict[str, list[int]], layers: int
) -> None:
    """Name the kind of layers at each layer where it changes, if there are several kinds."""
    if len(layer_types) == 1:
        return
    type_of = {}
    for layer_type, members in layer_types.items():
        type_of.update(dict.fromkeys(members, layer_type))
    ticks = []
    for layer in range(layers):
        if layer == 0 or type_of[layer] != type_of[layer - 1]:
            ticks.append(layer)
    figure.update_yaxes(
        tickvals=ticks,
        ticktext=[f"{layer} {type_of[layer]}" for layer in ticks],
        title_text="layer (index, kind)",
    )
