"""The paper's claim, head by head: do positional heads use short wavelengths?"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import head_table, points_by_label, ring, row_of
from ropelens.figures.numbers import number, short_count
from ropelens.figures.style import log_axis, new_figure
from ropelens.figures.wavelengths import wavelength_axis

OUTSIDE = ("sink", "diffuse")
"""Labels whose heads choose too little for the claim to be about them."""


def plot_claim(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """A point a head: how positional it is, by the wavelength that its selectivity uses.

    x: selectivity-weighted geometric mean of wavelength, in tokens. y: positional_fraction,
    the share of position in position + content bits, in [0, 1]. The title gives the rank
    correlation of the two and its 95% interval (`heads.attrs["claim"]`); sink and diffuse
    heads, which it leaves out, are hollow. `selected` (layer, head) gets a ring.
    """
    heads = head_table(profile, heads)
    x = heads["mean_wavelength"].to_numpy(float)
    y = heads["positional_fraction"].to_numpy(float)
    figure = new_figure(claim_title(heads.attrs.get("claim")), height=430)
    for rows, look in points_by_label(heads, np.isfinite(x) & np.isfinite(y), hollow=OUTSIDE):
        figure.add_scatter(x=x[rows], y=y[rows], **look)
    if selected is not None:
        row = row_of(heads, selected)
        figure.add_scatter(x=x[[row]], y=y[[row]], **ring())
    figure.update_xaxes(**_used_wavelengths(profile, x))
    figure.update_yaxes(title_text="positional fraction (0 to 1)", range=[-0.04, 1.04])
    figure.update_yaxes(tickvals=[0, 0.25, 0.5, 0.75, 1])
    return figure.update_layout(legend_itemsizing="constant")


def claim_title(claim: dict | None) -> str:
    """The claim's numbers in one line."""
    if not claim:
        return "Positional fraction by mean wavelength"
    if not math.isfinite(claim["rank_correlation"]):
        return "Too few heads for a rank correlation"
    value, low, high = (number(claim[name]) for name in ("rank_correlation", "low", "high"))
    return f"Rank correlation {value} (95% interval {low} to {high}, {claim['heads']} heads)"


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
