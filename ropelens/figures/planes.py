"""The axis of wavelengths: places, borders and columns of planes, and marks on the axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from ropelens.figures import style
from ropelens.figures.formats import short_count
from ropelens.profiles.kinds import Reach, window_of

AXIS_TITLE = "wavelength (tokens, log scale)"
LONE_HALF_WIDTH = 0.35  # half width of a plane without neighbours, in log tokens
LEAST_HALF_WIDTH = 1e-3  # planes with equal wavelengths need a width too
SAME_BORDER = 1e-4  # in log tokens; measured layers differ in the sixth digit
STOPPED = "∞<br>(stopped)"
NO_PLANES = np.array([1.0, 10.0])  # range of an axis without planes, in tokens

Wavelengths = Float[np.ndarray, "layer frequency"]
"""Wavelength of each plane (tokens): infinite without rotation, NaN if a layer lacks it."""


def wavelength_positions(wavelength: Wavelengths) -> Wavelengths:
    """Position of each plane on the axis, in tokens (the wavelength).

    Planes that do not rotate follow after a gap, at most one usual step apart, and fill at most
    a third of the width of the other planes. NaN (the layer lacks the plane) stays NaN.
    """
    logs = np.log(np.where(np.isfinite(wavelength), wavelength, np.nan))
    endless = np.isinf(wavelength)
    # Measured wavelengths of two layers differ in the last digits, so compare within a layer.
    steps = np.diff(np.sort(logs, axis=-1), axis=-1)
    steps = steps[np.isfinite(steps)]
    usual = float(np.median(steps)) if steps.size else float(np.log(2))
    rotating = logs[np.isfinite(logs)]
    longest = float(rotating.max()) if rotating.size else 0.0
    step = usual
    most_endless = int(endless.sum(-1).max())
    if steps.size and most_endless:
        width = longest - float(rotating.min())
        step = min(usual, width / (3 * most_endless))
    gap = usual / 2 + 0.5 + max(step / 2, LONE_HALF_WIDTH)
    # cumsum numbers the planes of a layer that do not rotate: 1, 2, 3, ...
    beyond = longest + gap + step * (np.cumsum(endless, axis=-1) - 1)
    positions = np.where(np.isnan(logs), np.nan, wavelength)
    return np.where(endless, np.exp(beyond), positions)


def set_wavelengths(figure: go.Figure, wavelength: Wavelengths) -> None:
    """Give x the range of wavelengths on a log scale, with ticks at powers of ten and "∞"."""
    positions = wavelength_positions(wavelength)
    labels = {}
    rotating = positions[np.isfinite(wavelength)]
    if rotating.size:
        low, high = np.log10([rotating.min(), rotating.max()])
        for power in range(int(np.ceil(low)), int(high) + 1):
            labels[float(10**power)] = short_count(10**power)
    endless = positions[np.isinf(wavelength)]
    if endless.size:
        labels[float(np.exp(np.log(endless).mean()))] = "∞"
    drawn = positions[np.isfinite(positions)]
    if not drawn.size:
        drawn = NO_PLANES
    ends = np.log10([drawn.min(), drawn.max()]) + np.array([-0.12, 0.12])
    style.set_log_ticks(figure, labels, ends=ends.tolist())
    style.set_x_title(figure, AXIS_TITLE)


def shade_stopped(figure: go.Figure, wavelength: Wavelengths) -> None:
    """Shade and name the group of planes that do not rotate, which is not a wavelength."""
    endless = wavelength_positions(wavelength)[np.isinf(wavelength)]
    if not endless.size:
        return
    room = np.exp(LONE_HALF_WIDTH)
    figure.add_vrect(
        x0=float(endless.min() / room),
        x1=float(endless.max() * room),
        fillcolor=style.SHADE,
        opacity=0.6,
        line_width=0,
        layer="below",
        name="stopped",
    )
    for axis in figure.select_xaxes():
        words = [text.replace("∞", STOPPED) for text in axis.ticktext]
        axis.ticktext = words


def reach_of(results: xr.Dataset, layers: Sequence[int], context_name: str) -> Reach:
    """The window or chunk of `layers`, or the "context" or "trained context" if shorter."""
    attribute = context_name.replace(" ", "_")
    context = Reach(context_name, int(results.attrs.get(attribute, 0)))
    window = window_of(results, layers)
    if window and window.length <= context.length:
        return window
    return context


def mark_context(
    figure: go.Figure,
    profile: xr.Dataset,
    layers: Sequence[int],
    *,
    row: int | None = None,
    color: str = style.MUTED,
    y: float = 1,
    yanchor: str = "bottom",
) -> None:
    """Mark the window, chunk or context of `layers`; slower planes do not finish one turn."""
    reach = reach_of(profile, layers, "context")
    turning = profile["wavelength"].values[layers]
    turning = turning[np.isfinite(turning)]
    if turning.size and turning.min() < reach.length < turning.max():
        style.mark(
            figure,
            reach.length,
            reach.name,
            row="all" if row is None else row,
            color=color,
            y=y,
            yanchor=yanchor,
        )


def mark_trained(figure: go.Figure, results: xr.Dataset, layers: Sequence[int]) -> None:
    """Mark the reach of `layers` if it is inside the range of the first panel."""
    low, high = 10.0 ** np.array(figure.layout.xaxis.range)
    reach = reach_of(results, layers, "trained context")
    if low < reach.length < high:
        words = f"{reach.name}<br>{reach.length:,} tokens"
        style.mark(figure, reach.length, words, xanchor="right", yanchor="bottom")


@dataclass(frozen=True)
class Borders:
    """Start and end of each plane on the axis, in tokens [layer, frequency]."""

    low: Wavelengths
    high: Wavelengths


def plane_borders(wavelength: Wavelengths) -> Borders:
    """Borders of each plane on the axis.

    Neighbours meet at their geometric mean. The gap before planes that do not rotate is empty.
    """
    centres = np.log(wavelength_positions(wavelength))
    low = np.full_like(centres, np.nan)
    high = np.full_like(centres, np.nan)
    for layer, of_layer in enumerate(wavelength):
        for planes in (
            np.flatnonzero(np.isfinite(of_layer)),
            np.flatnonzero(np.isinf(of_layer)),
        ):
            planes = planes[np.argsort(centres[layer, planes], kind="stable")]
            centre = centres[layer, planes]
            half = _half_widths(centre)
            low[layer, planes] = centre - half[: len(centre)]
            high[layer, planes] = centre + half[1:][: len(centre)]
    return Borders(np.exp(low), np.exp(high))


def _half_widths(centre: Float[np.ndarray, " plane"]) -> Float[np.ndarray, " border"]:
    """Half of the distance between neighbours, and the same at both ends (in log tokens)."""
    half = np.array([LONE_HALF_WIDTH])
    if len(centre) > 1:
        half = np.diff(centre) / 2
    return np.pad(np.maximum(half, LEAST_HALF_WIDTH), 1, mode="edge")


@dataclass(frozen=True)
class Columns:
    """Columns of a map in which all layers show their planes.

    `edges` [column + 1] are in tokens. `planes` [layer, column] are the planes of the columns;
    -1 marks a column without a plane. If layers differ, a plane covers several columns.
    """

    edges: Float[np.ndarray, " edge"]
    planes: np.ndarray


def common_columns(wavelength: Wavelengths) -> Columns:
    borders = plane_borders(wavelength)
    low = borders.low
    high = borders.high
    logs = np.log(np.concatenate([low[np.isfinite(low)], high[np.isfinite(high)]]))
    logs = np.sort(logs) if logs.size else np.log(NO_PLANES)
    edges = np.exp(logs[np.append(True, np.diff(logs) > SAME_BORDER)])
    centres = np.sqrt(edges[1:] * edges[:-1])
    inside = (low[..., None] < centres) & (centres < high[..., None])
    return Columns(edges, np.where(inside.any(1), inside.argmax(1), -1))


@dataclass(frozen=True)
class Cells:
    """The cells of a heat map of planes.

    `edges` [column + 1] are in tokens. `values` [row, column] are NaN, and `wavelengths` [row,
    column] are "", for columns without a plane.
    """

    edges: Float[np.ndarray, " edge"]
    values: Float[np.ndarray, "row column"]
    wavelengths: np.ndarray


def plane_cells(
    wavelength: Wavelengths,
    values: Float[np.ndarray, "row frequency"],
    layers: np.ndarray,
) -> Cells:
    """Cells for the `values` of rows, which belong to these `layers`."""
    columns = common_columns(wavelength)
    planes = columns.planes[layers]
    in_columns = np.take_along_axis(values, np.maximum(planes, 0), axis=1)
    names = []
    for of_layer, of_row in zip(wavelength[layers], planes, strict=True):
        counts = [short_count(of_layer[plane]) for plane in of_row]
        names.append(np.where(of_row >= 0, counts, ""))
    return Cells(
        edges=columns.edges,
        values=np.where(planes >= 0, in_columns, np.nan),
        wavelengths=np.array(names),
    )
