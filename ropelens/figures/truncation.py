"""What it costs to stop planes: from either end, by bands, beside random planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from ropelens.errors import BadArgument, public
from ropelens.figures.head_wavelengths import mean_share, selectivity_shares
from ropelens.figures.style import DOTTED, MUTED, TEXT_ONLY, VARIANT_COLORS, mark, new_figure
from ropelens.figures.text import number, short_count
from ropelens.figures.truncated_heads import (
    ENDS,
    KEPT_AXIS,
    KEPT_TITLE,
    MEAN_OF_DRAWS,
    changed_heads_figure,
)
from ropelens.figures.wavelengths import (
    alike,
    marks,
    one_title,
    plane_borders,
    plane_index,
    turning_wavelengths,
    wavelength_axis,
    wavelength_positions,
)
from ropelens.measure.truncation_table import summarize_truncation


@dataclass(frozen=True)
class Measure:
    """A column of the summary as an axis: its words with the unit, and how to write it."""

    column: str
    title: str
    format: str = "+.3f"


MeasureName = Literal["loss", "repeat_loss", "retrieval", "induction", "labels"]
MEASURES: dict[MeasureName, Measure] = {
    "loss": Measure("loss_change", "loss, change<br>(nats/token)"),
    "repeat_loss": Measure("repeat_loss_change", "loss on repeats,<br>change (nats/token)"),
    "retrieval": Measure("retrieval_change", "right retrievals,<br>change (share)"),
    "induction": Measure("induction_change", "best induction head,<br>change (0 to 1)"),
    "labels": Measure("labels_changed_share", "heads with a new<br>label (share)", ".1%"),
}


def change_and_bars(rows: pd.DataFrame, measure: Measure) -> dict[str, Any]:
    """A measure's change and its interval (if it has one), as plotly's `y` and `error_y`."""
    change = rows[measure.column].to_numpy(float)
    ends = [f"{measure.column}_high", f"{measure.column}_low"]
    if not set(ends) <= set(rows):
        return {"y": change, "error_y": None}
    above, below = np.nan_to_num(np.abs(rows[ends].to_numpy(float) - change[:, None])).T
    bars = {"array": above, "arrayminus": below, "thickness": 1.5, "width": 4}
    return {"y": change, "error_y": bars}


def draw_crosses(draws: pd.DataFrame, measure: Measure, *, size: int) -> dict[str, Any]:
    """Keywords of a scatter: a cross for each random set of planes, `size` in pixels."""
    return {
        "y": draws[measure.column],
        "mode": "markers",
        "marker": {"color": MUTED, "size": size, "symbol": "x"},
        "name": "random planes",
        "legendgroup": "random",
        "text": hover_texts(draws, measure),
        "hovertemplate": TEXT_ONLY,
    }


def hover_texts(rows: pd.DataFrame, measure: Measure) -> list[str]:
    """What stopped in each row of the summary, and the measure with its interval."""
    return [_hover(row, measure) for row in rows.to_dict("records")]


def _hover(row: dict, measure: Measure) -> str:
    value = number(row[measure.column], measure.format)
    low, high = (row.get(f"{measure.column}_{side}", np.nan) for side in ("low", "high"))
    if np.isfinite(low):
        value += f" (95% {number(low, measure.format)} to {number(high, measure.format)})"
    if row["kind"] == "none":
        return f"<b>as it is</b><br>{value}"
    span = f"{short_count(row['wavelength_low'])} to {short_count(row['wavelength_high'])}"
    return (
        f"<b>{row['edit']}</b>: {100 * row['kept']:.3g}% of the planes rotate<br>"
        f"stopped: {row['planes']}, wavelengths {span} tokens<br>{value}"
    )


def bands_figure(truncation: xr.Dataset, table: pd.DataFrame, measure: Measure) -> go.Figure:
    """`plot_truncation` by band: the change a band, above the selectivity of each plane."""
    bands = table[table["kind"] == "band"]
    panels = 2 if "selectivity_keys" in truncation else 1
    figure = new_figure(
        "What each band of wavelengths is worth",
        height=200 + 180 * panels,
        **{"rows": panels, "cols": 1, "vertical_spacing": 0.09},
        row_heights=[0.62, 0.38][:panels],
    ).update_layout(margin_t=80)
    spans = _spans(truncation, bands)
    _add_bands(figure, bands, spans, measure)
    _add_band_draws(figure, table, spans, measure)
    room = _with_room(table, measure.column)
    figure.update_yaxes(title_text=measure.title, zeroline=True, range=room, row=1)
    if panels == 2:
        _add_selectivity(figure, truncation)
    ends = np.log10([spans.min(), spans.max()])
    figure.update_xaxes(**wavelength_axis(truncation["wavelength"].values))
    figure.update_xaxes(range=[float(ends[0]) - 0.03, float(ends[1]) + 0.03])
    one_title(figure)
    if panels == 2:
        figure.update_xaxes(showticklabels=False, row=1)
    for at in marks(truncation):
        if spans.min() < at.wavelength < spans.max():
            side = "left" if at.name == "band" else "right"
            mark(figure, at.wavelength, at.words, name=at.name, xanchor=side, align=side)
    return figure


def _with_room(table: pd.DataFrame, column: str) -> list[float]:
    """The range of the upper panel, with room above for the words at the marks."""
    shown = table[table["kind"].isin(["none", "band", "band control"])]
    known = [name for name in (column, f"{column}_low", f"{column}_high") if name in shown]
    low, high = float(shown[known].min().min()), float(shown[known].max().max())
    reach = high - low or 1.0
    return [low - 0.05 * reach, high + 0.25 * reach]


def _spans(truncation: xr.Dataset, bands: pd.DataFrame) -> Float[np.ndarray, "band 2"]:
    """Where each band begins and ends on the axis (tokens): the borders of its outer planes."""
    wavelength = truncation["wavelength"].transpose("layer", "frequency").values
    low, high = plane_borders(wavelength)
    outer = bands[["wavelength_low", "wavelength_high"]].to_numpy(float)
    inside = [(wavelength >= first) & (wavelength <= last) for first, last in outer]
    return np.array([(low[planes].min(), high[planes].max()) for planes in inside])


def _add_bands(
    figure: go.Figure, bands: pd.DataFrame, spans: np.ndarray, measure: Measure
) -> None:
    """A bar a band, and its interval."""
    low, high = spans.T
    bars, color = change_and_bars(bands, measure), VARIANT_COLORS[2]
    figure.add_bar(
        x=(low + high) / 2,
        width=high - low,
        y=bars["y"],
        name="one band stopped",
        marker={"color": color, "opacity": 0.55, "line": {"width": 1}},
        text=hover_texts(bands, measure),
        textposition="none",
        hovertemplate=TEXT_ONLY,
        row=1,
        col=1,
    )
    # A bar's own error stands at the middle of its width, which a logarithmic axis moves.
    look = {"mode": "markers", "marker": {"color": color, "size": 6}}
    silent = {"showlegend": False, "hoverinfo": "skip", "row": 1, "col": 1}
    figure.add_scatter(x=np.sqrt(low * high), **bars, **look, **silent)


def _add_band_draws(
    figure: go.Figure, table: pd.DataFrame, spans: np.ndarray, measure: Measure
) -> None:
    """Random sets of a band's size: a cross a draw over the band, dashed their mean."""
    draws = table[table["kind"] == "band control"]
    if not len(draws):
        return
    span = dict(zip(table.loc[table["kind"] == "band", "band"], spans, strict=True))
    middles = [float(np.sqrt(span[band].prod())) for band in draws["band"]]
    figure.add_scatter(x=middles, **draw_crosses(draws, measure, size=6), row=1, col=1)
    means = draws.groupby("band")[measure.column].mean()
    x = [place for band in means.index for place in (*span[band], None)]
    y = [value for mean in means for value in (mean, mean, None)]
    figure.add_scatter(x=x, y=y, **MEAN_OF_DRAWS, showlegend=False, row=1, col=1)


