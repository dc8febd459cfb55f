"""The paper's claim, head by head: do positional heads use short wavelengths?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import head_table, points_by_label, ring, row_of
from ropelens.figures.numbers import number, short_count
from ropelens.figures.style import MUTED, OUTSIDE, log_axis, new_figure
from ropelens.figures.wavelengths import wavelength_axis
from ropelens.measure.heads import claim_numbers
from ropelens.statistics.claim import correlations


def plot_claim(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """A point a head: how much the offset explains, by the wavelength that picks its keys.

    Above: x is the mean wavelength (tokens, weighted by the push toward keys that are no
    sinks), y the share of the bits without sinks that the offset explains by itself, both on
    the rows that surrogates are compared on. Sink and diffuse heads, which do not count, are
    missing. Below: the rank correlation of the two, beside those of the surrogates, whose
    frequencies are in a random order. `selected` (layer, head) gets a ring.
    """
    heads = head_table(profile, heads)
    x, y = claim_points(profile, heads)
    figure = new_figure(
        claim_title(heads.attrs.get("claim")),
        height=430,
        rows=2,
        cols=1,
        row_heights=[0.8, 0.2],
        vertical_spacing=0.2,
    )
    for rows, look in points_by_label(heads, np.isfinite(x) & np.isfinite(y), hollow=OUTSIDE):
        figure.add_scatter(x=x[rows], y=y[rows], **look, row=1, col=1)
    if selected is not None:
        row = row_of(heads, selected)
        figure.add_scatter(x=x[[row]], y=y[[row]], **ring(), row=1, col=1)
    _add_surrogates(figure, profile)
    figure.update_xaxes(**_used_wavelengths(profile, x), row=1, col=1)
    figure.update_yaxes(title_text="offset alone<br>explains (0 to 1)", row=1, col=1)
    figure.update_yaxes(range=[-0.04, 1.04], tickvals=[0, 0.25, 0.5, 0.75, 1], row=1, col=1)
    return figure.update_layout(legend_itemsizing="constant")


def claim_points(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Mean wavelength (tokens) and what the offset explains, [0, 1], a row a head."""
    at = heads["layer"].to_numpy(int), heads["head"].to_numpy(int)
    fraction, wavelength = (drawn[0][at] for drawn in claim_numbers(profile))
    return np.exp(wavelength), fraction


def claim_title(claim: dict | None) -> str:
    """The claim's numbers in one line."""
    if not claim:
        return "What the offset explains, by mean wavelength"
    if not math.isfinite(claim["rank_correlation"]):
        return "Too few heads for a rank correlation"
    names = ("rank_correlation", "null_low", "null_high")
    value, low, high = (number(claim[name]) for name in names)
    if not math.isfinite(claim["null_low"]):
        return f"Rank correlation {value}, without surrogates"
    return f"Rank correlation {value}; of surrogates {low} to {high}"


def _add_surrogates(figure: go.Figure, profile: xr.Dataset) -> None:
    """The rank correlations of the surrogates, a stroke each, and the model's."""
    rho = correlations(*claim_numbers(profile))
    strokes: dict[str, Any] = {"mode": "markers", "showlegend": False, "row": 2, "col": 1}
    figure.add_scatter(
        x=rho[1:],
        y=np.zeros(len(rho) - 1),
        marker={"symbol": "line-ns-open", "size": 16, "color": MUTED, "line_width": 1.5},
        hovertemplate="surrogate: %{x:.2f}<extra></extra>",
        **strokes,
    )
    figure.add_scatter(
        x=rho[:1],
        y=[0],
        marker={"symbol": "star-diamond", "size": 14, "color": "#d43f3a"},
        hovertemplate="this model: %{x:.2f}<extra></extra>",
        **strokes,
    )
    figure.update_xaxes(
        title_text="rank correlation (−1 to 1)",
        range=[-1.05, 1.05],
        tickvals=[-1, -0.5, 0, 0.5, 1],
        row=2,
        col=1,
    )
    figure.update_yaxes(visible=False, range=[-1, 1], row=2, col=1)


def _used_wavelengths(profile: xr.Dataset, used: np.ndarray) -> dict:
    """The wavelength axis, cut to the wavelengths that heads use on average."""
    ticks = [float(f"{n * 10.0**power:g}") for power in range(-1, 10) for n in (1, 3)]
    axis = wavelength_axis(profile["wavelength"].values) | log_axis(
        {tick: short_count(tick) for tick in ticks},
        title_text="mean wavelength (tokens, log scale)",
    )
    used = np.log10(used[np.isfinite(used) & (used > 0)])
    if used.size:
        axis["range"] = [float(used.min()) - 0.15, float(used.max()) + 0.15]
    return axis
