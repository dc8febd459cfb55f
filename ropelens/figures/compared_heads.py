"""Figure of one head of compared runs or models."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from ropelens.figures import style
from ropelens.figures.formats import plotly_text
from ropelens.figures.head_planes import (
    PANEL_TITLES,
    PLANE_LINES,
    add_plane_lines,
)
from ropelens.figures.inputs import kv_heads
from ropelens.figures.planes import (
    set_wavelengths,
    shade_stopped,
    wavelength_positions,
)

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


def plot_compared_head(comparison: xr.Dataset, head: ComparedHead) -> go.Figure:
    """Selectivity and norms of the planes of a head by wavelength.

    The figures of all heads have the same axis of wavelengths. Trace `meta` names the variable
    of each axis, and `customdata` is the wavelength in tokens.
    """
    name = comparison["entry"].values[head.entry]
    figure = style.stacked(
        f"{plotly_text(str(name))}: L{head.layer} H{head.head}",
        len(COMPARED_PANELS),
        height=400,
    )
    entry = comparison.isel(entry=head.entry)
    indices = {
        "layer": head.layer,
        "head": head.head,
        "kv_head": kv_heads(entry)[head.layer, head.head],
    }
    add_plane_lines(
        figure,
        COMPARED_LINES,
        entry.isel(indices, missing_dims="ignore"),
        positions=position_by_entry(comparison)[head.entry, head.layer],
        wavelength=entry["wavelength"].values[head.layer],
        some_stop=bool(np.isinf(comparison["wavelength"]).any()),
    )
    for row, title in enumerate(COMPARED_PANELS, start=1):
        figure.update_yaxes(title_text=title, row=row)
    figure.update_yaxes(nticks=5, zeroline=True, rangemode="tozero")
    set_wavelengths(figure, _by_layer(comparison))
    shade_stopped(figure, _by_layer(comparison))
    figure.update_layout(legend={"yref": "container", "y": 0, "yanchor": "bottom"})
    return style.note_missing(figure, "no plane of this head was measured")


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