def _add_selectivity(figure: go.Figure, truncation: xr.Dataset) -> None:
    """Share of the positive selectivity by wavelength, mean over all heads."""
    wavelength = truncation["wavelength"].values
    shares = np.nanmean(selectivity_shares(truncation), axis=1)
    figure.add_scatter(
        **mean_share(wavelength_positions(wavelength), shares, wavelength),
        mode="lines+markers",
        line={"color": VARIANT_COLORS[1], "width": 2},
        marker={"symbol": "square", "size": 6},
        name="push",
        hovertemplate="wavelength %{text} tokens<br>%{y:.1f}% of the push<extra></extra>",
        row=2,
        col=1,
    )
    title = "push toward<br>keys (%)"
    figure.update_yaxes(title_text=title, rangemode="tozero", row=2)


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
    for one in marks(truncation):
        index = plane_index(wavelength, one.wavelength)
        if index is None:
            continue
        share = (index + 0.5) / len(wavelength)
        at = share if end == "slow" else 1 - share
        figure.add_vline(x=at, line=DOTTED, name=one.name, row="all", col=column)
        side = "right" if (one.name == "band") == (end == "slow") else "left"
        axes = {"xref": trace.xaxis, "yref": f"{trace.yaxis} domain"}
        place = {"x": at, "y": 1, "yanchor": "bottom"} | axes
        words = {"text": one.words, "name": one.name, "xanchor": side, "align": side}
        figure.add_annotation(place | words)
