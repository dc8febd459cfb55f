"""What it costs to stop planes, from either end, beside random planes of the same number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.numbers import number, short_count
from ropelens.figures.plane_marks import alike, marks, plane_index, turning_wavelengths
from ropelens.figures.series import COLORS
from ropelens.figures.style import DASHED, DOTTED, MUTED, TEXT_ONLY, new_figure
from ropelens.measure.truncation_table import summarize_truncation

ENDS = {
    "slow": ("slowest planes stopped first (p-RoPE)", COLORS[0], "square"),
    "fast": ("fastest planes stopped first", COLORS[3], "circle"),
}
MOST_TICKS = 8
MEAN_OF_DRAWS = {
    "mode": "lines",
    "line": DASHED,
    "name": "random planes",
    "legendgroup": "random",
    "hoverinfo": "skip",
}
"""Keywords of the scatter that draws the mean over random sets of planes."""
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
    height = 180 + 240 * len(measures)
    figure = new_figure(
        "What stopping planes costs, from either end"
        if tuple(measures) == ("loss",)
        else "What else stopping planes changes, from either end",
        height=height,
        **{"rows": len(measures), "cols": len(ends), "shared_yaxes": True},
        **{"horizontal_spacing": 0.04, "vertical_spacing": 0.08},
    )
    for row, name in enumerate(measures, start=1):
        for column, end in enumerate(ends, start=1):
            place = {"row": row, "col": column}
            _add_random(figure, table, end, MEASURES[name], legend=row == column == 1, **place)
            _add_end(figure, table, end, MEASURES[name], legend=row == 1, **place)
        figure.update_yaxes(title_text=MEASURES[name].title, row=row, col=1)
    figure.update_layout(
        margin_t=130,
        title={"y": 1, "yref": "container", "yanchor": "top", "pad_t": 16},
        legend={"y": 1 - 40 / height, "yref": "container", "yanchor": "top"},
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
    legend: bool,
    **place: int,
) -> None:
    """The line of one end, from the model as it is."""
    words, color, symbol = ENDS[end]
    rows = table[table["kind"].isin(["none", end])].sort_values("kept", ascending=False)
    figure.add_scatter(
        x=rows["kept"],
        **change_and_bars(rows, measure),
        name=words,
        legendgroup=end,
        showlegend=legend,
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"color": color, "symbol": symbol, "size": 7},
        text=hover_texts(rows, measure),
        hovertemplate=TEXT_ONLY,
        cliponaxis=False,
        **place,
    )


def _add_random(
    figure: go.Figure,
    table: pd.DataFrame,
    end: str,
    measure: Measure,
    *,
    legend: bool,
    **place: int,
) -> None:
    """Random sets of planes: a cross a draw, and the mean from nothing stopped to all."""
    draws = table[table["kind"] == "random"]
    if not len(draws):
        return
    ends = table[(table["kind"] == "none") | ((table["kind"] == end) & (table["kept"] == 0))]
    mean = pd.concat([draws, ends]).groupby("kept")[measure.column].mean().sort_index()
    x, y = mean.index.to_numpy(), mean.to_numpy()
    figure.add_scatter(x=x, y=y, **MEAN_OF_DRAWS, showlegend=legend, **place)
    crosses = draw_crosses(draws, measure, size=5)
    figure.add_scatter(x=draws["kept"], **crosses, showlegend=False, **place)


def change_and_bars(rows: pd.DataFrame, measure: Measure) -> dict[str, Any]:
    """As plotly's `y` and `error_y`: a measure's change, with its interval where it has one."""
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


def _name_planes(figure: go.Figure, truncation: xr.Dataset, end: str, *, column: int) -> None:
    """Above a panel, the wavelengths of the planes in the order in which they stop."""
    layer, wavelength = turning_wavelengths(truncation)
    count = len(wavelength)
    planes = range(0, count, max(1, -(-count // MOST_TICKS)))
    below, side = _axes(figure, column)
    above = 100 + column
    figure.layout[f"xaxis{above}"] = {
        "overlaying": below,
        "side": "top",
        "range": [1.04, -0.04],
        "tickvals": [_place(plane, count, end) for plane in planes],
        "ticktext": [short_count(wavelength[plane]) for plane in planes],
        "title_text": "wavelength of the plane that stops there (tokens)"
        + ("" if alike(truncation) else f", layer {layer}"),
        "showgrid": False,
    }
    figure.add_scatter(
        x=[None], y=[None], xaxis=f"x{above}", yaxis=side, showlegend=False, hoverinfo="skip"
    )


def _axes(figure: go.Figure, column: int) -> tuple[str, str]:
    """The x and y axis of a column's first panel, as traces name them."""
    axes = (
        next(select(row=1, col=column)) for select in (figure.select_xaxes, figure.select_yaxes)
    )
    x, y = (axis.plotly_name.replace("axis", "") for axis in axes)
    return x, y


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
    x, y = _axes(figure, column)
    for mark in marks(truncation):
        index = plane_index(wavelength, mark.wavelength)
        if index is None:
            continue
        at = _place(index, len(wavelength), end)
        figure.add_vline(x=at, line=DOTTED, name=mark.name, row="all", col=column)
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
