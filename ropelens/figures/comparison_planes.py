"""What each group of a comparison carries in its planes, at the end and as it learns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from ropelens.comparison.pairs import entries_of, group_names
from ropelens.figures.plane_marks import marks
from ropelens.figures.series import looks, mean_and_range
from ropelens.figures.style import MUTED, template
from ropelens.figures.text import plotly_text
from ropelens.figures.wavelengths import AXIS_TITLE, short_count

ROOM = 0.45
"""Share of the first panel's values that is left above them for the marks' words."""

PANELS = {
    "q_norm": "query norm<br>(model units)",
    "k_norm": "key norm<br>(model units)",
    "selectivity": "selectivity<br>(nats)",
}


def plot_comparison_planes(comparison: xr.Dataset) -> go.Figure:
    """Norms and selectivity of the planes, means over layers, heads and seeds.

    Whiskers reach from the lowest seed to the highest.
    Planes stand at their wavelength. One that does not rotate stands where the same plane of
    another group rotates, and is hollow.
    """
    figure = _panels("What the planes carry")
    traces = _traces(comparison, prefix="")
    for trace, row in traces:
        figure.add_trace(trace, row=row, col=1)
    _finish(figure, comparison)
    _scale(figure, traces)
    return figure


def plot_growth_planes(comparison: xr.Dataset) -> go.Figure:
    """As `plot_comparison_planes`, with a slider over the checkpoints of the runs."""
    figure = _panels("What the planes carry, as the models learn")
    steps = comparison["step"].values
    frames = [_traces(comparison.isel(step=i), prefix="growth_") for i in range(len(steps))]
    for trace, row in frames[-1]:
        figure.add_trace(trace, row=row, col=1)
    _finish(figure, comparison)
    _scale(figure, [trace for frame in frames for trace in frame])
    figure.update_layout(
        height=650,
        sliders=[
            {
                "active": len(steps) - 1,
                "currentvalue": {"prefix": "step "},
                "pad": {"t": 56},
                "bgcolor": MUTED,
                "bordercolor": MUTED,
                "tickcolor": MUTED,
                "steps": [
                    {
                        "label": f"{step:,}",
                        "method": "restyle",
                        "args": [_moved(frame), list(range(len(frame)))],
                    }
                    for step, frame in zip(steps, frames, strict=True)
                ],
            }
        ],
    )
    return figure


def plane_places(comparison: xr.Dataset, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the planes of `group` stand (tokens), and whether they rotate, [frequency] each.

    The wavelength of a plane is its median over layers. One that does not rotate takes the
    place of the same plane in the first entry of as many planes in which it does; NaN in none.
    """
    wavelength = comparison["wavelength"].median("layer").transpose("entry", "frequency").values
    exists = ~np.isnan(wavelength)
    own = wavelength[np.flatnonzero(comparison["group"].values == group)[0]]
    alike = wavelength[(exists == ~np.isnan(own)).all(axis=1)]
    turning = np.isfinite(alike)
    lent = np.where(turning.any(0), alike[turning.argmax(0), np.arange(alike.shape[1])], np.nan)
    return np.where(np.isfinite(own), own, lent), np.isfinite(own)


def _panels(title: str) -> go.Figure:
    figure = make_subplots(rows=len(PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.05)
    figure.update_layout(template=template("light"), title_text=title, height=560)
    return figure


def _traces(comparison: xr.Dataset, *, prefix: str) -> list[tuple[go.Scatter, int]]:
    """A line for each panel and group, with the row of its panel."""
    look = looks(comparison)
    found = []
    for row, name in enumerate(PANELS, start=1):
        for group in group_names(comparison):
            values = entries_of(comparison, group)[prefix + name]
            kept = ("entry", "frequency")
            values = values.mean([dim for dim in values.dims if dim not in kept])
            place, turning = plane_places(comparison, group)
            symbol = look[group].symbol
            found.append(
                (
                    go.Scatter(
                        x=place,
                        **mean_and_range(values.transpose(*kept)),
                        name=plotly_text(group),
                        legendgroup=group,
                        showlegend=False,
                        mode="lines+markers",
                        line=look[group].line,
                        marker={
                            "size": 7,
                            "symbol": [symbol if t else f"{symbol}-open" for t in turning],
                        },
                        customdata=[
                            short_count(w) if t else "∞"
                            for w, t in zip(place, turning, strict=True)
                        ],
                        hovertemplate=f"{plotly_text(group)}<br>%{{y:.3f}}, wavelength "
                        "%{customdata} tokens<extra></extra>",
                        meta={"x": "wavelength", "y": name},
                    ),
                    row,
                )
            )
    return found


def _moved(frame: Sequence[tuple[go.Scatter, int]]) -> dict[str, list]:
    """What of a figure's traces another checkpoint changes, as plotly's "restyle" has it."""
    return {
        "y": [trace.y for trace, _ in frame],
        "error_y.array": [trace.error_y.array for trace, _ in frame],
        "error_y.arrayminus": [trace.error_y.arrayminus for trace, _ in frame],
    }


def _scale(figure: go.Figure, traces: Sequence[tuple[go.Scatter, int]]) -> None:
    """One range for each panel that holds all of `traces`; the first has room for words."""
    for row in range(1, len(PANELS) + 1):
        shown = [trace for trace, panel in traces if panel == row]
        lows = np.concatenate([trace.y - trace.error_y.arrayminus for trace in shown])
        highs = np.concatenate([trace.y + trace.error_y.array for trace in shown])
        low, high = min(0.0, float(np.nanmin(lows))), float(np.nanmax(highs))
        room = ROOM if row == 1 else 0.06
        figure.update_yaxes(range=[low and 1.06 * low, (1 + room) * high], row=row)


def _finish(figure: go.Figure, comparison: xr.Dataset) -> None:
    """Legend and axes, and marks where the trained context and the predicted band lie."""
    for group, look in looks(comparison).items():
        # By a trace of its own: a plane that stands still would hollow the legend's mark.
        figure.add_scatter(
            x=[None],
            y=[None],
            name=plotly_text(group),
            legendgroup=group,
            mode="lines+markers",
            line=look.line,
            marker={"size": 7, "symbol": look.symbol},
            row=1,
            col=1,
        )
    for row, title in enumerate(PANELS.values(), start=1):
        figure.update_yaxes(title_text=title, nticks=5, row=row)
    figure.update_yaxes(zeroline=True, zerolinecolor=MUTED, row=len(PANELS))
    powers = 10.0 ** np.arange(0, 9)
    figure.update_xaxes(
        type="log", tickvals=powers, ticktext=[short_count(power) for power in powers]
    )
    figure.update_xaxes(title_text=AXIS_TITLE, row=len(PANELS))
    for mark in marks(comparison):
        figure.add_vline(x=mark.wavelength, line={"width": 1.5, "dash": "dot", "color": MUTED})
        figure.add_annotation(
            x=np.log10(mark.wavelength),
            y=1,
            yref="y domain",
            xanchor="right" if mark.name == "context" else "left",
            yanchor="top",
            text=mark.words,
        )
