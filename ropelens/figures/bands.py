"""What each band of wavelengths is worth, beside how much the heads select through it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from ropelens.errors import BadArgument
from ropelens.figures.label_selectivity import selectivity_shares
from ropelens.figures.plane_marks import marks
from ropelens.figures.style import COLORS, MUTED, template
from ropelens.figures.truncation import MEASURES, check_measures, hover_text
from ropelens.figures.wavelengths import (
    AXIS_TITLE,
    plane_borders,
    wavelength_axis,
    wavelength_positions,
)
from ropelens.measure.truncation_table import summarize_truncation


def plot_bands(
    truncation: xr.Dataset, *, measure: str = "loss", table: pd.DataFrame | None = None
) -> go.Figure:
    """The cost of stopping one band of wavelengths at a time, and the selectivity there.

    Top: change of `measure` (see `plot_truncation`) with the 95 % interval of the paired
    difference, a bar a band, from its fastest plane to its slowest; grey: as many random
    planes, a cross a draw, dashed their mean. Bottom, where measured: share of the positive
    selectivity that each plane has, mean over all heads, in percent. x: wavelength in
    tokens. `table` is the sweep's summary, None computes it.
    """
    table = summarize_truncation(truncation) if table is None else table
    bands = table[table["kind"] == "band"]
    if not len(bands):
        raise BadArgument(
            "The sweep stopped no bands of wavelengths.",
            attempt="ropelens truncate --bands N, or truncate(model, tokens, bands=N)",
        )
    check_measures(table, [measure])
    panels = 2 if "selectivity" in truncation else 1
    figure = make_subplots(
        rows=panels, cols=1, vertical_spacing=0.09, row_heights=[0.62, 0.38][:panels]
    )
    spans = _spans(truncation, bands)
    _add_bands(figure, bands, spans, measure)
    _add_controls(figure, table, spans, measure)
    figure.update_yaxes(title_text=MEASURES[measure].title, zeroline=True, row=1)
    figure.update_yaxes(range=_with_room(table, measure), row=1)
    if panels == 2:
        _add_selectivity(figure, truncation)
    figure.update_layout(
        template=template("light"),
        title_text="What each band of wavelengths is worth",
        height=200 + 180 * panels,
        margin_t=80,
    )
    figure.update_xaxes(**wavelength_axis(truncation["wavelength"].values))
    ends = [np.log10(min(low for low, _ in spans)), np.log10(max(high for _, high in spans))]
    figure.update_xaxes(range=[float(ends[0]) - 0.03, float(ends[1]) + 0.03])
    for row in range(1, panels):
        figure.update_xaxes(title_text="", showticklabels=False, row=row)
    figure.update_xaxes(title_text=AXIS_TITLE, row=panels)
    _add_marks(figure, truncation, ends)
    return figure


def _with_room(table: pd.DataFrame, measure: str) -> list[float]:
    """The range of the upper panel, with room above for the words at the marks."""
    column = MEASURES[measure].column
    shown = table[table["kind"].isin(["none", "band", "band control"])]
    known = [name for name in (column, f"{column}_low", f"{column}_high") if name in shown]
    low, high = float(shown[known].min().min()), float(shown[known].max().max())
    reach = high - low or 1.0
    return [low - 0.05 * reach, high + 0.25 * reach]


def _spans(truncation: xr.Dataset, bands: pd.DataFrame) -> list[tuple[float, float]]:
    """Where each band begins and ends on the axis (tokens): at its outer planes' borders."""
    wavelength = truncation["wavelength"].transpose("layer", "frequency").values
    low, high = plane_borders(wavelength)
    spans = []
    for band in bands.itertuples():
        inside = (wavelength >= band.wavelength_low) & (wavelength <= band.wavelength_high)
        spans.append((float(low[inside].min()), float(high[inside].max())))
    return spans


