"""The paper's claim, head by head: do positional heads use short wavelengths?"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import Count, public
from ropelens.figures.inputs import RING, head_table, points_by_label, row_of
from ropelens.figures.style import MUTED, OUTSIDE, log_axis, new_figure
from ropelens.figures.text import number, short_count
from ropelens.measure.heads import claim_numbers
from ropelens.statistics.budget.claim import correlations

PANELS = {"rows": 2, "cols": 1, "row_heights": [0.8, 0.2], "vertical_spacing": 0.2}


@public
def plot_claim(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[Count, Count] | None = None,
) -> go.Figure:
    """A point a head: how much the offset explains, by the wavelength that picks its keys.

    Above: x is the mean wavelength (tokens, weighted by the push toward keys that are no
    sinks), y the share of the bits without sinks that the offset explains by itself, both on
    the rows that surrogates are compared on. Sink and diffuse heads, which do not count, are
    left out. Below: the rank correlation of the two, beside those of the surrogates, whose
    frequencies are in a random order. `selected` (layer, head) gets a ring.
    """
    heads = head_table(profile, heads)
    at = heads["layer"].to_numpy(int), heads["head"].to_numpy(int)
    y, x = (drawn[0][at] for drawn in claim_numbers(profile))
    x = np.exp(x)
    figure = new_figure(claim_title(heads.attrs.get("claim")), height=430, **PANELS)
    for rows, look in points_by_label(heads, np.isfinite(x) & np.isfinite(y), hollow=OUTSIDE):
        figure.add_scatter(x=x[rows], y=y[rows], **look, row=1, col=1)
    if selected is not None:
        row = row_of(heads, selected)
        figure.add_scatter(x=x[[row]], y=y[[row]], **RING, row=1, col=1)
    _add_surrogates(figure, profile)
    figure.update_xaxes(**_used_wavelengths(x), row=1, col=1)
    figure.update_yaxes(title_text="offset alone<br>explains (0 to 1)", row=1, col=1)
    figure.update_yaxes(range=[-0.04, 1.04], tickvals=[0, 0.25, 0.5, 0.75, 1], row=1, col=1)
    return figure.update_layout(legend_itemsizing="constant")


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
    stroke = {"symbol": "line-ns-open", "size": 16, "color": MUTED, "line_width": 1.5}
    diamond = {"symbol": "star-diamond", "size": 14, "color": "#d43f3a"}
    for words, x, marker in (
        ("surrogate", rho[1:], stroke),
        ("this model", rho[:1], diamond),
    ):
        hover = f"{words}: %{{x:.2f}}<extra></extra>"
        look = {"mode": "markers", "marker": marker, "showlegend": False}
        figure.add_scatter(x=x, y=0 * x, **look, hovertemplate=hover, row=2, col=1)
    ticks = {"range": [-1.05, 1.05], "tickvals": [-1, -0.5, 0, 0.5, 1]}
    figure.update_xaxes(title_text="rank correlation (−1 to 1)", **ticks, row=2, col=1)
    figure.update_yaxes(visible=False, range=[-1, 1], row=2, col=1)


def _used_wavelengths(used: np.ndarray) -> dict:
    """A wavelength axis, cut to the wavelengths that heads use on average."""
    ticks = [float(f"{n * 10.0**power:g}") for power in range(-1, 10) for n in (1, 3)]
    used = np.log10(used[np.isfinite(used) & (used > 0)])
    ends = [float(used.min()) - 0.15, float(used.max()) + 0.15] if used.size else [0, 6]
    title = "mean wavelength (tokens, log scale)"
    return log_axis({tick: short_count(tick) for tick in ticks}, title_text=title, range=ends)
