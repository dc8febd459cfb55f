"""Figures of planes: the axis of wavelengths, the push of heads by wavelength, and norms."""

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from ropelens.arguments import Count, public
from ropelens.figures import style
from ropelens.figures.formats import short_count
from ropelens.figures.inputs import Selected, head_table, numbers, row_of
from ropelens.profiles.kinds import layers_by_kind, window_of

AXIS_TITLE = "wavelength (tokens, log scale)"
LONE_HALF_WIDTH = 0.35  # half width of a plane without neighbours, in log tokens
NO_PLANES = np.array([1.0, 10.0])  # range of an axis without planes, in tokens
MEANS_HEIGHT = 150  # pixels of the panel of means; title, legend and axis need the same
MAX_ROW_NAMES = 40
NORM_PANELS = {"query": "q_norm", "key": "k_norm", "value": "v_norm"}


def wavelength_positions(wavelength: np.ndarray) -> np.ndarray:
    """Position of each plane on the axis [layer, frequency], in tokens (the wavelength).

    Planes that do not rotate follow after a gap, at most one usual step apart, and fill at most
    a third of the width of the other planes. NaN (the layer lacks the plane) stays NaN.
    """
    finite = np.log(np.where(np.isfinite(wavelength), wavelength, np.nan))
    endless = np.isinf(wavelength)
    # Measured wavelengths of two layers differ in the last digits, so compare within a layer.
    apart = np.diff(np.sort(finite, axis=-1), axis=-1)
    apart = apart[np.isfinite(apart)]
    usual = float(np.median(apart)) if apart.size else float(np.log(2))
    known, step, most = finite[np.isfinite(finite)], usual, int(endless.sum(-1).max())
    longest = float(known.max()) if known.size else 0.0
    if apart.size and most:
        step = min(usual, (longest - float(known.min())) / (3 * most))
    gap = usual / 2 + 0.5 + max(step / 2, LONE_HALF_WIDTH)
    # cumsum numbers the planes of a layer that do not rotate: 1, 2, 3, ...
    beyond = longest + gap + step * (np.cumsum(endless, axis=-1) - 1)
    return np.where(
        endless, np.exp(beyond), np.where(np.isnan(finite), np.nan, wavelength)
    )


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
    style.set_x(figure, style.log_axis(ticks, range=ends.tolist()), AXIS_TITLE)


def reach_of(results: xr.Dataset, layers: Sequence[int], name: str) -> tuple[str, int]:
    """Name and length (tokens) of the window or chunk of `layers`, or of a shorter context."""
    context = name, int(results.attrs.get(name.replace(" ", "_"), 0))
    return min(window_of(results, layers) or context, context, key=itemgetter(1))


def mark_context(
    figure: go.Figure, profile: xr.Dataset, layers: Sequence[int], **look: Any
) -> None:
    """Mark the window, chunk or context of `layers`; slower planes do not finish one turn."""
    name, length = reach_of(profile, layers, "context")
    turning = profile["wavelength"].values[layers]
    turning = turning[np.isfinite(turning)]
    if turning.size and turning.min() < length < turning.max():
        style.mark(figure, length, name, **{"yanchor": "bottom"} | look)


