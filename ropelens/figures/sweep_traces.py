"""Parts of the figures of a truncation sweep: changes, random planes, and swept layers."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style
from ropelens.figures.formats import NO_NUMBER, number, short_count
from ropelens.figures.planes import Wavelengths
from ropelens.interventions.truncation_table import swept_layers


@dataclass(frozen=True)
class EndLook:
    """How figures show the planes of an end: the name in the legend, colour and symbol."""

    name: str
    color: str
    symbol: str


END_LOOKS = {
    "slow": EndLook(
        "slowest planes stopped first (p-RoPE)", style.VARIANT_COLORS[0], "square"
    ),
    "fast": EndLook("fastest planes stopped first", style.VARIANT_COLORS[3], "circle"),
}
RANDOM = "random planes"
KEPT_TITLE = "planes that still rotate (% of all)"


def set_kept_shares(figure: go.Figure) -> None:
    """Make x the share of planes that still rotate, from all to none."""
    figure.update_xaxes(
        range=[1.04, -0.04],
        tickvals=[1, 0.75, 0.5, 0.25, 0],
        tickformat=".0%",
    )


@dataclass(frozen=True)
class SweptPlanes:
    """The layers whose planes stop in a sweep, and wavelengths [layer, frequency] (tokens).

    `title_end` says in a title which layers these are, and whether planes are scaled instead.
    """

    title_end: str
    layers: list[int]
    wavelength: Wavelengths


def swept_planes(truncation: xr.Dataset) -> SweptPlanes:
    by_type = swept_layers(truncation)
    title_end = ""
    if "all" not in by_type:
        title_end = f", {next(iter(by_type))} layers"
    if "scale" in truncation.attrs:
        title_end += f": scaled by {truncation.attrs['scale']:g} instead"
    layers = sorted(layer for numbers in by_type.values() for layer in numbers)
    wavelength = truncation["wavelength"].transpose("layer", ...).values
    return SweptPlanes(title_end, layers, wavelength[layers])


def figure_with_marks(title: str, *, height: int, **panels: Any) -> go.Figure:
    """Figure with room for a legend and the words of marks above its `panels`."""
    legend = {"y": 1 - 40 / height, "yref": "container", "yanchor": "top"}
    figure = style.new_figure(title, height=height, **panels)
    return figure.update_layout(margin_t=110, legend=legend)


@dataclass(frozen=True)
class Changes:
    """Change of a measure under each edit: values, error bars, and texts for the pointer."""

    values: np.ndarray
    bars: dict[str, Any] | None
    hovers: list[str]


def changes_of(rows: pd.DataFrame, measure: str) -> Changes:
    """The changes of a measure in rows of the summary of a sweep."""
    values = rows[measure].to_numpy(float)
    bars = None
    if f"{measure}_low" in rows:
        low = rows[f"{measure}_low"]
        high = rows[f"{measure}_high"]
        bars = style.interval_bars(values, low, high, width=4)
    hovers = [_edit_hover(row, measure) for row in rows.to_dict("records")]
    return Changes(values, bars, hovers)


def _edit_hover(row: Mapping[Hashable, Any], measure: str) -> str:
    change = number(row.get(measure, np.nan), "+.3f")
    low = number(row.get(f"{measure}_low", np.nan), "+.3f")
    high = number(row.get(f"{measure}_high", np.nan), "+.3f")
    if low != NO_NUMBER:
        change += f" (95% interval {low} to {high})"
    if row["kind"] == "none":
        return f"<b>unmodified</b><br>{change}"
    shortest = short_count(row["wavelength_low"])
    longest = short_count(row["wavelength_high"])
    return (
        f"<b>{row['edit']}</b>: {100 * row['kept']:.3g}% of the planes rotate<br>"
        f"stopped: {row['planes']}, wavelengths {shortest} to {longest} tokens<br>"
        f"{change}"
    )


def add_mean_of_draws(
    figure: go.Figure,
    x: Any,
    y: Any,
    *,
    showlegend: bool | None = None,
    meta: dict[str, str] | None = None,
    row: int | None = None,
    col: int | None = None,
) -> None:
    """Draw the dashed line of the means over random sets of planes."""
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line=style.DASHED,
        hoverinfo="skip",
        name=RANDOM,
        legendgroup="random",
        showlegend=showlegend,
        meta=meta,
        row=row,
        col=col,
    )


def add_draws(
    figure: go.Figure,
    x: Any,
    changes: Changes,
    *,
    row: int | None = None,
    col: int | None = None,
) -> None:
    """Draw a cross for each random set of planes."""
    figure.add_scatter(
        x=x,
        y=changes.values,
        text=changes.hovers,
        hovertemplate=style.TEXT_ONLY,
        mode="markers",
        marker={"color": style.MUTED, "size": 5, "symbol": "x"},
        name=RANDOM,
        legendgroup="random",
        showlegend=False,
        row=row,
        col=col,
    )
