"""Figure of the push of heads toward keys by wavelength."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from ropelens.arguments import public
from ropelens.figures import style
from ropelens.figures.formats import short_count
from ropelens.figures.inputs import Selected, head_table, numbers, row_of
from ropelens.figures.planes import (
    Cells,
    Wavelengths,
    mark_context,
    plane_cells,
    set_wavelengths,
    wavelength_positions,
)
from ropelens.profiles.kinds import layers_by_kind
from ropelens.profiles.measures import complete_profile

MEANS_HEIGHT = 150  # pixels of the panel of means; title, legend and axis need the same
MAX_ROW_NAMES = 40
WHITE = {"color": "#ffffff", "width": 2}
ROOM_FOR_LABELS = 0.03  # share of the axis to the left of the map
OUTSIDE = -2  # row of a head that the map does not show
MEAN_LABELS = style.LABEL_ORDER[:3]  # labels with a line of means


@public
def plot_head_wavelengths(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Push of each wavelength toward the keys that heads pick: means by label, and every head.

    The push is the positive part of `selectivity_keys` (without sinks), in percent of the head.
    The most positional head is at the top; diffuse heads and sinks have no row. The head
    `selected` (layer, head) gets a frame.
    """
    profile = complete_profile(profile)
    heads = head_table(profile, heads)
    shares = push_shares(profile)
    rows = _map_rows(profile, heads)
    wavelength = profile["wavelength"].values
    of_rows = shares[rows.layer, rows.head].astype(np.float32)
    cells = plane_cells(wavelength, of_rows, rows.layer)
    figure = _panels(rows)
    _add_map(figure, cells, rows)
    _add_labels(figure, cells.edges, rows, heads["label"].iloc[rows.order])
    set_wavelengths(figure, wavelength)
    _leave_room_for_labels(figure, cells.edges)
    for panel, (layer_type, layers) in enumerate(rows.layer_types.items(), start=1):
        for label in MEAN_LABELS:
            of_label = heads[heads["label"] == label]
            means = _mean_shares(wavelength, shares, of_label, layers)
            if means is not None:
                name = f"{label} ({len(of_label)} heads)"
                _add_means(figure, means, label, name=name, panel=panel)
        title = "mean<br>share (%)"
        if rows.several_types:
            title = f"{layer_type} layers:<br>{title}"
        figure.update_yaxes(title_text=title, rangemode="tozero", nticks=4, row=panel)
        mark_context(figure, profile, layers, row=panel if rows.several_types else None)
    if rows.several_types:
        _name_layer_types(figure, rows)
    _name_rows(figure, rows)
    if selected is not None:
        _add_frame(figure, cells.edges, rows, row_of(heads, selected))
    return style.note_missing(
        figure, "no head prefers keys other than sinks", cells.values
    )


def push_shares(profile: xr.Dataset) -> Float[np.ndarray, "layer head frequency"]:
    """Push of each plane toward keys that are not sinks, in percent of its head; NaN for 0."""
    selectivity = profile["selectivity_keys"]
    push = selectivity.transpose("layer", "head", "frequency").clip(min=0)
    total = push.sum("frequency")
    return 100 * (push / total.where(total > 0)).values


def by_position(heads: pd.DataFrame) -> Int[np.ndarray, " row"]:
    """Rows of the table by descending positional fraction, without `EXCLUDED_LABELS`."""
    fraction = numbers(heads, "positional_fraction")
    excluded = heads["label"].isin(style.EXCLUDED_LABELS).to_numpy()
    order = np.argsort(-fraction, kind="stable")
    shown = np.isfinite(fraction) & ~excluded
    return order[shown[order]]


