"""Figure of the effect of stopping one band of wavelengths."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style
from ropelens.figures.planes import (
    Wavelengths,
    mark_trained,
    plane_borders,
    set_wavelengths,
)
from ropelens.figures.sweep_traces import (
    add_draws,
    add_mean_of_draws,
    changes_of,
    figure_with_marks,
    swept_planes,
)
from ropelens.figures.truncation_ends import AXIS_TITLES

BAR_COLOR = style.VARIANT_COLORS[2]


@dataclass(frozen=True)
class BandSpan:
    """The part of the axis of wavelengths that a band covers, in tokens."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The middle on a logarithmic axis."""
        return float(np.sqrt(self.low * self.high))


def bands_figure(
    truncation: xr.Dataset, table: pd.DataFrame, measure: str
) -> go.Figure:
    """A bar for each band, as wide as its wavelengths; `measure` is a column of the table."""
    swept = swept_planes(truncation)
    bands = table[table["kind"] == "band"]
    spans = _spans(bands, swept.wavelength)
    figure = figure_with_marks(
        f"Effect of stopping one band of wavelengths{swept.title_end}", height=400
    )
    _add_bars(figure, bands, measure, list(spans.values()))
    _add_random_bands(figure, table, measure, spans)
    figure.update_yaxes(title_text=AXIS_TITLES[measure], zeroline=True)
    set_wavelengths(figure, swept.wavelength)
    first = np.log10(min(span.low for span in spans.values()))
    last = np.log10(max(span.high for span in spans.values()))
    figure.update_xaxes(range=[float(first) - 0.03, float(last) + 0.03])
    mark_trained(figure, truncation, swept.layers)
    return figure


def _spans(bands: pd.DataFrame, wavelength: Wavelengths) -> dict[int, BandSpan]:
    """The span of each band, by its number."""
    borders = plane_borders(wavelength)
    spans = {}
    for band in bands.to_dict("records"):
        longer = wavelength >= band["wavelength_low"]
        inside = longer & (wavelength <= band["wavelength_high"])
        low = borders.low[inside].min()
        high = borders.high[inside].max()
        spans[band["band"]] = BandSpan(low, high)
    return spans


def _add_bars(
    figure: go.Figure, bands: pd.DataFrame, measure: str, spans: list[BandSpan]
) -> None:
    changes = changes_of(bands, measure)
    low = np.array([span.low for span in spans])
    high = np.array([span.high for span in spans])
    figure.add_bar(
        x=(low + high) / 2,
        y=changes.values,
        width=high - low,
        text=changes.hovers,
        textposition="none",
        hovertemplate=style.TEXT_ONLY,
        name="one band stopped",
        marker={"color": BAR_COLOR, "opacity": 0.55, "line": {"width": 1}},
    )
    # The error bars of a bar would be off its centre on a logarithmic axis.
    figure.add_scatter(
        x=np.sqrt(low * high),
        y=changes.values,
        error_y=changes.bars,
        text=changes.hovers,
        hovertemplate=style.TEXT_ONLY,
        mode="markers",
        marker={"color": BAR_COLOR, "size": 6},
        showlegend=False,
    )


def _add_random_bands(
    figure: go.Figure, table: pd.DataFrame, measure: str, spans: dict[int, BandSpan]
) -> None:
    """Draw random sets of planes, as many as each band has, and their means."""
    draws = table[table["kind"] == "band control"]
    if draws.empty:
        return
    x: list[float | None] = []
    y: list[float | None] = []
    means = draws.groupby("band")[measure].mean()
    for band, span in spans.items():
        if band not in means:
            continue
        mean = means[band]
        x += [span.low, span.high, None]  # None ends the line
        y += [mean, mean, None]
    add_mean_of_draws(figure, x, y)
    middles = [spans[band].middle for band in draws["band"]]
    add_draws(figure, middles, changes_of(draws, measure))
