"""Figures of the cost of stopping planes, from either end or by bands, and silencing heads."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.formats import NO_NUMBER, number, short_count
from ropelens.figures.planes import (
    mark_trained,
    plane_borders,
    reach_of,
    set_wavelengths,
)
from ropelens.figures.truncated_heads import (
    END_LOOKS,
    KEPT_AXIS,
    KEPT_TITLE,
    MEAN_OF_DRAWS,
)
from ropelens.interventions.truncation_table import (
    QUARTER,
    class_changes,
    summarize_truncation,
    sweeps_by_kind,
    swept_layers,
)

MeasureName = Literal[
    "loss", "far_loss", "copy_loss", "repeat_loss", "retrieval", "induction", "labels"
]
AXIS_TITLES = {  # by column of the summary
    "loss_change": "change of loss<br>(nats/token)",
    "far_loss_change": "change of loss at late<br>positions (nats/token)",
    "copy_loss_change": "change of loss of<br>far copies (nats/token)",
    "repeat_loss_change": "change of loss of<br>repeats (nats/token)",
    "retrieval_change": "change of correct<br>retrievals (share)",
    "induction_change": "change of best induction<br>head (0 to 1)",
    "labels_changed_share": "heads with a new<br>label (share)",
    "bits": "change of<br>attention (bits)",
    "labels_changed": "heads with a new<br>label (count)",
}
CLASS_COLUMNS = ("loss_change", "bits", "labels_changed")


def summary_column(measure: MeasureName) -> str:
    return "labels_changed_share" if measure == "labels" else f"{measure}_change"


@public
def plot_truncation(
    truncation: xr.Dataset,
    *,
    by: Literal["share", "band", "class"] = "share",
    measures: Sequence[MeasureName] = ("loss",),
    layers: str | None = None,
    table: pd.DataFrame | None = None,
) -> go.Figure:
    """Effect of stopping planes, by the share that still rotates, by band, or by token class.

    - "share": change of each of `measures` from the unmodified model, with the 95 % interval of
      the paired difference. Grey crosses are draws of equally many random planes, and the
      dashed line is their mean. The dotted line is the plane whose wavelength is the trained
      context. Source: p-RoPE in both directions, Barbero et al. 2024 (arXiv 2410.06205).
    - "band": change of the first of `measures` if one band of wavelengths stops.
    - "class": change of loss, attention and labels of each class of tokens, with the share of
      planes stopped that is nearest to a quarter.

    `layers` names the kind of layers if the sweep has several; the default is the first kind.
    `table` is `summarize_truncation(truncation)`, if you already have it.
    """
    table = summarize_truncation(truncation) if table is None else table
    sweeps = sweeps_by_kind(truncation)
    truncation = sweeps.get(layers or next(iter(sweeps)), truncation)
    table = table[table["edit"].isin(truncation["edit"].values)]
    what, wanted = (
        ("bands", ["band"]) if by == "band" else ("planes from an end", END_LOOKS)
    )
    kinds = [kind for kind in wanted if (table["kind"] == kind).any()]
    if by == "class":
        classes = class_changes(truncation)
        faults = ["did not measure classes of tokens"] * classes.empty
    else:
        missing = [
            name for name in measures if table[summary_column(name)].isna().all()
        ]
        faults = [f"did not measure {name}" for name in missing]
        faults += [] if measures else ["has no measures to draw"]
    faults += [] if kinds else [f"stopped no {what}"]
    if layers not in (None, *sweeps):
        faults = [f"has no layers {layers!r}, only {', '.join(sweeps)}"]
    if faults:
        hint = "truncate(model, text, ends=..., bands=..., measures=..., tokenizer=...)"
        raise BadArgument(f"The sweep {faults[0]}.", hint=hint)
    if by == "class":
        return _classes_figure(classes, kinds)
    columns = [summary_column(name) for name in measures]
    if by == "band":
        return _bands_figure(truncation, table, columns[0])
    return _ends_figure(truncation, table, kinds, columns)


def _ends_figure(
    truncation: xr.Dataset, table: pd.DataFrame, ends: list[str], measures: list[str]
) -> go.Figure:
    title = f"Effect of stopping planes from either end{_swept(truncation)[0]}"
    panels: dict[str, Any] = {
        "rows": len(measures),
        "cols": len(ends),
        "shared_yaxes": True,
    }
    panels |= {"horizontal_spacing": 0.04, "vertical_spacing": 0.08}
    figure = _with_words_above(title, height=180 + 240 * len(measures), **panels)
    draws, unmodified = table[table["kind"] == "random"], table[table["kind"] == "none"]
    for row, measure in enumerate(measures, start=1):
        for column, end in enumerate(ends, start=1):
            place, of_end = {"row": row, "col": column}, table[table["kind"] == end]
            steps = [draws, unmodified, of_end[of_end["kept"] == 0]]
            means = pd.concat(steps).groupby("kept")[measure].mean()
            line = {"x": means.index, "y": means, "showlegend": row == column == 1}
            _add_draws(figure, draws, measure, x=draws["kept"], line=line, **place)
            words, color, symbol = END_LOOKS[end]
            rows = pd.concat([unmodified, of_end]).sort_values("kept", ascending=False)
            look = {"mode": "lines+markers", "cliponaxis": False, "name": words}
            look |= {"line": {"color": color, "width": 2}, "legendgroup": end}
            look["marker"] = {"color": color, "symbol": symbol, "size": 7}
            data = _change_trace(rows, measure) | {
                "x": rows["kept"],
                "showlegend": row == 1,
            }
            figure.add_scatter(**data, **look, **place)
        figure.update_yaxes(title_text=AXIS_TITLES[measure], row=row, col=1)
    figure.update_yaxes(zeroline=True, nticks=6)
    figure.update_xaxes(**KEPT_AXIS, showticklabels=False)
    figure.update_xaxes(showticklabels=True, title_text=KEPT_TITLE, row=len(measures))
    for column, end in enumerate(ends, start=1):
        _mark_shares(figure, truncation, end, column=column)
    return figure


def _bands_figure(
    truncation: xr.Dataset, table: pd.DataFrame, measure: str
) -> go.Figure:
    bands, (words, layers, wavelength) = (
        table[table["kind"] == "band"],
        _swept(truncation),
    )
    figure = _with_words_above(
        f"Effect of stopping one band of wavelengths{words}", height=400
    )
    starts, stops = plane_borders(wavelength)
    spans = {}
    for row in bands.to_dict("records"):
        inside = (wavelength >= row["wavelength_low"]) & (
            wavelength <= row["wavelength_high"]
        )
        spans[row["band"]] = starts[inside].min(), stops[inside].max()
    low, high = np.array([*spans.values()]).T
    bars, color = _change_trace(bands, measure), style.VARIANT_COLORS[2]
    look = {"color": color, "opacity": 0.55, "line": {"width": 1}}
    place = {"x": (low + high) / 2, "width": high - low, "error_y": None}
    name = {"name": "one band stopped", "textposition": "none"}
    figure.add_bar(**bars | place, **name, marker=look)
    # The error bars of a bar would be off its centre on a logarithmic axis.
    look = {
        "mode": "markers",
        "marker": {"color": color, "size": 6},
        "showlegend": False,
    }
    figure.add_scatter(**bars, x=np.sqrt(low * high), **look)
    draws = table[table["kind"] == "band control"]
    means = draws.groupby("band")[measure].mean()
    middles = [float(np.sqrt(np.prod(spans[band]))) for band in draws["band"]]
    ends_of_lines = [place for band in means.index for place in (*spans[band], None)]
    line = {"x": ends_of_lines, "y": [y for mean in means for y in (mean, mean, None)]}
    _add_draws(figure, draws, measure, x=middles, line=line)
    figure.update_yaxes(title_text=AXIS_TITLES[measure], zeroline=True)
    set_wavelengths(figure, wavelength)
    first, last = np.log10([low.min(), high.max()]).tolist()
    figure.update_xaxes(range=[first - 0.03, last + 0.03])
    mark_trained(figure, truncation, layers)
    return figure


def _classes_figure(table: pd.DataFrame, ends: list[str]) -> go.Figure:
    """Panels per measure, with a mark per class and end; a quarter of the planes stops."""
    measures = [measure for measure in CLASS_COLUMNS if measure in table]
    title, height = (
        "Effect of stopping planes, by class of token",
        120 + 110 * len(measures),
    )
    figure = style.stacked(title, len(measures), height=height, spacing=0.08)
    for panel, measure in enumerate(measures, start=1):
        for end in ends:
            rows, (words, color, symbol) = table[table["kind"] == end], END_LOOKS[end]
            share = min(rows["kept"], key=lambda value: abs(value - QUARTER))
            name = f"{words.split()[0]} {100 * (1 - share):.3g}% of planes stopped"
            marker = {"color": color, "symbol": symbol, "size": 9}
            look = {
                "mode": "markers",
                "name": name,
                "legendgroup": end,
                "marker": marker,
            }
            rows = rows[rows["kept"] == share]
            data = _change_trace(rows, measure) | {"x": rows["token_class"]}
            data |= {"showlegend": panel == 1, "cliponaxis": False}
            figure.add_scatter(**data, **look, row=panel, col=1)
        figure.update_yaxes(
            title_text=AXIS_TITLES[measure], zeroline=True, nticks=5, row=panel
        )
    style.set_x(figure, {}, "class of token (name)")
    return figure.update_layout(scattermode="group", margin_t=80)


def _swept(truncation: xr.Dataset) -> tuple[str, list[int], np.ndarray]:
    """Words for a title, the layers whose planes stop, and wavelengths [layer, frequency]."""
    kinds = swept_layers(truncation)
    layers = sorted(n for numbers in kinds.values() for n in numbers)
    words = "" if "all" in kinds else f", {next(iter(kinds))} layers"
    if "scale" in truncation.attrs:
        words += f": scaled by {truncation.attrs['scale']:g} instead"
    return (
        words,
        layers,
        truncation["wavelength"].transpose("layer", ...).values[layers],
    )


def _with_words_above(title: str, *, height: int, **panels: Any) -> go.Figure:
    """Return a figure with room for a legend and the words of marks above its panels."""
    legend = {"y": 1 - 40 / height, "yref": "container", "yanchor": "top"}
    figure = style.new_figure(title, height=height, **panels)
    return figure.update_layout(margin_t=110, legend=legend)


def _change_trace(rows: pd.DataFrame, measure: str) -> dict[str, Any]:
    """Keywords of a trace: the change of a measure, its interval, and hover texts."""
    y, bars = rows[measure].to_numpy(float), None
    if f"{measure}_low" in rows:
        bars = style.interval_bars(
            y, rows[f"{measure}_low"], rows[f"{measure}_high"], width=4
        )
    hovers = [_edit_hover(row, measure) for row in rows.to_dict("records")]
    return {"y": y, "error_y": bars, "text": hovers, "hovertemplate": style.TEXT_ONLY}


def _edit_hover(row: dict, measure: str) -> str:
    names = (measure, f"{measure}_low", f"{measure}_high")
    value, low, high = (number(row.get(name, np.nan), "+.3f") for name in names)
    if low != NO_NUMBER:
        value += f" (95% interval {low} to {high})"
    if row["kind"] == "none":
        return f"<b>unmodified</b><br>{value}"
    span = (
        f"{short_count(row['wavelength_low'])} to {short_count(row['wavelength_high'])}"
    )
    title = f"<b>{row['edit']}</b>: {100 * row['kept']:.3g}% of the planes rotate"
    return f"{title}<br>stopped: {row['planes']}, wavelengths {span} tokens<br>{value}"


def _add_draws(
    figure: go.Figure,
    draws: pd.DataFrame,
    measure: str,
    *,
    x: Any,
    line: dict,
    **place: int,
) -> None:
    """Draw random sets of planes: a cross at `x` per draw, and the dashed `line` of means."""
    if draws.empty:
        return
    figure.add_scatter(**MEAN_OF_DRAWS | line, **place)
    cross = {"color": style.MUTED, "size": 5, "symbol": "x"}
    look = {
        "mode": "markers",
        "marker": cross,
        "name": "random planes",
        "showlegend": False,
    }
    dots = _change_trace(draws, measure) | {
        "x": x,
        "error_y": None,
        "legendgroup": "random",
    }
    figure.add_scatter(**dots, **look, **place)


def _mark_shares(
    figure: go.Figure, truncation: xr.Dataset, end: str, *, column: int
) -> None:
    """Mark the trained context in a column, with words above the first panel."""
    _, layers, wavelength = _swept(truncation)
    name, trained = reach_of(truncation, layers, "trained context")
    rotates = np.isfinite(wavelength)
    most = rotates.sum(axis=1).argmax()  # the layer with most rotating planes
    turning = wavelength[most][rotates[most]]
    if len(turning) < 2 or not turning[0] <= trained <= turning[-1]:
        return
    index = np.interp(np.log(trained), np.log(turning), np.arange(len(turning)))
    share = float(index + 0.5) / len(turning)
    x, side = (share, "left") if end == "slow" else (1 - share, "right")
    trace = next(figure.select_traces(row=1, col=column))
    place = {"xref": trace.xaxis, "yref": f"{trace.yaxis} domain"}
    place |= {"yanchor": "bottom", "xanchor": side, "align": side}
    words = f"wavelength = {name.replace(' ', '<br>')} ({trained:,} tokens)"
    style.mark(figure, x, words, col=column, **place)


@public
def plot_silenced(table: pd.DataFrame) -> go.Figure:
    """Change of loss (nats/token) with 95 % intervals, by silenced heads and kind of token.

    Columns of `table`: `what` (the heads), `label` (or ""), `tokens`, `change`, `low` and
    `high`.
    """
    kinds, sets = table["tokens"].unique().tolist(), table["what"].unique().tolist()
    titles = [kind.replace(" ", "<br>") for kind in kinds]  # lines that fit on a phone
    panels: dict[str, Any] = {"cols": max(1, len(kinds)), "shared_yaxes": True}
    panels |= {"subplot_titles": titles, "horizontal_spacing": 0.03}
    title = "Change of loss if heads are silenced"
    figure = style.new_figure(title, height=130 + 34 * len(sets), **panels)
    for row in table.to_dict("records"):
        change, low, high = row["change"], row["low"], row["high"]
        color = style.COLORS.get(row["label"], style.MUTED)
        marker = {
            "color": color,
            "symbol": style.SYMBOLS.get(row["label"], "line-ns-open"),
        }
        data = {
            "x": [change],
            "y": [row["what"]],
            "showlegend": False,
            "mode": "markers",
        }
        data["error_x"] = style.interval_bars([change], [low], [high], color=color)
        hover = f"{row['tokens']}<br>%{{y}}<br>%{{x:+.4f}} nats/token ({low:+.4f} to "
        data |= {
            "hovertemplate": f"{hover}{high:+.4f})<extra></extra>",
            "marker_size": 9,
        }
        figure.add_scatter(
            **data, marker=marker, row=1, col=kinds.index(row["tokens"]) + 1
        )
    figure.update_annotations(font_size=12)
    figure.update_xaxes(zeroline=True, nticks=5, rangemode="tozero")
    figure.update_xaxes(title_text="change (nats/token)", col=1 + len(kinds) // 2)
    figure.update_yaxes(categoryorder="array", categoryarray=sets[::-1], showgrid=False)
    figure.update_yaxes(title_text="silenced heads (set)", col=1)
    figure.update_layout(margin_t=100)
    return style.note_missing(figure, "no change of loss was measured", table["change"])