def _add_bands(
    figure: go.Figure, bands: pd.DataFrame, spans: list[tuple[float, float]], measure: str
) -> None:
    column = MEASURES[measure].column
    change = bands[column].to_numpy(float)
    error = None
    bounds = [f"{column}_high", f"{column}_low"]
    if set(bounds) <= set(bands):
        reach = np.nan_to_num(np.abs(bands[bounds].to_numpy(float) - change[:, None]))
        error = {"array": reach[:, 0], "arrayminus": reach[:, 1], "thickness": 1.5, "width": 4}
    low, high = np.array(spans).T
    hovers = [hover_text(row, MEASURES[measure]) for row in bands.to_dict("records")]
    figure.add_bar(
        x=(low + high) / 2,
        width=(high - low),
        y=change,
        name="one band stopped",
        marker={"color": COLORS["positional"], "opacity": 0.55, "line": {"width": 1}},
        text=hovers,
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
        row=1,
        col=1,
    )
    # A bar's own error stands at the middle of its width, which a logarithmic axis moves.
    figure.add_scatter(
        x=np.sqrt(low * high),
        y=change,
        error_y=error,
        mode="markers",
        marker={"color": COLORS["positional"], "size": 6},
        showlegend=False,
        hoverinfo="skip",
        row=1,
        col=1,
    )


def _add_controls(
    figure: go.Figure, table: pd.DataFrame, spans: list[tuple[float, float]], measure: str
) -> None:
    """Random sets of a band's size: a cross a draw over the band, dashed their mean."""
    column = MEASURES[measure].column
    draws = table[table["kind"] == "band control"]
    if not len(draws):
        return
    numbers = table.loc[table["kind"] == "band", "band"]
    span = dict(zip(numbers, spans, strict=True))
    figure.add_scatter(
        x=[float(np.sqrt(span[band][0] * span[band][1])) for band in draws["band"]],
        y=draws[column],
        mode="markers",
        marker={"color": MUTED, "size": 6, "symbol": "x"},
        name="random planes",
        legendgroup="random",
        text=[hover_text(row, MEASURES[measure]) for row in draws.to_dict("records")],
        hovertemplate="%{text}<extra></extra>",
        row=1,
        col=1,
    )
    x: list[float | None] = []
    y: list[float | None] = []
    for band, mean in draws.groupby("band")[column].mean().items():
        x += [*span[band], None]
        y += [mean, mean, None]
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": MUTED, "width": 2, "dash": "4px,3px"},
        legendgroup="random",
        showlegend=False,
        hoverinfo="skip",
        row=1,
        col=1,
    )


def _add_selectivity(figure: go.Figure, truncation: xr.Dataset) -> None:
    """Share of the positive selectivity by wavelength, mean over all heads."""
    places = wavelength_positions(truncation["wavelength"].values)
    share = 100 * np.nanmean(selectivity_shares(truncation), axis=1)
    kept = np.isfinite(places) & np.isfinite(share)
    mean = pd.Series(share[kept]).groupby(np.round(np.log(places[kept]), 4)).mean()
    figure.add_scatter(
        x=np.exp(mean.index.to_numpy()),
        y=mean.to_numpy(),
        mode="lines+markers",
        line={"color": COLORS["semantic"], "width": 2},
        marker={"symbol": "square", "size": 6},
        name="selectivity",
        hovertemplate="wavelength %{x:.3~s} tokens<br>%{y:.1f}% of the selectivity"
        "<extra></extra>",
        row=2,
        col=1,
    )
    title = "selectivity<br>(% of positive)"
    figure.update_yaxes(title_text=title, rangemode="tozero", row=2)


def _add_marks(figure: go.Figure, truncation: xr.Dataset, ends: list[float]) -> None:
    for mark in marks(truncation):
        if not ends[0] < np.log10(mark.wavelength) < ends[1]:
            continue
        line = {"width": 1.5, "dash": "dot", "color": MUTED}
        figure.add_vline(x=mark.wavelength, line=line, name=mark.name)
        figure.add_annotation(
            x=float(np.log10(mark.wavelength)),
            y=1,
            xref="x",
            yref="y domain",
            xanchor="left" if mark.name == "band" else "right",
            yanchor="top",
            align="left" if mark.name == "band" else "right",
            text=mark.words,
            name=mark.name,
        )
