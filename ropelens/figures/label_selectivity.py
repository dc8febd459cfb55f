"""Through which wavelengths do heads of each kind pick their keys?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from ropelens.figures.inputs import head_table
from ropelens.figures.numbers import short_count
from ropelens.figures.style import COLORS, LABELS, SYMBOLS, new_figure
from ropelens.figures.wavelengths import mark_context, wavelength_axis, wavelength_positions

FEWEST_HEADS = 2
"""A kind with fewer heads has no mean worth a line."""


def plot_label_selectivity(profile: xr.Dataset, heads: pd.DataFrame | None = None) -> go.Figure:
    """Share of the push toward keys that each plane has, mean over heads of a label.

    The push is the positive part of `selectivity_keys`: sinks are left out.

    A line a label, over wavelengths (tokens), in percent of the head's own total, so that
    heads that choose sharply do not drown the others. Where layers rotate differently
    each head stands at its own layer's wavelengths, and lines join the means.
    """
    figure = new_figure("Push toward keys by wavelength, mean over heads", height=380)
    add_label_lines(figure, profile, head_table(profile, heads))
    figure.update_xaxes(**wavelength_axis(profile["wavelength"].values))
    figure.update_yaxes(title_text="share of the push (%)", rangemode="tozero")
    mark_context(figure, profile)
    return figure


def add_label_lines(figure: go.Figure, profile: xr.Dataset, heads: pd.DataFrame) -> None:
    """The lines of `plot_label_selectivity`, in the first panel of a figure."""
    shares = selectivity_shares(profile)
    wavelength = profile["wavelength"].values
    places = wavelength_positions(wavelength)
    for label in LABELS[:3]:
        rows = heads[heads["label"] == label]
        if len(rows) < FEWEST_HEADS:
            continue
        layers, columns = rows["layer"].to_numpy(int), rows["head"].to_numpy(int)
        figure.add_scatter(
            **mean_share(places[layers], shares[layers, columns], wavelength[layers]),
            name=f"{label} ({len(rows)} heads)",
            mode="lines+markers",
            line={"color": COLORS[label], "width": 2},
            marker={"symbol": SYMBOLS[label], "size": 8},
            hovertemplate=f"{label}<br>wavelength %{{text}} tokens<br>%{{y:.1f}}%"
            "<extra></extra>",
        )


def selectivity_shares(profile: xr.Dataset) -> Float[np.ndarray, "layer head frequency"]:
    """Each plane's share of a head's push toward keys; they sum to one over planes."""
    positive = profile["selectivity_keys"].transpose("layer", "head", "frequency").clip(min=0)
    total = positive.sum("frequency")
    return (positive / total.where(total > 0)).values


def mean_share(
    places: Float[np.ndarray, "row frequency"],
    shares: Float[np.ndarray, "row frequency"],
    wavelength: Float[np.ndarray, "row frequency"],
) -> dict[str, Any]:
    """The mean of `shares` in percent (y) by place on the axis (x), and its wavelength (text).

    A line breaks before each plane that never turns: no wavelength lies between two of them.
    """
    known = np.isfinite(places) & np.isfinite(shares)
    at = np.round(np.log(places[known]), 4)  # measured layers differ in the last digits
    found = pd.DataFrame({"y": 100 * shares[known], "wavelength": wavelength[known]})
    mean = found.groupby(at).mean()
    breaks = np.flatnonzero(np.isinf(mean["wavelength"]))
    return {
        "x": np.insert(np.exp(mean.index.to_numpy()), breaks, np.nan),
        "y": np.insert(mean["y"].to_numpy(), breaks, np.nan),
        "text": np.insert([short_count(w) for w in mean["wavelength"]], breaks, ""),
    }