@dataclass(frozen=True)
class MapRows:
    """The rows of the map, from the top.

    `order` are their rows in the table of heads, and `layer` and `head` their indices in the
    profile. `layer_types` are the layers of each kind; the rows of a kind are together.
    """

    order: list[int]
    layer: Int[np.ndarray, " row"]
    head: Int[np.ndarray, " row"]
    layer_types: dict[str, list[int]]

    @property
    def map_height(self) -> int:
        """Height of the map in pixels."""
        return int(np.clip(13 * len(self.order), 120, 560))

    @property
    def means_height(self) -> int:
        """Height of the panels of means in pixels."""
        return MEANS_HEIGHT * len(self.layer_types)

    @property
    def map_panel(self) -> int:
        """Number of the map among the panels."""
        return len(self.layer_types) + 1

    @property
    def several_types(self) -> bool:
        return len(self.layer_types) > 1

    @property
    def names(self) -> np.ndarray:
        """Name of each row, such as "L2 H3"."""
        pairs = zip(self.layer, self.head, strict=True)
        return np.array([f"L{layer} H{head}" for layer, head in pairs])


def _map_rows(profile: xr.Dataset, heads: pd.DataFrame) -> MapRows:
    layer_types: dict[str, list[int]] = {}
    of_layer: dict[int, int] = {}
    for layer_type, layers in layers_by_kind(profile).items():
        if heads["layer"].isin(layers).any():
            number = len(layer_types)
            layer_types[layer_type] = layers
            of_layer.update(dict.fromkeys(layers, number))
    order = sorted(
        by_position(heads), key=lambda row: of_layer[heads["layer"].iloc[row]]
    )
    shown = heads.iloc[order]
    return MapRows(
        order=order,
        layer=shown["layer"].to_numpy(int),
        head=shown["head"].to_numpy(int),
        layer_types=layer_types,
    )


def _panels(rows: MapRows) -> go.Figure:
    """A panel for each kind of layers, above the map."""
    return style.stacked(
        "Push toward keys by wavelength",
        rows.map_panel,
        height=rows.means_height + MEANS_HEIGHT + rows.map_height,
        row_heights=[MEANS_HEIGHT] * len(rows.layer_types) + [rows.map_height],
        spacing=0.05 if rows.several_types else 0.03,
    )


def _add_map(figure: go.Figure, cells: Cells, rows: MapRows) -> None:
    """Draw a row of cells per head."""
    bar = {
        "thickness": 10,
        "nticks": 4,
        "title": {"text": "share<br>(%)"},
        "len": rows.map_height / (rows.means_height + rows.map_height),
        "y": 0,
        "yanchor": "bottom",
    }
    figure.add_heatmap(
        x=cells.edges,
        y=rows.names,
        z=cells.values,
        text=cells.wavelengths,
        colorscale=style.sequential(cells.values),
        zmin=0,
        colorbar=bar,
        hovertemplate="%{y}<br>%{z:.0f}% of the push at %{text} tokens<extra></extra>",
        row=rows.map_panel,
        col=1,
    )


def _add_labels(
    figure: go.Figure,
    edges: Float[np.ndarray, " edge"],
    rows: MapRows,
    labels: pd.Series,
) -> None:
    """Draw the symbol of each head's label to the left of its row."""
    low = np.log10(edges[0])
    breadth = np.log10(edges[-1] / edges[0])
    marker = {
        "color": labels.map(style.COLORS),
        "size": 7,
        "symbol": labels.map(style.SYMBOLS),
    }
    figure.add_scatter(
        x=np.full(len(labels), 10 ** (low - 0.5 * ROOM_FOR_LABELS * breadth)),
        y=rows.names,
        marker=marker,
        mode="markers",
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
        row=rows.map_panel,
        col=1,
    )


def _leave_room_for_labels(
    figure: go.Figure, edges: Float[np.ndarray, " edge"]
) -> None:
    low = np.log10(edges[0])
    breadth = np.log10(edges[-1] / edges[0])
    figure.update_xaxes(range=[low - ROOM_FOR_LABELS * breadth, np.log10(edges[-1])])


