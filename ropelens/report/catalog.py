"""Tables of the figures on each page, with the functions that draw them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import comparison, head, heads, planes, truncated_heads
from ropelens.figures.edits import MEASURE_AXES, MeasureName, plot_truncation
from ropelens.report.render import page_words


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure on a page. The words around it are in templates/words.toml.

    `draw` draws the results of the page. `known` returns False if they have no data for it.
    `section` is the place on the page of a profile: "all" heads, the chosen "head" or the
    "model". `layout` updates the layout of the figure.
    """

    name: str
    draw: Callable[..., go.Figure]
    known: Callable[..., bool] = lambda *_: True
    section: str = ""
    layout: dict[str, Any] = field(default_factory=dict)


FIXED_MARGINS = {
    f"{axis}_automargin": False for axis in ("xaxis3", "yaxis", "yaxis2", "yaxis3")
}
"""Fixed margins: automatic margins take a third of the time of a click."""

# fmt: off
PROFILE_FIGURES = (
    PageFigure("wavelengths",
        lambda profile, table, place: planes.plot_head_wavelengths(
            profile, table, selected=place),
        section="all", layout={"margin_t": 40},
        known=lambda _, table, place: len(planes.by_position(table)) > 0),
    PageFigure("map",
        lambda profile, table, place: heads.plot_head_map(profile, table, selected=place),
        section="all"),
    PageFigure("claim",
        lambda profile, table, place: heads.plot_claim(profile, table, selected=place),
        section="all", layout={"height": 520}),
    PageFigure("selectivity",
        lambda profile, _, place: head.plot_selectivity(profile, layer=place[0], head=place[1]),
        section="head", layout={"margin_t": 36, "margin_l": 72, "height": 415} | FIXED_MARGINS),
    PageFigure("attention",
        lambda profile, _, place: head.plot_attention(profile, layer=place[0], head=place[1]),
        section="head", layout={"height": 470, "margin_t": 12}),
    PageFigure("pair", lambda profile, *_: head.pair_figure(profile),
        section="head", layout={"height": 330, "margin_t": 12}),
    PageFigure("kernel",
        lambda profile, _, place: head.plot_kernel(profile, layer=place[0], head=place[1]),
        section="head", layout={"height": 450, "margin_t": 36}),
    PageFigure("norms", lambda profile, *_: planes.plot_norms(profile), section="model"),
)

SIDE_BY_SIDE = ("selectivity", "attention", "pair", "kernel")
"""Figures that show a second head next to the chosen head."""

HEAD_SWEEP_FIGURES = (
    PageFigure("stopped",
        lambda sweep, place: truncated_heads.plot_head_truncation(
            sweep, layer=place[0], head=place[1]),
        section="head", layout={"margin_t": 56, "height": 400},
        known=lambda sweep, _: (
            _has_ends(sweep) and bool({*truncated_heads.HEAD_PANELS} & {*sweep})
        )),
)

REACH_FIGURES = (
    PageFigure("reach", head.plot_reach,
        section="head", layout={"margin_t": 12, "height": 360, "showlegend": True},
        known=lambda reach: bool(reach["found_share"].notnull().any())),
)


def _measures_in(table: pd.DataFrame) -> list[MeasureName]:
    return [name for name, m in MEASURE_AXES.items() if table[m.column].notna().any()]


def _other_measures(table: pd.DataFrame) -> list[MeasureName]:
    return [name for name in _measures_in(table) if name != "loss"]


def _has_ends(sweep: pd.DataFrame | xr.Dataset) -> bool:
    return bool(sweep["kind"].isin(["slow", "fast"]).any())


SWEEP_FIGURES = (
    PageFigure("truncation", lambda sweep, table: plot_truncation(sweep, table=table),
        known=lambda _, table: _has_ends(table) and "loss" in _measures_in(table)),
    PageFigure("bands", lambda sweep, table: plot_truncation(sweep, by="band", table=table),
        known=lambda _, table: "band" in {*table["kind"]} and "loss" in _measures_in(table)),
    PageFigure("classes",
        lambda sweep, table: plot_truncation(sweep, by="class", table=table),
        known=lambda sweep, table: (
            _has_ends(table) and bool(np.any(sweep.get("class_tokens", 0))))),
    PageFigure("others",
        lambda sweep, table: plot_truncation(
            sweep, measures=_other_measures(table), table=table),
        known=lambda _, table: _has_ends(table) and bool(_other_measures(table))),
)

COMPARISON_FIGURES = (
    PageFigure("loss_change", comparison.plot_loss_change,
        known=lambda _, table: bool(table["loss_change"].notna().any())),
    PageFigure("position_loss", lambda runs, _: comparison.plot_position_loss(runs),
        known=lambda runs, _: "position_loss" in runs),
    PageFigure("copying", lambda runs, _: comparison.plot_copying(runs),
        known=lambda runs, _: "copy_loss" in runs),
    PageFigure("planes", lambda runs, _: comparison.plot_comparison_planes(runs)),
    PageFigure("growth", lambda runs, _: comparison.plot_growth(runs),
        known=lambda runs, _: "growth_loss" in runs),
)
# fmt: on


def draw(rows: Sequence[PageFigure], *results: Any) -> dict[PageFigure, go.Figure]:
    """Draw the figures of `rows` for which `results` have data; {} if the first is None."""
    if results[0] is None:
        return {}
    return {row: row.draw(*results) for row in rows if row.known(*results)}


def card(row: PageFigure, figure: go.Figure) -> dict[str, Any]:
    """Title and explanation of a figure."""
    words = {"name": row.name, "section": row.section, "title": figure.layout.title.text}
    return words | page_words()["figures"][row.name]


def bare(figure: go.Figure, **layout: Any) -> dict[str, Any]:
    """JSON of a figure for the script, which sets the title, the colours and the legend."""
    figure = go.Figure(figure)
    figure.update_layout(title_text="", template=None, dragmode=False, autosize=True)
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)")
    legend = figure.layout.legend
    if legend.yref == "container" and legend.y:  # above an axis at the top
        layout = {"legend_y": 1, "legend_yanchor": "top", "margin_t": 90} | layout
    figure.update_layout({"margin_t": 36} | layout)
    return json.loads(figure.to_json(engine="json"))
