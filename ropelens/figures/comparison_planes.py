"""What each group of a comparison carries in its planes, at the end and as it learns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import entries_of
from ropelens.figures.comparison import Look, group_line, looks
from ropelens.figures.style import MUTED, log_axis, mark, new_figure
from ropelens.figures.text import plotly_text, short_count
from ropelens.figures.wavelengths import AXIS_TITLE, marks

ROOM = 0.45
"""Share of the first panel's values that is left above them for the marks' words."""

PANELS = {
    "q_norm": "query norm<br>(model units)",
    "k_norm": "key norm<br>(model units)",
    "selectivity_keys": "selectivity on keys<br>(nats)",
}


def plot_comparison_planes(comparison: xr.Dataset, *, by_step: bool = False) -> go.Figure:
    """Norms and selectivity of the planes, means over layers, heads and seeds.

    Whiskers reach from the lowest seed to the highest. Planes stand at their wavelength. One
    that does not rotate stands where the same plane of another group rotates, and is hollow.
    `by_step`: at each checkpoint of the runs, with a slider.
    """
    if not by_step:
        return _draw("What the planes carry", comparison, [_lines(comparison, prefix="")])
    steps = comparison["step"].values
    frames = [_lines(comparison.isel(step=i), prefix="growth_") for i in range(len(steps))]
    figure = _draw("What the planes carry, as the models learn", comparison, frames)
    places = list(range(len(frames[-1])))
    slides = [
        {"label": f"{step:,}", "method": "restyle", "args": [_changes(frame), places]}
        for step, frame in zip(steps, frames, strict=True)
    ]
    slider = {"active": len(steps) - 1, "currentvalue": {"prefix": "step "}, "pad": {"t": 56}}
    colors = {"bgcolor": MUTED, "bordercolor": MUTED, "tickcolor": MUTED}
    return figure.update_layout(height=650, sliders=[slider | colors | {"steps": slides}])


def plane_places(comparison: xr.Dataset, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the planes of `group` stand (tokens), and whether they rotate, [frequency] each.

    The wavelength of a plane is its median over layers. One that does not rotate takes the
    place of the same plane in the first entry of as many planes in which it does, else NaN.
    """
    wavelength = comparison["wavelength"].median("layer").transpose("entry", "frequency").values
    exists = ~np.isnan(wavelength)
    of_group = wavelength[np.flatnonzero(comparison["group"].values == group)[0]]
    alike = wavelength[(exists == ~np.isnan(of_group)).all(axis=1)]
    turning = np.isfinite(alike)
    lent = np.where(turning.any(0), alike[turning.argmax(0), np.arange(alike.shape[1])], np.nan)
    return np.where(np.isfinite(of_group), of_group, lent), np.isfinite(of_group)


def _lines(comparison: xr.Dataset, *, prefix: str) -> list[go.Scatter]:
    """The lines of all groups, panel after panel; `meta` names the variable of each."""
    return [
        _line(entries_of(comparison, group)[prefix + name], look, name, comparison)
        for name in PANELS
        for group, look in looks(comparison).items()
    ]


def _line(values: xr.DataArray, look: Look, name: str, comparison: xr.Dataset) -> go.Scatter:
    group = str(values["group"].values[0])
    place, turning = plane_places(comparison, group)
    axes = ("entry", "frequency")
    over = values.mean([dim for dim in values.dims if dim not in axes]).transpose(*axes)
    return go.Scatter(
        x=place,
        **group_line(group, look, over),
        showlegend=False,
        marker={"size": 7, "symbol": [look.symbol + "-open" * (not t) for t in turning]},
        customdata=[short_count(length) for length in np.where(turning, place, np.inf)],
        hovertemplate=f"{plotly_text(group)}<br>%{{y:.3f}}, wavelength "
        "%{customdata} tokens<extra></extra>",
        meta={"x": "wavelength", "y": name},
    )


def _changes(lines: Sequence[go.Scatter]) -> dict[str, list]:
    """The values that another checkpoint changes, as plotly's "restyle" takes them."""
    return {
        "y": [line.y for line in lines],
        "error_y.array": [line.error_y.array for line in lines],
        "error_y.arrayminus": [line.error_y.arrayminus for line in lines],
    }


def _draw(
    title: str, comparison: xr.Dataset, frames: Sequence[Sequence[go.Scatter]]
) -> go.Figure:
    """The lines of the last frame; each panel's range holds those of all frames."""
    rows = {"rows": len(PANELS), "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.05}
    figure = new_figure(title, height=560, **rows)
    for line in frames[-1]:
        figure.add_trace(line, row=list(PANELS).index(line.meta["y"]) + 1, col=1)
    for group, look in looks(comparison).items():
        # A trace of its own: a plane that does not rotate would hollow the legend's mark.
        legend = {"name": plotly_text(group), "legendgroup": group, "mode": "lines+markers"}
        marker = {"size": 7, "symbol": look.symbol}
        place = {"x": [None], "y": [None], "row": 1, "col": 1}
        figure.add_scatter(**place, **legend, line=look.line, marker=marker)
    for row, (name, unit) in enumerate(PANELS.items(), start=1):
        lines = [line for frame in frames for line in frame if line.meta["y"] == name]
        low = min(0.0, *(float(np.nanmin(line.y - line.error_y.arrayminus)) for line in lines))
        high = max(float(np.nanmax(line.y + line.error_y.array)) for line in lines)
        room = ROOM if row == 1 else 0.06
        figure.update_yaxes(title_text=unit, nticks=5, row=row)
        figure.update_yaxes(range=[low and 1.06 * low, (1 + room) * high], row=row)
    figure.update_yaxes(zeroline=True, zerolinecolor=MUTED, row=len(PANELS))
    figure.update_xaxes(
        **log_axis({power: short_count(power) for power in 10.0 ** np.arange(9)})
    )
    figure.update_xaxes(title_text=AXIS_TITLE, row=len(PANELS))
    for at in marks(comparison):
        side = "right" if at.name == "context" else "left"
        mark(figure, at.wavelength, at.words, name=at.name, xanchor=side)
    return figure
