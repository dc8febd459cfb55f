"""What each band of wavelengths is worth, beside how much the heads select through it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from ropelens.errors import BadArgument
from ropelens.figures.label_selectivity import mean_share, selectivity_shares
from ropelens.figures.plane_marks import marks
from ropelens.figures.series import COLORS
from ropelens.figures.style import TEXT_ONLY, mark, new_figure
from ropelens.figures.truncation import (
    MEAN_OF_DRAWS,
    MEASURES,
    Measure,
    change_and_bars,
    check_measures,
    draw_crosses,
    hover_texts,
)
from ropelens.figures.wavelengths import (
    one_title,
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
    panels = 2 if "selectivity_keys" in truncation else 1
    figure = new_figure(
        "What each band of wavelengths is worth",
        height=200 + 180 * panels,
        **{"rows": panels, "cols": 1, "vertical_spacing": 0.09},
        row_heights=[0.62, 0.38][:panels],
    ).update_layout(margin_t=80)
    spans = _spans(truncation, bands)
    _add_bands(figure, bands, spans, MEASURES[measure])
    _add_random(figure, table, spans, MEASURES[measure])
    figure.update_yaxes(title_text=MEASURES[measure].title, zeroline=True, row=1)
    figure.update_yaxes(range=_with_room(table, MEASURES[measure].column), row=1)
    if panels == 2:
        _add_selectivity(figure, truncation)
    ends = np.log10([spans.min(), spans.max()])
    figure.update_xaxes(**wavelength_axis(truncation["wavelength"].values))
    figure.update_xaxes(range=[float(ends[0]) - 0.03, float(ends[1]) + 0.03])
    one_title(figure)
    for row in range(1, panels):
        figure.update_xaxes(showticklabels=False, row=row)
    for at in marks(truncation):
        if spans.min() < at.wavelength < spans.max():
            side = "left" if at.name == "band" else "right"
            mark(figure, at.wavelength, at.words, name=at.name, xanchor=side, align=side)
    return figure


def _with_room(table: pd.DataFrame, column: str) -> list[float]:
    """The range of the upper panel, with room above for the words at the marks."""
    shown = table[table["kind"].isin(["none", "band", "band control"])]
    known = [name for name in (column, f"{column}_low", f"{column}_high") if name in shown]
    low, high = float(shown[known].min().min()), float(shown[known].max().max())
    reach = high - low or 1.0
    return [low - 0.05 * reach, high + 0.25 * reach]


def _spans(truncation: xr.Dataset, bands: pd.DataFrame) -> Float[np.ndarray, "band 2"]:
    """Where each band begins and ends on the axis (tokens): at its outer planes' borders."""
    wavelength = truncation["wavelength"].transpose("layer", "frequency").values
    low, high = plane_borders(wavelength)
    outer = bands[["wavelength_low", "wavelength_high"]].to_numpy(float)
    inside = [(wavelength >= first) & (wavelength <= last) for first, last in outer]
    return np.array([(low[planes].min(), high[planes].max()) for planes in inside])


def _add_bands(
    figure: go.Figure, bands: pd.DataFrame, spans: np.ndarray, measure: Measure
) -> None:
    """A bar a band, and its interval."""
    low, high = spans.T
    bars = change_and_bars(bands, measure)
    figure.add_bar(
        x=(low + high) / 2,
        width=high - low,
        y=bars["y"],
        name="one band stopped",
        marker={"color": COLORS[2], "opacity": 0.55, "line": {"width": 1}},
        text=hover_texts(bands, measure),
        textposition="none",
        hovertemplate=TEXT_ONLY,
        row=1,
        col=1,
    )
    # A bar's own error stands at the middle of its width, which a logarithmic axis moves.
    marker = {"color": COLORS[2], "size": 6}
    look = {"mode": "markers", "marker": marker, "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(x=np.sqrt(low * high), **bars, **look, row=1, col=1)


def _add_random(
    figure: go.Figure, table: pd.DataFrame, spans: np.ndarray, measure: Measure
) -> None:
    """Random sets of a band's size: a cross a draw over the band, dashed their mean."""
    draws = table[table["kind"] == "band control"]
    if not len(draws):
        return
    span = dict(zip(table.loc[table["kind"] == "band", "band"], spans, strict=True))
    middles = [float(np.sqrt(span[band].prod())) for band in draws["band"]]
    figure.add_scatter(x=middles, **draw_crosses(draws, measure, size=6), row=1, col=1)
    means = draws.groupby("band")[measure.column].mean()
    x = [place for band in means.index for place in (*span[band], None)]
    y = [value for mean in means for value in (mean, mean, None)]
    figure.add_scatter(x=x, y=y, **MEAN_OF_DRAWS, showlegend=False, row=1, col=1)


def _add_selectivity(figure: go.Figure, truncation: xr.Dataset) -> None:
    """Share of the positive selectivity by wavelength, mean over all heads."""
    wavelength = truncation["wavelength"].values
    shares = np.nanmean(selectivity_shares(truncation), axis=1)
    figure.add_scatter(
        **mean_share(wavelength_positions(wavelength), shares, wavelength),
        mode="lines+markers",
        line={"color": COLORS[1], "width": 2},
        marker={"symbol": "square", "size": 6},
        name="push",
        hovertemplate="wavelength %{text} tokens<br>%{y:.1f}% of the push<extra></extra>",
        row=2,
        col=1,
    )
    title = "push toward<br>keys (%)"
    figure.update_yaxes(title_text=title, rangemode="tozero", row=2)
