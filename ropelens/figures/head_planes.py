"""Figures of the planes of one head, and of its scores between two tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from ropelens.arguments import public
from ropelens.figures import style
from ropelens.figures.inputs import Head, Layer, head_of, kv_heads
from ropelens.figures.planes import (
    mark_context,
    set_wavelengths,
    shade_stopped,
    wavelength_positions,
)
from ropelens.profiles.measures import complete_profile

MAX_MARKED_PLANES = 32  # markers of more planes overlap and are slow


@dataclass(frozen=True)
class PlaneLine:
    """A line of the figure: its variable, its name in the legend, its panel, and its look."""

    variable: str
    name: str
    panel: int
    line: Mapping[str, object]
    marker_size: int
    filled: bool = False


FILLED_LINE = {"width": 1.5, "shape": "hvh"}
DASHED_STEPS = {"width": 2, "dash": "4px,3px", "color": style.MUTED, "shape": "hvh"}
SOLID = {"width": 2}
PANEL_TITLES = (
    "selectivity<br>(nats)",
    "norm<br>(model units)",
    "coherence<br>(0 to 1)",
)
PLANE_LINES = (
    PlaneLine("selectivity_keys", "on keys", 1, FILLED_LINE, 4, filled=True),
    PlaneLine("selectivity_sink", "on sinks", 1, DASHED_STEPS, 3),
    PlaneLine("q_norm", "query", 2, SOLID, 5),
    PlaneLine("k_norm", "key", 2, style.DASHED, 5),
    PlaneLine("q_coherence", "query", 3, SOLID, 5),
    PlaneLine("k_coherence", "key", 3, style.DASHED, 5),
)


@public
def plot_selectivity(
    profile: xr.Dataset, *, layer: Layer = None, head: Head
) -> go.Figure:
    """Selectivity, norms and coherence of a head by wavelength, in three panels.

    Selectivity is the push of a plane toward the keys that the head picks. Norms bound the
    push. Coherence is 1 if the plane has the same vector for all tokens, and at least 0. The
    selectivity of a capture includes sinks. The head is "2.3", or layer=2, head=3. Trace `meta`
    names the variable of each axis; `customdata` is the wavelength in tokens.
    """
    profile = complete_profile(profile)
    drawn = head_of(profile, layer, head)
    numbers = drawn.dataset
    indices = {
        "layer": drawn.layer,
        "head": drawn.index,
        "kv_head": kv_heads(numbers)[drawn.layer, drawn.index],
    }
    wavelength = numbers["wavelength"].values
    positions = wavelength_positions(wavelength)[drawn.layer]
    figure = style.stacked(
        f"Planes of layer {drawn.name_of_layer}, head {drawn.name_of_head}",
        len(PANEL_TITLES),
        height=460,
        row_heights=[0.4, 0.34, 0.26],
    )
    add_plane_lines(
        figure,
        PLANE_LINES,
        numbers.isel(indices, missing_dims="ignore"),
        positions=positions,
        wavelength=wavelength[drawn.layer],
        some_stop=bool(np.isinf(wavelength).any()),
    )
    for row, title in enumerate(PANEL_TITLES, start=1):
        figure.update_yaxes(title_text=title, nticks=5, row=row)
    figure.update_yaxes(zeroline=True, row=1)
    figure.update_yaxes(rangemode="tozero", row=2)
    figure.update_yaxes(range=[-0.03, 1.03], tickvals=[0, 0.5, 1], row=3)
    set_wavelengths(figure, wavelength)
    shade_stopped(figure, wavelength)
    mark_context(figure, numbers, [drawn.layer])
    return style.note_missing(figure, "no plane of this head was measured")


def add_plane_lines(
    figure: go.Figure,
    lines: Sequence[PlaneLine],
    of_head: xr.Dataset,
    *,
    positions: Float[np.ndarray, " frequency"],
    wavelength: Float[np.ndarray, " frequency"],
    some_stop: bool,
) -> None:
    """Draw the variables of the planes of one head, each in the panel of its line.

    If `some_stop`, planes that do not rotate are points, which no line joins. Trace `meta`
    names the variable of each axis and the drawn planes; `customdata` is the wavelength in
    tokens.
    """
    stopped = np.isinf(wavelength)
    for line in lines:
        values = of_head[line.variable].values
        if some_stop:
            values = np.where(stopped, np.nan, values)
        _add_line(figure, line, positions, values, wavelength, some_stop)
    if not some_stop:
        return
    for line in lines:
        values = np.where(stopped, of_head[line.variable].values, np.nan)
        _add_stopped_planes(figure, line, positions, values, wavelength)


def _add_line(
    figure: go.Figure,
    line: PlaneLine,
    positions: Float[np.ndarray, " frequency"],
    values: Float[np.ndarray, " frequency"],
    wavelength: Float[np.ndarray, " frequency"],
    some_stop: bool,
) -> None:
    meta = _variables(line)
    if some_stop:
        meta["planes"] = "rotating"
    few = len(positions) <= MAX_MARKED_PLANES
    hover = f"{line.name} %{{y:.3f}}<br>wavelength %{{customdata:.3~s}} tokens"
    figure.add_scatter(
        x=positions,
        y=values,
        customdata=wavelength,
        meta=meta,
        mode="lines+markers" if few or line.filled else "lines",
        line=line.line,
        marker={"size": line.marker_size},
        fill="tozeroy" if line.filled else None,
        fillcolor=style.SHADE if line.filled else None,
        name=line.name,
        legendgroup=line.name,
        showlegend=line.panel < len(PANEL_TITLES),
        hovertemplate=f"{hover}<extra></extra>",
        row=line.panel,
        col=1,
    )


def _add_stopped_planes(
    figure: go.Figure,
    line: PlaneLine,
    positions: Float[np.ndarray, " frequency"],
    values: Float[np.ndarray, " frequency"],
    wavelength: Float[np.ndarray, " frequency"],
) -> None:
    figure.add_scatter(
        x=positions,
        y=values,
        customdata=wavelength,
        meta={**_variables(line), "planes": "stopped"},
        mode="markers",
        marker={"size": line.marker_size, "color": line.line.get("color")},
        name=line.name,
        legendgroup=line.name,
        showlegend=False,
        hovertemplate=f"{line.name} %{{y:.3f}}<br>does not rotate<extra></extra>",
        row=line.panel,
        col=1,
    )


def _variables(line: PlaneLine) -> dict[str, str]:
    """The variable of each axis of a trace, from which the script fills it."""
    return {
        "x": "wavelength_position",
        "y": line.variable,
        "customdata": "wavelength",
    }


def pair_figure(profile: xr.Dataset) -> go.Figure:
    """Panels of pushes and scores without data, which the script fills for a pair."""
    figure = style.new_figure(
        "One query, one key",
        height=380,
        rows=2,
        cols=1,
        vertical_spacing=0.2,
        row_heights=[0.5, 0.5],
    )
    hover = "%{y:+.2f} nats<br>wavelength %{customdata[0]:.3~s} tokens%{customdata[1]}"
    figure.add_bar(
        x=[], y=[], hovertemplate=f"{hover}<extra></extra>", meta={"role": "push"}
    )
    figure.add_scatter(
        x=[],
        y=[],
        meta={"role": "score"},
        mode="lines",
        line={"width": 1.2},
        hovertemplate="%{x} tokens back: %{y:.2f} nats<extra></extra>",
        row=2,
        col=1,
    )
    figure.add_scatter(
        x=[],
        y=[],
        meta={"role": "here"},
        mode="markers",
        marker={"size": 11, "symbol": "circle-open", "line": {"width": 2.5}},
        hoverinfo="skip",
        row=2,
        col=1,
    )
    set_wavelengths(figure, profile["wavelength"].values)
    figure.update_xaxes(title_text=figure.layout.xaxis2.title.text, row=1)
    figure.update_xaxes(
        type="linear",
        tickmode="auto",
        autorange=True,
        rangemode="tozero",
        title_text="distance (tokens)",
        row=2,
    )
    figure.update_yaxes(title_text="push<br>(nats)", zeroline=True, nticks=5, row=1)
    figure.update_yaxes(title_text="score<br>(nats)", zeroline=True, nticks=5, row=2)
    return figure.update_traces(showlegend=False)
