"""What it costs to stop planes, from either end, beside random planes of the same number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument, public
from ropelens.figures.bands import (
    MEASURES,
    Measure,
    MeasureName,
    bands_figure,
    change_and_bars,
    draw_crosses,
    hover_texts,
)
from ropelens.figures.style import DOTTED, TEXT_ONLY, new_figure
from ropelens.figures.text import short_count
from ropelens.figures.truncated_heads import (
    ENDS,
    KEPT_AXIS,
    KEPT_TITLE,
    MEAN_OF_DRAWS,
    changed_heads_figure,
)
from ropelens.figures.wavelengths import alike, marks, plane_index, turning_wavelengths
from ropelens.measure.truncation_table import summarize_truncation


@public
def plot_truncation(
    truncation: xr.Dataset,
    *,
    by: Literal["share", "band", "head"] = "share",
    measures: Sequence[MeasureName] = ("loss",),
    table: pd.DataFrame | None = None,
) -> go.Figure:
    """What stopping planes changes, `by` the share that still rotates, by band or by head.

    "share": change of each of `measures` from the model as it is, with the 95 % interval of
    the paired difference, an end of the axis a panel. x: share of the planes that still
    rotate, and the wavelength (tokens) that stops there. Grey: as many random planes, a cross
    a draw, dashed their mean. Dotted: the plane whose wavelength is the trained context, and
    the one where Oka et al. 2026 predict the longest queries. Source: Barbero et al. 2024
    (arXiv 2410.06205), its p-RoPE and reversed variants.

    "band": the first of `measures` for one band of wavelengths at a time, a bar a band; below,
    where measured, the share of the positive selectivity that each plane has, mean over all
    heads, in percent. x: wavelength (tokens).

    "head": the 16 heads whose attention changes most, a column a share. Colour: mean over rows
    of KL(attention as it is || under the edit), in bits, by its square root. A word in a cell
    is a new label: pos(itional), mix(ed), sem(antic), sink, dif(fuse).

    `table` is `summarize_truncation(truncation)`, if made already.
    """
    table = summarize_truncation(truncation) if table is None else table
    if by == "head":
        return changed_heads_figure(truncation)
    missing = [name for name in measures if table[MEASURES[name].column].isna().all()]
    kinds = ["band"] if by == "band" else [end for end in ENDS if (table["kind"] == end).any()]
    if missing or not table["kind"].isin(kinds).any():
        raise BadArgument(
            f"The sweep did not measure {missing[0]}."
            if missing
            else f"The sweep stopped no {'bands' if by == 'band' else 'planes from an end'}.",
            attempt="truncate(model, tokens, ends=..., bands=..., measures=...)",
        )
    if by == "band":
        return bands_figure(truncation, table, MEASURES[measures[0]])
    return _ends_figure(truncation, table, kinds, [MEASURES[name] for name in measures])


def _ends_figure(
    truncation: xr.Dataset, table: pd.DataFrame, ends: list[str], measures: list[Measure]
) -> go.Figure:
    """A column an end of the axis, a row a measure."""
    height = 180 + 240 * len(measures)
    what = "What" if measures == [MEASURES["loss"]] else "What else"
    verb = "costs" if what == "What" else "changes"
    figure = new_figure(
        f"{what} stopping planes {verb}, from either end",
        height=height,
        **{"rows": len(measures), "cols": len(ends), "shared_yaxes": True},
        **{"horizontal_spacing": 0.04, "vertical_spacing": 0.08},
    )
    for row, measure in enumerate(measures, start=1):
        for column, end in enumerate(ends, start=1):
            place = {"row": row, "col": column}
            _add_random(figure, table, end, measure, legend=row == column == 1, **place)
            _add_end(figure, table, end, measure, legend=row == 1, **place)
        figure.update_yaxes(title_text=measure.title, row=row, col=1)
    figure.update_layout(
        margin_t=110,
        title={"y": 1, "yref": "container", "yanchor": "top", "pad_t": 16},
        legend={"y": 1 - 40 / height, "yref": "container", "yanchor": "top"},
    )
    figure.update_yaxes(zeroline=True, nticks=6)
    figure.update_xaxes(**KEPT_AXIS, showticklabels=False)
    for column, end in enumerate(ends, start=1):
        axis = _share_axis(truncation, end)
        figure.update_xaxes(**axis, showticklabels=True, row=len(measures), col=column)
        _add_marks(figure, truncation, end, column=column)
    return figure


def _add_end(
    figure: go.Figure, table: pd.DataFrame, end: str, measure: Measure, **place: Any
) -> None:
    """The line of one end, from the model as it is."""
    words, color, symbol = ENDS[end]
    rows = table[table["kind"].isin(["none", end])].sort_values("kept", ascending=False)
    figure.add_scatter(
        x=rows["kept"],
        **change_and_bars(rows, measure),
        name=words,
        legendgroup=end,
        showlegend=place.pop("legend"),
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"color": color, "symbol": symbol, "size": 7},
        text=hover_texts(rows, measure),
        hovertemplate=TEXT_ONLY,
        cliponaxis=False,
        **place,
    )


def _add_random(
    figure: go.Figure, table: pd.DataFrame, end: str, measure: Measure, **place: Any
) -> None:
    """Random sets of planes: a cross a draw, and the mean from nothing stopped to all."""
    legend, draws = place.pop("legend"), table[table["kind"] == "random"]
    if not len(draws):
        return
    ends = table[(table["kind"] == "none") | ((table["kind"] == end) & (table["kept"] == 0))]
    mean = pd.concat([draws, ends]).groupby("kept")[measure.column].mean().sort_index()
    x, y = mean.index.to_numpy(), mean.to_numpy()
    figure.add_scatter(x=x, y=y, **MEAN_OF_DRAWS, showlegend=legend, **place)
    crosses = draw_crosses(draws, measure, size=5)
    figure.add_scatter(x=draws["kept"], **crosses, showlegend=False, **place)


def _share_axis(truncation: xr.Dataset, end: str) -> dict[str, Any]:
    """Keywords of a share axis, with the wavelength that stops at each tick."""
    layer, wavelength = turning_wavelengths(truncation)
    shares = np.array(KEPT_AXIS["tickvals"])
    plane = (shares if end == "slow" else 1 - shares) * len(wavelength) - 0.5
    lengths = np.exp(np.interp(plane, np.arange(len(wavelength)), np.log(wavelength)))
    ticks = [f"{s:.0%}<br>{short_count(w)}" for s, w in zip(shares, lengths, strict=True)]
    where = "" if alike(truncation) else f" of layer {layer}"
    title = f"{KEPT_TITLE};<br>wavelength that stops there{where} (tokens)"
    return KEPT_AXIS | {"ticktext": ticks, "title_text": title}


def _add_marks(figure: go.Figure, truncation: xr.Dataset, end: str, *, column: int) -> None:
    """Lines at the trained context and the predicted band, named above the first panel."""
    _, wavelength = turning_wavelengths(truncation)
    trace = next(figure.select_traces(row=1, col=column))
    for mark in marks(truncation):
        index = plane_index(wavelength, mark.wavelength)
        if index is None:
            continue
        share = (index + 0.5) / len(wavelength)
        at = share if end == "slow" else 1 - share
        figure.add_vline(x=at, line=DOTTED, name=mark.name, row="all", col=column)
        side = "right" if (mark.name == "band") == (end == "slow") else "left"
        axes = {"xref": trace.xaxis, "yref": f"{trace.yaxis} domain"}
        place = {"x": at, "y": 1, "yanchor": "bottom"} | axes
        words = {"text": mark.words, "name": mark.name, "xanchor": side, "align": side}
        figure.add_annotation(place | words)
