"""Logarithmic axis of wavelengths, with room for planes that do not rotate."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.formats import short_count
from ropelens.figures.style import MUTED, log_axis, mark, set_x

AXIS_TITLE = "wavelength (tokens, log scale)"
LONE_HALF_WIDTH = 0.35  # half width of a plane without neighbours, in log tokens
NO_PLANES = np.array([1.0, 10.0])  # range of an axis without planes, in tokens


def wavelength_positions(wavelength: np.ndarray) -> np.ndarray:
    """Position of each plane on the axis [layer, frequency], in tokens: its finite wavelength.

    Planes that do not rotate follow after a gap, at most one usual step apart, and fill at most
    a third of the width of the other planes. NaN (the layer lacks the plane) stays NaN.
    """
    finite = np.log(np.where(np.isfinite(wavelength), wavelength, np.nan))
    endless = np.isinf(wavelength)
    # Measured wavelengths of two layers differ in the last digits, so compare within a layer.
    apart = np.diff(np.sort(finite, axis=-1), axis=-1)
    apart = apart[np.isfinite(apart)]
    usual = float(np.median(apart)) if apart.size else float(np.log(2))
    longest = float(np.nanmax(finite)) if np.isfinite(finite).any() else 0.0
    most = int(endless.sum(-1).max())
    few = not (apart.size and most)
    step = usual if few else min(usual, (longest - float(np.nanmin(finite))) / (3 * most))
    gap = usual / 2 + 0.5 + max(step / 2, LONE_HALF_WIDTH)
    # cumsum numbers the planes of a layer that do not rotate: 1, 2, 3, ...
    beyond = longest + gap + step * (np.cumsum(endless, axis=-1) - 1)
    return np.where(endless, np.exp(beyond), np.where(np.isnan(finite), np.nan, wavelength))


def set_wavelengths(figure: go.Figure, wavelength: np.ndarray) -> None:
    """Give x the range of wavelengths on a log scale, with ticks at powers of ten and "∞"."""
    positions = wavelength_positions(wavelength)
    known = positions[np.isfinite(positions)]
    known = known if known.size else NO_PLANES
    turning = positions[np.isfinite(wavelength)]
    low, high = np.log10([turning.min(), turning.max()]) if turning.size else (1.0, 0.0)
    powers = range(int(np.ceil(low)), int(high) + 1)
    ticks = {float(10**power): short_count(10**power) for power in powers}
    if (endless := positions[np.isinf(wavelength)]).size:
        ticks[float(np.exp(np.log(endless).mean()))] = "∞"
    ends = np.log10([known.min(), known.max()]) + np.array([-0.12, 0.12])
    set_x(figure, log_axis(ticks, range=ends.tolist()), AXIS_TITLE)


def mark_context(
    figure: go.Figure, profile: xr.Dataset, *, color: str = MUTED, below: bool = False
) -> None:
    """Mark the length of the context. Planes with longer wavelengths do not finish one turn."""
    context = int(profile.attrs.get("context", 0))
    turning = profile["wavelength"].values
    turning = turning[np.isfinite(turning)]
    if turning.size and turning.min() < context < turning.max():
        place = {"y": 0, "yanchor": "top"} if below else {"yanchor": "bottom"}
        mark(figure, context, "context", color=color, **place)


def plane_borders(wavelength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each plane on the axis, in tokens, two arrays [layer, frequency].

    Neighbours meet at their geometric mean. The gap before planes that do not rotate is empty.
    """
    place = np.log(wavelength_positions(wavelength))
    low, high = np.full_like(place, np.nan), np.full_like(place, np.nan)
    for layer in range(len(place)):
        for kind in (np.isfinite(wavelength[layer]), np.isinf(wavelength[layer])):
            planes = np.flatnonzero(kind)
            planes = planes[np.argsort(place[layer, planes], kind="stable")]
            centre = place[layer, planes]
            half = np.diff(centre) / 2 if len(centre) > 1 else np.array([LONE_HALF_WIDTH])
            half = np.maximum(half, 1e-3)  # planes with equal wavelengths need a width too
            low[layer, planes] = centre - np.append(half[:1], half)[: len(centre)]
            high[layer, planes] = centre + np.append(half, half[-1:])[: len(centre)]
    return np.exp(low), np.exp(high)


def common_columns(wavelength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns for the planes of all layers: edges [column + 1] and planes [layer, column].

    If layers differ, a plane covers several columns. -1 marks a column without a plane.
    """
    low, high = plane_borders(wavelength)
    borders = np.log(np.concatenate([low[np.isfinite(low)], high[np.isfinite(high)]]))
    borders = np.sort(borders) if borders.size else np.log(NO_PLANES)
    # Measured frequencies of two layers differ in the sixth digit, which is not a new column.
    edges = np.exp(borders[np.append(True, np.diff(borders) > 1e-4)])
    centres = np.sqrt(edges[1:] * edges[:-1])
    inside = (low[..., None] < centres) & (centres < high[..., None])
    return edges, np.where(inside.any(1), inside.argmax(1), -1)


def plane_map(wavelength: np.ndarray, values: np.ndarray, layers: np.ndarray) -> dict[str, Any]:
    """Heat map keywords for `values` [row, frequency] of `layers`. Gaps have NaN and ""."""
    edges, planes = common_columns(wavelength)
    rows = planes[layers]
    moved = np.take_along_axis(values, np.maximum(rows, 0), axis=1)
    names = [
        ["" if plane < 0 else short_count(of_layer[plane]) for plane in row]
        for of_layer, row in zip(wavelength[layers], rows, strict=True)
    ]
    return {"x": edges, "z": np.where(rows >= 0, moved, np.nan), "text": np.array(names)}


def mark_trained(figure: go.Figure, dataset: xr.Dataset) -> None:
    """Mark the trained context if it is inside the range of the first panel."""
    low, high = 10.0 ** np.array(figure.layout.xaxis.range)
    context = int(dataset.attrs.get("trained_context", 0))
    if low < context < high:
        words = f"trained context<br>{context:,} tokens"
        mark(figure, context, words, xanchor="right", yanchor="bottom")
