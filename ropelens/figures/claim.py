"""The paper's claim, head by head: do positional heads use short wavelengths?"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.inputs import head_table, hover_lines, row_of
from ropelens.figures.style import COLORS, LABELS, SYMBOLS, new_figure
from ropelens.figures.triangle import marker_size, ring
from ropelens.figures.wavelengths import short_count, wavelength_axis

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
    hovers, size = hover_lines(heads), marker_size(heads)
    figure = new_figure(claim_title(heads.attrs.get("claim")), height=430)
    for label in LABELS:
        rows = (heads["label"] == label).to_numpy() & np.isfinite(x) & np.isfinite(y)
        if not rows.any():
            continue
        hollow = "-open" if label in OUTSIDE else ""
        figure.add_scatter(
            x=x[rows],
            y=y[rows],
            mode="markers",
            name=label,
            marker={
                "color": COLORS[label],
                "symbol": SYMBOLS[label] + hollow,
                "size": size[rows],
                "opacity": 0.85,
                "line": {"width": 1.5} if hollow else {"width": 1},
            },
            customdata=heads.loc[rows, ["layer", "head"]].to_numpy(int),
            text=hovers[rows],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
        )
    if selected is not None:
        row = row_of(heads, selected)
        figure.add_scatter(
            x=x[row : row + 1], y=y[row : row + 1], meta={"role": "selected"}, **ring()
        )
    figure.update_xaxes(**_wavelengths(profile, x))
    figure.update_yaxes(
        title_text="positional fraction (0 to 1)",
        range=[-0.04, 1.04],
        tickvals=[0, 0.25, 0.5, 0.75, 1],
    )
    figure.update_layout(legend_itemsizing="constant")
    return figure


def claim_title(claim: dict | None) -> str:
    """The claim's numbers in one line."""
    if not claim:
        return "Positional fraction by mean wavelength"
    if not math.isfinite(claim["rank_correlation"]):
        return "Too few heads for a rank correlation"
    return (
        f"Rank correlation {signed(claim['rank_correlation'])} "
        f"(95% interval {signed(claim['low'])} to {signed(claim['high'])}, "
        f"{claim['heads']} heads)"
    )


def signed(value: float) -> str:
    """Two decimals, with a true minus sign; "?" where there is no number."""
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "?"


def _wavelengths(profile: xr.Dataset, used: np.ndarray) -> dict:
    """The wavelength axis, cut to the wavelengths that heads use on average."""
    axis = wavelength_axis(profile["wavelength"].values)
    used = np.log10(used[np.isfinite(used) & (used > 0)])
    if used.size:
        axis["range"] = [float(used.min()) - 0.15, float(used.max()) + 0.15]
    ticks = 10.0 ** np.arange(-1, 10)
    axis["tickvals"] = sorted(
        float(f"{value:g}") for tick in ticks for value in (tick, 3 * tick)
    )
    axis["ticktext"] = [short_count(value) for value in axis["tickvals"]]
    axis["title_text"] = "mean wavelength (tokens, log scale)"
    return axis
