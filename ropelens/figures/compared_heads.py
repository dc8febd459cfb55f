"""Figure of one head of each of two compared runs or models, next to each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from ropelens.figures import style
from ropelens.figures.formats import plotly_text
from ropelens.figures.head_planes import PANEL_TITLES, PLANE_LINES, add_plane_line
from ropelens.figures.inputs import kv_heads
from ropelens.figures.planes import AXIS_TITLE, set_wavelengths, wavelength_positions

COMPARED_PANELS = PANEL_TITLES[:2]  # a comparison has no coherence
COMPARED_LINES = tuple(
    line
    for line in PLANE_LINES
    if line.variable in ("selectivity_keys", "q_norm", "k_norm")
)


@dataclass(frozen=True)
class ComparedHead:
    """A head of a compared run or model: the index of the entry, its layer and its index."""

    entry: int
    layer: int
    head: int


def plot_compared_heads(
    comparison: xr.Dataset, heads: Sequence[ComparedHead]
) -> go.Figure:
    """Selectivity and norms of the planes of some heads by wavelength, a column for each head.

    The traces of the first head come first. Trace `meta` names the variable of each axis, and
    `customdata` is the wavelength in tokens.
    """
    figure = style.new_figure(
        "Two heads, side by side",
        height=440,
        rows=len(COMPARED_PANELS),
        cols=len(heads),
        shared_xaxes=True,
        shared_yaxes=True,
        vertical_spacing=0.06,
        horizontal_spacing=0.03,
        column_titles=[_head_title(comparison, head) for head in heads],
    )
    positions = position_by_entry(comparison)
    for column, head in enumerate(heads, start=1):
        entry = comparison.isel(entry=head.entry)
        indices = {
            "layer": head.layer,
            "head": head.head,
            "kv_head": kv_heads(entry)[head.layer, head.head],
        }
        for line in COMPARED_LINES:
            values = entry[line.variable].isel(indices, missing_dims="ignore")
            add_plane_line(
                figure,
                line,
                positions=positions[head.entry, head.layer],
                values=values.values,
                wavelength=entry["wavelength"].values[head.layer],
                in_legend=column == 1,
                column=column,
            )
    for row, title in enumerate(COMPARED_PANELS, start=1):
        figure.update_yaxes(title_text=title, row=row, col=1)
    figure.update_yaxes(nticks=5, zeroline=True, rangemode="tozero", autorange=True)
    set_wavelengths(figure, _by_layer(comparison))
    figure.update_xaxes(title_text=AXIS_TITLE, row=len(COMPARED_PANELS))
    figure.update_layout(legend={"yref": "container", "y": 0, "yanchor": "bottom"})
    return style.note_missing(figure, "no plane of these heads was measured")


def position_by_entry(
    comparison: xr.Dataset,
) -> Float[np.ndarray, "entry layer frequency"]:
    """Position of each plane on the common axis, in tokens."""
    shape = comparison["wavelength"].transpose("entry", "layer", "frequency").shape
    return wavelength_positions(_by_layer(comparison)).reshape(shape)


def kv_heads_by_entry(comparison: xr.Dataset) -> Int[np.ndarray, "entry layer head"]:
    """Key-value head of each query head of each run or model."""
    entries = [comparison.isel(entry=n) for n in range(comparison.sizes["entry"])]
    return np.array([kv_heads(entry) for entry in entries])


def _by_layer(comparison: xr.Dataset) -> Float[np.ndarray, "row frequency"]:
    """Wavelengths (tokens) with a row for each layer of each entry."""
    wavelength = comparison["wavelength"].transpose("entry", "layer", "frequency")
    return wavelength.values.reshape(-1, wavelength.shape[-1])


def _head_title(comparison: xr.Dataset, head: ComparedHead) -> str:
    entry = plotly_text(str(comparison["entry"].values[head.entry]))
    return f"{entry}: L{head.layer} H{head.head}"
