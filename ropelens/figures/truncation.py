"""What it costs to stop planes, from either end, beside random planes of the same number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from ropelens.errors import BadArgument
from ropelens.figures.plane_marks import alike, marks, plane_index, turning_wavelengths
from ropelens.figures.style import COLORS, MUTED, template
from ropelens.figures.wavelengths import short_count
from ropelens.measure.truncation_table import summarize_truncation

ENDS = {
    "slow": ("slowest planes stopped first (p-RoPE)", COLORS["semantic"], "square"),
    "fast": ("fastest planes stopped first", COLORS["positional"], "circle"),
}
TITLES = {
    True: "What stopping planes costs, from either end",
    False: "What else stopping planes changes, from either end",
}
MOST_TICKS = 8
WORDS = 0.17
"""Kept shares that the words at a mark stretch over."""


@dataclass(frozen=True)
class Measure:
    """A column of the summary as an axis: its words with the unit, and how to write it."""

    column: str
    title: str
    format: str = "+.3f"


MEASURES = {
    "loss": Measure("loss_change", "loss, change<br>(nats/token)"),
    "repeat_loss": Measure("repeat_loss_change", "loss on repeats,<br>change (nats/token)"),
    "retrieval": Measure("retrieval_change", "right retrievals,<br>change (share)"),
    "induction": Measure("induction_change", "best induction head,<br>change (0 to 1)"),
    "labels": Measure("labels_changed_share", "heads with a new<br>label (share)", ".1%"),
}


def plot_truncation(
    truncation: xr.Dataset,
    *,
    measures: Sequence[str] = ("loss",),
    table: pd.DataFrame | None = None,
) -> go.Figure:
    """Change of each of `measures` by the share of planes that still rotate, an end a panel.

    x: kept share of the planes, from all on the left to none; above it the wavelength
    (tokens) of the plane that stops there. y: change from the model as it is, with the 95 %
    interval of the paired difference where there is one. Grey: as many random planes, a
    dot a draw, dashed their mean. Dotted lines: the plane whose wavelength is the trained
    context, and the one where Oka et al. 2026 predict the longest queries. `measures`:
    "loss", "repeat_loss", "retrieval", "induction", "labels". `table` is the sweep's
    summary, None computes it. Source: Barbero et al. 2024
    (arXiv 2410.06205), its p-RoPE and reversed variants.
    """
    table = summarize_truncation(truncation) if table is None else table
    ends = [end for end in ENDS if (table["kind"] == end).any()]
    if not ends:
        raise BadArgument(
            "The sweep stopped no planes from either end.",
            attempt='truncate(model, tokens, ends=("slow", "fast"))',
        )
    check_measures(table, measures)
    figure = make_subplots(
        rows=len(measures),
        cols=len(ends),
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=0.08,
    )
    for row, name in enumerate(measures, start=1):
        for column, end in enumerate(ends, start=1):
            first = row == column == 1
            place = {"row": row, "col": column}
            _add_control(figure, table, end, MEASURES[name], named=first, place=place)
            _add_end(figure, table, end, MEASURES[name], named=row == 1, place=place)
        figure.update_yaxes(title_text=MEASURES[name].title, row=row, col=1)
    figure.update_layout(
        template=template("light"),
        title_text=TITLES[tuple(measures) == ("loss",)],
        height=180 + 240 * len(measures),
        margin_t=130,
        title={"y": 1, "yref": "container", "yanchor": "top", "pad_t": 16},
        legend={"y": 1 - 40 / (180 + 240 * len(measures)), "yref": "container"},
        legend_yanchor="top",
    )
    figure.update_yaxes(zeroline=True, nticks=6)
    figure.update_xaxes(range=[1.04, -0.04], tickvals=[1, 0.75, 0.5, 0.25, 0], tickformat=".0%")
    for row in range(1, len(measures)):  # not `matches`: with a set range it loses the y axes
        figure.update_xaxes(showticklabels=False, row=row)
    figure.update_xaxes(title_text="planes that still rotate (% of all)", row=len(measures))
    for column, end in enumerate(ends, start=1):
        _name_planes(figure, truncation, end, column=column)
        _add_marks(figure, truncation, table, end, MEASURES[measures[0]], column=column)
    return figure


def check_measures(table: pd.DataFrame, measures: Sequence[str]) -> None:
    """Raise `BadArgument` for what the sweep did not measure, or is no measure."""
    unknown = [name for name in measures if name not in MEASURES]
    if unknown or not measures:
        raise BadArgument(
            f"There is no measure {unknown[0]!r} of a truncation."
            if unknown
            else "No measure was asked for.",
            attempt=", ".join(MEASURES),
        )
    for name in measures:
        if table[MEASURES[name].column].isna().all():
            raise BadArgument(
                f"The sweep did not measure {name}.",
                attempt="truncate(model, tokens) with that among its measures",
            )


def _add_end(
    figure: go.Figure,
    table: pd.DataFrame,
    end: str,
    measure: Measure,
    *,
    named: bool,
    place: dict,
) -> None:
    """The line of one end, from the model as it is."""
    words, color, symbol = ENDS[end]
    rows = table[table["kind"].isin(["none", end])].sort_values("kept", ascending=False)
    change = rows[measure.column].to_numpy(float)
    bounds = [f"{measure.column}_high", f"{measure.column}_low"]
    error = None
    if set(bounds) <= set(rows):
        reach = np.nan_to_num(np.abs(rows[bounds].to_numpy(float) - change[:, None]))
        error = {"array": reach[:, 0], "arrayminus": reach[:, 1], "thickness": 1.5, "width": 4}
    figure.add_scatter(
        x=rows["kept"],
        y=change,
        error_y=error,
        name=words,
        legendgroup=end,
        showlegend=named,
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"color": color, "symbol": symbol, "size": 7},
        text=[hover_text(row, measure) for row in rows.to_dict("records")],
        hovertemplate="%{text}<extra></extra>",
        cliponaxis=False,
        **place,
    )


def _add_control(
    figure: go.Figure,
    table: pd.DataFrame,
    end: str,
    measure: Measure,
    *,
    named: bool,
    place: dict,
) -> None:
    """Random sets of planes: a dot a draw, and the mean from nothing stopped to all."""
    draws = table[table["kind"] == "random"]
    if not len(draws):
        return
    ends = table[(table["kind"] == "none") | ((table["kind"] == end) & (table["kept"] == 0))]
    mean = pd.concat([draws, ends]).groupby("kept")[measure.column].mean().sort_index()
    look = {"name": "random planes", "legendgroup": "random"}
    figure.add_scatter(
        x=mean.index.to_numpy(),
        y=mean.to_numpy(),
        mode="lines",
        line={"color": MUTED, "width": 2, "dash": "4px,3px"},
        showlegend=named,
        hoverinfo="skip",
        **look,
        **place,
    )
    figure.add_scatter(
        x=draws["kept"],
        y=draws[measure.column],
        mode="markers",
        marker={"color": MUTED, "size": 5, "symbol": "x"},
        showlegend=False,
        text=[hover_text(row, measure) for row in draws.to_dict("records")],
        hovertemplate="%{text}<extra></extra>",
        **look,
        **place,
    )


def hover_text(row: dict, measure: Measure) -> str:
    """An entry of the sweep in words: what stopped, and the measure with its interval."""
    value = f"{row[measure.column]:{measure.format}}".replace("-", "−")
    low, high = (row.get(f"{measure.column}_{side}", np.nan) for side in ("low", "high"))
    if np.isfinite(low):
        value += f" (95% {low:{measure.format}} to {high:{measure.format}})".replace("-", "−")
    if row["kind"] == "none":
        return f"<b>as it is</b><br>{value}"
    span = f"{short_count(row['wavelength_low'])} to {short_count(row['wavelength_high'])}"
    return (
        f"<b>{row['edit']}</b>: {100 * row['kept']:.3g}% of the planes rotate<br>"
        f"stopped: {row['planes']}, wavelengths {span} tokens<br>{value}"
    )


def _name_planes(figure: go.Figure, truncation: xr.Dataset, end: str, *, column: int) -> None:
    """Above a panel, the wavelengths of the planes in the order in which they stop."""
    layer, wavelength = turning_wavelengths(truncation)
    count = len(wavelength)
    step = max(1, -(-count // MOST_TICKS))
    planes = range(0, count, step)
    below = next(figure.select_xaxes(row=1, col=column)).plotly_name.replace("axis", "")
    above = 100 + column
    figure.update_layout(
        {
            f"xaxis{above}": {
                "overlaying": below,
                "side": "top",
                "range": [1.04, -0.04],
                "tickvals": [_place(plane, count, end) for plane in planes],
                "ticktext": [short_count(wavelength[plane]) for plane in planes],
                "title_text": "wavelength of the plane that stops there (tokens)"
                + ("" if alike(truncation) else f", layer {layer}"),
                "showgrid": False,
            }
        }
    )
    side = next(figure.select_yaxes(row=1, col=column)).plotly_name.replace("axis", "")
    figure.add_scatter(
        x=[None], y=[None], xaxis=f"x{above}", yaxis=side, showlegend=False, hoverinfo="skip"
    )


def _place(plane: float, count: int, end: str) -> float:
    """Where a plane stands on the axis of kept shares: amid the step that stops it."""
    share = (plane + 0.5) / count
    return share if end == "slow" else 1 - share


def _is_high(
    table: pd.DataFrame, end: str, measure: Measure, words: tuple[float, float]
) -> bool:
    """Whether the line of an end, between two kept shares, is in its panel's upper half."""
    seen = table[table["kind"].isin(["none", "random", *ENDS])]
    line = seen[seen["kind"].isin(["none", end])].sort_values("kept")
    inside = np.interp(np.linspace(*words, 9), line["kept"], line[measure.column])
    values = seen[measure.column]
    return bool(inside.mean() > (values.min() + values.max()) / 2)


def _add_marks(
    figure: go.Figure,
    truncation: xr.Dataset,
    table: pd.DataFrame,
    end: str,
    measure: Measure,
    *,
    column: int,
) -> None:
    """Lines at the trained context and the predicted band, named where the line is not."""
    _, wavelength = turning_wavelengths(truncation)
    x, y = (
        next(axes(row=1, col=column)).plotly_name.replace("axis", "")
        for axes in (figure.select_xaxes, figure.select_yaxes)
    )
    for mark in marks(truncation):
        index = plane_index(wavelength, mark.wavelength)
        if index is None:
            continue
        at = _place(index, len(wavelength), end)
        line = {"width": 1.5, "dash": "dot", "color": MUTED}
        figure.add_vline(x=at, line=line, name=mark.name, row="all", col=column)
        left = (mark.name == "band") == (end == "slow")
        covered = (at, at + (WORDS if left else -WORDS))  # shares fall to the right
        below = _is_high(table, end, measure, covered)
        figure.add_annotation(
            x=at,
            y=0.09 if below else 1,
            xref=x,
            yref=f"{y} domain",
            xanchor="right" if left else "left",
            yanchor="bottom" if below else "top",
            align="right" if left else "left",
            text=mark.words,
            name=mark.name,
        )
