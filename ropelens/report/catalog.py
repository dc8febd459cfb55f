"""The figures of each page, a row per figure: what draws it, and where."""

from __future__ import annotations

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
    """A figure on a page; the words around it are in templates/words.toml.

    `draw` takes the page's results; so does `known`, whether there is something to draw.
    `section`: the place on the page of a profile, "all" heads, the chosen "head" or the
    "model". `layout`: what the page changes in the figure's.
    """

    name: str
    draw: Callable[..., go.Figure]
    known: Callable[..., bool] = lambda *_: True
    section: str = ""
    layout: dict[str, Any] = field(default_factory=dict)


FIXED = {f"{axis}_automargin": False for axis in ("xaxis3", "yaxis", "yaxis2", "yaxis3")}
"""Margins that stay: to find margins that fit takes a third of the time of a click."""

# fmt: off
PROFILE = (
    PageFigure("wavelengths",
        lambda profile, table, at: planes.plot_head_wavelengths(profile, table, selected=at),
        section="all", layout={"margin_t": 40},
        known=lambda _, table, at: len(planes.by_position(table)) > 0),
    PageFigure("map",
        lambda profile, table, at: heads.plot_head_map(profile, table, selected=at),
        section="all"),
    PageFigure("claim",
        lambda profile, table, at: heads.plot_claim(profile, table, selected=at),
        section="all", layout={"height": 520}),
    PageFigure("selectivity",
        lambda profile, _, at: head.plot_selectivity(profile, layer=at[0], head=at[1]),
        section="head", layout={"margin_t": 36, "margin_l": 72, "height": 415} | FIXED),
    PageFigure("attention",
        lambda profile, _, at: head.plot_attention(profile, layer=at[0], head=at[1]),
        section="head", layout={"height": 470, "margin_t": 12}),
    PageFigure("pair", lambda profile, *_: head.pair_figure(profile),
        section="head", layout={"height": 330, "margin_t": 12}),
    PageFigure("kernel",
        lambda profile, _, at: head.plot_kernel(profile, layer=at[0], head=at[1]),
        section="head", layout={"height": 450, "margin_t": 36}),
    PageFigure("norms", lambda profile, *_: planes.plot_norms(profile), section="model"),
)

BESIDE = ("selectivity", "attention", "pair", "kernel")
"""The figures of `PROFILE` that show a second head beside the chosen one."""

SWEEP_OF_HEAD = (
    PageFigure("stopped",
        lambda sweep, at: truncated_heads.plot_head_truncation(sweep, layer=at[0], head=at[1]),
        section="head", layout={"margin_t": 56, "height": 400},
        known=lambda sweep, _: (
            _has(sweep, "slow", "fast") and bool({*truncated_heads.HEAD_PANELS} & {*sweep})
        )),
)


REACH = (
    PageFigure("reach", head.plot_reach,
        section="head", layout={"margin_t": 12, "height": 360, "showlegend": True},
        known=lambda reach: bool(reach["found_share"].notnull().any())),
)


def _measured(table: pd.DataFrame) -> list[MeasureName]:
    """The measures of a sweep that its table has numbers of."""
    return [name for name, m in MEASURE_AXES.items() if table[m.column].notna().any()]


def _has(sweep: pd.DataFrame | xr.Dataset, *kinds: str) -> bool:
    return bool(sweep["kind"].isin(kinds).any())


SWEEP = (
    PageFigure("truncation", lambda sweep, table: plot_truncation(sweep, table=table),
        known=lambda _, table: _has(table, "slow", "fast") and "loss" in _measured(table)),
    PageFigure("bands", lambda sweep, table: plot_truncation(sweep, by="band", table=table),
        known=lambda _, table: _has(table, "band") and "loss" in _measured(table)),
    PageFigure("classes",
        lambda sweep, table: plot_truncation(sweep, by="class", table=table),
        known=lambda sweep, table: (
            _has(table, "slow", "fast") and bool(np.any(sweep.get("class_tokens", 0)))
        )),
    PageFigure("others",
        lambda sweep, table: plot_truncation(
            sweep, measures=[one for one in _measured(table) if one != "loss"], table=table
        ),
        known=lambda _, table: (
            _has(table, "slow", "fast") and bool({*_measured(table)} - {"loss"})
        )),
)

COMPARISON = (
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
    """The figures of `rows` that `results`, if there are any, have something to show in."""
    if results[0] is None:
        return {}
    return {row: row.draw(*results) for row in rows if row.known(*results)}


def card(row: PageFigure, figure: go.Figure) -> dict[str, Any]:
    """The words around a figure, as a template reads them."""
    words = {"name": row.name, "section": row.section, "title": figure.layout.title.text}
    return words | page_words()["figures"][row.name]


def bare(figure: go.Figure, **layout: Any) -> dict[str, Any]:
    """A figure for a page's script: title, colours and the legend's place are the page's."""
    figure = go.Figure(figure)
    figure.update_layout(title_text="", template=None, dragmode=False, autosize=True)
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)")
    legend = figure.layout.legend
    if legend.yref == "container" and legend.y:  # above an axis that stands on top
        layout = {"legend_y": 1, "legend_yanchor": "top", "margin_t": 90} | layout
    figure.update_layout({"margin_t": 36} | layout)
    return json.loads(figure.to_json(engine="json"))
