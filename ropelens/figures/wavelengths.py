"""One axis for all wavelengths: logarithmic, with a place for planes that never turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.style import MUTED, log_axis, mark, set_x
from ropelens.figures.text import short_count

AXIS_TITLE = "wavelength (tokens, log scale)"

ALONE = 0.35  # half the breadth, in log tokens, of a plane without neighbours

NO_PLANES = np.array([1.0, 10.0])  # where an axis ends that has no plane to hold, in tokens


def wavelength_positions(wavelength: np.ndarray) -> np.ndarray:
    """Where each plane stands on the axis [layer, frequency], in tokens.

    A finite wavelength stands at itself. Infinite ones, which a logarithmic axis cannot
    hold, follow the longest finite one after a gap, in the order of their planes and at
    most one usual step apart; together they take at most a third of the finite ones' room.
    NaN (no such plane in this layer) stays NaN.
    """
    finite = np.log(np.where(np.isfinite(wavelength), wavelength, np.nan))
    endless = np.isinf(wavelength)
    # Steps within a layer: the wavelengths of two layers differ in the last digits.
    apart = np.diff(np.sort(finite, axis=-1), axis=-1)
    apart = apart[np.isfinite(apart)]
    usual = float(np.median(apart)) if apart.size else float(np.log(2))
    longest = float(np.nanmax(finite)) if np.isfinite(finite).any() else 0.0
    most = int(endless.sum(-1).max())
    step = usual
    if apart.size and most:
        step = min(usual, (longest - float(np.nanmin(finite))) / (3 * most))
    gap = usual / 2 + 0.5 + max(step / 2, ALONE)
    # cumsum counts the endless planes of a layer: 1, 2, 3, ...
    beyond = longest + gap + step * (np.cumsum(endless, axis=-1) - 1)
    return np.where(endless, np.exp(beyond), np.where(np.isnan(finite), np.nan, wavelength))


def set_wavelengths(figure: go.Figure, wavelength: np.ndarray) -> None:
    """Give x the range of wavelengths, a log scale, ticks at powers of ten and one at "∞"."""
    positions = wavelength_positions(wavelength)
    everything = positions[np.isfinite(positions)]
    everything = everything if everything.size else NO_PLANES
    turning = positions[np.isfinite(wavelength)]
    powers: range | tuple[()] = ()
    if turning.size:
        low, high = np.log10(turning.min()), np.log10(turning.max())
        powers = range(int(np.ceil(low)), int(high) + 1)
    ticks = {float(10**power): short_count(10**power) for power in powers}
    if (endless := positions[np.isinf(wavelength)]).size:
        ticks[float(np.exp(np.log(endless).mean()))] = "∞"
    ends = np.log10([everything.min(), everything.max()]) + np.array([-0.12, 0.12])
    set_x(figure, log_axis(ticks, range=ends.tolist()), AXIS_TITLE)


def mark_context(
    figure: go.Figure, profile: xr.Dataset, *, color: str = MUTED, below: bool = False
) -> None:
    """A dotted line at the context's length: planes beyond it never turn once.

    Its name stands above the first panel, or `below` it.
    """
    context = int(profile.attrs.get("context", 0))
    turning = profile["wavelength"].values
    turning = turning[np.isfinite(turning)]
    if turning.size and turning.min() < context < turning.max():
        place = {"y": 0, "yanchor": "top"} if below else {"yanchor": "bottom"}
        mark(figure, context, "context", name="context", color=color, **place)


def plane_borders(wavelength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each plane begins and ends on the axis, [layer, frequency] each, in tokens.

    Neighbours meet at their geometric mean; the outermost reach as far out as in. The gap
    between planes that turn and planes that do not belongs to no plane.
    """
    place = np.log(wavelength_positions(wavelength))
    low, high = np.full_like(place, np.nan), np.full_like(place, np.nan)
    for layer in range(len(place)):
        for kind in (np.isfinite(wavelength[layer]), np.isinf(wavelength[layer])):
            planes = np.flatnonzero(kind)
            planes = planes[np.argsort(place[layer, planes], kind="stable")]
            centre = place[layer, planes]
            half = np.diff(centre) / 2 if len(centre) > 1 else np.array([ALONE])
            half = np.maximum(half, 1e-3)  # planes that turn alike still take up room
            low[layer, planes] = centre - np.append(half[:1], half)[: len(centre)]
            high[layer, planes] = centre + np.append(half, half[-1:])[: len(centre)]
    return np.exp(low), np.exp(high)


def common_columns(wavelength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns that fit every layer: their edges [column + 1] and planes [layer, column].

    Where all layers rotate alike a column is a plane. Where they differ (Gemma 3's two
    bases) a plane spans several columns, and -1 marks a column that a layer does not have.
    """
    low, high = plane_borders(wavelength)
    borders = np.log(np.concatenate([low[np.isfinite(low)], high[np.isfinite(high)]]))
    borders = np.sort(borders) if borders.size else np.log(NO_PLANES)
    # Measured frequencies of two layers differ in the sixth digit; that is no new column.
    edges = np.exp(borders[np.append(True, np.diff(borders) > 1e-4)])
    centres = np.sqrt(edges[1:] * edges[:-1])
    inside = (low[..., None] < centres) & (centres < high[..., None])
    return edges, np.where(inside.any(1), inside.argmax(1), -1)


def plane_map(wavelength: np.ndarray, values: np.ndarray, layers: np.ndarray) -> dict[str, Any]:
    """Values [row, frequency] of rows of `layers` as x, z and text of a heat map.

    x are the edges of `common_columns`; z is NaN, and the text "", where a layer lacks one.
    """
    edges, planes = common_columns(wavelength)
    rows = planes[layers]
    moved = np.take_along_axis(values, np.maximum(rows, 0), axis=1)
    names = [
        ["" if plane < 0 else short_count(of_layer[plane]) for plane in row]
        for of_layer, row in zip(wavelength[layers], rows, strict=True)
    ]
    return {"x": edges, "z": np.where(rows >= 0, moved, np.nan), "text": np.array(names)}


def mark_trained(figure: go.Figure, dataset: xr.Dataset) -> None:
    """A dotted line at the trained context, where the range of the first panel holds it."""
    low, high = 10.0 ** np.array(figure.layout.xaxis.range)
    context = int(dataset.attrs.get("trained_context", 0))
    if low < context < high:
        place: dict[str, Any] = {"xanchor": "right", "yanchor": "bottom"}
        mark(figure, context, f"trained context<br>{context:,} tokens", name="context", **place)