def plane_borders(wavelength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each plane on the axis, in tokens, two arrays [layer, frequency].

    Neighbours meet at their geometric mean. The gap before planes that do not rotate is empty.
    """
    place = np.log(wavelength_positions(wavelength))
    low, high = np.full_like(place, np.nan), np.full_like(place, np.nan)
    for layer, kind in itertools.product(range(len(place)), (np.isfinite, np.isinf)):
        planes = np.flatnonzero(kind(wavelength[layer]))
        planes = planes[np.argsort(place[layer, planes], kind="stable")]
        centre = place[layer, planes]
        half = np.diff(centre) / 2 if len(centre) > 1 else np.array([LONE_HALF_WIDTH])
        half = np.maximum(half, 1e-3)  # planes with equal wavelengths need a width too
        half = np.pad(half, 1, mode="edge")
        low[layer, planes] = centre - half[: len(centre)]
        high[layer, planes] = centre + half[1:][: len(centre)]
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


def plane_map(
    wavelength: np.ndarray, values: np.ndarray, layers: np.ndarray
) -> dict[str, Any]:
    """Heat map keywords for `values` [row, frequency] of `layers`. Gaps have NaN and ""."""
    edges, planes = common_columns(wavelength)
    rows = planes[layers]
    moved = np.take_along_axis(values, np.maximum(rows, 0), axis=1)
    names = [
        ["" if plane < 0 else short_count(of_layer[plane]) for plane in row]
        for of_layer, row in zip(wavelength[layers], rows, strict=True)
    ]
    return {
        "x": edges,
        "z": np.where(rows >= 0, moved, np.nan),
        "text": np.array(names),
    }


def mark_trained(figure: go.Figure, results: xr.Dataset, layers: Sequence[int]) -> None:
    """Mark the reach of `layers` if it is inside the range of the first panel."""
    low, high = 10.0 ** np.array(figure.layout.xaxis.range)
    name, context = reach_of(results, layers, "trained context")
    if low < context < high:
        words = f"{name}<br>{context:,} tokens"
        style.mark(figure, context, words, xanchor="right", yanchor="bottom")


@public
def plot_head_wavelengths(
    profile: xr.Dataset, heads: pd.DataFrame | None = None, *, selected: Selected = None
) -> go.Figure:
    """Push of each wavelength toward the keys that heads pick: means by label, and every head.

    The push is the positive part of `selectivity_keys` (without sinks), in percent of the head.
    The most positional head is at the top; diffuse heads and sinks have no row. The head
    `selected` (layer, head) gets a frame.
    """
    heads = head_table(profile, heads)
    kinds = {
        k: n for k, n in layers_by_kind(profile).items() if heads["layer"].isin(n).any()
    }
    several, last = len(kinds) > 1, {"row": len(kinds) + 1, "col": 1}
    rank = {
        layer: number
        for number, of_kind in enumerate(kinds.values())
        for layer in of_kind
    }
    order = sorted(by_position(heads), key=lambda row: rank[heads["layer"].iloc[row]])
    rows = heads.iloc[order]
    layer, head = (rows[name].to_numpy(int) for name in ("layer", "head"))
    names = np.array([f"L{n} H{h}" for n, h in zip(layer, head, strict=True)])
    push = (
        profile["selectivity_keys"].transpose("layer", "head", "frequency").clip(min=0)
    )
    total = push.sum("frequency")
    shares = 100 * (push / total.where(total > 0)).values
    wavelength = profile["wavelength"].values
    cells = plane_map(wavelength, shares[layer, head].astype(np.float32), layer)
    edges, below = cells["x"], int(np.clip(13 * len(order), 120, 560))
    above, title = MEANS_HEIGHT * len(kinds), "Push toward keys by wavelength"
    size: dict[str, Any] = {"height": above + MEANS_HEIGHT + below}
    size |= {"row_heights": [MEANS_HEIGHT] * len(kinds) + [below]}
    figure = style.stacked(
        title, len(kinds) + 1, **size, spacing=0.05 if several else 0.03
    )
    bar = {"thickness": 10, "nticks": 4, "title": {"text": "share<br>(%)"}}
    bar |= {"len": below / (above + below), "y": 0, "yanchor": "bottom"}
    hover = "%{y}<br>%{z:.0f}% of the push at %{text} tokens<extra></extra>"
    look = {"colorscale": style.sequential(cells["z"]), "zmin": 0, "colorbar": bar}
    figure.add_heatmap(**cells, y=names, **look, hovertemplate=hover, **last)
    breadth = np.log10(edges[-1] / edges[0])
    silent = {
        "mode": "markers",
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
    colors, symbols = (
        rows["label"].map(looks) for looks in (style.COLORS, style.SYMBOLS)
    )
    x, marker = (
        10 ** (np.log10(edges[0]) - 0.015 * breadth),
        {"color": colors, "size": 7},
    )
    marker["symbol"] = symbols
    figure.add_scatter(
        x=np.full(len(names), x), y=names, marker=marker, **silent, **last
    )
    set_wavelengths(figure, wavelength)
    figure.update_xaxes(range=np.log10([edges[0], edges[-1]]) - [0.03 * breadth, 0])
    for row, (kind, layers) in enumerate(kinds.items(), start=1):
        _add_label_lines(figure, wavelength, shares, heads, layers, row=row)
        words = f"{kind} layers:<br>" * several + "mean<br>share (%)"
        figure.update_yaxes(title_text=words, rangemode="tozero", nticks=4, row=row)
        mark_context(figure, profile, layers, row=row if several else "all")
    white = {"color": "#ffffff", "width": 2}
    for first in (
        np.unique([rank[n] for n in layer], return_index=True)[1] if several else ()
    ):
        if first:
            figure.add_hline(y=first - 0.5, line=white, **last)
        place = {
            "x": 1,
            "xref": "x domain",
            "xanchor": "right",
            "y": first,
            "showarrow": False,
        }
        ink = {"font_color": "#ffffff", "font_size": 12, "bgcolor": "rgba(0,0,0,0.45)"}
        words = f"{[*kinds][rank[layer[first]]]} layers"
        figure.add_annotation(place | ink, text=words, **last)
    shown = names[:: -(-len(order) // MAX_ROW_NAMES)] if len(order) else names
    axis = {"title_text": "head (layer, head)", "type": "category", "showgrid": False}
    axis |= {"range": [len(order) - 0.4, -0.6], "categoryarray": names}
    figure.update_yaxes(**axis, tickvals=shown, tickfont_size=11, row=len(kinds) + 1)
    if selected is not None:
        here = row_of(heads, selected)
        y = order.index(here) if here in order else -2
        box = {"x0": edges[0], "x1": edges[-1], "y0": y - 0.5, "y1": y + 0.5}
        figure.add_shape(name="selected", type="rect", **box, line=white, **last)
    return style.note_missing(
        figure, "no head prefers keys other than sinks", cells["z"]
    )


def _add_label_lines(
    figure: go.Figure,
    wavelength: Float[np.ndarray, "layer frequency"],
    shares: Float[np.ndarray, "layer head frequency"],
    heads: pd.DataFrame,
    layers: Sequence[int],
    *,
    row: int,
) -> None:
    """Draw the mean share of each label in `layers`. Planes that do not rotate break a line."""
    places = np.log(wavelength_positions(wavelength))
    for label in style.LABEL_ORDER[:3]:
        of_label = heads[heads["label"] == label]
        rows = of_label[of_label["layer"].isin(layers)]
        at, columns = rows["layer"].to_numpy(int), rows["head"].to_numpy(int)
        points = {"y": shares[at, columns], "wavelength": wavelength[at]}
        points["place"] = places[at].round(
            4
        )  # measured layers differ in the last digits
        flat = pd.DataFrame(
            {name: values.ravel() for name, values in points.items()}
        ).dropna()
        mean = flat.groupby("place").mean()
        if len(rows) < 2 or mean.empty:
            continue
        breaks = np.flatnonzero(np.isinf(mean["wavelength"]))
        data = {"x": np.exp(mean.index.to_numpy()), "y": mean["y"].to_numpy()}
        data = {
            name: np.insert(values, breaks, np.nan) for name, values in data.items()
        }
        data["text"] = np.insert(
            [short_count(w) for w in mean["wavelength"]], breaks, ""
        )
        look = {
            "line": {"color": style.COLORS[label], "width": 2},
            "mode": "lines+markers",
        }
        look["marker"] = {"symbol": style.SYMBOLS[label], "size": 8}
        hover = f"{label}<br>wavelength %{{text}} tokens<br>%{{y:.1f}}%<extra></extra>"
        look |= {"name": f"{label} ({len(of_label)} heads)", "legendgroup": label}
        named = any(trace.legendgroup == label for trace in figure.data)
        place: dict[str, Any] = {"showlegend": not named, "row": row, "col": 1}
        figure.add_scatter(**data, **look, hovertemplate=hover, **place)


def by_position(heads: pd.DataFrame) -> Int[np.ndarray, " row"]:
    """Rows of the table by descending positional fraction, without `EXCLUDED_LABELS`."""
    fraction = numbers(heads, "positional_fraction")
    known = (
        np.isfinite(fraction) & ~heads["label"].isin(style.EXCLUDED_LABELS).to_numpy()
    )
    order = np.argsort(-fraction, kind="stable")
    return order[known[order]]


@public
def plot_norms(profile: xr.Dataset, *, layer: Count | None = None) -> go.Figure:
    """Mean norm of every plane by wavelength, in model units, for queries, keys and values.

    Values are a control, because they do not rotate. A row is the mean over the heads of a
    layer, or a head of `layer`. Source: figures of Barbero et al. 2024 (arXiv 2410.06205).
    """
    what = "layer" if layer is None else "head"
    scope = "mean over heads" if layer is None else f"heads of layer {layer}"
    rows, wavelength = profile.sizes[what], profile["wavelength"].values
    kinds = layers_by_kind(profile) if layer is None else {"": [int(layer)]}
    kinds = {
        k: n for k, n in kinds.items() if np.isfinite(wavelength[n]).any()
    } or kinds
    several, valued = len(kinds) > 1, bool(profile["v_norm"].notnull().any())
    sides = [*NORM_PANELS.items()][: 2 + valued]
    panels = [(*side, *kind) for side in sides for kind in kinds.items()]
    height = 170 + len(panels) * int(
        np.clip(rows * 30 / len(kinds), 120, max(220, rows * 9))
    )
    size: dict[str, Any] = {"height": height, "spacing": 0.1 if rows <= 16 else 0.05}
    size["row_heights"] = [max(len(layers), rows / 4) for *_, layers in panels]
    figure = style.stacked(f"Norms by wavelength, {scope}", len(panels), **size)
    for row, (side, name, kind, layers) in enumerate(panels, start=1):
        dim = "head" if side == "query" else "kv_head"
        values, of_row = profile[name].transpose("layer", dim, "frequency"), what
        if layer is None:
            norms, y = values.mean(dim)[layers].values, np.array(layers)
        else:
            norms, y = values[layer].values, np.arange(values.sizes[dim])
            of_row = what if side == "query" else "key-value head"
        cells = plane_map(
            wavelength, norms, y if layer is None else np.full(len(y), layer)
        )
        bottom, top = figure.layout[f"yaxis{row}"].domain
        bar = {
            "thickness": 10,
            "nticks": 4,
            "len": top - bottom,
            "yanchor": "top",
            "y": top,
        }
        look = {"colorscale": style.sequential(cells["z"]), "colorbar": bar, "zmin": 0}
        look["zmax"] = float(np.nanmax(cells["z"], initial=0))
        hover = (
            f"{what} %{{y}}<br>wavelength %{{text}} tokens<br>{side} norm %{{z:.3f}}"
        )
        look |= {"name": f"{side} norm", "hovertemplate": f"{hover}<extra></extra>"}
        figure.add_heatmap(**cells, y=y, **look, row=row, col=1)
        # An annotation, because the title of a colour bar would widen the margin.
        place = {
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
        }
        words = f"{side} norm{f' of {kind} layers' * several} (model units)"
        yref = f"{figure.data[-1].yaxis} domain"
        figure.add_annotation(place, text=words, font_size=12, yref=yref)
        axis = style.index_axis(len(y), of_row)
        if several:  # numbers of layers have gaps
            axis |= {
                "range": [y[-1] + 0.5, y[0] - 0.5],
                "tickvals": y[:: -(-len(y) // 8)],
            }
        figure.update_yaxes(**axis, row=row)
    set_wavelengths(figure, wavelength)
    figure.update_xaxes(range=np.log10(figure.data[0].x[[0, -1]]), showgrid=False)
    look = {"color": "#ffffff", "y": 0, "yanchor": "top"}
    for row, (*_, layers) in enumerate(panels if several else panels[:1], start=1):
        mark_context(figure, profile, layers, **look, row=row if several else "all")
    return style.note_missing(figure, "no queries and keys were measured")