def _mean_shares(
    wavelength: Wavelengths,
    shares: Float[np.ndarray, "layer head frequency"],
    heads: pd.DataFrame,
    layers: Sequence[int],
) -> pd.DataFrame | None:
    """Mean share of each plane over those `heads` that are in `layers`; None for one head.

    The columns are `x` (tokens), `share` (%) and `wavelength` (tokens).
    """
    chosen = heads[heads["layer"].isin(layers)]
    layer = chosen["layer"].to_numpy(int)
    logs = np.log(wavelength_positions(wavelength))
    points = pd.DataFrame(
        {
            "share": shares[layer, chosen["head"].to_numpy(int)].ravel(),
            "wavelength": wavelength[layer].ravel(),
            # Measured layers differ in the last digits.
            "log_x": logs[layer].round(4).ravel(),
        }
    )
    means = points.dropna().groupby("log_x").mean()
    if len(chosen) < 2 or means.empty:
        return None
    return means.assign(x=np.exp(means.index.to_numpy()))


def _add_means(
    figure: go.Figure, means: pd.DataFrame, label: str, *, name: str, panel: int
) -> None:
    """Draw the line of a label in a panel, with its `name` in the legend.

    Planes that do not rotate break the line.
    """
    breaks = np.flatnonzero(np.isinf(means["wavelength"]))
    names = [short_count(wavelength) for wavelength in means["wavelength"]]
    in_legend = any(trace.legendgroup == label for trace in figure.data)
    hover = f"{label}<br>wavelength %{{text}} tokens<br>%{{y:.1f}}%<extra></extra>"
    figure.add_scatter(
        x=np.insert(means["x"].to_numpy(), breaks, np.nan),
        y=np.insert(means["share"].to_numpy(), breaks, np.nan),
        text=np.insert(names, breaks, ""),
        line={"color": style.COLORS[label], "width": 2},
        mode="lines+markers",
        marker={"symbol": style.SYMBOLS[label], "size": 8},
        name=name,
        legendgroup=label,
        showlegend=not in_legend,
        hovertemplate=hover,
        row=panel,
        col=1,
    )


def _name_layer_types(figure: go.Figure, rows: MapRows) -> None:
    """Separate the rows of the kinds of layers by lines, and name the kinds."""
    for layer_type, layers in rows.layer_types.items():
        of_type = np.flatnonzero(np.isin(rows.layer, layers))
        if not len(of_type):
            continue
        first = of_type[0]
        if first:
            figure.add_hline(y=first - 0.5, line=WHITE, row=rows.map_panel, col=1)
        figure.add_annotation(
            text=f"{layer_type} layers",
            x=1,
            xref="x domain",
            xanchor="right",
            y=first,
            showarrow=False,
            font_color=WHITE["color"],
            font_size=12,
            bgcolor="rgba(0,0,0,0.45)",
            row=rows.map_panel,
            col=1,
        )


def _name_rows(figure: go.Figure, rows: MapRows) -> None:
    """Name the rows of the map; every few rows if there are many."""
    names = rows.names
    count = len(names)
    shown = names[:: -(-count // MAX_ROW_NAMES)] if count else names
    figure.update_yaxes(
        title_text="head (layer, head)",
        type="category",
        showgrid=False,
        range=[count - 0.4, -0.6],
        categoryarray=names,
        tickvals=shown,
        tickfont_size=11,
        row=rows.map_panel,
    )


def _add_frame(
    figure: go.Figure,
    edges: Float[np.ndarray, " edge"],
    rows: MapRows,
    row_of_table: int,
) -> None:
    """Draw a frame around the row of a head."""
    y = OUTSIDE
    if row_of_table in rows.order:
        y = rows.order.index(row_of_table)
    figure.add_shape(
        name="selected",
        type="rect",
        x0=edges[0],
        x1=edges[-1],
        y0=y - 0.5,
        y1=y + 0.5,
        line=WHITE,
        row=rows.map_panel,
        col=1,
    )
