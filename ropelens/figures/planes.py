"""Figures of planes: the axis of wavelengths, the push of heads by wavelength, and norms."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from ropelens.errors import Count, public
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
    style.set_x(figure, style.log_axis(ticks, range=ends.tolist()), AXIS_TITLE)


def mark_context(
    figure: go.Figure,
    profile: xr.Dataset,
    layers: list[int] | None = None,
    *,
    row: int | None = None,
    color: str = style.MUTED,
    below: bool = False,
) -> None:
    """Mark the window, chunk or context of `layers`, in one row of panels or in all.

    Planes with longer wavelengths do not finish one turn.
    """
    layers = list(range(profile.sizes["layer"])) if layers is None else layers
    context = ("context", int(profile.attrs.get("context", 0)))
    name, length = min(window_of(profile, layers) or context, context, key=itemgetter(1))
    turning = profile["wavelength"].values[layers]
    turning = turning[np.isfinite(turning)]
    if turning.size and turning.min() < length < turning.max():
        place: dict[str, Any] = {"y": 0, "yanchor": "top"} if below else {"yanchor": "bottom"}
        style.mark(figure, length, name, color=color, row=row, **place)


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


def trained_reach(dataset: xr.Dataset, layers: list[int]) -> tuple[str, int]:
    """Name and length (tokens) of the window of `layers`, or the trained context."""
    trained = int(dataset.attrs.get("trained_context", 0))
    return window_of(dataset, layers) or ("trained context", trained)


def mark_trained(figure: go.Figure, dataset: xr.Dataset, layers: list[int]) -> None:
    """Mark the reach of `layers` if it is inside the range of the first panel."""
    low, high = 10.0 ** np.array(figure.layout.xaxis.range)
    name, context = trained_reach(dataset, layers)
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
    kinds = {k: n for k, n in layers_by_kind(profile).items() if heads["layer"].isin(n).any()}
    order = by_position(heads)
    rows = heads.iloc[order]
    order = order[np.argsort([_rank(kinds, n) for n in rows["layer"]], kind="stable")]
    rows = heads.iloc[order]
    layer, head = (rows[name].to_numpy(int) for name in ("layer", "head"))
    names = np.array([f"L{n} H{h}" for n, h in zip(layer, head, strict=True)])
    push = profile["selectivity_keys"].transpose("layer", "head", "frequency").clip(min=0)
    total = push.sum("frequency")
    shares = 100 * (push / total.where(total > 0)).values
    wavelength = profile["wavelength"].values
    cells = plane_map(wavelength, shares[layer, head].astype(np.float32), layer)
    edges, below = cells["x"], int(np.clip(13 * len(order), 120, 560))
    above = MEANS_HEIGHT * len(kinds)
    panels: dict[str, Any] = {"row_heights": [*[MEANS_HEIGHT] * len(kinds), below]}
    panels["spacing"] = 0.03 if len(kinds) == 1 else 0.05
    height, title = above + MEANS_HEIGHT + below, "Push toward keys by wavelength"
    figure = style.stacked(title, len(kinds) + 1, height=height, **panels)
    bar = {"thickness": 10, "nticks": 4, "title": {"text": "share<br>(%)"}}
    bar |= {"len": below / (above + below), "y": 0, "yanchor": "bottom"}
    hover = "%{y}<br>%{z:.0f}% of the push at %{text} tokens<extra></extra>"
    look = {"colorscale": style.sequential(cells["z"]), "zmin": 0, "colorbar": bar}
    look["hovertemplate"] = hover
    last = {"row": len(kinds) + 1, "col": 1}
    figure.add_heatmap(**cells, y=names, **look, **last)
    breadth = np.log10(edges[-1] / edges[0])
    silent = {"mode": "markers", "hoverinfo": "skip", "showlegend": False, "cliponaxis": False}
    for label in style.LABEL_ORDER[:3]:
        of_label = names[(rows["label"] == label).to_numpy()]
        marker = {"color": style.COLORS[label], "symbol": style.SYMBOLS[label], "size": 7}
        x = np.full(len(of_label), 10 ** (np.log10(edges[0]) - 0.015 * breadth))
        figure.add_scatter(x=x, y=of_label, marker=marker, **silent, **last)
    set_wavelengths(figure, wavelength)
    figure.update_xaxes(range=np.log10([edges[0], edges[-1]]) - [0.03 * breadth, 0])
    label_names = {n: f"{n} ({(heads['label'] == n).sum()} heads)" for n in style.LABEL_ORDER}
    for row, (kind, layers) in enumerate(kinds.items(), start=1):
        of_kind = heads[heads["layer"].isin(layers)]
        _add_label_lines(figure, wavelength, shares, of_kind, label_names, row)
        named = f"{kind} layers:<br>" if len(kinds) > 1 else ""
        words = f"{named}mean<br>share (%)"
        figure.update_yaxes(title_text=words, rangemode="tozero", nticks=4, row=row)
        mark_context(figure, profile, layers, row=row if len(kinds) > 1 else None)
    if len(kinds) > 1:
        _name_kinds(figure, [_rank(kinds, n) for n in layer], [*kinds], **last)
    shown = names[:: -(-len(order) // MAX_ROW_NAMES)] if len(order) else names
    axis = {"title_text": "head (layer, head)", "type": "category", "showgrid": False}
    axis |= {"range": [len(order) - 0.4, -0.6], "categoryarray": names}
    figure.update_yaxes(**axis, tickvals=shown, tickfont_size=11, row=len(kinds) + 1)
    if selected is not None:
        here = np.flatnonzero(order == row_of(heads, selected))
        y = float(here[0]) if here.size else -2.0
        box = {"x0": edges[0], "x1": edges[-1], "y0": y - 0.5, "y1": y + 0.5}
        line = {"color": "#ffffff", "width": 2}
        figure.add_shape(name="selected", type="rect", **box, line=line, **last)
    return style.note_missing(figure, "no head prefers keys other than sinks", cells["z"])


def _rank(kinds: Mapping[str, list[int]], layer: int) -> int:
    """Index of the kind of a layer."""
    return next(index for index, layers in enumerate(kinds.values()) if layer in layers)


def _name_kinds(
    figure: go.Figure, kind_of_row: Sequence[int], kinds: Sequence[str], **panel: int
) -> None:
    """Name the kinds of layers at the right of their first rows, and divide their rows."""
    for number in sorted({*kind_of_row}):
        first = list(kind_of_row).index(number)
        if first:
            figure.add_hline(y=first - 0.5, line={"color": "#ffffff", "width": 2}, **panel)
        place = {"x": 1, "xref": "x domain", "xanchor": "right", "y": first, "showarrow": False}
        ink = {"font_color": "#ffffff", "font_size": 12, "bgcolor": "rgba(0,0,0,0.45)"}
        figure.add_annotation(place | ink, text=f"{kinds[number]} layers", **panel)


def _add_label_lines(
    figure: go.Figure,
    wavelength: Float[np.ndarray, "layer frequency"],
    shares: Float[np.ndarray, "layer head frequency"],
    heads: pd.DataFrame,
    names: Mapping[str, str],
    row: int,
) -> None:
    """Draw the mean share of each label's heads in a row of panels; `names` are for the legend.

    Planes that do not rotate break a line.
    """
    places = np.log(wavelength_positions(wavelength))
    for label in style.LABEL_ORDER[:3]:
        rows = heads[heads["label"] == label]
        if len(rows) < 2:
            continue
        layers, columns = rows["layer"].to_numpy(int), rows["head"].to_numpy(int)
        points = {"y": shares[layers, columns], "wavelength": wavelength[layers]}
        points["place"] = places[layers].round(4)  # measured layers differ in the last digits
        flat = pd.DataFrame({name: values.ravel() for name, values in points.items()}).dropna()
        mean = flat.groupby("place").mean()
        if mean.empty:
            continue
        breaks = np.flatnonzero(np.isinf(mean["wavelength"]))
        data = {"x": np.exp(mean.index.to_numpy()), "y": mean["y"].to_numpy()}
        data = {name: np.insert(values, breaks, np.nan) for name, values in data.items()}
        data["text"] = np.insert([short_count(w) for w in mean["wavelength"]], breaks, "")
        look = {"line": {"color": style.COLORS[label], "width": 2}, "mode": "lines+markers"}
        look["marker"] = {"symbol": style.SYMBOLS[label], "size": 8}
        hover = f"{label}<br>wavelength %{{text}} tokens<br>%{{y:.1f}}%<extra></extra>"
        named = any(trace.legendgroup == label for trace in figure.data)
        look |= {"name": names[label], "legendgroup": label}
        place: dict[str, Any] = {"showlegend": not named, "row": row, "col": 1}
        figure.add_scatter(**data, **look, hovertemplate=hover, **place)


def by_position(heads: pd.DataFrame) -> Int[np.ndarray, " row"]:
    """Rows of the table by descending positional fraction, without `EXCLUDED_LABELS`."""
    fraction = numbers(heads, "positional_fraction")
    known = np.isfinite(fraction) & ~heads["label"].isin(style.EXCLUDED_LABELS).to_numpy()
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
    sides = [*NORM_PANELS.items()][: 2 + bool(profile["v_norm"].notnull().any())]
    kinds = layers_by_kind(profile) if layer is None else {"": [int(layer)]}
    kinds = {k: n for k, n in kinds.items() if np.isfinite(wavelength[n]).any()} or kinds
    panels = [(*side, kind) for side in sides for kind in kinds]
    height = 170 + len(panels) * int(np.clip(rows * 30 / len(kinds), 120, max(220, rows * 9)))
    size: dict[str, Any] = {"height": height, "spacing": 0.1 if rows <= 16 else 0.05}
    size["row_heights"] = [max(len(kinds[kind]), rows / 4) for *_, kind in panels]
    figure = style.stacked(f"Norms by wavelength, {scope}", len(panels), **size)
    for row, (side, name, kind) in enumerate(panels, start=1):
        dim = "head" if side == "query" else "kv_head"
        values = profile[name].transpose("layer", dim, "frequency")
        by_layer, of_kind = layer is None, np.array(kinds[kind])
        norms = (values.mean(dim)[of_kind] if by_layer else values[layer]).values
        layers = of_kind if by_layer else np.full(len(norms), layer)
        cells = plane_map(wavelength, norms, layers)
        bottom, top = figure.layout[f"yaxis{row}"].domain
        bar = {"thickness": 10, "nticks": 4, "len": top - bottom, "yanchor": "top", "y": top}
        most = float(np.nanmax(cells["z"], initial=0))
        look = {"colorscale": style.sequential(cells["z"]), "zmin": 0, "zmax": most}
        look["colorbar"] = bar
        hover = f"{what} %{{y}}<br>wavelength %{{text}} tokens<br>{side} norm %{{z:.3f}}"
        look |= {"name": f"{side} norm", "hovertemplate": f"{hover}<extra></extra>"}
        y = of_kind if by_layer else np.arange(len(norms))
        figure.add_heatmap(**cells, y=y, **look, row=row, col=1)
        # An annotation, because the title of a colour bar would widen the margin.
        place = {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yanchor": "bottom"}
        named = f" of {kind} layers" if len(kinds) > 1 else ""
        words = {"text": f"{side} norm{named} (model units)", "font_size": 12}
        figure.add_annotation(place | words, yref=f"y{row} domain".replace("y1 ", "y "))
        of_row = what if by_layer or side == "query" else "key-value head"
        axis = style.index_axis(len(norms), of_row)
        if len(kinds) > 1:  # numbers of layers have gaps
            step = -(-len(of_kind) // 8)
            axis |= {"range": [of_kind[-1] + 0.5, of_kind[0] - 0.5], "tickvals": y[::step]}
        figure.update_yaxes(**axis, row=row)
    set_wavelengths(figure, wavelength)
    figure.update_xaxes(range=np.log10(figure.data[0].x[[0, -1]]), showgrid=False)
    for row, (*_, kind) in enumerate(panels if len(kinds) > 1 else panels[:1], start=1):
        only = row if len(kinds) > 1 else None
        mark_context(figure, profile, kinds[kind], row=only, color="#ffffff", below=True)
    return style.note_missing(figure, "no queries and keys were measured")
