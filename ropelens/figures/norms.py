"""Figure of the norms of queries, keys and values by wavelength."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import Count, public
from ropelens.figures import style
from ropelens.figures.planes import (
    Cells,
    Wavelengths,
    mark_context,
    plane_cells,
    set_wavelengths,
)
from ropelens.profiles.kinds import layers_by_kind
from ropelens.profiles.measures import complete_profile

NORM_PANELS = {"query": "q_norm", "key": "k_norm", "value": "v_norm"}
MOST_TICKS = 8


@dataclass(frozen=True)
class NormPanel:
    """A panel of norms: whose norms ("query", "key" or "value"), and of which layers.

    `layer_type` is the kind of the layers, or "" if the rows are the heads of one layer.
    """

    side: str
    layer_type: str
    layers: Sequence[int]

    @property
    def head_dim(self) -> str:
        return "head" if self.side == "query" else "kv_head"

    def values(self, profile: xr.Dataset) -> xr.DataArray:
        """Norms [layer, head, frequency] in model units."""
        norms = profile[NORM_PANELS[self.side]]
        return norms.transpose("layer", self.head_dim, "frequency")


@public
def plot_norms(profile: xr.Dataset, *, layer: Count | None = None) -> go.Figure:
    """Mean norm of every plane by wavelength, in model units, for queries, keys and values.

    Values are a control, because they do not rotate. A row is the mean over the heads of a
    layer, or a head of `layer`. Source: figures of Barbero et al. 2024 (arXiv 2410.06205).
    """
    profile = complete_profile(profile)
    wavelength = profile["wavelength"].values
    panels = _panels(profile, layer)
    layer_types = {panel.layer_type for panel in panels}
    several = len(layer_types) > 1
    rows = profile.sizes["head" if layer is not None else "layer"]
    scope = "mean over heads" if layer is None else f"heads of layer {layer}"
    panel_height = np.clip(rows * 30 / len(layer_types), 120, max(220, rows * 9))
    figure = style.stacked(
        f"Norms by wavelength, {scope}",
        len(panels),
        height=170 + len(panels) * int(panel_height),
        spacing=0.1 if rows <= 16 else 0.05,
        row_heights=[max(len(panel.layers), rows / 4) for panel in panels],
    )
    for row, panel in enumerate(panels, start=1):
        if layer is None:
            norms = _norms_of_layers(panel, profile)
        else:
            norms = _norms_of_heads(panel, profile, layer)
        _add_cells(figure, norms, panel.side, row=row)
        of_type = f" of {panel.layer_type} layers" if several else ""
        _write_title(figure, f"{panel.side} norm{of_type} (model units)")
        style.set_rows(figure, len(norms.indices), norms.unit, row=row)
        if several:
            _number_rows(figure, norms.indices, row=row)
    _set_axis(figure, wavelength)
    if several:
        for row, panel in enumerate(panels, start=1):
            _mark_reach(figure, profile, panel, row=row)
    else:
        _mark_reach(figure, profile, panels[0])
    return style.note_missing(figure, "no queries and keys were measured")


def _panels(profile: xr.Dataset, layer: int | None) -> list[NormPanel]:
    layer_types: dict[str, Sequence[int]] = {}
    if layer is None:
        layer_types.update(layers_by_kind(profile))
    else:
        layer_types[""] = [int(layer)]
    rotating = {}
    for layer_type, layers in layer_types.items():
        if np.isfinite(profile["wavelength"].values[layers]).any():
            rotating[layer_type] = layers
    sides = ["query", "key"]
    if profile["v_norm"].notnull().any():
        sides.append("value")
    panels = []
    for side in sides:
        for layer_type, layers in (rotating or layer_types).items():
            panels.append(NormPanel(side, layer_type, layers))
    return panels


@dataclass(frozen=True)
class NormRows:
    """The rows of a panel: their cells, their indices, and what they are.

    `unit` names the rows on the axis, and `of_row` at the pointer.
    """

    cells: Cells
    indices: np.ndarray
    unit: str
    of_row: str


def _norms_of_layers(panel: NormPanel, profile: xr.Dataset) -> NormRows:
    """A row for each layer of the panel, with means over its heads."""
    indices = np.array(panel.layers)
    means = panel.values(profile).mean(panel.head_dim)[panel.layers].values
    cells = plane_cells(profile["wavelength"].values, means, indices)
    return NormRows(cells, indices, unit="layer", of_row="layer")


def _norms_of_heads(panel: NormPanel, profile: xr.Dataset, layer: int) -> NormRows:
    """A row for each head of a layer."""
    norms = panel.values(profile)[layer].values
    of_layer = np.full(len(norms), layer)
    cells = plane_cells(profile["wavelength"].values, norms, of_layer)
    unit = "head" if panel.side == "query" else "key-value head"
    return NormRows(cells, np.arange(len(norms)), unit=unit, of_row="head")


def _number_rows(figure: go.Figure, indices: np.ndarray, *, row: int) -> None:
    """Write the numbers of some layers, which have gaps."""
    step = -(-len(indices) // MOST_TICKS)
    figure.update_yaxes(
        range=[indices[-1] + 0.5, indices[0] - 0.5], tickvals=indices[::step], row=row
    )


def _add_cells(figure: go.Figure, norms: NormRows, side: str, *, row: int) -> None:
    cells = norms.cells
    bottom, top = figure.layout[f"yaxis{row}"].domain
    bar = {
        "thickness": 10,
        "nticks": 4,
        "len": top - bottom,
        "yanchor": "top",
        "y": top,
    }
    hover = f"{norms.of_row} %{{y}}<br>wavelength %{{text}} tokens"
    hover += f"<br>{side} norm %{{z:.3f}}"
    figure.add_heatmap(
        x=cells.edges,
        y=norms.indices,
        z=cells.values,
        text=cells.wavelengths,
        colorscale=style.sequential(cells.values),
        colorbar=bar,
        zmin=0,
        zmax=float(np.nanmax(cells.values, initial=0)),
        name=f"{side} norm",
        hovertemplate=f"{hover}<extra></extra>",
        row=row,
        col=1,
    )


def _write_title(figure: go.Figure, title: str) -> None:
    """Write a title above the last panel; a title of its colour bar would widen the margin."""
    figure.add_annotation(
        text=title,
        font_size=12,
        x=0,
        xref="paper",
        xanchor="left",
        y=1,
        yref=f"{figure.data[-1].yaxis} domain",
        yanchor="bottom",
    )


def _set_axis(figure: go.Figure, wavelength: Wavelengths) -> None:
    set_wavelengths(figure, wavelength)
    edges = figure.data[0].x
    figure.update_xaxes(range=np.log10(edges[[0, -1]]), showgrid=False)


def _mark_reach(
    figure: go.Figure, profile: xr.Dataset, panel: NormPanel, **panels: Any
) -> None:
    mark_context(
        figure, profile, panel.layers, color="#ffffff", y=0, yanchor="top", **panels
    )
