"""Tables of the figures on each page, with the functions that draw them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import comparison, head, heads, planes, truncated_heads
from ropelens.figures.edits import MeasureName, plot_truncation, summary_column
from ropelens.report.render import page_words


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure on a page. The words around it are in templates/words.toml.

    `draw` draws the results of the page. `known` returns False if they have no data for it. On
    the page of a profile, `section` is its place: "all" heads, the chosen "head" or the
    "model".
    """

    name: str
    draw: Callable[..., go.Figure]
    known: Callable[..., bool] = lambda *_, **__: True
    section: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    words: str = ""  # name of its words, if it differs


FIXED_AXES = ("xaxis3", "yaxis", "yaxis2", "yaxis3")
FIXED_MARGINS = {f"{axis}_automargin": False for axis in FIXED_AXES}  # otherwise slow

# fmt: off
PROFILE_FIGURES = (
    PageFigure("wavelengths", planes.plot_head_wavelengths,
        section="all", layout={"margin_t": 40},
        known=lambda _, *, heads, **__: len(planes.by_position(heads)) > 0),
    PageFigure("map", heads.plot_head_map, section="all"),
    PageFigure("follow", heads.plot_follow, section="all", layout={"height": 520},
        known=lambda _, *, heads, **__: (
            bool(heads.filter(["follow_score"]).notna().any(axis=None)))),
    PageFigure("claim", heads.plot_claim, section="all", layout={"height": 520}),
    PageFigure("selectivity", head.plot_selectivity,
        section="head", layout={"margin_t": 36, "margin_l": 72, "height": 415} | FIXED_MARGINS),
    PageFigure("attention", head.plot_attention,
        section="head", layout={"height": 470, "margin_t": 12}),
    PageFigure("pair", lambda profile, **_: head.pair_figure(profile),
        section="head", layout={"height": 330, "margin_t": 12}),
    PageFigure("kernel", head.plot_kernel,
        section="head", layout={"height": 450, "margin_t": 36}),
    PageFigure("norms", planes.plot_norms, section="model"),
)

SIDE_BY_SIDE = ("selectivity", "attention", "pair", "kernel")  # figures of a second head too

HEAD_SWEEP_FIGURE = PageFigure("stopped", truncated_heads.plot_head_truncation,
    section="head", layout={"margin_t": 56, "height": 400},
    known=lambda sweep, **_: (
        _has_ends(sweep) and bool({*truncated_heads.HEAD_PANELS} & {*sweep})))

REACH_FIGURE = PageFigure("reach", head.plot_reach,
    section="head", layout={"margin_t": 12, "height": 360, "showlegend": True},
    known=lambda reach: bool(reach["found_share"].notnull().any()))


def _measures_in(table: pd.DataFrame) -> list[MeasureName]:
    return [n for n in get_args(MeasureName) if table[summary_column(n)].notna().any()]


def _other_measures(table: pd.DataFrame) -> list[MeasureName]:
    return [name for name in _measures_in(table) if name != "loss"]


def _has_ends(sweep: pd.DataFrame | xr.Dataset) -> bool:
    return bool(sweep["kind"].isin(["slow", "fast"]).any())


SWEEP_FIGURES = (
    PageFigure("truncation", plot_truncation,
        known=lambda _, table: _has_ends(table) and "loss" in _measures_in(table)),
    PageFigure("bands", partial(plot_truncation, by="band"),
        known=lambda _, table: "band" in {*table["kind"]} and "loss" in _measures_in(table)),
    PageFigure("classes", partial(plot_truncation, by="class"),
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
    PageFigure("position_loss", lambda runs, **_: comparison.plot_position_loss(runs),
        known=lambda runs, **_: "position_loss" in runs),
    PageFigure("copying", lambda runs, **_: comparison.plot_copying(runs),
        known=lambda runs, **_: "copy_loss" in runs),
    PageFigure("planes", lambda runs, **_: comparison.plot_comparison_planes(runs)),
    PageFigure("growth", lambda runs, **_: comparison.plot_growth(runs),
        known=lambda runs, **_: "growth_loss" in runs),
)
# fmt: on


def draw(
    rows: Sequence[PageFigure], results: xr.Dataset | None, **more: Any
) -> dict[PageFigure, go.Figure]:
    """Draw the figures of `rows` for which the `results` have data; {} if they are None."""
    known = [row for row in rows if results is not None and row.known(results, **more)]
    return {row: row.draw(results, **more) for row in known}


def draw_profile(
    profile: xr.Dataset, heads: pd.DataFrame, selected: tuple[int, int]
) -> dict[PageFigure, go.Figure]:
    """Draw the `PROFILE_FIGURES` for the `selected` head (layer, head)."""
    arguments: dict[str, dict[str, Any]] = {
        "all": {"heads": heads, "selected": selected},
        "head": {"layer": selected[0], "head": selected[1]},
        "model": {},
    }
    figures: dict[PageFigure, go.Figure] = {}
    for row in PROFILE_FIGURES:
        figures |= draw([row], profile, **arguments[row.section])
    return figures


def card(row: PageFigure, figure: go.Figure) -> dict[str, Any]:
    """Title and explanation of a figure."""
    words = {"name": row.name, "section": row.section, "title": figure.layout.title.text}
    return words | page_words()["figures"][row.words or row.name]


def bare(figure: go.Figure, **layout: Any) -> dict[str, Any]:
    """JSON of a figure for the script, which sets the title, the colours and the legend."""
    figure = go.Figure(figure)
    figure.update_layout(title_text="", template=None, dragmode=False, autosize=True)
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)")
    if figure.layout.legend.yref == "container" and figure.layout.legend.y:  # at the top
        layout = {"legend_y": 1, "legend_yanchor": "top", "margin_t": 90} | layout
    figure.update_layout({"margin_t": 36} | layout)
    return json.loads(figure.to_json(engine="json"))
