"""Figure of the claim that positional heads use shorter wavelengths."""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.claims.arrays import DrawnHeads
from ropelens.claims.numbers import correlations
from ropelens.figures import inputs, style
from ropelens.figures.formats import number, short_count
from ropelens.figures.head_points import add_points
from ropelens.figures.inputs import Selected
from ropelens.profiles.measures import complete_profile


@public
def plot_claim(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Share of each head's bits that the offset explains, by the head's mean wavelength.

    x is the mean wavelength, weighted by the push toward keys that are not sinks. y is the
    share of the bits without sinks. Both are measured on the rows of the surrogates. Sink and
    diffuse heads are left out. The lower panel shows the rank correlation of x and y in this
    model and in the surrogates, which have their frequencies in a random order. The head
    `selected` (layer, head) gets a ring.
    """
    profile = complete_profile(profile)
    heads = inputs.head_table(profile, heads)
    drawn = DrawnHeads.of(profile)
    indices = heads["layer"].to_numpy(int), heads["head"].to_numpy(int)
    share = drawn.offset_fraction[0][indices]
    wavelength = np.exp(drawn.log_wavelength[0][indices])
    figure = style.new_figure(
        claim_title(heads.attrs.get("claim")),
        height=430,
        rows=2,
        cols=1,
        row_heights=[0.8, 0.2],
        vertical_spacing=0.2,
    )
    add_points(figure, heads, x=wavelength, y=share, selected=selected)
    rho = correlations(drawn.offset_fraction, drawn.log_wavelength)
    _add_correlations(figure, rho)
    _set_wavelengths(figure, wavelength)
    figure.update_yaxes(
        title_text="explained by<br>offset (0 to 1)",
        range=[-0.04, 1.04],
        tickvals=[0, 0.25, 0.5, 0.75, 1],
        row=1,
    )
    figure.update_xaxes(
        title_text="diamond: this model; strokes: surrogates<br>"
        "rank correlation (−1 to 1)",
        range=[-1.05, 1.05],
        tickvals=[-1, -0.5, 0, 0.5, 1],
        row=2,
    )
    figure.update_yaxes(visible=False, range=[-1, 1], row=2)
    figure.update_layout(legend_itemsizing="constant")
    why = "no head has a wavelength and a share"
    return style.note_missing(figure, why, wavelength * share)


def _add_correlations(figure: go.Figure, rho: np.ndarray) -> None:
    """Draw the rank correlation of this model, which is the first, and of the surrogates."""
    stroke = {
        "symbol": "line-ns-open",
        "size": 16,
        "color": style.MUTED,
        "line_width": 1.5,
    }
    diamond = {"symbol": "star-diamond", "size": 14}
    _add_marks(figure, rho[1:], "surrogate", stroke)
    _add_marks(figure, rho[:1], "this model", diamond)


def _add_marks(
    figure: go.Figure, rho: np.ndarray, name: str, marker: dict[str, object]
) -> None:
    figure.add_scatter(
        x=rho,
        y=0 * rho,
        mode="markers",
        marker=marker,
        showlegend=False,
        hovertemplate=f"{name}: %{{x:.2f}}<extra></extra>",
        row=2,
        col=1,
    )


def _set_wavelengths(figure: go.Figure, wavelength: np.ndarray) -> None:
    labels = {0.1: "0.1", 0.3: "0.3"}
    for power in range(10):
        for digit in (1, 3):
            tick = digit * 10.0**power
            labels[tick] = short_count(tick)
    ends: list[float] = [0, 6]
    drawn = np.log10(wavelength[np.isfinite(wavelength) & (wavelength > 0)])
    if drawn.size:
        ends = [float(drawn.min()) - 0.15, float(drawn.max()) + 0.15]
    style.set_log_ticks(figure, labels, ends=ends, row=1)
    figure.update_xaxes(title_text="mean wavelength (tokens, log scale)", row=1)


def claim_title(claim: dict | None) -> str:
    if not claim:
        return "Share explained by the offset, by mean wavelength"
    if not math.isfinite(claim["rank_correlation"]):
        return "Too few heads for a rank correlation"
    value = number(claim["rank_correlation"])
    if not math.isfinite(claim["null_low"]):
        return f"Rank correlation {value}, without surrogates"
    low = number(claim["null_low"])
    high = number(claim["null_high"])
    return f"Rank correlation {value}; surrogates {low} to {high}"
